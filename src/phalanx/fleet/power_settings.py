"""The section `power` of a fleet file: how caps are counted, and how nodes are reached."""

from typing import Self

from pydantic import Field, model_validator

from phalanx.cluster.spec import StrictModel
from phalanx.fleet.node_control_settings import CapDeviceSettings, HelperReach

MAX_LEASE_S = 60.0
LATE_AFTER_PERIODS = 3
"""Age in periods from which a report is missing."""


class PowerSettings(StrictModel):
    """How budgets are held."""

    margin: float = Field(0.02, ge=0, le=1)
    """Share by which a device may draw more than its cap. On an A40 no mean exceeded a cap of half of the limit or more
    by over 1%; the lowest cap was exceeded by up to 21%."""
    min_cap_share: float = Field(0.55, gt=0, le=1)
    """Lowest cap of devices of which the job was not swept, as a share of the device's most power."""
    averaging_s: float = Field(1.0, ge=0, le=120)
    """Seconds over which devices average the power that they report."""
    dead_time_s: float = Field(1.0, ge=0, le=60)
    """Seconds from a write to the first change of power."""
    lease_s: float = Field(30.0, gt=0, le=MAX_LEASE_S)
    """Seconds after which a node that hears nothing lowers its caps to the fallback."""

    devices: CapDeviceSettings = CapDeviceSettings()
    """What of each node is capped."""
    helper: HelperReach = HelperReach()
    """How nodes are reached."""

    @model_validator(mode="after")
    def _check_lease(self) -> Self:
        if self.lease_s < 2 * self.period_s:
            raise ValueError(
                f"lease_s: {self.lease_s:g} s is shorter than 2 periods of the guard, {2 * self.period_s:g} s "
                "(averaging_s and dead_time_s): what is raised would fall before it is renewed"
            )
        return self

    @property
    def period_s(self) -> float:
        """Seconds from one step of the guard to the next. A loop that is faster than averaging and dead time together
        oscillates."""
        return max(1.0, self.averaging_s + self.dead_time_s)

    @property
    def fresh_s(self) -> float:
        """Age from which a report is missing."""
        return LATE_AFTER_PERIODS * self.period_s
