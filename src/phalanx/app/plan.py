"""Predict a run on a cluster, and choose its parallelism. `phalanx.plan` is here, and so is what fine-tuning with an
adapter fits on common GPUs: of that only config.json is read.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.autoconfig.plan import RunPlan, describe_slowdown, plan_run, render_recipe
from phalanx.autoconfig.plan import list_chosen_keys as list_chosen_keys
from phalanx.cluster.catalog import find_accelerator
from phalanx.cluster.load import CLUSTER_VARIABLE
from phalanx.errors import RecipeError, UsageError
from phalanx.formatting import BYTES_PER_GIB
from phalanx.planner import finetune_memory
from phalanx.planner.memory import USABLE_MEMORY_FRACTION
from phalanx.planner.search import Candidate
from phalanx.planner.state_memory import BYTES_PER_MOMENT
from phalanx.planner.step_time import format_breakdown as format_breakdown
from phalanx.planner.step_time import format_seconds as format_seconds
from phalanx.recipe import Recipe, load_recipe
from phalanx.recipe.imports import HF_CONFIG_FILE, huggingface_location
from phalanx.recipe.load import LoadedRecipe, expand_recipe
from phalanx.recipe.locations import localize_named
from phalanx.recipe.schema import AdapterConfig
from phalanx.run.directory import check_output_path, write_output


def plan(
    recipe: "str | os.PathLike[str] | Recipe | None" = None,
    cluster: str | None = None,
    num_gpus: int | None = None,
    overrides: Sequence[str] = (),
) -> RunPlan:
    """Predict memory, step time, energy and cost as `phalanx plan` does. Nothing is written.

    Args:
        recipe: a file's path or URL, or a value.
        cluster: a name of the catalog, or a cluster file; default: that of PHALANX_CLUSTER, else this
            machine, if calibrated.
        num_gpus: devices to plan for; default: all of the cluster.
        overrides: `key=value` of a recipe in a file.

    Raises:
        RecipeError: the recipe or the cluster is wrong, or nothing fits.
        UsageError: the cluster has fewer devices.
    """
    if isinstance(recipe, Recipe):
        loaded = LoadedRecipe(expand_recipe(recipe, Path.cwd()), None, Path.cwd(), {})
    else:
        loaded = load_recipe(None if recipe is None else os.fspath(recipe), overrides)
    return plan_run(loaded, _choose_cluster(cluster), num_gpus, Path.cwd())


def _choose_cluster(name: str | None) -> str | None:
    """The cluster of that name, else of PHALANX_CLUSTER; None for this machine."""
    return name or os.environ.get(CLUSTER_VARIABLE) or None


def plan_recipe_file(
    path: Path | str,
    overrides: Sequence[str],
    cluster: str | None,
    num_gpus: int | None,
    out: Path,
    in_place: bool = False,
) -> RunPlan:
    """Plan a recipe file, and write the recipe with the choice to `out`, which `in_place` is the file itself.

    Raises UsageError where `out` cannot be written, or is a file that no plan wrote.
    """
    if not in_place:
        check_output_path("--out", out, ["# Planned by `phalanx plan`"])
    loaded = load_recipe(path, overrides)
    run_plan = plan_run(loaded, _choose_cluster(cluster), num_gpus, Path.cwd())
    write_output(out, render_recipe(loaded, overrides, run_plan))
    return run_plan


def rank_candidates(run_plan: RunPlan, count: int) -> list[tuple[Candidate, str]]:
    """Return the `count` best candidates, each with what it spends more time on than the best. Those that differ only
    in how replicas are divided into shards count once."""
    ranked = {_candidate_key(run_plan.best): (run_plan.best, "")}
    for candidate in run_plan.alternatives:
        reason = describe_slowdown(run_plan.best.breakdown, candidate.breakdown)
        ranked.setdefault(_candidate_key(candidate), (candidate, reason))
    return list(ranked.values())[:count]


def _candidate_key(candidate: Candidate) -> tuple[Any, ...]:
    scenario, parallelism = candidate.scenario, candidate.scenario.parallelism
    return (
        parallelism.tensor,
        parallelism.pipeline,
        parallelism.context > 1,
        parallelism.expert > 1,
        parallelism.pipeline_schedule,
        scenario.virtual_stages,
        scenario.checkpointing,
        scenario.precision,
        parallelism.shard > 1,
    )


GPU_NAMES = ("RTX 4090", "A100 SXM 40GB", "L40S", "H100 SXM", "H200 SXM")
BASE_DTYPES: tuple[finetune_memory.BaseDtype, ...] = ("fp32", "int8", "nf4")
LAYER_NAMES = {f"{name}_proj": name for name in finetune_memory.ALL_LINEAR}
UNGATED_MODEL_TYPES = ("phi", "starcoder2")
"""Models of which an MLP has two layers, not three."""


@dataclass(frozen=True)
class BaseFit:
    """A format of the frozen base: bytes of all weights, and by GPU the longest sequence in tokens, 0 for none."""

    base_dtype: finetune_memory.BaseDtype
    weight_bytes: float
    max_seq_len: dict[str, int]


def find_fits(path: Path | str, overrides: Sequence[str]) -> tuple[finetune_memory.FineTuning, list[BaseFit]]:
    """Return the run of a recipe file, and what fits of it in a micro-batch of 1 by format of the base.

    Raises RecipeError where config.json is not that of a decoder, UsageError where the recipe has no adapter.
    """
    loaded = load_recipe(path, overrides)
    with loaded.locate_errors():
        run = _describe_run(loaded.recipe, loaded.recipe_dir)
    gpus = {f"{name} {gib:g} GiB": gib for name in GPU_NAMES for gib in (find_accelerator(name).memory_gib,)}
    fits = []
    for other in (replace(run, base_dtype=dtype) for dtype in BASE_DTYPES):
        usable_bytes = {name: gib * BYTES_PER_GIB * USABLE_MEMORY_FRACTION for name, gib in gpus.items()}
        lengths = {
            name: finetune_memory.find_longest_sequence(other, capacity) for name, capacity in usable_bytes.items()
        }
        fits.append(BaseFit(other.base_dtype, finetune_memory.estimate_finetune_memory(other).parameters, lengths))
    return run, fits


def _describe_run(recipe: Recipe, recipe_dir: Path) -> finetune_memory.FineTuning:
    if (adapter := recipe.adapter) is None:
        raise UsageError("--fits: the recipe trains all weights; expected an adapter, such as adapter={rank: 8}")
    checkpointing, loss = recipe.memory.activation_checkpointing, "fused" if recipe.memory.chunked_loss else "kernel"
    return finetune_memory.FineTuning(
        sizes=_read_decoder_sizes(recipe, recipe_dir),
        seq_len=recipe.data.seq_len,
        base_dtype=adapter.base_dtype or "fp32",
        adapter_rank=adapter.rank,
        adapter_targets=_match_layers(adapter),
        adapter_dropout=adapter.dropout > 0,
        bytes_per_moment=0.0 if recipe.optimizer.offload else BYTES_PER_MOMENT[recipe.optimizer.state_dtype],
        checkpointing="full" if checkpointing == "auto" else checkpointing,
        stack=replace(finetune_memory.PHALANX_STACK, bytes_per_logit=finetune_memory.BYTES_PER_LOGIT[loss]),
    )


def _match_layers(adapter: AdapterConfig) -> frozenset[str]:
    modules = adapter.target_modules or list(LAYER_NAMES)
    names = {module.rpartition(".")[2] for module in ([modules] if isinstance(modules, str) else modules)}
    if unknown := sorted(names - LAYER_NAMES.keys()):
        known = ", ".join(sorted(LAYER_NAMES))
        raise RecipeError(f"adapter.target_modules: found {unknown[0]}; --fits expects names out of {known}")
    return frozenset(LAYER_NAMES[name] for name in names)


def _read_decoder_sizes(recipe: Recipe, recipe_dir: Path) -> finetune_memory.DecoderSizes:
    location = huggingface_location(recipe.model.build)
    if location is None:
        raise RecipeError(f"model.build: found {recipe.model.build}; --fits reads the config.json of hf:PATH")
    file = localize_named(location, recipe_dir, "model.build", (HF_CONFIG_FILE,)) / HF_CONFIG_FILE
    if not file.is_file():
        raise RecipeError(f"model.build: found {recipe.model.build}; expected hf:PATH with a {file.name} at {file}")
    try:
        values: dict[str, Any] = json.loads(file.read_bytes())
    except ValueError as error:
        raise RecipeError(f"model.build: {file} is not JSON: {error}") from None
    values = values | values.get("text_config", {}) | recipe.model.args
    model_type = values.get("model_type", "")
    try:
        hidden_size, num_heads = values["hidden_size"], values["num_attention_heads"]
        return finetune_memory.DecoderSizes(
            num_layers=values["num_hidden_layers"],
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=values.get("num_key_value_heads") or num_heads,
            head_dim=values.get("head_dim") or hidden_size // num_heads,
            ffn_hidden_size=values.get("moe_intermediate_size") or values["intermediate_size"],
            vocab_size=values["vocab_size"],
            gated=model_type not in UNGATED_MODEL_TYPES,
            tie_embeddings=values.get("tie_word_embeddings", model_type.startswith("gemma")),
            num_experts=values.get("num_local_experts") or values.get("num_experts") or 1,
            experts_per_token=values.get("num_experts_per_tok") or 1,
        )
    except KeyError as error:
        raise RecipeError(f"model.build: {file} has no {error.args[0]}; --fits expects that of a decoder") from None
