"""What training asks before it starts on this machine, as `phalanx calibrate` measured it: which layout to take, and
how long a step will be."""

from dataclasses import replace
from pathlib import Path

from phalanx.cluster import Cluster, Machine, load_cluster, this_machine
from phalanx.cluster.probe import default_cluster_file
from phalanx.data.foretold import foretold
from phalanx.errors import RecipeError
from phalanx.plan.measured import Here, NotMeasured
from phalanx.plan.setup import Setup, wire_of
from phalanx.plan.stacks import OURS, rates_of, stack
from phalanx.plan.step import Parts, step_here
from phalanx.planning import GIB, memory_of, plan_run
from phalanx.profiling import numbers_of, profile_of
from phalanx.recipe import Recipe
from phalanx.recipe.load import Loaded
from phalanx.recipe.schema import Parallelism


def foretold_here(recipe: Recipe, folder: Path, cluster: Cluster, world: int) -> Parts | None:
    """Seconds of a step by cause, of a resolved recipe on this machine as it was measured; None where that cannot be
    said: on GPUs and for divided models by data sheets only, and not for what was not measured."""
    measured, layout = cluster.measured, recipe.parallelism
    if measured is None or cluster.node.accelerator.generation != "cpu" or not isinstance(layout, Parallelism):
        return None
    if layout.replicate != layout.world or recipe.compile is not False or recipe.precision not in ("fp32", "bf16"):
        return None
    assert isinstance(recipe.batch.micro_size, int)
    loaded = Loaded(recipe, None, folder, {})
    profile = profile_of(loaded, foretold(recipe.data, folder), numbers_of(recipe.precision))
    ours = replace(stack(OURS), fused=False, computing=1.0, communicating=1.0, launch=0.0, step_seconds=0.0)
    setup = Setup(
        profile,
        cluster,
        layout,
        recipe.batch.micro_size,
        recipe.batch.global_size,
        recipe.precision,
        recompute="none"
        if recipe.memory.activation_checkpointing == "auto"
        else recipe.memory.activation_checkpointing,
        zero=0,
        stack=ours,
        wire=wire_of(recipe, profile),
    )
    try:
        return step_here(setup, rates_of(cluster.node.accelerator, "fp32", ours), Here(measured, world))
    except NotMeasured:
        return None


def probed(machine: Machine) -> Cluster | None:
    """This machine as `phalanx calibrate` measured it under today's driver and libraries; None where it did not."""
    path = default_cluster_file(machine)
    try:
        return load_cluster(str(path)) if path.is_file() else None
    except RecipeError:  # torn, or of another version: `phalanx calibrate` makes it again, and training does without
        return None


def automatic_layout(recipe: Recipe, folder: Path, cluster: Cluster, world: int) -> tuple[Parallelism, str] | None:
    """The layout for so many workers of this machine, and why. On a CPU whole replicas, as long as these fit: what
    dividing a model costs there is not foretold. None where the model cannot be followed, or nothing is foretold to
    fit."""
    loaded = Loaded(recipe, None, folder, {})
    device = cluster.node.accelerator
    try:
        if device.generation == "cpu":
            profile = profile_of(loaded, foretold(recipe.data, folder), numbers_of(recipe.precision))
            micro = recipe.batch.micro_size if isinstance(recipe.batch.micro_size, int) else 1
            base = Setup(
                profile, cluster, Parallelism(replicate=world), micro, recipe.batch.global_size, "fp32", zero=0
            )
            needed = memory_of(recipe, replace(base, recompute="full")).total
            share = device.memory_gib * GIB / world
            return (base.layout, "a replica fits into each worker's memory") if needed <= share else None
        planned = plan_run(loaded, str(default_cluster_file(this_machine(device=recipe.device))), world)
    except RecipeError:
        return None
    layout, seconds = planned.best.setup.layout, planned.best.seconds
    others = f"; the next best takes {planned.others[0].seconds:.3g} s" if planned.others else ""
    return layout, f"the fastest of {planned.valid} that are valid: {seconds:.3g} s a step foretold{others}"
