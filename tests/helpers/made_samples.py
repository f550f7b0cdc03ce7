"""Samples of a node with eight accelerators, every value of which is there."""

from dataclasses import fields

from phalanx.telemetry.sample import DeviceSample, HostSample, NodeSample, SlowReason


def full_device(number: int = 0, seconds: float = 0.0) -> DeviceSample:
    """An accelerator under load, `seconds` after its counters were 0."""
    counts = {name: seconds for name in (each.name for each in fields(DeviceSample)) if name.endswith("_total")}
    return DeviceSample(
        id=f"GPU-{number}",
        name="NVIDIA H100",
        power_instant_w=640.0,
        power_mean_w=650.0,
        power_cap_w=700.0,
        energy_joules=650.0 * seconds,
        core_temperature_c=61.0 + number,
        memory_temperature_c=80.0,
        thermal_margin_c=20.0 - number,
        core_clock_hz=1.755e9,
        memory_clock_hz=2.619e9,
        slow_reasons=SlowReason.POWER_CAP,
        utilization=0.97,
        memory_used_bytes=70e9,
        memory_size_bytes=80e9,
        xid=0.0,
        **counts,
    )


def full_node(time: float, seconds: float = 0.0) -> NodeSample:
    """A node with eight of them at `time`."""
    host = HostSample(
        cpu_energy_joules=200.0 * seconds,
        cpu_power_w=200.0,
        node_power_w=6200.0,
        cpu_temperature_c=55.0,
        inlet_temperature_c=24.0,
        cpu_utilization=0.3,
        memory_used_bytes=1e11,
        memory_size_bytes=1e12,
    )
    return NodeSample(time, host, tuple(full_device(number, seconds) for number in range(8)))
