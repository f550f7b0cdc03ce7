"""What a response to lost cooling knows of the nodes: key `cooling_response` of the nodes file."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from phalanx.cluster.spec import StrictModel
from phalanx.fleet.power_units import Power, parse_power
from phalanx.fleet.thermal.flow_loss import DETECTION_S, HeatCapacity
from phalanx.recipe.field_types import NUMBER_NOT_BOOL


class CoolingResponseSettings(StrictModel):
    """Defaults are the worst case of a device of 1 kW."""

    device_power: Power = parse_power("1 kW")
    """Most power of one device."""
    heat_j_per_k: Annotated[float, Field(gt=0, le=1e5), NUMBER_NOT_BOOL] = 300.0
    """Of a device with its cold plate: 300 to 600 for one of 1 kW."""
    limit_c: Annotated[float, Field(ge=40, le=150), NUMBER_NOT_BOOL] = 90.0
    """Core temperature at which the hardware shuts down."""
    usual_c: Annotated[float, Field(ge=20, le=150), NUMBER_NOT_BOOL] = 60.0
    """Core temperature under load, where a node reports no margin."""
    min_flow_share: Annotated[float, Field(gt=0, lt=1), NUMBER_NOT_BOOL] = 0.2
    """Of its usual flow, below which a rack or CDU has lost it."""

    @model_validator(mode="after")
    def _check_heat(self) -> Self:
        if self.device_power <= 0:
            raise ValueError("device_power: 0 W heats nothing; expected the most of a device, such as 1 kW")
        if self.usual_c >= self.limit_c:
            raise ValueError(f"usual_c: {self.usual_c:g} C is not below limit_c, {self.limit_c:g} C")
        return self

    def find_device(self, margin_k: float | None) -> HeatCapacity:
        """Return a node's hottest device after the detection of a fault; `margin_k`: up to the limit, by a reading of
        now."""
        warmed_c = self.usual_c + self.device_power / self.heat_j_per_k * DETECTION_S
        temperature_c = warmed_c if margin_k is None else self.limit_c - max(0.0, margin_k)
        return HeatCapacity(self.heat_j_per_k, self.device_power, min(temperature_c, self.limit_c), self.limit_c)
