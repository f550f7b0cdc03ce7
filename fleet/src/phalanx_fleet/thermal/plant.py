"""The cooling plant, hour by hour and steady: racks, CDU, hall loop, trim chiller, tower or dry cooler.

Heat flows node > rack loop > CDU > hall loop > exchanger > tower or dry cooler. Where those cannot reach the supply set
point, the chiller does the rest; without one the supply temperature rises. All hours are computed at once.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from phalanx_fleet.thermal.cooling_tower import (
    AIR_BISECTIONS,
    APPROACH_BISECTIONS,
    FAN_EXPONENT,
    WATER_J_PER_KG_K,
    find_air_share,
    find_approach,
    find_effectiveness,
)
from phalanx_fleet.thermal.device_series import Values
from phalanx_fleet.thermal.plant_settings import CoolingPlant

EVAPORATION_J_PER_KG = 2.43e6
KELVIN_OFFSET = 273.15
CHILLER_PINCH_K = 2.0
MAX_COP = 12.0
CHILLER_ITERATIONS = 8
"""The compressor's own heat changes the tower by a twentieth of it: converged to 1e-10."""
AIR_FILM_EXPONENT = 0.6
"""Heat transfer of air past fins rises with its flow to the power of 0.6."""


@dataclass(frozen=True)
class PlantControls:
    """What an operator sets, by hour or for all hours."""

    supply_c: Values | float
    """Set point of the hall loop's supply."""
    flow_share: Values | float = 1.0
    """Flow of the hall, rack and tower loops over their design."""


@dataclass(frozen=True)
class PlantHours:
    """The plant by hour. Powers in W, temperatures in C."""

    it_w: Values
    conversion_w: Values
    pumps_w: Values
    fans_w: Values
    """Of the tower or dry cooler."""
    air_fans_w: Values
    """That cool what liquid does not; fans in servers count as IT."""
    chiller_w: Values
    rejected_w: Values
    supply_c: Values
    return_c: Values
    rack_supply_c: Values
    rack_return_c: Values
    core_c: Values
    """Of a device at full power."""
    evaporation_kg_per_s: Values
    makeup_kg_per_s: Values
    balance_error: Values
    """Largest imbalance of a loop or of the whole plant, over the IT power."""

    @property
    def site_w(self) -> Values:
        return self.it_w + self.conversion_w + self.cooling_w

    @property
    def coolant_c(self) -> Values:
        """Mean of the racks' supply and return."""
        return np.asarray((self.rack_supply_c + self.rack_return_c) / 2)

    @property
    def cooling_w(self) -> Values:
        return np.asarray(self.pumps_w + self.fans_w + self.air_fans_w + self.chiller_w)

    @property
    def pue(self) -> float:
        """PUE: energy of the site over that of IT, over all hours. A year by ISO/IEC 30134-2, IT metered behind the
        conversion."""
        return float(self.site_w.sum() / self.it_w.sum())

    @property
    def wue_l_per_kwh(self) -> float:
        """WUE: litres of make-up water per kWh of IT (ISO/IEC 30134-9, water of the site alone)."""
        return float(self.makeup_kg_per_s.sum() * 3600.0 / (self.it_w.sum() / 1000.0))


@dataclass(frozen=True)
class _Loads:
    """Heat into the loops at a supply temperature."""

    it_w: Values
    conversion_w: Values
    air_fans_w: Values
    rack_w: Values
    hall_w: Values


def simulate_plant(
    plant: CoolingPlant, it_w: Values, dry_bulb_c: Values, wet_bulb_c: Values, controls: PlantControls
) -> PlantHours:
    """Compute the plant for each hour.

    Args:
        plant: Its design.
        it_w: Power of IT with the coolant at `plant.reference_supply_c`; where it is warmer, leakage adds to it.
        dry_bulb_c: Of the outside air.
        wet_bulb_c: Of the outside air.
        controls: Set points.
    """
    count = len(it_w)
    set_point = np.broadcast_to(np.asarray(controls.supply_c, dtype=float), count)
    flow = np.broadcast_to(np.asarray(controls.flow_share, dtype=float), count)
    rejection = make_heat_rejection(plant, dry_bulb_c, wet_bulb_c)
    hall_flow, rack_flow, tower_flow = (each * flow for each in plant.design_flows_kg_per_s)
    rack_pump, hall_pump, tower_pump = (plant.pump_power_w(loop, flow) for loop in ("rack", "hall", "tower"))

    supply = set_point.copy()
    loads = _find_loads(plant, it_w, supply, rack_pump, hall_pump)
    heat = loads.hall_w + tower_pump
    fan = rejection.find_fan_share(heat, tower_flow, set_point - plant.exchanger_approach_k)
    chiller = np.zeros(count)
    is_short = np.isnan(fan)  # at full fan the water is warmer than asked
    if np.any(is_short):
        short = _solve_short_hours(
            plant, rejection.select(is_short), it_w[is_short], set_point[is_short],
            hall_flow[is_short], tower_flow[is_short], (rack_pump[is_short], hall_pump[is_short], tower_pump[is_short]),
        )  # fmt: skip
        supply[is_short], chiller[is_short] = short
        loads = _find_loads(plant, it_w, supply, rack_pump, hall_pump)
        fan = np.where(is_short, 1.0, fan)
    rejected = loads.hall_w + tower_pump + chiller
    return_c = supply + loads.hall_w / (hall_flow * WATER_J_PER_KG_K)
    rack_supply, rack_return = _solve_cdu(plant, loads.rack_w, supply, hall_flow, rack_flow)
    evaporation = rejected * rejection.evaporated_share / EVAPORATION_J_PER_KG
    core = rack_supply + (rack_return - rack_supply) / 2 + plant.core_rise_k * _scale_plate(plant, flow)
    fans = plant.rejection_fan_w * fan**FAN_EXPONENT
    hours = PlantHours(
        it_w=loads.it_w,
        conversion_w=loads.conversion_w,
        pumps_w=rack_pump + hall_pump + tower_pump,
        fans_w=fans,
        air_fans_w=loads.air_fans_w,
        chiller_w=chiller,
        rejected_w=rejected,
        supply_c=supply,
        return_c=return_c,
        rack_supply_c=rack_supply,
        rack_return_c=rack_return,
        core_c=core,
        evaporation_kg_per_s=evaporation,
        makeup_kg_per_s=evaporation * plant.concentration_cycles / (plant.concentration_cycles - 1),
        balance_error=np.zeros(count),
    )
    error = _find_balance_error(hours, plant, hall_flow * WATER_J_PER_KG_K, rack_flow * WATER_J_PER_KG_K, rack_pump)
    return replace(hours, balance_error=error)


def _find_loads(
    plant: CoolingPlant, it_w: Values, supply_c: Values, rack_pump_w: Values, hall_pump_w: Values
) -> _Loads:
    it = it_w * (1 + plant.leakage_per_k * (supply_c - plant.reference_supply_c))
    conversion = it * (1 / plant.conversion_efficiency - 1)
    air_heat = it * (1 - plant.liquid_share) + conversion
    design = plant.design_it * (1 - plant.liquid_share + 1 / plant.conversion_efficiency - 1)
    share = np.clip(air_heat / design, 0.2, None) if design > 0 else np.zeros_like(it)
    air_fans = plant.air_fan_share * design * share**FAN_EXPONENT
    rack = it * plant.liquid_share + rack_pump_w
    return _Loads(it, conversion, air_fans, rack, rack + air_heat + air_fans + hall_pump_w)


def _solve_short_hours(
    plant: CoolingPlant,
    rejection: "CoolingTower | DryCooler",
    it_w: Values,
    set_point_c: Values,
    hall_flow: Values,
    tower_flow: Values,
    pumps_w: tuple[Values, Values, Values],
) -> tuple[Values, Values]:
    """The supply temperature and the chiller's power in hours in which a full fan does not reach the set point."""
    rack_pump, hall_pump, tower_pump = pumps_w
    supply, chiller = set_point_c.copy(), np.zeros_like(it_w)
    for _ in range(CHILLER_ITERATIONS):
        loads = _find_loads(plant, it_w, supply, rack_pump, hall_pump)
        cold = rejection.find_cold_water(loads.hall_w + tower_pump + chiller, tower_flow)
        free = cold + plant.exchanger_approach_k
        if not plant.trim_chiller:
            supply = free
            continue
        lifted = np.clip(hall_flow * WATER_J_PER_KG_K * (free - set_point_c), 0, loads.hall_w)
        evaporator = set_point_c - CHILLER_PINCH_K + KELVIN_OFFSET
        hot = cold + (loads.hall_w + tower_pump + chiller) / (tower_flow * WATER_J_PER_KG_K)
        condenser = hot + CHILLER_PINCH_K + KELVIN_OFFSET
        cop = np.minimum(plant.chiller_carnot_share * evaporator / np.maximum(condenser - evaporator, 0.1), MAX_COP)
        chiller = lifted / cop
    return supply, chiller


def _solve_cdu(
    plant: CoolingPlant, heat_w: Values, supply_c: Values, hall_flow: Values, rack_flow: Values
) -> tuple[Values, Values]:
    """Supply and return of the racks, by effectiveness and NTU of a counterflow exchanger with one UA."""
    hall, rack = hall_flow * WATER_J_PER_KG_K, rack_flow * WATER_J_PER_KG_K
    least, ratio = np.minimum(hall, rack), np.minimum(hall, rack) / np.maximum(hall, rack)
    units = plant.cdu_ua_w_per_k / least
    effectiveness = find_effectiveness(units, ratio)
    rack_return = supply_c + heat_w / (effectiveness * least)
    return rack_return - heat_w / rack, rack_return


def _scale_plate(plant: CoolingPlant, flow_share: Values) -> Values:
    """Resistance of a cold plate over that at design flow: a part that conducts, and one that falls with the flow."""
    return np.asarray(1 - plant.plate_flow_share + plant.plate_flow_share * flow_share**-plant.plate_flow_exponent)


def _find_balance_error(
    hours: PlantHours, plant: CoolingPlant, hall_w_per_k: Values, rack_w_per_k: Values, rack_pump_w: Values
) -> Values:
    """From temperatures and flows, not from the heats that they were made of."""
    rack = rack_w_per_k * (hours.rack_return_c - hours.rack_supply_c) - (hours.it_w * plant.liquid_share + rack_pump_w)
    whole = hours.site_w - hours.fans_w - hours.rejected_w  # the tower's fans heat the air that leaves
    hall_heat = hall_w_per_k * (hours.return_c - hours.supply_c)
    air = hours.it_w * (1 - plant.liquid_share) + hours.conversion_w + hours.air_fans_w
    tower_pump = hours.rejected_w - hours.chiller_w - hall_heat
    hall_pump = hall_heat - rack_w_per_k * (hours.rack_return_c - hours.rack_supply_c) - air
    pumps = tower_pump + hall_pump + rack_pump_w - hours.pumps_w
    return np.asarray(np.max(np.abs([rack, whole, pumps]), axis=0) / np.maximum(hours.it_w, 1.0))


@dataclass(frozen=True)
class CoolingTower:
    """Water over air: colder than the dry bulb, and uses water."""

    wet_bulb_c: Values
    air_kg_per_s: float
    calibration: float
    evaporated_share: float
    """Of the heat, by evaporation."""
    min_fan_share: float

    def find_cold_water(self, heat_w: Values, flow_kg_per_s: Values) -> Values:
        """Return the temperature of the cold water in C with a full fan."""
        range_k = heat_w / (flow_kg_per_s * WATER_J_PER_KG_K)
        approach = find_approach(heat_w / self.air_kg_per_s, range_k, self.wet_bulb_c, self.calibration)
        return self.wet_bulb_c + approach

    def find_fan_share(self, heat_w: Values, flow_kg_per_s: Values, target_c: Values) -> Values:
        """Return the least fan speed that gives the target temperature; NaN where a full fan does not."""
        range_k, approach = heat_w / (flow_kg_per_s * WATER_J_PER_KG_K), target_c - self.wet_bulb_c
        heat = heat_w / self.air_kg_per_s
        return find_air_share(heat, range_k, self.wet_bulb_c, approach, self.calibration, self.min_fan_share)

    def select(self, chosen: NDArray[np.bool_]) -> "CoolingTower":
        return replace(self, wet_bulb_c=self.wet_bulb_c[chosen])


@dataclass(frozen=True)
class DryCooler:
    """Air past fins: effectiveness of a crossflow coil as counterflow with one UA at full fan."""

    dry_bulb_c: Values
    air_w_per_k: float
    ua_w_per_k: float
    min_fan_share: float
    evaporated_share: float = 0.0

    def find_cold_water(self, heat_w: Values, flow_kg_per_s: Values, fan_share: Values | float = 1.0) -> Values:
        water, air = flow_kg_per_s * WATER_J_PER_KG_K, self.air_w_per_k * np.asarray(fan_share)
        least, ratio = np.minimum(water, air), np.minimum(water, air) / np.maximum(water, air)
        units = self.ua_w_per_k * np.asarray(fan_share) ** AIR_FILM_EXPONENT / least
        effectiveness = find_effectiveness(units, ratio)
        return np.asarray(self.dry_bulb_c + heat_w / (effectiveness * least) - heat_w / water)

    def find_fan_share(self, heat_w: Values, flow_kg_per_s: Values, target_c: Values) -> Values:
        low, high = np.full_like(heat_w, self.min_fan_share), np.ones_like(heat_w)
        is_possible = self.find_cold_water(heat_w, flow_kg_per_s, high) <= target_c
        for _ in range(AIR_BISECTIONS):
            middle = (low + high) / 2
            is_cold = self.find_cold_water(heat_w, flow_kg_per_s, middle) <= target_c
            low, high = np.where(is_cold, low, middle), np.where(is_cold, middle, high)
        return np.where(is_possible, high, np.nan)

    def select(self, chosen: NDArray[np.bool_]) -> "DryCooler":
        return replace(self, dry_bulb_c=self.dry_bulb_c[chosen])


def make_heat_rejection(plant: CoolingPlant, dry_bulb_c: Values, wet_bulb_c: Values) -> CoolingTower | DryCooler:
    """Return the plant's tower or dry cooler in this weather."""
    heat_w, flow = plant.design_heat_w, plant.design_flows_kg_per_s[2]
    if plant.heat_rejection == "tower":
        air_kg_per_s = heat_w / plant.tower_heat_j_per_kg
        return CoolingTower(
            wet_bulb_c, air_kg_per_s, plant.tower_calibration, plant.evaporated_share, plant.min_fan_share
        )
    return make_dry_cooler(plant, heat_w, flow * WATER_J_PER_KG_K, dry_bulb_c)


def make_dry_cooler(plant: CoolingPlant, heat_w: float, water_w_per_k: float, dry_bulb_c: Values) -> DryCooler:
    """Return a dry cooler that has its approach at full fan and design heat, with as much air as the water needs to
    give it its range."""
    low, high = 1e-3, 1e3
    cooler = DryCooler(np.array([0.0]), water_w_per_k * plant.dry_air_share, 0.0, plant.min_fan_share)
    for _ in range(APPROACH_BISECTIONS):
        middle = (low * high) ** 0.5
        cooler = replace(cooler, ua_w_per_k=middle * water_w_per_k)
        cold = cooler.find_cold_water(np.array([heat_w]), np.array([water_w_per_k / WATER_J_PER_KG_K]))
        low, high = (middle, high) if cold[0] > plant.dry_approach_k else (low, middle)
    return replace(cooler, dry_bulb_c=dry_bulb_c, ua_w_per_k=(low * high) ** 0.5 * water_w_per_k)
