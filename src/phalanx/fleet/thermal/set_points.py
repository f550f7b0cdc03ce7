"""Advise set points of a cooling plant: supply temperature and flow by hour, with limits and reasons.

It is advice. A controller of the building decides: see `find_refusal`.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.fleet.thermal.device_series import Values
from phalanx.fleet.thermal.plant import PlantControls, PlantHours, simulate_plant
from phalanx.fleet.thermal.plant_settings import CoolingPlant

CORE_MARGIN_K = 5.0
"""Kelvins that a device at full power keeps below the temperature from which it throttles."""
MAX_STEP_K = 2
"""Change of the supply set point within an hour."""
LOWEST_SUPPLY_C = 18
"""Dew point of a hall at 27 C and 58 %: colder pipes get wet."""
FLOW_STEP = 0.05
OUTSIDE_STEP_K = 0.25
LOAD_STEP = 0.02
MAX_REQUEST_AGE_S = 300.0
"""Age of the newest heartbeat from which a local controller leaves requests. A plant answers in 5 to 15 minutes."""


@dataclass(frozen=True)
class SetPointAdvice:
    """Set points by hour, what they do, and what the fixed set point does."""

    supply_c: Values
    flow_share: Values
    advised: PlantHours
    fixed: PlantHours

    @property
    def saved_share(self) -> float:
        """Share of the energy of pumps, fans and chiller."""
        return float(1 - self.advised.cooling_w.sum() / self.fixed.cooling_w.sum())

    @property
    def saved_site_share(self) -> float:
        """Share of the energy of the site, leakage of warmer chips included."""
        return float(1 - self.advised.site_w.sum() / self.fixed.site_w.sum())


def advise_set_points(plant: CoolingPlant, it_w: Values, dry_bulb_c: Values, wet_bulb_c: Values) -> SetPointAdvice:
    """Choose for each hour the supply and flow with which the site draws least.

    Limits: the class of the nodes (`max_supply_c`), the core temperature with a margin, the least safe flow, the rise
    over a rack, and 2 K an hour. Compared with `supply_c` at all times and a flow that follows the load.
    """
    supplies = np.arange(LOWEST_SUPPLY_C, int(plant.max_supply_c) + 1)
    flows = np.unique(np.append(np.arange(plant.min_flow_share, 1.0, FLOW_STEP), 1.0))
    bins, places = _bin_hours(plant, it_w, dry_bulb_c, wet_bulb_c)
    shape = (len(supplies), len(flows), len(bins))
    supply, flow, power, outside = (
        np.ascontiguousarray(np.broadcast_to(each, shape)).reshape(-1)
        for each in (supplies[:, None, None].astype(float), flows[:, None], bins[:, 0], bins[:, 1])
    )
    hours = simulate_plant(plant, power, outside, outside, PlantControls(supply, flow))
    # where nothing is allowed the coolest is best
    site_w = np.where(_is_allowed(plant, hours), hours.site_w, 1e12 + 1e9 * hours.core_c).reshape(shape)
    best_rows = _limit_steps(np.argmin(site_w.min(axis=1), axis=0)[places])
    best_flows = np.argmin(site_w[best_rows, :, places], axis=1)
    supply_c, flow_share = supplies[best_rows].astype(float), flows[best_flows]
    fixed = PlantControls(plant.supply_c, np.clip(it_w / plant.design_it, plant.min_flow_share, 1.0))
    return SetPointAdvice(
        supply_c,
        flow_share,
        simulate_plant(plant, it_w, dry_bulb_c, wet_bulb_c, PlantControls(supply_c, flow_share)),
        simulate_plant(plant, it_w, dry_bulb_c, wet_bulb_c, fixed),
    )


def _bin_hours(
    plant: CoolingPlant, it_w: Values, dry_bulb_c: Values, wet_bulb_c: Values
) -> tuple[Values, NDArray[np.intp]]:
    """Power and outside temperature of which a year has a hundred pairs, each rounded up, and the pair of each hour. A
    tower knows only the wet bulb, a dry cooler only the dry bulb."""
    outside = wet_bulb_c if plant.heat_rejection == "tower" else dry_bulb_c
    power_step = LOAD_STEP * plant.design_it
    rounded = np.stack(
        [np.ceil(it_w / power_step) * power_step, np.ceil(outside / OUTSIDE_STEP_K) * OUTSIDE_STEP_K], axis=1
    )
    bins, places = np.unique(rounded, axis=0, return_inverse=True)
    return bins, places.reshape(-1)


def _is_allowed(plant: CoolingPlant, hours: PlantHours) -> NDArray[np.bool_]:
    is_cool = (hours.core_c <= plant.core_limit_c - CORE_MARGIN_K) & (hours.supply_c <= plant.max_supply_c)
    return np.asarray(is_cool & (hours.rack_return_c - hours.rack_supply_c <= plant.max_rack_rise_k))


def _limit_steps(rows: NDArray[np.intp]) -> NDArray[np.intp]:
    """Follow the best row by `MAX_STEP_K` an hour; rows are 1 K from each other. It goes down early: what an hour needs
    bounds the hours before it."""
    limited = rows.copy()
    for hour in range(len(rows) - 2, -1, -1):
        limited[hour] = min(limited[hour], limited[hour + 1] + MAX_STEP_K)
    for hour in range(1, len(rows)):
        limited[hour] = min(limited[hour], limited[hour - 1] + MAX_STEP_K)
    return limited


def explain_hour(plant: CoolingPlant, advice: SetPointAdvice, hour: int) -> str:
    """Return why an hour has its set points: what draws less, and which limit is next."""
    parts = {
        "pumps": advice.fixed.pumps_w[hour] - advice.advised.pumps_w[hour],
        "fans": advice.fixed.fans_w[hour] - advice.advised.fans_w[hour],
        "chiller": advice.fixed.chiller_w[hour] - advice.advised.chiller_w[hour],
        "IT, by leakage": advice.fixed.it_w[hour] - advice.advised.it_w[hour],
    }
    changes = [f"{name} {-watts / 1000:+.1f} kW" for name, watts in parts.items() if abs(watts) >= 50.0]
    margin = plant.core_limit_c - float(advice.advised.core_c[hour])
    limits = f"cores stay {margin:.0f} K below throttling, supply {plant.max_supply_c - advice.supply_c[hour]:.0f} K "
    return f"{', '.join(changes) or 'no change'}; {limits}below its class"


@dataclass(frozen=True)
class SetPointRequest:
    """What an adviser asks a local controller for."""

    supply_c: float
    flow_share: float


def find_refusal(
    plant: CoolingPlant, request: SetPointRequest, current_c: float, heartbeat_age_s: float, is_operator_in_charge: bool
) -> str | None:
    """Return why a local controller refuses a request, or leaves it; None if it may follow.

    The controller checks each request itself, as if the adviser were wrong: it must be safe without it.
    """
    if is_operator_in_charge:
        return "an operator has taken over"
    if not heartbeat_age_s <= MAX_REQUEST_AGE_S:  # also for a missing one, which is NaN
        return f"the last heartbeat is {heartbeat_age_s:.0f} s old, more than {MAX_REQUEST_AGE_S:.0f} s"
    if not LOWEST_SUPPLY_C <= request.supply_c <= plant.max_supply_c:
        return f"a supply of {request.supply_c:g} °C is not within {LOWEST_SUPPLY_C} to {plant.max_supply_c:g} °C"
    if not plant.min_flow_share <= request.flow_share <= 1:
        return f"a flow of {request.flow_share:.0%} is not within {plant.min_flow_share:.0%} to 100%"
    if request.supply_c - current_c > MAX_STEP_K:
        return f"a step from {current_c:g} to {request.supply_c:g} °C is more than {MAX_STEP_K} K"
    return None
