"""The last day of a node, by hour."""

from pathlib import Path

import pytest

from phalanx.errors import DataError
from phalanx.fleet.day_summary import DAY_S, HourSummary, read_last_day
from phalanx.fleet.telemetry.ring_file import RingLayout, RingWriter
from phalanx.fleet.telemetry.sample import DeviceSample, HostSample, NodeSample, SlowReason

NOW = 100 * 3600.0


def test_hours_have_the_mean_and_most_power_and_the_least_margin(tmp_path: Path) -> None:
    ring = RingWriter(tmp_path / "n1.ring", RingLayout((("a", ""),)))
    samples = [
        (NOW - 7200.0, 100.0, 30.0, SlowReason(0)),
        (NOW - 7199.0, 900.0, 1.0, SlowReason(0)),  # not the first second of its minute
        (NOW - 7140.0, 200.0, 20.0, SlowReason.POWER_CAP),
        (NOW - 60.0, 300.0, None, SlowReason.IDLE),
        (NOW - DAY_S - 120.0, 900.0, 1.0, SlowReason(0)),
    ]
    for time, watts, margin, reasons in samples:
        device = DeviceSample(id="a", power_mean_w=watts, thermal_margin_c=margin, slow_reasons=reasons)
        ring.write(NodeSample(time, HostSample(), (device,)))
    ring.close()
    assert read_last_day(tmp_path / "n1.ring", NOW) == [
        HourSummary(NOW - 7200.0, 2, 150.0, 200.0, 20.0, 0.5),
        HourSummary(NOW - 3600.0, 1, 300.0, 300.0, None, 0.0),
    ]


def test_a_node_without_a_ring_has_no_hours_and_a_damaged_one_is_said(tmp_path: Path) -> None:
    assert read_last_day(tmp_path / "n1.ring", NOW) == []
    (tmp_path / "n1.ring").write_text("{}\n")
    with pytest.raises(DataError, match=r"n1\.ring: is no telemetry of this version"):
        read_last_day(tmp_path / "n1.ring", NOW)
