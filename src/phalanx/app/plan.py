"""Predict a run on a cluster, and choose its parallelism. `phalanx.plan` is here."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from phalanx.autoconfig.plan import RunPlan, describe_slowdown, plan_run, render_recipe
from phalanx.autoconfig.plan import list_chosen_keys as list_chosen_keys
from phalanx.cluster.load import CLUSTER_VARIABLE
from phalanx.planner.search import Candidate
from phalanx.planner.step_time import format_breakdown as format_breakdown
from phalanx.planner.step_time import format_seconds as format_seconds
from phalanx.recipe import Recipe, load_recipe
from phalanx.recipe.load import LoadedRecipe, expand_recipe
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
