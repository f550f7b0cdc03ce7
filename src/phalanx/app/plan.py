"""Predict a run on a cluster, and choose its parallelism. `phalanx.plan` is here."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.app.plan_cluster import CLUSTER_VARIABLE, PlanTarget, find_plan_target
from phalanx.autoconfig.plan import RunPlan, describe_slowdown, list_chosen_keys, plan_run, render_recipe
from phalanx.planner.search import Candidate
from phalanx.planner.timeline import chrome_trace, draw_timeline, format_breakdown
from phalanx.planner.timeline import format_seconds as format_seconds
from phalanx.recipe import Recipe, expand_recipe, load_recipe
from phalanx.recipe.load import LoadedRecipe
from phalanx.run.directory import check_output_path, write_output


@dataclass(frozen=True)
class PlanOutputs:
    """Files that a plan writes: the recipe with the choice, and the timeline of a step."""

    recipe: Path
    trace: Path | None = None
    in_place: bool = False
    """`recipe` is the planned recipe itself."""

    def check_paths(self) -> None:
        """Raise UsageError where a file cannot be written, or would replace one that no plan wrote."""
        if not self.in_place:
            check_output_path("--out", self.recipe, ["# Planned by `phalanx plan`"])
        if self.trace is not None:
            check_output_path("--trace", self.trace, ['"traceEvents"'])


@dataclass(frozen=True)
class RankedCandidate:
    """A candidate of a plan, and what it spends more time on than the best."""

    candidate: Candidate
    slowdown_reason: str


def plan(
    recipe: "str | os.PathLike[str] | Recipe | None" = None,
    cluster: str | None = None,
    num_gpus: int | None = None,
    overrides: Sequence[str] = (),
    run: "str | os.PathLike[str] | None" = None,
) -> RunPlan:
    """Predict memory, step time, energy and cost as `phalanx plan` does. Nothing is written.

    Args:
        recipe: a file's path or a value.
        cluster: a name of the catalog, or a file of a cluster or fleet; default: that of PHALANX_CLUSTER, else this
            machine, if calibrated.
        num_gpus: devices to plan for; default: all of the cluster.
        overrides: `key=value` of a recipe in a file.
        run: a run with a power sweep, which says what the cap of a fleet file costs; default: the recipe's run
            directory, where it has a sweep, else an estimate.

    Raises:
        DataError: `run` has no sweep.
        RecipeError: the recipe or the cluster is wrong, or nothing fits.
        UsageError: the cluster has fewer devices.
    """
    if isinstance(recipe, Recipe):
        loaded = LoadedRecipe(expand_recipe(recipe, Path.cwd()), None, Path.cwd(), {})
    else:
        loaded = load_recipe(None if recipe is None else Path(recipe), overrides)
    target = _find_target(cluster, loaded, None if run is None else Path(run))
    return plan_run(loaded, target.cluster, num_gpus, Path.cwd(), target.swept)


def _find_target(name: str | None, loaded: LoadedRecipe, run: Path | None) -> PlanTarget:
    """The cluster of that name, else of PHALANX_CLUSTER, else this machine."""
    return find_plan_target(name or os.environ.get(CLUSTER_VARIABLE) or None, loaded.recipe.name, run)


def plan_recipe_file(
    path: Path,
    overrides: Sequence[str],
    cluster: str | None,
    num_gpus: int | None,
    outputs: PlanOutputs,
    run: Path | None = None,
) -> RunPlan:
    """Plan a recipe file, and write `outputs`. `run`: as of `plan`."""
    outputs.check_paths()
    loaded = load_recipe(path, overrides)
    target = _find_target(cluster, loaded, run)
    run_plan = plan_run(loaded, target.cluster, num_gpus, Path.cwd(), target.swept)
    write_output(outputs.recipe, render_recipe(loaded, overrides, run_plan))
    if outputs.trace is not None:
        write_output(outputs.trace, chrome_trace(run_plan.step_events()))
    return run_plan


def rank_candidates(run_plan: RunPlan, count: int) -> list[RankedCandidate]:
    """Return the `count` best candidates. Those that differ only in how replicas are divided into shards count once."""
    seen, ranked = set[tuple[Any, ...]](), list[RankedCandidate]()
    for candidate in (run_plan.best, *run_plan.alternatives):
        key = _candidate_key(candidate)
        if key not in seen:
            seen.add(key)
            reason = describe_slowdown(run_plan.best.breakdown, candidate.breakdown) if ranked else ""
            ranked.append(RankedCandidate(candidate, reason))
    return ranked[:count]


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


def memory_by_part(run_plan: RunPlan) -> dict[str, float]:
    """Bytes of the fullest device by part; they sum to its total."""
    return {name: value for name, value in vars(run_plan.footprint).items() if name != "pipeline_rank"}


def render_step_breakdown(run_plan: RunPlan) -> str:
    """Draw the parts of a step as bars."""
    return format_breakdown(run_plan.best.breakdown)


def render_step_timeline(run_plan: RunPlan) -> str:
    """Draw what each pipeline rank computes and sends in a step."""
    return draw_timeline(run_plan.step_events())


def recipe_changes(run_plan: RunPlan) -> dict[str, Any]:
    """Return the choice as dotted recipe keys and their values."""
    return list_chosen_keys(run_plan)
