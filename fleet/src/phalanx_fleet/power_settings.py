"""Powers with their unit, and the section `power` of a fleet file: how caps are counted, what of a node is capped, and
how nodes are reached."""

import re
import shlex
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from phalanx.cluster.spec import StrictModel
from phalanx.recipe.validation_errors import describe_value

WATTS_BY_UNIT = {"W": 1.0, "kW": 1e3, "MW": 1e6}
POWER_PATTERN = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(W|kW|MW)")
MAX_LEASE_S = 60.0
LATE_AFTER_PERIODS = 3
"""Age in periods from which a report is missing."""
DEFAULT_SOCKET = Path("/run/phalanx/power.sock")
RAPL_KEYS = {"root", "packages", "package_power"}


def parse_power(value: Any) -> float:
    """Return the watts of a text such as "45 kW". ValueError for a number without a unit, or another unit."""
    found = POWER_PATTERN.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise ValueError(f"found {describe_value(value)}, expected a power with its unit (W, kW or MW), such as 45 kW")
    return float(found[1]) * WATTS_BY_UNIT[found[2]]


Power = Annotated[
    float,
    BeforeValidator(parse_power, json_schema_input_type=str),
    Field(json_schema_extra={"type": "string", "format": "power"}),
]


class CapDeviceSettings(StrictModel):
    """Devices of a node that may be capped."""

    kind: Literal["nvml", "rapl"] = "nvml"
    ids: list[str] | None = Field(None, min_length=1)
    """Only these devices, such as GPU-5b0c...; without it all of this kind."""
    root: Path = Path("/")
    """Folder with sys/class/powercap, for rapl."""
    packages: int | None = Field(None, ge=1, le=64)
    """CPU packages of a node, for rapl in a fleet file."""
    package_power: Power | None = None
    """Most power of one package, for rapl in a fleet file."""

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if self.kind != "rapl" and (unused := RAPL_KEYS.intersection(self.model_fields_set)):
            raise ValueError(f"{min(unused)} is not for kind: {self.kind}; expected kind: rapl")
        return self


def _check_command(command: str) -> str:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ValueError(f"expected a command, found an error in it: {error}") from None
    if not any("{node}" in word for word in words):
        raise ValueError("expected a command with {node} for the name of the node")
    return command


class HelperReach(StrictModel):
    """How a guard reaches the helper of a node (`phalanx power node`)."""

    socket: Path = DEFAULT_SOCKET
    """Socket of the helper on this machine. Where there is none, the guard's own process caps, as root."""
    command: Annotated[str, AfterValidator(_check_command)] | None = None
    """Command that connects to the helper of another node, without a shell; {node} stands for its name. Such as
    ssh -o BatchMode=yes {node} phalanx power node --stdio"""
    timeout_s: float = Field(10.0, gt=0, le=120)
    """Seconds to wait for the first answers."""


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
