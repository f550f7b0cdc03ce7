"""What ran: the facts of a run that were fixed before its first step, from resolved.yaml and the small JSON files.

Tolerant on purpose: a run made by another version, or one that died while starting, must still have a report.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from phalanx.errors import DataError, RecipeError
from phalanx.observe.history import RunHistory
from phalanx.recipe.schema import Recipe
from phalanx.recipe.validation_errors import MAX_FILE_BYTES
from phalanx.recipe.yaml_loader import parse_yaml
from phalanx.run import Run
from phalanx.run.directory import is_number
from phalanx.safe_files import read_text


@dataclass(frozen=True)
class RunInfo:
    """Facts about the run. `unit` is `tokens` or `samples`, what speed is counted in."""

    name: str
    run_path: str
    model: str
    model_args: dict[str, Any]
    parameters: int | None
    adapters: str
    task: str
    data: str
    global_batch: int | None
    micro_batch: int | None
    unit: str
    units_per_sample: int
    optimizer: str
    precision: str
    parallelism: str
    world_size: int
    num_nodes: int
    threads_per_worker: int | None
    device: str
    device_name: str
    physical_cores: int | None
    measured_matmul_tflops: dict[str, float]
    flops_rule: str | None
    checkpoint_interval_steps: int | None
    auto_choices: tuple[tuple[str, str, str], ...]
    """What `auto` became: (key, value, why)."""
    versions: dict[str, str]


def read_resolved_recipe(run: Run) -> dict[str, Any]:
    """The recipe of a run, as far as it is known."""
    return recipe_and_losses(run)[0]


def recipe_and_losses(run: Run) -> tuple[dict[str, Any], list[str]]:
    """resolved.yaml as a plain mapping with every default filled in; as it stands when this version of Phalanx does
    not understand it. Where it is lost it is the recipe as it was given, and nothing where that is lost, too; what is
    lost is said."""
    try:
        return _mapping(run.resolved), []
    except DataError as error:
        lost = str(error)
    try:
        return _mapping(run.recipe), [f"{lost}; the recipe is shown as it was given"]
    except DataError as error:
        return {}, [lost, f"{error}; so the recipe is not known"]


def _mapping(path: Path) -> dict[str, Any]:
    """A recipe's file as a mapping. DataError where it is none, or nothing but a part of one."""
    try:
        raw, _ = parse_yaml(read_text(path, MAX_FILE_BYTES, follow_links=False), str(path))
    except RecipeError as error:
        raise DataError(str(error)) from None
    except OSError as error:
        raise DataError(f"{path}: {'is missing' if isinstance(error, FileNotFoundError) else error.strerror}") from None
    if not isinstance(raw, dict) or not raw:
        raise DataError(f"{path}: is empty or not a recipe")
    try:
        return Recipe.model_validate(raw).model_dump(mode="json")
    except ValidationError:
        return raw


def flatten_keys(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings, and lists of mappings, as dotted keys: {"source": [{"text": "a"}]} -> {"source.0.text": "a"}.
    An empty mapping has no key."""
    if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        value = dict(enumerate(value))
    if not isinstance(value, Mapping):
        return {prefix: value} if prefix else {}
    return {
        key: value_
        for name, item in value.items()
        for key, value_ in flatten_keys(item, f"{prefix}.{name}" if prefix else str(name)).items()
    }


def read_run_info(
    run: Run,
    recipe: Mapping[str, Any],
    plan: Mapping[str, Any] | None,
    cluster: Mapping[str, Any] | None,
    environment: Mapping[str, Any] | None,
    history: RunHistory,
) -> RunInfo:
    """Put the facts together. A plan, cluster or environment that was not written leaves its facts out."""
    plan, cluster, environment = plan or {}, cluster or {}, environment or {}
    model = _sub_mapping(recipe, "model")
    batch = _sub_mapping(recipe, "batch")
    optimizer = _sub_mapping(recipe, "optimizer")
    session = _sub_mapping(plan, "session")  # what only a training loop of the user's own knew
    task = "a session" if session else str(recipe.get("task", "?"))
    unit = str(plan.get("unit") or ("samples" if task == "classification" else "tokens"))
    last_attempt = history.attempts[-1] if history.attempts else None
    num_threads = recipe.get("num_threads")
    rates = _sub_mapping(cluster, "measured_matmul_tflops")
    return RunInfo(
        name=str(recipe.get("name") or run.path.name),
        run_path=run.location,
        model=str(session.get("model") or model.get("build", "?")),
        model_args=dict(_sub_mapping(model, "args")),
        parameters=int_or_none(plan.get("trainable_parameters")),
        adapters=str(plan.get("adapters") or ""),
        task=task,
        data=str(session.get("data") or _describe_data(_sub_mapping(recipe, "data"), task, plan.get("data_summary"))),
        global_batch=int_or_none(batch.get("global_size")),
        micro_batch=int_or_none(batch.get("micro_size")),
        unit=unit,
        units_per_sample=int_or_none(plan.get("units_per_sample")) or 1,
        optimizer=_describe_optimizer(optimizer, session.get("optimizer")),
        precision=str(recipe.get("precision", "?")),
        parallelism=_describe_parallelism(recipe.get("parallelism")),
        world_size=last_attempt.world_size if last_attempt else 1,
        num_nodes=history.num_nodes,
        threads_per_worker=int_or_none(num_threads) or int_or_none(cluster.get("threads_per_worker")),
        device=(last_attempt.device if last_attempt else "") or str(cluster.get("device", "")),
        device_name=str(cluster.get("device_name") or ""),
        physical_cores=int_or_none(cluster.get("physical_cores")),
        measured_matmul_tflops={name: float(rate) for name, rate in rates.items() if isinstance(rate, int | float)},
        flops_rule=plan.get("flops_rule"),
        checkpoint_interval_steps=int_or_none(_sub_mapping(recipe, "checkpoint").get("every")),
        auto_choices=tuple(
            (str(item.get("key", "?")), _shown(item.get("value", "?")), str(item.get("reason", "")))
            for item in plan.get("auto_choices") or ()
            if isinstance(item, Mapping)
        ),
        versions=_read_versions(environment),
    )


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _read_versions(environment: Mapping[str, Any]) -> dict[str, str]:
    """What ran, by name; the commit of the recipe's folder with what is not in it."""
    versions = {key: str(environment[key]) for key in ("phalanx", "torch", "python") if environment.get(key)}
    git = _sub_mapping(environment, "git")
    if commit := git.get("commit"):
        words = {"dirty": "changed", "untracked_files": "with untracked files"}
        notes = [word for key, word in words.items() if git.get(key)]
        versions["git"] = ", ".join([str(commit)[:12], *notes])
    return versions


def _sub_mapping(mapping: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = mapping.get(key)
    return value if isinstance(value, Mapping) else {}


def int_or_none(value: Any) -> int | None:
    """A number as a whole one; None for anything else."""
    return int(value) if is_number(value) else None


def _describe_data(data: Mapping[str, Any], task: str, summary: str | None = None) -> str:
    samples = "" if summary is None else f"; {summary}"
    sources = data.get("source")
    source_names = []
    for source in sources if isinstance(sources, list) else [sources]:
        for kind in ("text", "jsonl", "parquet", "arrow", "tokens", "webdataset", "images", "prepared", "idx"):
            found = source.get(kind) if isinstance(source, Mapping) else None
            if found is not None:
                found = found.get("images", "?") if isinstance(found, Mapping) else found
                source_names.append(", ".join(map(str, found)) if isinstance(found, list) else str(found))
    text = " + ".join(source_names) or "?"
    if task == "classification":
        return text + samples
    tokenizer = data.get("tokenizer", "?")
    tokenizer = f"bpe {tokenizer.get('bpe')}" if isinstance(tokenizer, Mapping) else tokenizer
    return f"{text}; tokenizer {tokenizer}, sequence {data.get('seq_len', '?')}{samples}"


def _describe_optimizer(optimizer: Mapping[str, Any], session_optimizer: str | None = None) -> str:
    if not optimizer:
        return "?"
    schedule = _sub_mapping(optimizer, "schedule")
    clip = optimizer.get("max_grad_norm")
    clip_text = f", clip {clip:g}" if isinstance(clip, int | float) else ""
    text = (session_optimizer or f"{optimizer.get('name', '?')}, lr {optimizer.get('lr', '?')}") + clip_text
    return f"{text}, warm-up {schedule.get('warmup_steps')}, {schedule.get('decay')} decay" if schedule else text


def _describe_parallelism(layout: Any) -> str:
    if not isinstance(layout, Mapping):
        return str(layout or "?")
    dimensions = {name: size for name, size in layout.items() if type(size) is int and size != 1}
    text = " x ".join(f"{name} {size}" for name, size in dimensions.items()) or "one process"
    details = ["async_tp"] if layout.get("async_tp") else []
    if "pipeline" in dimensions:  # how its stages are cut and take turns means nothing without them
        stages = layout.get("layers_per_stage")
        details += [str(layout.get("pipeline_schedule", "?"))]
        details += [f"blocks {' + '.join(map(str, stages))}"] if isinstance(stages, list) else []
    return f"{text} ({', '.join(details)})" if details else text
