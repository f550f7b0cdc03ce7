"""Jobs of a simulated fleet that are recipes: their hours and saves, as the planner predicts them."""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from phalanx.autoconfig.plan import RunPlan, plan_run
from phalanx.cluster.spec import StorageSpec
from phalanx.errors import RecipeError, UsageError
from phalanx.formatting import format_bytes, format_count, format_duration
from phalanx.planner.storage_costs import CHECKPOINT_BYTES_PER_PARAMETER, checkpoint_stall_seconds
from phalanx.recipe import load_recipe
from phalanx_fleet.fleet_file import FleetFile
from phalanx_fleet.simulation_settings import CheckpointEntry, JobClassEntry, SimulationSettings

SECONDS_PER_HOUR = 3600.0


def price_recipe_jobs(
    settings: SimulationSettings, fleet: FleetFile, folder: Path, first_type: str
) -> tuple[SimulationSettings, list[str]]:
    """Return settings in which jobs that are recipes have predicted hours and saves, and a line about each.

    Args:
        settings: The settings of the fleet; paths of recipes are relative to `folder`.
        fleet: For its node types.
        folder: That of the fleet file.
        first_type: Kind of node of jobs that name none.

    Raises RecipeError, with the key, for a recipe that is wrong or does not fit the nodes.
    """
    jobs: dict[str, JobClassEntry] = {}
    notes: list[str] = []
    for name, entry in settings.jobs.items():
        jobs[name] = entry
        if entry.recipe is None:
            continue
        type_name = entry.node_type or first_type
        if type_name not in fleet.node_types:
            raise UsageError(f"simulate.jobs.{name}.node_type: no node type {type_name}")
        cluster, path = fleet.node_types[type_name].node, folder / entry.recipe
        plans = {size: _plan_size(name, path, cluster, size) for size in sorted(entry.devices)}
        jobs[name] = _price_entry(entry, plans)
        notes += [_describe_plan(name, entry.recipe, cluster, jobs[name], plan) for plan in plans.values()]
    return settings.model_copy(update={"jobs": jobs}), notes


def _plan_size(name: str, path: Path, cluster: str, num_devices: int) -> RunPlan:
    try:
        changed_ns = path.stat().st_mtime_ns if path.is_file() else 0
        return _plan_recipe(path, changed_ns, cluster, num_devices)
    except (RecipeError, UsageError) as error:
        raise RecipeError(f"simulate.jobs.{name}.recipe: {path} on {num_devices} of {cluster}: {error}") from None


@lru_cache(maxsize=64)
def _plan_recipe(path: Path, changed_ns: int, cluster: str, num_devices: int) -> RunPlan:
    """Plan a recipe. Variants and their seeds plan it once, until the file changes."""
    loaded = load_recipe(path)
    loaded.check_required()
    return plan_run(loaded, cluster, num_devices, path.parent)


def _price_entry(entry: JobClassEntry, plans: Mapping[int, RunPlan]) -> JobClassEntry:
    hours = {size: find_step_s(plan) * plan.recipe.steps / SECONDS_PER_HOUR for size, plan in plans.items()}
    checkpoint = entry.checkpoint
    if checkpoint.write_gbps is not None:
        checkpoint = _price_saves(checkpoint, checkpoint.write_gbps, plans[max(plans)])
    return entry.model_copy(update={"hours": hours, "checkpoint": checkpoint})


def _price_saves(checkpoint: CheckpointEntry, write_gbps: float, plan: RunPlan) -> CheckpointEntry:
    state_bytes = find_state_bytes(plan)
    stall_s = checkpoint_stall_seconds(state_bytes, StorageSpec(write_gbps=write_gbps), plan.cluster.nodes)
    return checkpoint.model_copy(
        update={
            "save_s": state_bytes / (write_gbps * 1e9),
            "stall_s": checkpoint.stall_s if stall_s is None else stall_s,
        }
    )


def find_step_s(plan: RunPlan) -> float:
    """Return the seconds of a step, without saves, which the simulation adds."""
    return plan.best.step_s - plan.best.breakdown.checkpoint_stall


def find_state_bytes(plan: RunPlan) -> float:
    """Return the bytes of a checkpoint."""
    return plan.parameters * CHECKPOINT_BYTES_PER_PARAMETER


def _describe_plan(name: str, recipe: str, cluster: str, entry: JobClassEntry, plan: RunPlan) -> str:
    save, work_s = entry.checkpoint, entry.hours[plan.num_devices] * SECONDS_PER_HOUR
    origin = "" if save.write_gbps is not None else " (as in the file)"
    return (
        f"{name}: {recipe} on {plan.num_devices} of {cluster}: predicted {find_step_s(plan):.3g} s a step, "
        f"{format_count(plan.recipe.steps)} steps, {format_duration(work_s)}; state "
        f"{format_bytes(find_state_bytes(plan))}, save {format_duration(save.save_s)}{origin}"
    )
