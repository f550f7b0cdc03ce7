"""Advise set points of a cooling plant: supply temperature and flow by hour, with limits and reasons.

It is advice. A controller of the building decides: see `local_controller`.
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
    table = tabulate_site_power(plant, it_w, dry_bulb_c, wet_bulb_c)
    best_rows = _limit_steps(np.argmin(table.site_w.min(axis=1), axis=0)[table.places])
    best_flows = np.argmin(table.site_w[best_rows, :, table.places], axis=1)
    controls = PlantControls(table.supplies_c[best_rows], table.flow_shares[best_flows])
    return compare_with_fixed(plant, it_w, dry_bulb_c, wet_bulb_c, controls)


@dataclass(frozen=True)
class SitePowerTable:
    """Power of the site by supply, flow and bin of load and weather; not allowed ones are far above all others."""

    supplies_c: Values
    flow_shares: Values
    site_w: Values
    """By supply, flow and bin."""
    places: NDArray[np.intp]
    """The bin of each hour."""

    def choose(self, hour: int, highest_c: float) -> tuple[float, float]:
        """Return the supply and flow with which the site draws least in an hour, at most `highest_c`."""
        power = self.site_w[: max(1, int(np.searchsorted(self.supplies_c, highest_c, "right"))), :, self.places[hour]]
        row, column = np.unravel_index(int(np.argmin(power)), power.shape)
        return float(self.supplies_c[row]), float(self.flow_shares[column])


def tabulate_site_power(plant: CoolingPlant, it_w: Values, dry_bulb_c: Values, wet_bulb_c: Values) -> SitePowerTable:
    """Compute the power of the site for all set points in each bin of load and weather."""
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
    return SitePowerTable(supplies.astype(float), flows, site_w, places)


def compare_with_fixed(
    plant: CoolingPlant, it_w: Values, dry_bulb_c: Values, wet_bulb_c: Values, controls: PlantControls
) -> SetPointAdvice:
    """Simulate a plant with these set points, and with its usual one and a flow that follows the load."""
    fixed = PlantControls(plant.supply_c, follow_load(plant, it_w))
    return SetPointAdvice(
        np.asarray(controls.supply_c),
        np.asarray(controls.flow_share),
        simulate_plant(plant, it_w, dry_bulb_c, wet_bulb_c, controls),
        simulate_plant(plant, it_w, dry_bulb_c, wet_bulb_c, fixed),
    )


def follow_load(plant: CoolingPlant, it_w: Values) -> Values:
    """Return the flow of a plant without advice: that of the load, at least the least safe one."""
    return np.clip(it_w / plant.design_it, plant.min_flow_share, 1.0)


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
