"""Simulate a fleet file, and variants of it with the same random numbers."""

import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from phalanx.errors import RecipeError, UsageError
from phalanx.planner.storage_costs import SECONDS_PER_DAY
from phalanx.recipe.schema_keys import join_alternatives
from phalanx.recipe.validation_errors import suggest_nearest
from phalanx_fleet.fleet_file import FleetFile, load_fleet_file
from phalanx_fleet.power_tree import BudgetLevel, NodePower, build_power_tree
from phalanx_fleet.simulate.fleet_simulation import JobTrace, SimulationResult, group_nodes, simulate_fleet
from phalanx_fleet.simulate.random_events import read_job_trace
from phalanx_fleet.simulate.site_series import SiteHours, load_site_hours
from phalanx_fleet.simulation_settings import REPLAY_CLASS, REPLAY_KEYS, SimulationSettings

BASE_LABEL = "as in the file"
MAX_IT_OVER_DESIGN = 20.0
"""Most power of the nodes over that for which a plant is built."""
MAX_DESIGN_OVER_IT = 1000.0
"""A row of racks may be simulated with the plant of its hall."""
PLANT_KEY = "simulate.site.plant."


@dataclass(frozen=True)
class ExceededBudget:
    """A level of the budget tree that has nodes which may draw more than its budget."""

    level: BudgetLevel
    committed_w: float


@dataclass(frozen=True)
class SimulatedVariant:
    """A fleet, and its results by seed."""

    label: str
    settings: SimulationSettings
    num_nodes: int
    num_devices: int
    results: list[SimulationResult]
    exceeded: list[ExceededBudget]
    site_hours: SiteHours = field(default_factory=SiteHours)
    fleet_name: str = "fleet"


@dataclass(frozen=True)
class SeedSpread:
    """A figure over seeds."""

    mean: float
    p05: float
    p95: float


def simulate_variants(
    path: Path,
    variants: Sequence[str],
    replay: Path | None,
    seeds: int | None,
) -> list[SimulatedVariant]:
    """Simulate a fleet file as it is, and once for each variant: a text of settings such as "spares=0.04 days=90".

    All use the same seeds, so that jobs and failures are the same as far as the settings allow.

    Args:
        path: The fleet file.
        variants: Settings of each variant.
        replay: CSV file of jobs, instead of those of the file.
        seeds: Simulations of each; by default the file's.

    Raises RecipeError for a wrong file or setting, DataError for a wrong trace, UsageError for jobs that can never run.
    """
    if not all(each.strip() for each in variants):
        raise UsageError("--what: expected KEY=VALUE, such as spares=0.04")
    trace = None if replay is None else read_job_trace(replay)
    base = _simulate_variant(path, "", trace, seeds)
    number = len(base.results)
    return [base, *(_simulate_variant(path, label, trace, number) for label in variants)]


def spread_over_seeds(variant: SimulatedVariant, figure: Callable[[SimulationResult], float]) -> SeedSpread:
    """Return the mean and quantiles of a figure over the seeds, without those that have none."""
    values = [value for value in map(figure, variant.results) if not math.isnan(value)]
    if not values:
        return SeedSpread(math.nan, math.nan, math.nan)
    low, high = np.percentile(values, [5, 95]).tolist()
    return SeedSpread(float(np.mean(values)), low, high)


def _simulate_variant(
    path: Path,
    label: str,
    trace: JobTrace | None,
    seeds: int | None,
) -> SimulatedVariant:
    try:
        words = shlex.split(label)
    except ValueError as error:
        raise UsageError(f"--what {label}: {error}") from None
    for word in words:
        if not word.partition("=")[0].strip() or "=" not in word:
            raise UsageError(
                f"--what {label}: found {word}, expected KEY=VALUE, such as spares=0.04; one with spaces stands in "
                "quotes of its own: \"'KEY=VALUE' ...\""
            )
    overrides = [_complete_key(word) for word in words]
    keys = [each.partition("=")[0].strip() for each in overrides]
    if twice := [key for index, key in enumerate(keys) if key in keys[:index]]:
        raise UsageError(f"--what {label}: {twice[0]} is there twice; variants of one setting are a --what each")
    if any(key.startswith(PLANT_KEY) for key in keys) and "simulate.site.plant.design_it" not in keys:
        _check_plant_is_given(path, overrides)
    fleet, locations = load_fleet_file(path, overrides)
    settings = fleet.simulate
    if settings is None or not (settings.jobs or trace):
        raise UsageError(f"{path}: no jobs to simulate; add `simulate: {{jobs: ...}}`, or give --replay JOBS.csv")
    for override in overrides:
        _check_effect(override, settings, trace is not None)
    tree = build_power_tree(fleet, locations)
    groups = group_nodes(fleet, tree, settings)
    if not groups:
        raise UsageError(f"{path}: there are no nodes; add racks with nodes")
    if trace is not None and trace[0][0] > settings.days * SECONDS_PER_DAY:
        raise UsageError(
            f"--replay: the first job is submitted after {trace[0][0] / SECONDS_PER_DAY:,.0f} days, and failures end "
            f"after {settings.days:g}; expected submit_s from the start on, so that the first is near 0"
        )
    site_hours = load_site_hours(settings.site, fleet.cooling, path.parent)
    _check_plant(site_hours, sum(node.power.max_w for node in tree.nodes))
    results = []
    for seed in range(seeds or settings.seeds):
        result = simulate_fleet(groups, settings, seed, trace, site_hours)
        results.append(result if seed == 0 else replace(result, hours=None))  # hours are shown of the first seed
    committed_w = tree.sum_by_level([find_capped_w(node.power, settings.power_cap) for node in tree.nodes])
    exceeded = [
        ExceededBudget(level, level_w)
        for level, level_w in zip(tree.levels, committed_w, strict=True)
        if level.budget_w is not None and level_w > level.budget_w
    ]
    num_nodes = sum(len(group.nodes) for group in groups)
    num_devices = sum(len(group.nodes) * group.power.num_devices for group in groups)
    return SimulatedVariant(
        label or BASE_LABEL, settings, num_nodes, num_devices, results, exceeded, site_hours, fleet.name
    )


def find_capped_w(power: NodePower, cap: float) -> float:
    """Return the most that a node with capped accelerators draws."""
    return power.max_w - (1 - cap) * power.num_devices * power.device_max_w


def _complete_key(override: str) -> str:
    """Return an override with `simulate.` where its first part is a key of that section.
    RecipeError for a first part that is no key."""
    key, equals, value = override.partition("=")
    first = key.partition(".")[0].strip()
    known = [*SimulationSettings.model_fields, *FleetFile.model_fields]
    if first not in known:
        hint = suggest_nearest(first, known) or f"; known are {', '.join(known)}"
        raise RecipeError(f"override {override}: {first}: unknown key{hint}")
    if f"{_find_section(key)}{key}".strip() == "simulate.seeds":
        raise RecipeError(f"override {override}: all variants have the same seeds; give --seeds")
    return f"{_find_section(key)}{key}{equals}{value}"


def _find_section(key: str) -> str:
    """Return `simulate.` for a key of that section, else nothing."""
    return "simulate." if key.partition(".")[0].strip() in SimulationSettings.model_fields else ""


def _check_effect(override: str, settings: SimulationSettings, is_replay: bool) -> None:
    """Raise RecipeError for an override of what is not simulated, which would change nothing."""
    key = override.partition("=")[0].strip()
    section, *rest = key.split(".")
    if section == "power":
        raise RecipeError(f"override {override}: power is not simulated, only committed; expected power_cap=0.8 or so")
    if section == "cooling" and (settings.site.weather is None or settings.site.plant is not None):
        right = "site.weather=FILE.csv as well" if settings.site.weather is None else f"site.plant.{'.'.join(rest)}"
        raise RecipeError(f"override {override}: cooling is not simulated here; expected {right}")
    if section != "simulate" or rest[:1] != ["jobs"]:
        return
    name, *entry_keys = rest[1:] or [""]
    given = settings.jobs[name].model_fields_set if name in settings.jobs else set()
    if not is_replay:
        if name == REPLAY_CLASS and not given.intersection({"count", "per_day"}):
            raise RecipeError(f"override {override}: jobs.{name} are those of --replay JOBS.csv, which is not given")
    elif name != REPLAY_CLASS:
        right = ".".join(("expected jobs", REPLAY_CLASS, *entry_keys)) if entry_keys[:1] else "leave it out"
        raise RecipeError(
            f"override {override}: --replay simulates the jobs of its file instead of {'.'.join(rest[:2])}; {right}"
        )
    elif unused := sorted(set(entry_keys[:1] or given).difference(REPLAY_KEYS)):
        known = join_alternatives([*REPLAY_KEYS])
        raise RecipeError(f"override {override}: --replay ignores jobs.{name}.{unused[0]}; expected {known}")


def _check_plant_is_given(path: Path, overrides: Sequence[str]) -> None:
    """Raise RecipeError for a part of a plant that the file has in `cooling`."""
    fleet = load_fleet_file(path)[0]
    is_elsewhere = fleet.cooling is not None and fleet.simulate is not None and fleet.simulate.site.plant is None
    if found := [each for each in overrides if is_elsewhere and each.startswith(PLANT_KEY)]:
        right = found[0].removeprefix(PLANT_KEY)
        raise RecipeError(f"override {found[0]}: the plant of this fleet is in `cooling`; expected cooling.{right}")


def _check_plant(site_hours: SiteHours, it_max_w: float) -> None:
    """Raise UsageError for a plant that is so small or large that its power has another unit than was meant."""
    if site_hours.plant is None:
        return
    ratio = it_max_w / site_hours.plant.design_it
    if not 1 / MAX_DESIGN_OVER_IT < ratio < MAX_IT_OVER_DESIGN:
        raise UsageError(
            f"plant.design_it: the plant is built for {site_hours.plant.design_it:g} W, and nodes draw up to "
            f"{it_max_w:g} W; expected the most power of IT, such as {math.ceil(it_max_w / 1e3)} kW"
        )
