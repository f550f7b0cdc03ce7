"""What gives the heat to the outside air: a cooling tower or a dry cooler, as functions of heat, flow and fan."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.fleet.thermal.cooling_tower import (
    AIR_BISECTIONS,
    APPROACH_BISECTIONS,
    WATER_J_PER_KG_K,
    find_air_share,
    find_approach,
    find_effectiveness,
)
from phalanx.fleet.thermal.device_series import Values
from phalanx.fleet.thermal.plant_settings import CoolingPlant

AIR_FILM_EXPONENT = 0.6
"""Heat transfer of air past fins rises with its flow to the power of 0.6."""


class HeatRejection(ABC):
    """A tower or dry cooler in the weather of some hours."""

    evaporated_share: float
    """Of the heat, by evaporation."""

    @abstractmethod
    def find_cold_water(self, heat_w: Values, flow_kg_per_s: Values, fan_share: Values | float = 1.0) -> Values:
        """Return the temperature of the cold water in C."""

    @abstractmethod
    def select(self, chosen: NDArray[np.bool_]) -> "HeatRejection":
        """Return the same in the chosen hours."""

    @abstractmethod
    def find_fan_share(self, heat_w: Values, flow_kg_per_s: Values, target_c: Values) -> Values:
        """Return the least fan speed that gives the target temperature; NaN where a full fan does not."""


@dataclass(frozen=True)
class CoolingTower(HeatRejection):
    """Water over air: colder than the dry bulb, and uses water."""

    wet_bulb_c: Values
    air_kg_per_s: float
    calibration: float
    evaporated_share: float
    min_fan_share: float

    def find_cold_water(self, heat_w: Values, flow_kg_per_s: Values, fan_share: Values | float = 1.0) -> Values:
        range_k = heat_w / (flow_kg_per_s * WATER_J_PER_KG_K)
        approach = find_approach(heat_w / self.air_kg_per_s, range_k, self.wet_bulb_c, self.calibration, fan_share)
        return self.wet_bulb_c + approach

    def find_fan_share(self, heat_w: Values, flow_kg_per_s: Values, target_c: Values) -> Values:
        range_k, approach = heat_w / (flow_kg_per_s * WATER_J_PER_KG_K), target_c - self.wet_bulb_c
        heat = heat_w / self.air_kg_per_s
        return find_air_share(heat, range_k, self.wet_bulb_c, approach, self.calibration, self.min_fan_share)

    def select(self, chosen: NDArray[np.bool_]) -> "CoolingTower":
        return CoolingTower(
            self.wet_bulb_c[chosen], self.air_kg_per_s, self.calibration, self.evaporated_share, self.min_fan_share
        )


@dataclass(frozen=True)
class DryCooler(HeatRejection):
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
        return DryCooler(self.dry_bulb_c[chosen], self.air_w_per_k, self.ua_w_per_k, self.min_fan_share)


def make_heat_rejection(plant: CoolingPlant, dry_bulb_c: Values, wet_bulb_c: Values) -> HeatRejection:
    """Return the plant's tower or dry cooler in this weather."""
    heat_w, flow = plant.design_heat_w, plant.design_flows_kg_per_s[2]
    if plant.heat_rejection == "tower":
        return CoolingTower(
            wet_bulb_c, heat_w / plant.tower_heat_j_per_kg, plant.tower_calibration, plant.evaporated_share,
            plant.min_fan_share,
        )  # fmt: skip
    return make_dry_cooler(plant, heat_w, flow * WATER_J_PER_KG_K, dry_bulb_c)


def make_dry_cooler(plant: CoolingPlant, heat_w: float, water_w_per_k: float, dry_bulb_c: Values) -> DryCooler:
    """Return a dry cooler that has its approach at full fan and design heat, with as much air as the water needs to
    give it its range."""
    low, high = 1e-3, 1e3
    design = np.array([0.0])
    for _ in range(APPROACH_BISECTIONS):
        middle = (low * high) ** 0.5
        cooler = DryCooler(design, water_w_per_k * plant.dry_air_share, middle * water_w_per_k, plant.min_fan_share)
        cold = cooler.find_cold_water(np.array([heat_w]), np.array([water_w_per_k / WATER_J_PER_KG_K]))
        low, high = (middle, high) if cold[0] > plant.dry_approach_k else (low, middle)
    return DryCooler(dry_bulb_c, water_w_per_k * plant.dry_air_share, (low * high) ** 0.5 * water_w_per_k,
                     plant.min_fan_share)  # fmt: skip
