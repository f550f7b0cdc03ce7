"""`phalanx plan`: a recipe's model followed, a cluster described, the best layout searched (precision, parallelism,
micro-batch and checkpointing, within the memory of a device), and what a run would take.

Nothing is trained and no data are read: text is only asked for its tokenizer. What was learned of a model is kept, so
that a second plan needs no torch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.autoconfig.memory_choice import CHECKPOINTING_MODES, LARGE_LOGITS_BYTES
from phalanx.autoconfig.model_profile import profile_model
from phalanx.cluster import Cluster, discover_machine, load_cluster
from phalanx.cluster.calibration.hardware_key import default_calibration_path
from phalanx.data.cache import expect_data_info, prepare_all_sources
from phalanx.data.dataset_files import open_dataset_files
from phalanx.data.manifest import read_manifest
from phalanx.data.reader import open_data
from phalanx.errors import RecipeError, UsageError
from phalanx.formatting import BYTES_PER_GIB, format_percent, format_plural
from phalanx.planner.device_costs import LOG_ERROR_STD_BY_SOURCE, DeviceCosts, device_costs_for_stack, phalanx_stack
from phalanx.planner.energy import RunCost, RunEnergy, estimate_run_cost, predict_run_energy
from phalanx.planner.memory import (
    USABLE_MEMORY_FRACTION,
    MemoryEstimate,
    TrainingOptions,
    estimate_memory,
    suggest_memory_changes,
)
from phalanx.planner.model_profile import Gemm, ModelProfile
from phalanx.planner.pipeline import balance_stages
from phalanx.planner.scenario import Scenario, transport_of
from phalanx.planner.search import Candidate, SearchResult, SearchSpace, search_parallelism
from phalanx.planner.state_memory import optimizer_state_of
from phalanx.planner.step_time import BREAKDOWN_LABELS, StepBreakdown, predict_step_time
from phalanx.planner.storage_costs import (
    CheckpointPlan,
    StorageDemand,
    StoredData,
    add_storage_stalls,
    checkpoint_bytes_of,
    plan_checkpoints,
    predict_storage_demand,
)
from phalanx.recipe import Recipe, check_recipe, scale_batch_with_workers
from phalanx.recipe.data_schema import list_sources
from phalanx.recipe.load import LoadedRecipe
from phalanx.recipe.overrides import rewrite_recipe
from phalanx.recipe.schema import Parallelism
from phalanx.storage.url import is_url

MIN_PRECISION_GAIN = 0.99
"""Another precision than the usual one must save at least so much."""
Z_SCORE_90 = 1.645
LEAST_PRODUCTIVE = 1e-3
"""Share of the time below which a run on failing nodes does not come to its end."""


def search_precisions(
    recipe: Recipe, profile: ModelProfile, cluster: Cluster, num_devices: int
) -> tuple[SearchResult, DeviceCosts, float]:
    """The best of every precision that may be used."""
    device, device_stack = cluster.node.accelerator, phalanx_stack(cluster.node.accelerator, num_devices)
    used_stack = replace(device_stack, fuses_memory_ops=recipe.compile is not False)
    memory_limit = device.memory_gib * BYTES_PER_GIB * USABLE_MEMORY_FRACTION
    checkpointing = recipe.memory.activation_checkpointing
    space = SearchSpace(
        devices=num_devices,
        global_batch=recipe.batch.global_size,
        parallelism=recipe.parallelism if isinstance(recipe.parallelism, Parallelism) else None,
        micro_size=recipe.batch.micro_size if isinstance(recipe.batch.micro_size, int) else None,
        checkpointing_modes=CHECKPOINTING_MODES if checkpointing == "auto" else (checkpointing,),
        domain_size=cluster.domain,
        replicas_only=recipe.determinism == "elastic" or recipe.local_sgd is not None,
        has_sequences=profile.units_per_sample > 1,
    )

    optimizer = recipe.optimizer
    optimizer_state = optimizer_state_of(
        optimizer.name, optimizer.state_dtype, optimizer.offload, optimizer.momentum, optimizer.ema_decay is not None
    )
    best_found: tuple[SearchResult, DeviceCosts] | None = None
    for precision in _candidate_precisions(recipe, device.tflops):
        rates = device_costs_for_stack(device, precision, used_stack)
        base = Scenario(
            profile,
            cluster,
            space.parallelism or Parallelism(),
            1,
            recipe.batch.global_size,
            precision,
            stack=used_stack,
            optimizer=optimizer.name,
            transport=transport_of(recipe, profile),
        )
        best = () if best_found is None else best_found[0].candidates
        if best_found is not None and best and rates.sustained_gemm_flops < best_found[1].sustained_gemm_flops:
            continue  # nothing else differs but that it takes more memory
        found = search_parallelism(
            base, rates, space, lambda setup: predict_memory(recipe, setup).total, memory_limit, optimizer_state
        )
        if best_found is None or (
            found.candidates and (not best or found.candidates[0].step_s < MIN_PRECISION_GAIN * best[0].step_s)
        ):
            best_found = found, rates
    assert best_found is not None
    if best_found[0].num_valid == 0:
        raise RecipeError(
            f"batch.global_size: {recipe.batch.global_size} samples and {profile.num_blocks} blocks cannot be divided "
            f"among {num_devices} devices; a multiple of {num_devices} samples can"
        )
    return best_found[0], best_found[1], memory_limit


def _candidate_precisions(recipe: Recipe, known: Any) -> list[str]:
    """What may be computed in: as given, else what `auto` chooses from, if the device has it."""
    if recipe.precision != "auto":
        if recipe.precision not in known and not (recipe.precision == "bf16" and "fp16" in known):
            raise RecipeError(
                f"precision: {recipe.precision} is not among what the device computes in: {', '.join(known)}"
            )
        return [recipe.precision]
    return [name for name in ("bf16", "fp32") if name in known] or [next(iter(known))]


def predict_memory(recipe: Recipe, setup: Scenario) -> MemoryEstimate:
    """Bytes on the fullest device, with the recipe's optimizer and loss."""
    return estimate_memory(setup, make_training_options(recipe, setup))


def make_training_options(recipe: Recipe, setup: Scenario) -> TrainingOptions:
    """Return what the memory of a recipe's run depends on besides the scenario. With `memory.chunked_loss: auto`,
    large logits are chunked."""
    chunked = recipe.memory.chunked_loss
    if chunked == "auto":
        head = setup.profile.segments[-1]
        heads = (op for op in head.ops_of("forward") if isinstance(op, Gemm))
        sizes = (op.m.evaluate(setup.micro_size) * op.n.evaluate(setup.micro_size) for op in heads)
        chunked = recipe.has_head_loss and 4.0 * max(sizes, default=0.0) > LARGE_LOGITS_BYTES
    optimizer = recipe.optimizer
    return TrainingOptions(
        optimizer.name,
        optimizer.state_dtype,
        optimizer.offload,
        "chunked" if chunked else "whole",
        optimizer.momentum,
        optimizer.ema_decay is not None,
    )


def describe_no_fit(
    recipe: Recipe, found: SearchResult, cluster: Cluster, num_devices: int, memory_limit: float
) -> str:
    """That nothing fits: by how much, and what would."""
    smallest = found.closest
    assert smallest is not None
    excess_gib = (smallest.peak_bytes - memory_limit) / BYTES_PER_GIB
    device = cluster.node.accelerator
    summary = (
        f"nothing fits: of {found.num_valid:,} layouts for {num_devices:,} x {device.name} not even the smallest, "
        f"which is {excess_gib:.1f} GiB above {USABLE_MEMORY_FRACTION:.0%} of a device's {device.memory_gib:g}"
    )
    options = make_training_options(recipe, smallest.scenario)
    return f"{summary}. It {suggest_memory_changes(smallest.scenario, options, memory_limit)}"


@dataclass(frozen=True)
class RunPlan:
    """A recipe on a cluster: the choice, what comes close, and what a run takes."""

    recipe: Recipe
    cluster: Cluster
    num_devices: int
    best: Candidate
    alternatives: tuple[Candidate, ...]
    footprint: MemoryEstimate
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
    storage_demand: StorageDemand
    scaling: tuple[tuple[int, float], ...]
    """Devices, and units a second on that many with the same parallelism for each replica."""
    epochs: tuple[float, ...] | None
    """How often the run passes through each source; None where one is not prepared: its size is not known."""


def plan_run(
    loaded: LoadedRecipe, cluster: str | Cluster | None, num_gpus: int | None = None, folder: Path | None = None
) -> RunPlan:
    """Predict a run of a recipe on a cluster (a value, a name of the catalog or a file), on `num_gpus` of its devices
    (default all), and choose the parallelism, micro-batch, activation checkpointing, precision and schedule that the
    recipe leaves open.

    Raises RecipeError when the name is unknown, the model cannot be traced, or nothing fits; the message says by how
    much, and which change would make it fit. Raises UsageError when the cluster has fewer devices.
    """
    if cluster is None:
        target_cluster = _load_local_cluster(loaded.recipe.device)
    else:
        target_cluster = load_sized_cluster(cluster, num_gpus, folder)
    num_devices = num_gpus or target_cluster.devices
    loaded = replace(loaded, recipe=scale_batch_with_workers(loaded.recipe, num_devices))
    recipe = loaded.recipe
    num_workers = num_devices if isinstance(recipe.parallelism, Parallelism) else None
    with loaded.locate_errors():
        check_recipe(recipe, loaded.recipe_dir, num_workers, loaded.location_of)
    facts = expect_data_info(recipe.data, loaded.recipe_dir)
    profile = profile_model(loaded, facts)
    found, rates, memory_limit = search_precisions(recipe, profile, target_cluster, num_devices)
    if not found.candidates:
        raise RecipeError(describe_no_fit(recipe, found, target_cluster, num_devices, memory_limit))
    data = _find_stored_data(recipe)
    run_plan = _build_plan(recipe, target_cluster, num_devices, profile, found, rates, facts.bytes_per_sample, data)
    return replace(run_plan, epochs=_count_epochs(recipe, loaded.recipe_dir))


def _count_epochs(recipe: Recipe, recipe_dir: Path) -> tuple[float, ...] | None:
    if not all(source.prepared for source in list_sources(recipe.data, recipe.evaluation)):
        return None
    data = open_data(*prepare_all_sources(recipe.data, recipe.evaluation, recipe_dir), recipe.seed)
    return tuple(data.mixture.count_epochs(recipe.steps, recipe.batch.global_size))


def _load_local_cluster(device: str) -> Cluster:
    """This machine, as it was measured with a recipe's device. UsageError: it was not."""
    path = default_calibration_path(discover_machine(device=device))
    if not path.is_file():
        calibrate_command = "CUDA_VISIBLE_DEVICES= phalanx calibrate" if device == "cpu" else "phalanx calibrate"
        raise UsageError(
            f"--cluster: not given, and this machine has not been measured: run `{calibrate_command}` first"
        )
    return load_cluster(str(path))


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


def _find_stored_data(recipe: Recipe) -> StoredData | None:
    """The prepared dataset that the recipe's first source names by URL."""
    source = recipe.data.sources[0]
    if source.prepared is None or not is_url(source.prepared):
        return None
    return StoredData(source.prepared, read_manifest(open_dataset_files(source.prepared).directory).bytes)


def _build_plan(
    recipe: Recipe,
    cluster: Cluster,
    num_devices: int,
    profile: ModelProfile,
    found: SearchResult,
    rates: DeviceCosts,
    sample_bytes: int,
    data: StoredData | None,
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
    peak = rates.peak_flops * num_devices
    flops = (profile.flops("forward") + profile.flops("backward")) * recipe.batch.global_size
    # what checkpoints cost is in the step already
    productive = 1.0
    if checkpoint_plan is not None:
        productive = checkpoint_plan.productive * (1 + checkpoint_plan.stall_s / checkpoint_plan.interval_s)
    if productive < LEAST_PRODUCTIVE:
        raise RecipeError(
            f"{cluster.name}: {nodes:,} nodes would fail again before they have made progress; check reliability and "
            "storage of the cluster, or use fewer --num-gpus"
        )
    wall_s = recipe.steps * best.step_s / productive
    num_frozen = sum(segment.repeats * segment.weights.frozen_count for segment in profile.segments)
    checkpoint_bytes = checkpoint_bytes_of(recipe, profile.num_parameters - num_frozen, num_frozen)
    demand = predict_storage_demand(recipe, cluster, num_devices, checkpoint_bytes, read_bytes / best.step_s, data)
    load = min(1.0, 0.3 + 0.7 * best.breakdown.gemm / best.step_s)  # products draw the most
    energy = predict_run_energy(cluster, wall_s, nodes, load)
    cost = estimate_run_cost(wall_s, num_devices, cluster.prices, energy)
    return RunPlan(
        recipe=recipe,
        cluster=cluster,
        num_devices=num_devices,
        best=best,
        alternatives=options[1:],
        footprint=predict_memory(recipe, best.scenario),
        low_s=best.step_s * math.exp(-Z_SCORE_90 * spread),
        high_s=best.step_s * math.exp(Z_SCORE_90 * spread),
        cost_source=rates.cost_source,
        num_valid=found.num_valid,
        parameters=profile.num_parameters,
        units_per_sample=profile.units_per_sample,
        mfu=flops / best.step_s / peak,
        cost=cost,
        energy=energy,
        checkpoint_plan=checkpoint_plan,
        storage_demand=demand,
        scaling=_predict_scaling(best.scenario, rates),
        epochs=None,
    )


def _predict_scaling(setup: Scenario, rates: DeviceCosts) -> tuple[tuple[int, float], ...]:
    """Units a second on one replica and on more, up to what was asked for; each replica divided as chosen, and with as
    many samples of its own (weak scaling)."""
    parallelism = setup.parallelism
    batch_per_replica = setup.global_batch // setup.data_parallel
    curve = []
    num_replicas = setup.data_parallel
    powers = [2**power for power in range(num_replicas.bit_length())]  # none is more than there are
    for count in sorted({*powers, num_replicas}):
        shard = min(parallelism.shard, count)
        if count % shard:
            continue
        smaller_parallelism = parallelism.model_copy(update={"replicate": count // shard, "shard": shard})
        smaller_scenario = replace(setup, parallelism=smaller_parallelism, global_batch=batch_per_replica * count)
        units = smaller_scenario.global_batch * setup.profile.units_per_sample
        curve.append((smaller_parallelism.world, units / predict_step_time(smaller_scenario, rates).total))
    return tuple(curve)


def list_chosen_keys(run_plan: RunPlan) -> dict[str, Any]:
    """The choice, as dotted keys of the recipe and their values; those that the recipe gives already are left out."""
    setup, recipe = run_plan.best.scenario, run_plan.recipe
    sizes = setup.parallelism.model_dump()
    parallelism = {name: value for name, value in sizes.items() if value not in (1, None, False, "1f1b")}
    if setup.virtual_stages > 1:
        parallelism["pipeline_schedule"] = "interleaved"
        num_stages = setup.parallelism.pipeline * setup.virtual_stages
        parallelism["layers_per_stage"] = balance_stages(setup.profile.num_blocks, num_stages)
    changes: dict[str, Any] = {}
    if not isinstance(recipe.parallelism, Parallelism):
        changes["parallelism"] = parallelism or {"replicate": 1}
    if recipe.batch.micro_size == "auto":
        changes["batch.micro_size"] = setup.micro_size
    if recipe.memory.activation_checkpointing == "auto":
        changes["memory.activation_checkpointing"] = setup.checkpointing
    if recipe.precision == "auto":
        changes["precision"] = setup.precision
    return changes


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
    share = extra_seconds[largest] / best.total
    return f"{BREAKDOWN_LABELS[largest]}: +{format_percent(share)}" if share > 0.002 else "as fast"
