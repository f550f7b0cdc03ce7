"""What training asks before it starts on this machine, as `phalanx calibrate` measured it: which layout to take, and
how long a step will be."""

from dataclasses import replace
from pathlib import Path

from phalanx.autoconfig.model_profile import profile_model, select_number_format
from phalanx.autoconfig.plan import plan_run
from phalanx.autoconfig.plan_search import predict_memory
from phalanx.cluster import Cluster, Machine, discover_machine, load_cluster
from phalanx.cluster.calibration import default_calibration_path
from phalanx.cluster.calibration.anomalies import MAX_BUSY_CORES
from phalanx.data.expected_info import expect_data_info
from phalanx.errors import RecipeError
from phalanx.formatting import BYTES_PER_GIB
from phalanx.planner.measured_costs import MeasuredCosts, MissingMeasurementError
from phalanx.planner.scenario import Scenario, transport_of
from phalanx.planner.stacks import device_costs_for_stack, phalanx_stack
from phalanx.planner.step_time import StepBreakdown, measured_step_time
from phalanx.recipe import Recipe
from phalanx.recipe.load import LoadedRecipe
from phalanx.recipe.schema import Parallelism


def predict_step(
    recipe: Recipe, micro_size: int, checkpointing: str, folder: Path, cluster: Cluster, world_size: int
) -> StepBreakdown | None:
    """Seconds of a step by cause, of a resolved recipe on this machine as it was measured; None where that cannot be
    said: on GPUs and for divided models by data sheets only, and not for what was not measured."""
    measured, parallelism = cluster.measured, recipe.parallelism
    if measured is None or cluster.node.accelerator.generation != "cpu" or not isinstance(parallelism, Parallelism):
        return None
    if (
        parallelism.replicate != parallelism.world
        or recipe.compile is not False
        or recipe.precision not in ("fp32", "bf16")
    ):
        return None
    loaded = LoadedRecipe(recipe, None, folder, {})
    profile = profile_model(loaded, expect_data_info(recipe.data, folder), select_number_format(recipe.precision))
    stack = phalanx_stack(cluster.node.accelerator, world_size)
    cpu_stack = replace(stack, fuses_memory_ops=False, compute_factor=1.0, comm_factor=1.0)
    setup = Scenario(
        profile,
        cluster,
        parallelism,
        micro_size,
        recipe.batch.global_size,
        recipe.precision,
        checkpointing=checkpointing,
        zero_level=0,
        stack=cpu_stack,
        transport=transport_of(recipe, profile),
    )
    try:
        return measured_step_time(
            setup,
            device_costs_for_stack(cluster.node.accelerator, "fp32", cpu_stack),
            MeasuredCosts(measured, world_size),
        )
    except MissingMeasurementError:
        return None


def load_calibrated_cluster(machine: Machine) -> Cluster | None:
    """Load this machine as `phalanx calibrate` measured it under today's driver and libraries; None where it did not,
    or while other programs used the cores."""
    path = default_calibration_path(machine)
    try:
        cluster = load_cluster(str(path)) if path.is_file() else None
    except RecipeError:  # torn, or of another version: `phalanx calibrate` makes it again, and training does without
        return None
    if cluster is None or (cluster.measured is not None and cluster.measured.busy_cores >= MAX_BUSY_CORES):
        return None
    return cluster


def predict_best_parallelism(
    recipe: Recipe, folder: Path, cluster: Cluster, world_size: int
) -> tuple[Parallelism, str] | None:
    """Choose the parallelism for `world_size` workers of this machine, with the reason. On a CPU whole replicas, as
    long as they fit: the cost of sharding a model there is not predicted. None where the model cannot be traced, or
    nothing is predicted to fit."""
    loaded = LoadedRecipe(recipe, None, folder, {})
    device = cluster.node.accelerator
    try:
        if device.generation == "cpu":
            profile = profile_model(
                loaded, expect_data_info(recipe.data, folder), select_number_format(recipe.precision)
            )
            micro = recipe.batch.micro_size if isinstance(recipe.batch.micro_size, int) else 1
            base_scenario = Scenario(
                profile,
                cluster,
                Parallelism(replicate=world_size),
                micro,
                recipe.batch.global_size,
                "fp32",
                zero_level=0,
            )
            needed = predict_memory(recipe, replace(base_scenario, checkpointing="full")).total
            memory_per_worker = device.memory_gib * BYTES_PER_GIB / world_size
            return (
                (base_scenario.parallelism, "a replica fits into each worker's memory")
                if needed <= memory_per_worker
                else None
            )
        planned = plan_run(loaded, str(default_calibration_path(discover_machine(device=recipe.device))), world_size)
    except RecipeError:
        return None
    parallelism, seconds = planned.best.scenario.parallelism, planned.best.step_s
    others = f"; the next best takes {planned.alternatives[0].step_s:.3g} s" if planned.alternatives else ""
    return parallelism, f"the fastest of {planned.num_valid} that are valid: {seconds:.3g} s a step predicted{others}"
