"""`phalanx plan`: a recipe's model followed, a cluster described, the best layout chosen, and what a run would take.

Nothing is trained and no data are read: text is only asked for its tokenizer. What was learned of a model is kept,
so that a second plan needs no torch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.autoconfig.model_profile import profile_model
from phalanx.autoconfig.plan_search import describe_no_fit, predict_memory, search_precisions
from phalanx.cluster import Cluster, discover_machine, load_cluster
from phalanx.cluster.calibration import default_calibration_path
from phalanx.cluster.data_sheet import torch_devices
from phalanx.data.expected_info import expect_data_info
from phalanx.data.reader import DataInfo
from phalanx.errors import RecipeError, UsageError
from phalanx.formatting import BYTES_PER_GIB, format_percent, format_plural
from phalanx.planner.bucket_size import best_bucket_mib
from phalanx.planner.cost import RunCost, estimate_run_cost
from phalanx.planner.device_costs import LOG_ERROR_STD_BY_SOURCE, DeviceCosts
from phalanx.planner.energy import (
    PowerCapSlowdown,
    RunEnergy,
    SweptSpeeds,
    device_power,
    predict_run_energy,
    predict_swept_slowdown,
)
from phalanx.planner.memory import MemoryEstimate
from phalanx.planner.model_profile import ModelProfile
from phalanx.planner.scenario import Scenario
from phalanx.planner.search import Candidate, SearchResult
from phalanx.planner.stages import balance_stages
from phalanx.planner.step_time import StepBreakdown, predict_step_time
from phalanx.planner.storage_costs import CheckpointPlan, add_storage_stalls, plan_checkpoints
from phalanx.planner.timeline import BREAKDOWN_LABELS, TimelineEvent, build_timeline
from phalanx.planner.warmup_phase import WarmupPhase, predict_warmup_phase
from phalanx.recipe import Recipe, check_recipe, scale_batch_with_workers
from phalanx.recipe.load import LoadedRecipe
from phalanx.recipe.schema import Parallelism
from phalanx.recipe.yaml_edit import rewrite_recipe

Z_SCORE_90 = 1.645
LEAST_PRODUCTIVE = 1e-3
"""Share of the time below which a run on failing nodes does not come to its end."""


@dataclass(frozen=True)
class RunPlan:
    """A recipe on a cluster: the choice, what comes close, and what a run takes."""

    recipe: Recipe
    cluster: Cluster
    num_devices: int
    best: Candidate
    alternatives: tuple[Candidate, ...]
    footprint: MemoryEstimate
    warmup_phase: WarmupPhase | None
    """The first steps, where they are of another kind; `best_found`, `low_s` and `high_s` are of those that follow."""
    low_s: float
    high_s: float
    """Seconds of a step between which nine of ten measurements should lie."""
    cost_source: str
    """Whence the costs: sheet, fitted or measured."""
    num_valid: int
    parameters: int
    units_per_sample: int
    """Units of a sample."""
    mfu: float
    cost: RunCost
    energy: RunEnergy | None
    checkpoint_plan: CheckpointPlan | None
    power_cap_slowdown: PowerCapSlowdown | None
    """Effect of the cluster's power cap on compute; all times include it."""
    scaling: tuple[tuple[int, float], ...]
    """Devices, and units a second on that many with the same parallelism for each replica."""
    rates: DeviceCosts

    def step_events(self) -> list[TimelineEvent]:
        """The time line of the best choice."""
        return build_timeline(self.best.scenario, self.rates, breakdown=self.best.breakdown)


def plan_run(
    loaded: LoadedRecipe,
    cluster: str | Cluster | None,
    num_gpus: int | None = None,
    folder: Path | None = None,
    swept: SweptSpeeds | None = None,
) -> RunPlan:
    """Predict a run of a recipe on a cluster (a value, a name of the catalog or a file), on `num_gpus` of its devices
    (default all), and choose the parallelism, micro-batch, activation checkpointing, precision and schedule that the
    recipe leaves open. `swept`: what a sweep has measured of it under power caps.

    Raises RecipeError when the name is unknown, the model cannot be traced, or nothing fits; the message says by how
    much, and which change would make it fit. Raises UsageError when the cluster has fewer devices.
    """
    target_cluster = (
        load_sized_cluster(cluster, num_gpus, folder)
        if cluster is not None
        else _load_local_cluster(loaded.recipe.device)
    )
    with loaded.locate_errors():
        check_kind(loaded.recipe.device, target_cluster)
    num_devices = num_gpus or target_cluster.devices
    loaded = replace(loaded, recipe=scale_batch_with_workers(loaded.recipe, num_devices))
    recipe = loaded.recipe
    with loaded.locate_errors():
        check_recipe(
            recipe,
            loaded.recipe_dir,
            num_devices if isinstance(recipe.parallelism, Parallelism) else None,
            loaded.location_of,
        )
    facts = expect_data_info(recipe.data, loaded.recipe_dir)
    profile = profile_model(loaded, facts)
    found, rates, memory_limit = search_precisions(recipe, profile, target_cluster, num_devices)
    if not found.candidates:
        raise RecipeError(describe_no_fit(recipe, found, target_cluster, num_devices, memory_limit))
    slowdown = _power_cap_slowdown(target_cluster, found.candidates[0], swept)
    if slowdown is not None and slowdown.expected > 1:
        found, rates, memory_limit = search_precisions(recipe, profile, target_cluster, num_devices, slowdown.expected)
    return _build_plan(recipe, target_cluster, num_devices, profile, found, rates, slowdown, _sample_bytes(facts))


def _load_local_cluster(device: str) -> Cluster:
    """This machine, as it was measured with a recipe's device. UsageError: it was not."""
    path = default_calibration_path(discover_machine(device=device))
    if not path.is_file():
        calibrate_command = "CUDA_VISIBLE_DEVICES= phalanx calibrate" if device == "cpu" else "phalanx calibrate"
        raise UsageError(
            f"--cluster: not given, and this machine has not been measured: run `{calibrate_command}` first"
        )
    return load_cluster(str(path))


def check_kind(device: str, cluster: Cluster) -> None:
    """RecipeError where a recipe's `device` is another than the cluster computes with."""
    kinds = torch_devices(cluster.node.accelerator)
    if device == "auto" or device in kinds:
        return
    valid = " or ".join([*(f"device={kind}" for kind in kinds), "device=auto"])
    other = {"cpu": ", such as cpu", "cuda": ", such as h100"}.get(device, "")
    raise RecipeError(
        f"device: found {device}, but {cluster.name} computes with {cluster.node.accelerator.name}; use {valid}, or "
        f"another --cluster{other}"
    )


def load_sized_cluster(named: str | Cluster, num_gpus: int | None, folder: Path | None = None) -> Cluster:
    """Load the cluster of that name with as many nodes as `num_gpus` devices need; a cluster with a fixed number of
    nodes must have them."""
    if num_gpus is not None and num_gpus < 1:
        raise UsageError(f"--num-gpus {num_gpus}: expected a number of devices, at least 1")
    cluster = named if isinstance(named, Cluster) else load_cluster(named, folder)
    cluster_name = cluster.name if isinstance(named, Cluster) else named
    if num_gpus is None or num_gpus <= cluster.devices:
        return cluster
    is_catalog_name = isinstance(named, str) and (
        ":" not in cluster_name and "/" not in cluster_name and not cluster_name.lower().endswith((".yaml", ".yml"))
    )
    if is_catalog_name and cluster.node.scale_out is not None:
        gpus_per_node = load_cluster(cluster.node.name).node.count
        return load_cluster(f"{cluster.node.name}:{-(-num_gpus // gpus_per_node)}")
    raise UsageError(
        f"--num-gpus {num_gpus}: {cluster.name} has {format_plural(cluster.devices, 'device')}: "
        f"{format_plural(cluster.nodes, 'node')} x {cluster.node.count}"
    )


def _power_cap_slowdown(cluster: Cluster, option: Candidate, swept: SweptSpeeds | None) -> PowerCapSlowdown | None:
    """What the cluster's power cap makes of computing, for the load that an option is without it."""
    device, power_cap_w = cluster.node.accelerator, cluster.prices.power_cap_w
    watts = device_power(device, _device_load(option.breakdown))
    if power_cap_w is None or watts is None:
        return None
    try:
        return predict_swept_slowdown(device, power_cap_w, watts, swept)
    except ValueError as why:
        raise RecipeError(f"{cluster.name}: prices.power_cap_w: {power_cap_w:g} W: {why}") from None


def _device_load(parts: StepBreakdown) -> float:
    """Load of the devices, for `device_power`: products draw the most."""
    return min(1.0, 0.3 + 0.7 * parts.gemm / parts.total)


def _sample_bytes(facts: DataInfo) -> float:
    """Bytes of a sample as it lies in storage: tokens of 32 bits, pixels of 8."""
    return 4.0 * facts.seq_len if facts.seq_len else float(math.prod(facts.image_shape or ()))


def _build_plan(
    recipe: Recipe,
    cluster: Cluster,
    num_devices: int,
    profile: ModelProfile,
    found: SearchResult,
    rates: DeviceCosts,
    slowdown: PowerCapSlowdown | None,
    sample_bytes: float,
) -> RunPlan:
    nodes = -(-num_devices // cluster.node.count)
    checkpoint_plan = plan_checkpoints(cluster, nodes, profile.num_parameters, found.candidates[0].step_s)
    read_bytes = sample_bytes * recipe.batch.global_size
    options = tuple(
        replace(each, breakdown=add_storage_stalls(each.breakdown, cluster.storage, nodes, read_bytes, checkpoint_plan))
        for each in found.candidates
    )
    best = options[0]
    spread = LOG_ERROR_STD_BY_SOURCE[rates.cost_source]
    low, high = (
        (slowdown.low / slowdown.expected, slowdown.high / slowdown.expected) if slowdown is not None else (1.0, 1.0)
    )
    samples = float(recipe.batch.global_size * recipe.steps)
    peak = rates.peak_flops * num_devices
    flops = (profile.flops("forward") + profile.flops("backward")) * recipe.batch.global_size
    # what checkpoints cost is in the step already
    productive = (
        checkpoint_plan.goodput.productive + checkpoint_plan.goodput.blocked if checkpoint_plan is not None else 1.0
    )
    if productive < LEAST_PRODUCTIVE:
        raise RecipeError(
            f"{cluster.name}: {nodes:,} nodes would fail again before they have made progress; check reliability and "
            "storage of the cluster, or use fewer --num-gpus"
        )
    load = _device_load(best.breakdown)
    warmup_phase = predict_warmup_phase(recipe, best, rates)
    mean_step_s = best.step_s if warmup_phase is None else warmup_phase.mean_step_seconds(best.step_s, recipe.steps)
    cost = estimate_run_cost(samples, recipe.batch.global_size, mean_step_s, num_devices, cluster.prices, productive)
    energy = predict_run_energy(cluster, cost.wall_s, nodes, load)
    if energy is not None:
        cost = estimate_run_cost(
            samples, recipe.batch.global_size, mean_step_s, num_devices, cluster.prices, productive, energy
        )
    return RunPlan(
        recipe=recipe,
        cluster=cluster,
        num_devices=num_devices,
        best=best,
        alternatives=options[1:],
        footprint=predict_memory(recipe, best.scenario),
        warmup_phase=warmup_phase,
        low_s=best.step_s * math.exp(-Z_SCORE_90 * spread) * low,
        high_s=best.step_s * math.exp(Z_SCORE_90 * spread) * high,
        cost_source=rates.cost_source,
        num_valid=found.num_valid,
        parameters=profile.num_parameters,
        units_per_sample=profile.units_per_sample,
        mfu=flops / best.step_s / peak,
        cost=cost,
        energy=energy,
        checkpoint_plan=checkpoint_plan,
        power_cap_slowdown=slowdown,
        scaling=_predict_scaling(best.scenario, rates),
        rates=rates,
    )


def _predict_scaling(setup: Scenario, rates: DeviceCosts) -> tuple[tuple[int, float], ...]:
    """Units a second on one replica and on more, up to what was asked for; each replica divided as chosen, and with as
    many samples of its own (weak scaling)."""
    parallelism = setup.parallelism
    batch_per_replica = setup.global_batch // setup.data_parallel
    curve = []
    num_replicas = setup.data_parallel
    sizes = sorted(
        {1, num_replicas, *(2**power for power in range(num_replicas.bit_length()) if 2**power <= num_replicas)}
    )
    for count in sizes:
        shard = min(parallelism.shard, count)
        if count % shard:
            continue
        smaller_parallelism = parallelism.model_copy(update={"replicate": count // shard, "shard": shard})
        smaller_scenario = replace(setup, parallelism=smaller_parallelism, global_batch=batch_per_replica * count)
        units = (
            smaller_scenario.global_batch
            * setup.profile.units_per_sample
            / predict_step_time(smaller_scenario, rates).total
        )
        curve.append((smaller_parallelism.world, units))
    return tuple(curve)


def list_chosen_keys(run_plan: RunPlan) -> dict[str, Any]:
    """The choice, as dotted keys of the recipe and their values; those that the recipe gives already are left out."""
    setup, recipe = run_plan.best.scenario, run_plan.recipe
    parallelism = {
        name: value for name, value in setup.parallelism.model_dump().items() if value not in (1, None, False, "1f1b")
    }
    if setup.virtual_stages > 1:
        parallelism["pipeline_schedule"] = "interleaved"
        parallelism["layers_per_stage"] = blocks_per_stage(setup)
    changes: dict[str, Any] = {}
    if not isinstance(recipe.parallelism, Parallelism):
        changes["parallelism"] = parallelism or {"replicate": 1}
    if recipe.batch.micro_size == "auto":
        changes["batch.micro_size"] = setup.micro_size
    if recipe.memory.activation_checkpointing == "auto":
        changes["memory.activation_checkpointing"] = setup.checkpointing
    if recipe.precision == "auto":
        changes["precision"] = setup.precision
    if recipe.grad_sync.bucket_mib == "auto" and (bucket := best_bucket_mib(setup, run_plan.rates)) is not None:
        changes["grad_sync.bucket_mib"] = bucket
    return changes


def blocks_per_stage(setup: Scenario) -> list[int]:
    """Blocks of each stage of an interleaved pipeline."""
    return balance_stages(setup.profile.num_blocks, setup.parallelism.pipeline * setup.virtual_stages)


def render_recipe(loaded: LoadedRecipe, overrides: Sequence[str], run_plan: RunPlan) -> str:
    """The recipe as it was given, with overrides and the choice in it."""
    device = run_plan.cluster.node.accelerator.name
    name = "the default recipe" if loaded.path is None else loaded.path.name
    header = [
        f"Planned by `phalanx plan` from {name} for {run_plan.num_devices} x {device}:",
        f"a step is predicted to take {run_plan.best.step_s:.3g} s ({run_plan.low_s:.3g} to {run_plan.high_s:.3g}) and "
        f"{run_plan.best.peak_bytes / BYTES_PER_GIB:.1f} GiB of a device.",
    ]
    text = "" if loaded.path is None else loaded.path.read_text(encoding="utf-8-sig")
    return rewrite_recipe(text, overrides, list_chosen_keys(run_plan), {}, header)


def describe_slowdown(best: StepBreakdown, other: StepBreakdown) -> str:
    """Why another choice loses: what it spends more on than the best, in a word or two."""
    extra_seconds = {name: getattr(other, name) - getattr(best, name) for name in BREAKDOWN_LABELS}
    largest = max(extra_seconds, key=lambda name: extra_seconds[name])
    return (
        f"{BREAKDOWN_LABELS[largest]}: +{format_percent(extra_seconds[largest] / best.total)}"
        if extra_seconds[largest] > 0.002 * best.total
        else "as fast"
    )
