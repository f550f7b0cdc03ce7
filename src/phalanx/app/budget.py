"""The budget of a run: what it may use, what it will need, and what it has used."""

import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from phalanx.app.plan_cluster import CLUSTER_VARIABLE, find_fleet_cluster, find_plan_target
from phalanx.autoconfig.plan import plan_run
from phalanx.cluster.load import load_cluster
from phalanx.cluster.spec import Prices
from phalanx.errors import ExitCode, PhalanxError, RecipeError
from phalanx.formatting import format_significant
from phalanx.jobs.agent.leader_agent import RunOutcome
from phalanx.observe.goodput import compute_device_time
from phalanx.observe.history import read_history
from phalanx.observe.run_cost import JOULES_PER_KWH, compute_cost
from phalanx.observe.run_energy import read_run_energy
from phalanx.recipe import ResolvedRecipe
from phalanx.recipe.load import LoadedRecipe
from phalanx.recipe.schema import BudgetConfig
from phalanx.run import Run

logger = logging.getLogger(__name__)

WARN_SHARE = 0.8
CHECK_INTERVAL_S = 5.0
"""Seconds between readings of what a run has used: energy is written once a minute."""


@dataclass(frozen=True)
class RunUsage:
    """What a run uses. None: not known."""

    device_hours: float | None
    kwh: float | None
    """At the building."""
    cost: float | None

    def shares(self, budget: BudgetConfig) -> dict[str, float]:
        """The share of each limit, as far as it is known."""
        limits = {"device_hours": budget.device_hours, "kwh": budget.kwh, "cost": budget.cost}
        return {
            name: used / limit
            for name, limit in limits.items()
            if limit is not None and (used := getattr(self, name)) is not None
        }

    def describe(self, name: str, budget: BudgetConfig) -> str:
        """How much of a limit it is."""
        return f"{format_significant(getattr(self, name))} of {format_significant(getattr(budget, name))}"


def load_prices(environment: Mapping[str, str] = os.environ) -> Prices | None:
    """Return the prices of PHALANX_CLUSTER; None where it is not set. Raises RecipeError for a cluster that cannot be
    loaded."""
    if not (text := environment.get(CLUSTER_VARIABLE)):
        return None
    try:
        fleet = find_fleet_cluster(text)
        return (load_cluster(text) if fleet is None else fleet.cluster).prices
    except RecipeError as error:
        raise RecipeError(f"{CLUSTER_VARIABLE}: {error}") from None


def check_budget(loaded: LoadedRecipe, prices: Prices | None) -> None:
    """Raise RecipeError for a budget of money without prices."""
    budget = loaded.recipe.budget
    has_price = prices is not None and (prices.device_hour is not None or prices.kwh is not None)
    if budget is not None and budget.cost is not None and not has_price:
        raise RecipeError(
            f"{loaded.location_of('budget.cost')}: needs prices: set {CLUSTER_VARIABLE} to a cluster file "
            "with prices.device_hour or prices.kwh"
        )


def check_planned_budget(loaded: LoadedRecipe, num_gpus: int | None, environment: Mapping[str, str]) -> None:
    """Raise RecipeError for a recipe that `phalanx plan` predicts to exceed its budget on PHALANX_CLUSTER. Without that
    nothing is predicted before the run starts."""
    budget, cluster = loaded.recipe.budget, environment.get(CLUSTER_VARIABLE)
    if budget is None:
        return
    check_budget(loaded, load_prices(environment))
    if cluster:
        try:
            target = find_plan_target(cluster, loaded.recipe.name)
            plan = plan_run(loaded, target.cluster, num_gpus, swept=target.swept)
        except PhalanxError as error:  # data may be on the cluster only; the run itself checks its budget again
            logger.warning("the budget is not checked before the job starts: %s", error)
            return
        cost = plan.cost.rent_cost if plan.cost.rent_cost is not None else plan.cost.energy_cost
        kwh = None if plan.energy is None else plan.energy.site_kwh
        _refuse_excess(RunUsage(plan.cost.device_hours, kwh, cost), budget, loaded.location_of, "predicted")


def _refuse_excess(
    usage: RunUsage, budget: BudgetConfig, locate: Callable[[str], str], what: str, most: float = 1.0
) -> None:
    for name, share in usage.shares(budget).items():
        if share > most:
            raise RecipeError(
                f"{locate(f'budget.{name}')}: {what} {usage.describe(name, budget)}; raise it, or train fewer steps"
            )


class BudgetGuard:
    """Follows what a run uses while it trains, in all attempts.

    Args:
        world_size: workers, each with a device.
        prices: of money and for PUE; None: energy counts as measured, and money not at all.
        startup_s: seconds that preparing this start has taken, which count.
        clock: seconds of a monotonic clock.
    """

    def __init__(
        self,
        run: Run,
        budget: BudgetConfig,
        world_size: int,
        prices: Prices | None,
        startup_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._run, self._budget, self._world_size, self._prices, self._clock = run, budget, world_size, prices, clock
        history = read_history(run.events)
        self._device_s_before, self._last_step = compute_device_time(history).allocated_s, history.last_step
        self._started_at = clock() - startup_s
        self._next_check_at = -math.inf
        self._warned: set[str] = set()
        self.stop_reason: str | None = None

    def check_start(self, num_steps: int, step_s: float | None) -> None:
        """Raise RecipeError if the budget is used up, or the run is predicted to exceed it by its step `num_steps`.
        `step_s`: predicted seconds of a step; None: not known."""
        used = self.measure_usage()
        for name, share in used.shares(self._budget).items():
            if share >= 1:
                raise RecipeError(f"budget.{name}: {used.describe(name, self._budget)} is used; raise it to resume")
        steps_left = max(0, num_steps - self._last_step)
        if step_s is None or not steps_left:
            return
        device_s = self._device_s_before + steps_left * step_s * self._world_size
        energy_j = None
        if used.kwh is not None and self._last_step:  # at the rate so far
            energy_j = used.kwh * JOULES_PER_KWH / self._pue * num_steps / self._last_step
        _refuse_excess(self._usage(device_s, energy_j), self._budget, str, "predicted")

    def find_stop_reason(self, warn: Callable[[str], None]) -> str | None:
        """Return why the run must stop, if it must; `warn` gets a text at 80% of each limit."""
        if self.stop_reason is None and self._clock() >= self._next_check_at:
            self._next_check_at = self._clock() + CHECK_INTERVAL_S
            usage = self.measure_usage()
            for name, share in usage.shares(self._budget).items():
                text = f"budget.{name}: {usage.describe(name, self._budget)} is used"
                if share >= 1:
                    self.stop_reason = self.stop_reason or text
                elif share >= WARN_SHARE and name not in self._warned:
                    self._warned.add(name)
                    warn(f"{text}; the run saves and stops at 100%")
        return self.stop_reason

    def measure_usage(self) -> RunUsage:
        """What the run has used so far."""
        device_s = self._device_s_before + (self._clock() - self._started_at) * self._world_size
        energy = read_run_energy(self._run)
        return self._usage(device_s, None if energy is None else energy.device_j + energy.cpu_j)

    @property
    def _pue(self) -> float:
        return 1.0 if self._prices is None else self._prices.pue

    def _usage(self, device_s: float, energy_j: float | None) -> RunUsage:
        kwh = None if energy_j is None else energy_j / JOULES_PER_KWH * self._pue
        cost = None if self._prices is None else compute_cost(device_s, energy_j, self._prices)
        return RunUsage(device_s / 3600, kwh, cost)


def check_run_budget(run: Run, recipe: ResolvedRecipe, world_size: int, predicted_step_s: float | None) -> None:
    """Raise RecipeError for a run that has used up its budget, or is predicted to exceed it."""
    if recipe.budget is not None:
        BudgetGuard(run, recipe.budget, world_size, load_prices()).check_start(recipe.steps, predicted_step_s)


def stop_at_budget(outcome: RunOutcome, guard: BudgetGuard | None) -> RunOutcome:
    """Return the outcome of a run that may have been stopped by its budget: it must not start again with the same."""
    if guard is None or guard.stop_reason is None or outcome.code is not ExitCode.UNFINISHED:
        return outcome
    message = f"{guard.stop_reason}: saved and stopped; raise it to resume"
    return replace(outcome, code=ExitCode.RECIPE, message=message)
