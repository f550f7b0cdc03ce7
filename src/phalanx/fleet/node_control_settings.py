"""What of a node is capped, and how its helper is reached: keys of the fleet file and of the helper's own file."""

import shlex
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from phalanx.cluster.spec import StrictModel
from phalanx.fleet.nodes_file import RedfishEntry
from phalanx.fleet.power_units import Power

DEFAULT_SOCKET = Path("/run/phalanx/power.sock")
KIND_OF_KEY = {
    **dict.fromkeys(("root", "packages", "package_power"), "rapl"),
    "redfish": "redfish",
    "clocks": "nvml-clocks",
}
DeviceKind = Literal["nvml", "nvml-clocks", "amdsmi", "rapl", "redfish"]


class ClockEntry(StrictModel):
    """A locked clock, and the most power that a sweep measured of a device at it."""

    clock_mhz: float = Field(gt=0, le=1e5)
    most_power: Power


class CapDeviceSettings(StrictModel):
    """Devices of a node that may be capped, and the caps that they may get."""

    kind: DeviceKind = "nvml"
    ids: list[str] | None = Field(None, min_length=1)
    """Only these devices, such as GPU-5b0c...; without it all of this kind."""
    min_cap: Power | None = None
    max_cap: Power | None = None
    root: Path = Path("/")
    """Folder with sys/class/powercap, for rapl."""
    packages: int | None = Field(None, ge=1, le=64)
    """CPU packages of a node, for rapl in a fleet file."""
    package_power: Power | None = None
    """Most power of one package, for rapl in a fleet file."""
    redfish: RedfishEntry | None = None
    """Management controller that limits a whole node, for redfish; {node} in `url` stands for its name."""
    clocks: list[ClockEntry] = Field(default_factory=list)
    """For nvml-clocks."""

    @model_validator(mode="after")
    def _check_range(self) -> Self:
        if self.min_cap is not None and self.max_cap is not None and self.min_cap > self.max_cap:
            raise ValueError(f"min_cap of {self.min_cap:g} W is above max_cap of {self.max_cap:g} W")
        if unused := [key for key in self.model_fields_set if KIND_OF_KEY.get(key, self.kind) != self.kind]:
            raise ValueError(f"{min(unused)} is not for kind: {self.kind}; expected kind: {KIND_OF_KEY[min(unused)]}")
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
