"""The design of a cooling plant: key `cooling` of the fleet file. Defaults are of a plant for liquid-cooled nodes."""

from functools import cached_property
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from phalanx.cluster.spec import StrictModel
from phalanx.recipe.field_types import NUMBER_NOT_BOOL
from phalanx_fleet.power_settings import Power
from phalanx_fleet.thermal.cooling_tower import WATER_J_PER_KG_K, calibrate_tower
from phalanx_fleet.thermal.device_series import Values

WATER_KG_PER_M3 = 995.0
Share = Annotated[float, Field(ge=0.001, le=1), NUMBER_NOT_BOOL]
ShareOrNone = Annotated[float, Field(ge=0, le=1), NUMBER_NOT_BOOL]
Kelvins = Annotated[float, Field(ge=0.01, le=100), NUMBER_NOT_BOOL]
Pressure = Annotated[float, Field(gt=0, le=5000), NUMBER_NOT_BOOL]
Degrees = Annotated[float, Field(ge=0, le=80), NUMBER_NOT_BOOL]


class CoolingPlant(StrictModel):
    """A plant from the racks to the outside air."""

    design_it: Power
    """Most power of IT, for which the plant is built."""
    heat_rejection: Literal["tower", "dry_cooler"] = "tower"
    trim_chiller: bool = True
    """Whether a chiller does what the tower or dry cooler cannot; else the supply temperature rises."""
    supply_c: Degrees = 32.0
    """Usual set point of the hall loop's supply; 32 is ASHRAE's class W32."""
    max_supply_c: Degrees = 45.0
    """Highest supply that the nodes are made for: ASHRAE's class, W45."""
    liquid_share: ShareOrNone = 0.9
    """Of IT's heat, into the cold plates; the rest goes through the air into the hall loop."""
    conversion_efficiency: Share = 0.97
    """From the site's meter to IT's: transformer and distribution."""
    hall_range_k: Kelvins = 10.0
    rack_range_k: Kelvins = 10.0
    """1.5 L/min for each kW."""
    cdu_approach_k: Kelvins = 4.0
    """Rack supply over hall supply at design."""
    exchanger_approach_k: Kelvins = 3.0
    """Hall supply over the water of the tower or dry cooler."""
    hall_head_kpa: Pressure = 250.0
    rack_head_kpa: Pressure = 200.0
    tower_head_kpa: Pressure = 150.0
    static_head_share: ShareOrNone = 0.15
    """Of each head, what remains without flow."""
    pump_efficiency: Share = 0.65
    rejection_fan_share: Share = 0.007
    """Power of the tower's fans at full speed over its heat: 3.4 L/s for each kW (ASHRAE 90.1, axial fans) at 10 K.
    A dry cooler needs three times as much."""
    min_fan_share: Share = 0.2
    tower_wet_bulb_c: Degrees = 24.0
    tower_approach_k: Kelvins = 4.0
    """At full fan, design heat and design wet bulb: this calibrates the tower."""
    tower_heat_j_per_kg: Annotated[float, Field(ge=1000, le=200_000), NUMBER_NOT_BOOL] = 37_000.0
    """Heat for each kg of air at design; calibrated on a tower (docs/benchmarks/fleet.md)."""
    dry_approach_k: Kelvins = 8.0
    """Of a dry cooler at full fan and design heat."""
    dry_air_share: Annotated[float, Field(ge=0.1, le=10), NUMBER_NOT_BOOL] = 1.2
    """Capacity flow of a dry cooler's air over that of its water."""
    evaporated_share: Share = 0.85
    """Of a tower's heat; the rest warms the air."""
    concentration_cycles: Annotated[float, Field(gt=1, le=20), NUMBER_NOT_BOOL] = 4.0
    """Minerals in the tower's water over those in its make-up."""
    air_fan_share: ShareOrNone = 0.03
    """Power of fan coils at design over the heat that they take from the air."""
    chiller_carnot_share: Annotated[float, Field(ge=0.05, le=1), NUMBER_NOT_BOOL] = 0.5
    """Of Carnot's COP."""
    core_rise_k: Kelvins = 35.0
    """Core of a device at full power over its coolant, at design flow: .035 K/W at 1 kW."""
    core_limit_c: Annotated[float, Field(ge=40, le=120), NUMBER_NOT_BOOL] = 87.0
    """Core temperature from which devices throttle."""
    plate_flow_share: ShareOrNone = 0.5
    """Of the cold plate's resistance, what falls with the flow."""
    plate_flow_exponent: Annotated[float, Field(ge=0, le=1), NUMBER_NOT_BOOL] = 0.65
    leakage_per_k: Annotated[float, Field(ge=0, le=0.02), NUMBER_NOT_BOOL] = 0.0004
    """Share by which IT draws more for each kelvin of the coolant: .27 W/K of a GPU of 700 W, measured at rest."""
    reference_supply_c: Degrees = 32.0
    """Supply temperature at which IT draws what its node types say; warmer, leakage adds to it."""
    min_flow_share: Share = 0.4
    """Least safe flow with a margin; Frontier ran at 2.9 times the least safe flow."""

    @model_validator(mode="after")
    def _check_design(self) -> Self:
        if self.design_it <= 0:
            raise ValueError("design_it: found 0 W, expected the most power of IT, such as 10 MW")
        if self.supply_c > self.max_supply_c:
            raise ValueError(
                f"supply_c: {self.supply_c:g} C is above max_supply_c, {self.max_supply_c:g} C, the most of the nodes"
            )
        return self

    @cached_property
    def design_heat_w(self) -> float:
        """Heat that the tower or dry cooler gives away at design, with a margin of 5 % for pumps."""
        return float(self.design_it / self.conversion_efficiency * 1.05)

    @cached_property
    def design_flows_kg_per_s(self) -> tuple[float, float, float]:
        """Flows of the hall, rack and tower loops."""
        hall = self.design_heat_w / (self.hall_range_k * WATER_J_PER_KG_K)
        rack = self.design_it * self.liquid_share / (self.rack_range_k * WATER_J_PER_KG_K)
        return hall, max(rack, 1e-6), hall

    @cached_property
    def cdu_ua_w_per_k(self) -> float:
        """UA of the CDUs for their approach at design: a counterflow exchanger, by its logarithmic mean difference."""
        heat = max(self.design_it * self.liquid_share, 1e-3)
        hall = self.design_flows_kg_per_s[0] * WATER_J_PER_KG_K
        cold_end = self.cdu_approach_k  # rack supply over hall supply
        hot_end = max(self.cdu_approach_k + self.rack_range_k - heat / hall, 0.1)
        is_equal = abs(hot_end - cold_end) < 1e-6
        mean = cold_end if is_equal else (hot_end - cold_end) / float(np.log(hot_end / cold_end))
        return heat / mean

    @cached_property
    def tower_calibration(self) -> float:
        return calibrate_tower(
            self.tower_heat_j_per_kg, self.hall_range_k, self.tower_wet_bulb_c, self.tower_approach_k
        )

    @cached_property
    def rejection_fan_w(self) -> float:
        """Fans of the tower or dry cooler at full speed."""
        return self.design_heat_w * self.rejection_fan_share * (3.0 if self.heat_rejection == "dry_cooler" else 1.0)

    def pump_power_w(self, loop: Literal["rack", "hall", "tower"], flow_share: Values) -> Values:
        """Return the power of a loop's pumps: its flow times a static head and one that goes with its square."""
        index = {"hall": 0, "rack": 1, "tower": 2}[loop]
        head_pa = 1000.0 * (self.hall_head_kpa, self.rack_head_kpa, self.tower_head_kpa)[index]
        design_w = self.design_flows_kg_per_s[index] / WATER_KG_PER_M3 * head_pa / self.pump_efficiency
        return np.asarray(
            design_w * flow_share * (self.static_head_share + (1 - self.static_head_share) * flow_share**2)
        )
