"""Readings of one node at one time, in base units. None is a missing value: not supported, not permitted, blank, null,
late, or of a counter that no longer changes. A missing value is never replaced by zero or by the value before it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntFlag
from typing import Literal

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


HOT_REASONS = SlowReason.SW_THERMAL | SlowReason.HW_THERMAL
SLOW_REASON_LABELS = {
    SlowReason.IDLE: "idle",
    SlowReason.APPLICATION_CLOCKS: "application clocks",
    SlowReason.POWER_CAP: "power cap",
    SlowReason.HW_SLOWDOWN: "hardware slowdown",
    SlowReason.SYNC_BOOST: "sync boost",
    SlowReason.SW_THERMAL: "thermal (driver)",
    SlowReason.HW_THERMAL: "thermal (hardware)",
    SlowReason.POWER_BRAKE: "power brake",
    SlowReason.DISPLAY_CLOCKS: "display clocks",
}


def describe_slow_reasons(reasons: SlowReason) -> str:
    """`power cap, thermal (driver)`; `none` for no reason."""
    return ", ".join(label for reason, label in SLOW_REASON_LABELS.items() if reason in reasons) or "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSample:
    """One accelerator. Counters (`*_joules`, `*_total`) count since the driver or the device started, and restart at
    zero with it: only their differences mean something."""

    id: str
    """UUID, or another name that stays the same when devices are renumbered."""
    name: str = ""
    power_instant_w: float | None = None
    """Power over milliseconds."""
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
    pcie_sent_bytes_per_s: float | None = None
    """To the host, over 20 ms; read of one device a turn."""
    pcie_received_bytes_per_s: float | None = None
    pcie_replays_total: float | None = None
    nvlink_sent_bytes_total: float | None = None
    nvlink_received_bytes_total: float | None = None
    nvlink_errors_total: float | None = None

    @property
    def power_w(self) -> float | None:
        """Watts as a mean, else the instant."""
        return self.power_mean_w if self.power_mean_w is not None else self.power_instant_w


@dataclass(frozen=True, slots=True, kw_only=True)
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
    disk_read_bytes_total: float | None = None
    disk_written_bytes_total: float | None = None
    network_sent_bytes_total: float | None = None
    network_received_bytes_total: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RackSample:
    """The liquid and power of a rack or of a coolant distribution unit (CDU), by the building management system, by
    Modbus or by Redfish. Of a CDU: its secondary side, which the racks are on."""

    id: str
    """Of a rack its location id, which building and cluster share; of a CDU the building's object id."""
    name: str = ""
    equipment: Literal["rack", "CDU"] = "rack"
    supply_temperature_c: float | None = None
    return_temperature_c: float | None = None
    flow_l_per_min: float | None = None
    differential_pressure_pa: float | None = None
    valve_position: float | None = None
    """0 closed, 1 open."""
    power_w: float | None = None
    has_leak: bool | None = None
    has_leak_sensor_fault: bool | None = None
    set_point_c: float | None = None
    """What the controller of a CDU holds its supply at."""
    failed_pumps: float | None = None
    """Pumps of a CDU that do not turn, or that it reports as failed."""
    age_s: float | None = None
    """Seconds since the oldest of these values was measured; None without any."""
    ages_s: Mapping[str, float] = field(default_factory=dict, compare=False)
    """Of single values, where they are not all of one age."""


@dataclass(frozen=True, slots=True)
class NodeSample:
    """All readings of a node at `time` (seconds since the epoch)."""

    time: float
    host: HostSample = field(default_factory=HostSample)
    devices: tuple[DeviceSample, ...] = ()
