"""What a site draws, evaporates, emits and pays in each hour of a simulation, and what ran in it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from phalanx.errors import UsageError
from phalanx_fleet.simulate.power_model import (
    GroupOutcome,
    PowerStep,
    find_allowed_power,
    integrate_steps,
    list_power_steps,
)
from phalanx_fleet.simulate.site_series import SECONDS_PER_HOUR, SiteHours
from phalanx_fleet.site_settings import SiteConditions
from phalanx_fleet.thermal.device_series import Values
from phalanx_fleet.thermal.plant import PlantControls, PlantHours, simulate_plant

WATTS_PER_KILOWATT = 1000.0
THROTTLING_ITERATIONS = 8
"""Throttling takes heat from the coolant, which it follows from: converged to 1e-3 of the power."""
SUPPLY_TOLERANCE_K = 0.05
BALANCE_TOLERANCE = 1e-9


@dataclass(frozen=True)
class FleetHours:
    """A simulation by hour. Devices, jobs and powers are means of the hour."""

    duration_h: Values
    """1, but for the last hour."""
    it_w: Values
    site_w: Values
    busy_devices: Values
    down_devices: Values
    num_devices: int
    waiting_jobs: Values
    pue: Values
    supply_c: Values
    """NaN without a plant."""
    allowed_power: Values
    """Power of an accelerator that is at its limit of temperature, over its highest; NaN without a plant."""
    price_per_kwh: Values
    carbon_g_per_kwh: Values

    @property
    def idle_devices(self) -> Values:
        """Free and spare ones."""
        return np.maximum(self.num_devices - self.busy_devices - self.down_devices, 0.0)

    @property
    def site_kwh(self) -> Values:
        return self.site_w * self.duration_h / WATTS_PER_KILOWATT


@dataclass
class SiteFigures:
    """A site over a simulation."""

    site_energy_kwh: float = 0.0
    cooling_energy_kwh: float = 0.0
    """Of pumps, fans and chiller; NaN without a plant."""
    water_l: float = 0.0
    carbon_kg: float = 0.0
    energy_cost: float = 0.0
    pue: float = math.nan
    wue_l_per_kwh: float = math.nan
    supply_max_c: float = math.nan
    core_max_c: float = math.nan
    """Of the accelerator that draws most, if it did not throttle."""
    hours_above_supply: float = math.nan
    chiller_hours: float = math.nan
    hours_above_design: float = math.nan
    """Hours in which IT draws more than the plant is built for."""
    throttled_hours: float = math.nan
    """Hours in which some accelerator would be above its limit."""
    throttled_device_hours: float = math.nan
    balance_error: float = 0.0
    """Largest imbalance of energy: of a loop of the plant in an hour, or of the hours against the events."""


FindSteps = Callable[[GroupOutcome], tuple[Values, Values]]
"""Returns times, and what changes at each."""


def measure_site(
    groups: Sequence[GroupOutcome],
    site: SiteConditions,
    hours: SiteHours,
    racks_w: float,
    nodes_hourly_w: Values,
    nodes_energy_j: float,
) -> tuple[SiteFigures, FleetHours]:
    """Compute a site for each hour from the power of its nodes; `racks_w` is that of switches and pumps of racks."""
    until_s = max(group.outcome.end_s for group in groups)
    duration_h = np.minimum(1.0, until_s / SECONDS_PER_HOUR - np.arange(len(nodes_hourly_w)))
    it_w = (nodes_hourly_w + racks_w) / site.conversion_efficiency
    figures = SiteFigures()
    expected_j = (nodes_energy_j + racks_w * until_s) / site.conversion_efficiency
    summed_j = float((it_w * duration_h).sum()) * SECONDS_PER_HOUR
    figures.balance_error = abs(summed_j - expected_j) / max(expected_j, 1.0)
    if hours.plant is None:
        pue = np.full_like(it_w, site.pue)
        site_w, water_l = it_w * site.pue, it_w * duration_h / WATTS_PER_KILOWATT * site.water_l_per_kwh
        supply_c = allowed_power = np.full_like(it_w, np.nan)
        figures.cooling_energy_kwh = math.nan
    else:
        found, allowed_power, steps = _run_throttled_plant(hours, it_w, groups, until_s, site.conversion_efficiency)
        it_w, site_w, supply_c = found.it_w, found.site_w, found.supply_c
        pue = site_w / np.maximum(it_w, 1.0)
        water_l = found.makeup_kg_per_s * duration_h * SECONDS_PER_HOUR
        _count_plant(figures, found, site, hours, duration_h)
        _count_throttling(figures, allowed_power, steps, duration_h)
        highest = max((float(group.power_shares.max(initial=0.0)) for group in groups), default=0.0)
        figures.core_max_c = float((found.coolant_c + highest * (found.core_c - found.coolant_c)).max())
    price, carbon = (
        np.full_like(it_w, fixed) if series is None else series.select(hours.start_hour, len(it_w))[0]
        for fixed, series in ((site.price_per_kwh, hours.price), (site.carbon_g_per_kwh, hours.carbon))
    )
    timeline = FleetHours(
        duration_h=duration_h,
        it_w=it_w,
        site_w=site_w,
        busy_devices=_sum_groups(groups, until_s, GroupOutcome.find_busy_steps),
        down_devices=_sum_groups(groups, until_s, _down_steps),
        num_devices=sum(group.num_nodes * group.power.num_devices for group in groups),
        waiting_jobs=_sum_groups(groups, until_s, _waiting_steps),
        pue=pue,
        supply_c=supply_c,
        allowed_power=allowed_power,
        price_per_kwh=price,
        carbon_g_per_kwh=carbon,
    )
    it_kwh = float((it_w * duration_h).sum()) / WATTS_PER_KILOWATT
    figures.site_energy_kwh = float(timeline.site_kwh.sum())
    figures.water_l = float(water_l.sum())
    figures.carbon_kg = float((timeline.site_kwh * carbon).sum()) / 1000.0
    figures.energy_cost = float((timeline.site_kwh * price).sum())
    if it_kwh > 0:
        figures.pue, figures.wue_l_per_kwh = figures.site_energy_kwh / it_kwh, figures.water_l / it_kwh
    if not figures.balance_error <= BALANCE_TOLERANCE:
        raise UsageError(
            f"simulate.site: the energy of the site is off by {figures.balance_error:.1e} of it in an hour, so no "
            "figure is given: a setting of the plant is one that no plant has, such as a design_it of another unit"
        )
    return figures, timeline


def find_busy_pue(hours: SiteHours, it_w: float) -> float | None:
    """Return the PUE of a site over all hours of its weather while IT draws `it_w`; None without a plant."""
    if hours.weather is None:
        return None
    count = hours.weather.columns.shape[1]
    return _run_plant(replace(hours, start_hour=hours.weather.first_hour), np.full(count, it_w)).pue


def _run_plant(hours: SiteHours, it_w: Values) -> PlantHours:
    """The plant with its usual set point, and a flow that follows the load."""
    plant, weather = hours.plant, hours.weather
    assert plant is not None
    assert weather is not None
    flow = np.clip(it_w / plant.design_it, plant.min_flow_share, 1.0)
    dry, wet = weather.select(hours.start_hour, len(it_w))
    return simulate_plant(plant, it_w, dry, wet, PlantControls(plant.supply_c, flow))


def _run_throttled_plant(
    hours: SiteHours, it_w: Values, groups: Sequence[GroupOutcome], until_s: float, efficiency: float
) -> tuple[PlantHours, Values, list[PowerStep]]:
    """The plant with the power that accelerators draw at its coolant; the power that it allows each; and those that may
    throttle."""
    assert hours.plant is not None
    found = _run_plant(hours, it_w)
    allowed_power = find_allowed_power(found, hours.plant.core_limit_c)
    steps = list_power_steps(groups, float(allowed_power.min()), until_s)
    if any(step.find_throttled(allowed_power).any() for step in steps):
        for _ in range(THROTTLING_ITERATIONS):
            saved_w = np.sum([step.find_saved_w(allowed_power) for step in steps], axis=0)
            found = _run_plant(hours, it_w - saved_w / efficiency)
            allowed_power = (allowed_power + find_allowed_power(found, hours.plant.core_limit_c)) / 2
    return found, allowed_power, steps


def _count_plant(
    figures: SiteFigures, found: PlantHours, site: SiteConditions, hours: SiteHours, duration_h: Values
) -> None:
    plant = hours.plant
    assert plant is not None
    limit_c = plant.supply_c if site.supply_limit_c is None else site.supply_limit_c
    figures.cooling_energy_kwh = float((found.cooling_w * duration_h).sum()) / WATTS_PER_KILOWATT
    figures.supply_max_c = float(found.supply_c.max())
    figures.hours_above_supply = float(duration_h[found.supply_c > limit_c + SUPPLY_TOLERANCE_K].sum())
    figures.chiller_hours = float(duration_h[found.chiller_w > 0].sum())
    figures.hours_above_design = float(duration_h[found.it_w > plant.design_it].sum())
    figures.balance_error = max(figures.balance_error, float(found.balance_error.max()))


def _count_throttling(
    figures: SiteFigures, allowed_power: Values, steps: Sequence[PowerStep], duration_h: Values
) -> None:
    """Count hours and devices of jobs that would be above the limit."""
    throttled = np.sum([np.zeros_like(duration_h), *(step.find_throttled(allowed_power) for step in steps)], axis=0)
    figures.throttled_hours = float(duration_h[throttled > 0].sum())
    figures.throttled_device_hours = float((throttled * duration_h).sum())


def _sum_groups(groups: Sequence[GroupOutcome], until_s: float, find_steps: FindSteps) -> Values:
    """The means by hour of a number that changes in steps, over all groups."""
    return np.asarray(sum(integrate_steps(*find_steps(group), until_s).hourly_w for group in groups))


def _down_steps(group: GroupOutcome) -> tuple[Values, Values]:
    times = np.array([time_s for time_s, _ in group.outcome.node_states])
    counts = np.array([0, *(count for _, count in group.outcome.node_states)], dtype=float)
    return np.append(0.0, times), np.append(0.0, np.diff(counts) * group.power.num_devices)


def _waiting_steps(group: GroupOutcome) -> tuple[Values, Values]:
    """Jobs that were submitted, are not done and do not run."""
    outcome, (start_s, end_s, _) = group.outcome, group.attempts
    submitted = np.array([job.submit_s for job in outcome.jobs])
    finished = np.array([job.finish_s for job in outcome.jobs if job.finish_s is not None])
    times = np.concatenate([[0.0], submitted, finished, start_s, end_s])
    signs = [np.zeros(1), np.ones_like(submitted), -np.ones_like(finished), -np.ones_like(start_s), np.ones_like(end_s)]
    return times, np.concatenate(signs)
