"""What every source of readings gives: one interface, whatever it asks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from phalanx.fleet.telemetry.sample import DeviceSample, HostSample, RackSample


@dataclass(frozen=True, slots=True)
class SourceReading:
    """What a source reads at one time: devices, parts of the host, racks."""

    devices: tuple[DeviceSample, ...] = ()
    host: HostSample | None = None
    racks: tuple[RackSample, ...] = ()
    host_age_s: float = 0.0
    """Seconds since the values of the host were measured: a service that answers slowly is asked in the background."""
    renewal_s: float = 0.0
    """Seconds between new values of devices where the service renews them more slowly than it is read; else 0."""


class Stoppable(Protocol):
    """What runs in the background."""

    def stop(self) -> None:
        """End it."""
        ...


class TelemetrySource(Protocol):
    """Reads one kind of hardware or service. It is opened by its constructor, which raises SourceUnavailableError."""

    name: str
    """Short name for people, such as `NVML`."""

    @property
    def problems(self) -> Sequence[str]:
        """What it cannot read here, and why."""
        ...

    def read(self) -> SourceReading:
        """Read all values now. A value that cannot be read is None; the source itself never raises for that."""
        ...

    def close(self) -> None:
        """Release what it holds. `read` is not called afterwards."""
        ...


class SourceUnavailableError(Exception):
    """A source cannot be used here; the text says why and what would help."""
