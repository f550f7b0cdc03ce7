"""What ran: the facts of a run that were fixed before its first step, from resolved.yaml and the small JSON files.

Tolerant on purpose: a run made by another version, or one that died while starting, must still have a report.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from phalanx.bounded import read_text
from phalanx.errors import DataError, RecipeError
from phalanx.observe.history import History
from phalanx.recipe.load import LARGEST
from phalanx.recipe.schema import Recipe
from phalanx.recipe.text import parse
from phalanx.run import Run


@dataclass(frozen=True)
class What:
    """Facts about the run. `unit` is `tokens` or `samples`, what speed is counted in."""

    name: str
    run: str
    model: str
    model_args: dict[str, Any]
    parameters: int | None
    task: str
    data: str
    global_batch: int | None
    micro_batch: int | None
    unit: str
    units_per_sample: int
    optimizer: str
    precision: str
    layout: str
    world: int
    nodes: int
    threads: int | None
    device: str
    device_name: str
    cores: int | None
    matmul_tflops: dict[str, float]
    flops_rule: str | None
    checkpoint_every: int | None
    evaluate_every: int | None
    chosen: tuple[tuple[str, str, str], ...]
    """What `auto` became: (key, value, why)."""
    versions: dict[str, str]


def read_recipe(run: Run) -> dict[str, Any]:
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
        raw, _ = parse(read_text(path, LARGEST, follow=False), str(path))
    except RecipeError as error:
        raise DataError(str(error)) from None
    except OSError as error:
        raise DataError(f"{path}: {'is missing' if isinstance(error, FileNotFoundError) else error.strerror}") from None
    if not isinstance(raw, dict) or not raw:
        raise DataError(f"{path}: is empty or no recipe")
    try:
        return Recipe.model_validate(raw).model_dump(mode="json")
    except ValidationError:
        return raw


NUMBERS = frozenset(
    {"trainable_parameters", "flops_per_sample", "units_per_sample", "predicted_step_s", "calibrated_step_s"}
    | {"physical_cores", "device_count", "threads_per_worker", "steps"}
)
TEXTS = frozenset({"unit", "flops_rule", "device", "device_name", "data_sheet_source", "host", "status", "digest"})
TABLES = frozenset({"measured_matmul_tflops", "data_sheet_tflops", "predicted_breakdown_s", "session", "git"})
LISTS = frozenset({"auto_choices"})


def sane(value: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What a small JSON file of a run says, without what is not of its kind: it may be damaged."""
    if value is None:
        return None
    return {key: each for key, each in value.items() if _fits(key, each)}


def _fits(key: str, value: Any) -> bool:
    if key in NUMBERS:
        return value is None or (_is_number(value) and 0 <= value < 1e30)
    if key in TEXTS:
        return value is None or isinstance(value, str)
    if key in LISTS:
        return isinstance(value, list)
    if key.endswith("_tflops"):
        return isinstance(value, dict) and all(_is_number(each) and 0 <= each < 1e30 for each in value.values())
    return isinstance(value, dict) if key in TABLES else True


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys: {"optimizer": {"lr": 1}} -> {"optimizer.lr": 1}."""
    if not isinstance(value, Mapping) or not value:
        return {prefix: value} if prefix else {}
    return {
        key: leaf
        for name, item in value.items()
        for key, leaf in flat(item, f"{prefix}.{name}" if prefix else str(name)).items()
    }


def what_ran(
    run: Run,
    recipe: Mapping[str, Any],
    plan: Mapping[str, Any] | None,
    cluster: Mapping[str, Any] | None,
    environment: Mapping[str, Any] | None,
    history: History,
) -> What:
    """Put the facts together. A plan, cluster or environment that was not written leaves its facts out."""
    plan, cluster, environment = plan or {}, cluster or {}, environment or {}
    model, batch, optim = _part(recipe, "model"), _part(recipe, "batch"), _part(recipe, "optimizer")
    loop = _part(plan, "session")  # what only a training loop of the user's own knew
    task = "a training loop of one's own" if loop else str(recipe.get("task", "?"))
    unit = str(plan.get("unit") or ("samples" if task == "classification" else "tokens"))
    start = history.attempts[-1] if history.attempts else None
    threads = recipe.get("num_threads")
    return What(
        name=str(recipe.get("name") or run.path.name),
        run=str(run.path),
        model=str(loop.get("model") or model.get("build", "?")),
        model_args=dict(_part(model, "args")),
        parameters=_int(plan.get("trainable_parameters")),
        task=task,
        data=str(loop.get("data") or _data(_part(recipe, "data"), task)),
        global_batch=_int(batch.get("global_size")),
        micro_batch=_int(batch.get("micro_size")),
        unit=unit,
        units_per_sample=_int(plan.get("units_per_sample")) or 1,
        optimizer=_optimizer(optim, loop.get("optimizer")),
        precision=str(recipe.get("precision", "?")),
        layout=_layout(recipe.get("parallelism")),
        world=start.world if start else 1,
        nodes=history.nodes,
        threads=_int(threads) or _int(cluster.get("threads_per_worker")),
        device=(start.device if start else "") or str(cluster.get("device", "")),
        device_name=str(cluster.get("device_name") or ""),
        cores=_int(cluster.get("physical_cores")),
        matmul_tflops={
            k: float(v) for k, v in _part(cluster, "measured_matmul_tflops").items() if isinstance(v, int | float)
        },
        flops_rule=plan.get("flops_rule"),
        checkpoint_every=_int(_part(recipe, "checkpoint").get("every")),
        evaluate_every=_int(_part(recipe, "evaluation").get("every")),
        chosen=tuple(
            (str(item.get("key", "?")), _shown(item.get("value", "?")), str(item.get("why", "")))
            for item in plan.get("auto_choices") or ()
            if isinstance(item, Mapping)
        ),
        versions=_versions(environment),
    )


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _versions(environment: Mapping[str, Any]) -> dict[str, str]:
    """What ran, by name; the commit of the recipe's folder with what is not in it."""
    versions = {key: str(environment[key]) for key in ("phalanx", "torch", "python") if environment.get(key)}
    git = _part(environment, "git")
    if commit := git.get("commit"):
        beside = [
            word for word, key in (("changed", "dirty"), ("with untracked files", "untracked_files")) if git.get(key)
        ]
        versions["git"] = ", ".join([str(commit)[:12], *beside])
    return versions


def _part(mapping: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = mapping.get(key)
    return value if isinstance(value, Mapping) else {}


def _int(value: Any) -> int | None:
    return int(value) if _is_number(value) else None


def _data(data: Mapping[str, Any], task: str) -> str:
    sources = data.get("source")
    names = []
    for source in sources if isinstance(sources, list) else [sources]:
        for kind in ("text", "jsonl", "parquet", "images", "prepared", "idx"):
            found = source.get(kind) if isinstance(source, Mapping) else None
            if found is not None:
                found = found.get("images", "?") if isinstance(found, Mapping) else found
                names.append(", ".join(map(str, found)) if isinstance(found, list) else str(found))
    text = " + ".join(names) or "?"
    if task == "classification":
        return text
    tokenizer = data.get("tokenizer", "?")
    tokenizer = f"bpe {tokenizer.get('bpe')}" if isinstance(tokenizer, Mapping) else tokenizer
    return f"{text}; tokenizer {tokenizer}, sequence {data.get('sequence', '?')}"


def _optimizer(optim: Mapping[str, Any], own: str | None = None) -> str:
    if not optim:
        return "?"
    schedule = _part(optim, "schedule")
    clip = f", clip {optim['max_grad_norm']:g}" if isinstance(optim.get("max_grad_norm"), int | float) else ""
    text = (own or f"{optim.get('name', '?')}, lr {optim.get('lr', '?')}") + clip
    return f"{text}, warm-up {schedule.get('warmup_steps')}, {schedule.get('decay')} decay" if schedule else text


def _layout(layout: Any) -> str:
    if not isinstance(layout, Mapping):
        return str(layout or "?")
    sizes = {name: size for name, size in layout.items() if type(size) is int and size != 1}
    text = " x ".join(f"{name} {size}" for name, size in sizes.items()) or "one process"
    more = ["async_tp"] if layout.get("async_tp") else []
    if "pipeline" in sizes:  # how its stages are cut and take turns means nothing without them
        stages = layout.get("layers_per_stage")
        more += [str(layout.get("pipeline_schedule", "?"))]
        more += [f"blocks {' + '.join(map(str, stages))}"] if isinstance(stages, list) else []
    return f"{text} ({', '.join(more)})" if more else text
