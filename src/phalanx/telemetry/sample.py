"""Readings of one node at one time, in base units, and what every source of them gives.

None is a missing value: not supported, not permitted, blank, null, late, or of a counter that no longer changes. It is
never replaced by zero or by the value before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntFlag
from typing import Protocol

SAMPLE_INTERVAL_S = 1.0
"""From one sample of a node by its agent to the next."""


class SlowReason(IntFlag):
    """Why clocks are lower than they could be. Bits as in NVML's clocks event reasons."""

    IDLE = 1
    APPLICATION_CLOCKS = 2
    POWER_CAP = 4
    HW_SLOWDOWN = 8
    SYNC_BOOST = 16
    SW_THERMAL = 32
    HW_THERMAL = 64
    POWER_BRAKE = 128
    DISPLAY_CLOCKS = 256


SLOW_REASON_LABELS = {reason: str(reason.name).lower().replace("_", " ") for reason in SlowReason} | {
    SlowReason.HW_SLOWDOWN: "hardware slowdown",
    SlowReason.SW_THERMAL: "thermal (driver)",
    SlowReason.HW_THERMAL: "thermal (hardware)",
}


def describe_slow_reasons(reasons: SlowReason) -> str:
    """`power cap, thermal (driver)`; `none` for no reason."""
    return ", ".join(label for reason, label in SLOW_REASON_LABELS.items() if reason in reasons) or "none"


@dataclass(frozen=True, kw_only=True)
class DeviceSample:
    """One accelerator. Counters (`*_joules`, `*_total`) count since the driver or the device started, and restart at
    zero with it: only their differences mean something."""

    id: str
    """UUID, or another name that stays the same when devices are renumbered."""
    name: str = ""
    power_instant_w: float | None = None
    power_mean_w: float | None = None
    """Mean power over about a second, by the device (NVML on Ampere and later, AMD's average socket power)."""
    power_cap_w: float | None = None
    """The cap that the device enforces."""
    energy_joules: float | None = None
    core_temperature_c: float | None = None
    memory_temperature_c: float | None = None
    thermal_margin_c: float | None = None
    """Kelvins up to the temperature from which the device slows down."""
    core_clock_hz: float | None = None
    memory_clock_hz: float | None = None
    slow_reasons: SlowReason | None = None
    utilization: float | None = None
    """Share of the last sampling period in which a kernel ran, 0 to 1. Not a measure of load: watts are."""
    memory_used_bytes: float | None = None
    memory_size_bytes: float | None = None
    ecc_corrected_total: float | None = None
    ecc_uncorrected_total: float | None = None
    xid: float | None = None
    """Number of the newest Xid error since the source was opened; 0 before the first."""
    xids_total: float | None = None
    """Xid errors since the source was opened."""
    pcie_replays_total: float | None = None
    nvlink_sent_bytes_total: float | None = None
    nvlink_received_bytes_total: float | None = None
    nvlink_errors_total: float | None = None

    @property
    def power_w(self) -> float | None:
        """Watts as a mean, else the instant."""
        return self.power_mean_w if self.power_mean_w is not None else self.power_instant_w


@dataclass(frozen=True, kw_only=True)
class HostSample:
    """A node without its accelerators."""

    cpu_energy_joules: float | None = None
    """Counter of the packages' energy (RAPL)."""
    cpu_power_w: float | None = None
    """Of all CPU packages: measured, or estimated (`cpu_power_is_estimate`)."""
    cpu_power_is_estimate: bool = False
    node_power_w: float | None = None
    """At the node's power supplies, by its management controller."""
    cpu_temperature_c: float | None = None
    inlet_temperature_c: float | None = None
    failed_fans: float | None = None
    """Fans that do not turn, or that the management controller reports as failed."""
    cpu_utilization: float | None = None
    memory_used_bytes: float | None = None
    memory_size_bytes: float | None = None


@dataclass(frozen=True)
class NodeSample:
    """All readings of a node at `time` (seconds since the epoch)."""

    time: float
    host: HostSample = field(default_factory=HostSample)
    devices: tuple[DeviceSample, ...] = ()


@dataclass(frozen=True)
class SourceReading:
    """What a source reads at one time: devices, parts of the host."""

    devices: tuple[DeviceSample, ...] = ()
    host: HostSample | None = None


class TelemetrySource(Protocol):
    """Reads one kind of hardware or service. It is opened by its constructor, which raises SourceUnavailableError."""

    name: str
    """Short name for people, such as `NVML`."""

    @property
    def problems(self) -> Sequence[str]:
        """What it cannot read here, and why."""

    def read(self) -> SourceReading:
        """Read all values now. A value that cannot be read is None; the source itself never raises for that."""

    def close(self) -> None:
        """Release what it holds. `read` is not called afterwards."""


class SourceUnavailableError(Exception):
    """A source cannot be used here; the text says why and what would help."""
