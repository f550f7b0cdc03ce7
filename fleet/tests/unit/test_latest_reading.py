"""The newest reading of a node: what is summed, what is missing, and when it is too old."""

import pytest

from phalanx.run.telemetry_minutes import NodeMinute, Rollups, ValueRollup
from phalanx.telemetry.sample import DeviceSample, HostSample, NodeSample, SlowReason
from phalanx_fleet.fleet_node import (
    LatestReading,
    reading_from_minute,
    reading_from_sample,
)

COOL = DeviceSample(id="a", power_mean_w=300.0, power_cap_w=700.0, thermal_margin_c=30.0)
HOT = DeviceSample(
    id="b",
    power_mean_w=400.0,
    power_cap_w=700.0,
    thermal_margin_c=2.0,
    slow_reasons=SlowReason.POWER_CAP | SlowReason.IDLE,
)


def test_power_and_caps_are_summed_and_the_least_margin_counts() -> None:
    found = reading_from_sample(NodeSample(1.0, HostSample(cpu_power_w=100.0), (COOL, HOT)), 1.0)
    assert (found.draw_w, found.parts) == (800.0, "CPU and accelerators")
    assert (found.device_draw_w, found.device_cap_w, found.margin_k) == (700.0, 1400.0, 2.0)
    assert (found.slow_because, found.is_estimate) == ("power cap", False)


def test_the_power_supplies_count_where_they_are_read() -> None:
    host = HostSample(node_power_w=1000.0, cpu_power_w=100.0, cpu_power_is_estimate=True)
    found = reading_from_sample(NodeSample(1.0, host, (COOL,)), 1.0)
    assert (found.draw_w, found.parts, found.is_estimate) == (1000.0, "node", False)


def test_with_an_accelerator_that_is_missing_there_are_no_sums_and_no_margin() -> None:
    found = reading_from_sample(NodeSample(1.0, HostSample(cpu_power_w=100.0), (COOL, DeviceSample(id="lost"))), 1.0)
    assert (found.draw_w, found.parts, found.margin_k) == (None, None, None)
    assert (found.device_draw_w, found.device_cap_w) == (None, None)


def test_an_estimate_is_marked() -> None:
    host = HostSample(cpu_power_w=9.0, cpu_power_is_estimate=True)
    found = reading_from_sample(NodeSample(1.0, host), 1.0)
    assert (found.draw_w, found.parts, found.is_estimate, found.device_cap_w) == (9.0, "CPU", True, None)


def test_an_exporter_knows_accelerators_only() -> None:
    assert reading_from_sample(NodeSample(1.0, devices=(COOL, HOT)), 30.0).parts == "accelerators"


@pytest.mark.parametrize("column", ["power_mean_w", "power_instant_w"])
def test_a_minute_gives_means_the_least_margin_and_the_time_of_its_end(column: str) -> None:
    def device(watts: float, margin: float) -> Rollups:
        values = {column: watts, "power_cap_w": 700.0, "thermal_margin_c": margin}
        return Rollups({name: ValueRollup(value - 1, value, value + 1, 60) for name, value in values.items()})

    host = Rollups({"cpu_power_w": ValueRollup(9.0, 10.0, 11.0, 60)})
    minute = NodeMinute(120.0, 60.0, 60, "n1", host, {"a": device(300.0, 30.0), "b": device(0.0, 5.0)}, True)
    assert reading_from_minute(minute) == LatestReading(
        180.0, 60.0, 310.0, "CPU and accelerators", True, 300.0, 1400.0, num_devices=2, margin_k=4.0
    )


@pytest.mark.parametrize(("age", "is_late"), [(0, False), (180, False), (181, True), (-60, False), (-181, True)])
def test_a_reading_is_missing_after_three_periods_or_from_a_clock_that_is_ahead(age: float, is_late: bool) -> None:
    assert LatestReading(1000.0, 60.0).is_late(1000.0 + age) is is_late
