"""Samples on their way: checked, rolled up into minutes."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from fake_nvml import FakeGpu, FakeNvml
from phalanx.run.telemetry_minutes import NodeMinute, NodeMinuteTail, Rollups, ValueRollup
from phalanx.telemetry import record as record_module
from phalanx.telemetry.gpu_sources import NvmlSource
from phalanx.telemetry.host import BUSY_WATTS_PER_CORE, HostSource
from phalanx.telemetry.record import NodeSampler, SamplingThread
from phalanx.telemetry.rollup import CounterTotal, MinuteBuilder, merge_hosts
from phalanx.telemetry.sample import DeviceSample, HostSample, NodeSample, SourceReading
from settable_clock import SettableClock


def device_sample(time_s: float, **values: float) -> NodeSample:
    return NodeSample(time_s, HostSample(cpu_utilization=0.5), (DeviceSample(id="a", name="A", **values),))


def test_readings_that_are_missing_lose_no_energy() -> None:
    total = CounterTotal()
    assert [total.add(value) for value in (10.0, None, None, 40.0)] == [None, None, None, 30.0]


def test_a_minute_has_least_mean_most_and_increases() -> None:
    builder, minutes = MinuteBuilder("node"), []
    for second in range(30, 121):
        power = {} if second in (70, 71) else {"power_mean_w": float(second)}
        minutes.append(builder.add(device_sample(float(second), energy_joules=10.0 * second, **power)))
    first, second_minute = [minute for minute in minutes if minute is not None]
    assert (first.time, first.num_samples) == (0.0, 30)
    assert first.devices["a"].values["power_mean_w"] == ValueRollup(30.0, 44.5, 59.0, 30)
    assert first.devices["a"].increases == {"energy_joules": 290.0}
    assert second_minute.devices["a"].values["power_mean_w"].num_readings == 58
    assert second_minute.devices["a"].increases == {"energy_joules": 600.0}
    assert second_minute.host.values["cpu_utilization"] == ValueRollup(0.5, 0.5, 0.5, 60)


def test_minutes_are_read_back_and_other_lines_skipped(tmp_path: Path) -> None:
    builder = MinuteBuilder("node")
    builder.add(device_sample(0.0, power_mean_w=5.0, energy_joules=1.0))
    minute = builder.add(device_sample(60.0))
    assert minute is not None
    path = tmp_path / "node.jsonl"
    path.write_bytes(minute.to_line() + b'{"format": 1, "ti\n[]\n' + minute.to_line() + minute.to_line()[:20])
    found = list(NodeMinuteTail(path).read())
    assert found == [minute, minute]


def test_the_sampler_passes_minutes_on_and_its_last_part_at_the_end() -> None:
    clock, minutes = SettableClock(), list[NodeMinute]()
    source = NvmlSource(FakeNvml(FakeGpu(), clock=clock))
    sampler = NodeSampler([source], "node", on_minute=minutes.append, clock=clock, wall_clock=clock)
    for clock.now in range(90):
        sampler.read()
    sampler.close()
    assert [(minute.time, minute.num_samples) for minute in minutes] == [(0.0, 60), (60.0, 30)]


class HungSource:
    """A driver that answers nothing until it is told to."""

    name, problems = "hung", ()

    def __init__(self) -> None:
        self.answers = threading.Event()

    def read(self) -> SourceReading:
        self.answers.wait(30)
        return SourceReading()

    def close(self) -> None:
        pass


def test_a_driver_that_hangs_blocks_neither_the_start_nor_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(record_module, "STOP_TIMEOUT_S", 0.0)
    source = HungSource()
    thread = SamplingThread(lambda: NodeSampler([source], "node"))
    thread.stop()
    assert "did not answer" in caplog.text
    source.answers.set()
    thread._thread.join(30)
    assert not thread._thread.is_alive()


def test_hosts_of_several_sources_are_one() -> None:
    estimated = HostSample(cpu_power_w=10.0, cpu_power_is_estimate=True, cpu_utilization=0.5)
    merged = merge_hosts([estimated, HostSample(node_power_w=800.0, cpu_power_w=50.0)])
    assert merged == replace(estimated, node_power_w=800.0)


def make_host(root: Path, energy_uj: str | None = "1000000", uptime: str = "100.0 150.0") -> None:
    package = root / "sys/class/powercap/intel-rapl:0"
    package.mkdir(parents=True, exist_ok=True)
    (root / "proc").mkdir(exist_ok=True)
    (root / "proc/uptime").write_text(uptime)
    if energy_uj is not None:
        (package / "name").write_text("package-0\n")
        (package / "max_energy_range_uj").write_text("262143328850\n")
        (package / "energy_uj").write_text(energy_uj)


def test_cpu_power_is_measured_where_rapl_can_be_read(tmp_path: Path) -> None:
    make_host(tmp_path)
    clock = SettableClock()
    source = HostSource(tmp_path, clock)
    assert source.problems == []
    source.read()
    make_host(tmp_path, "41000000")
    clock.now = 2.0
    host = source.read().host
    assert host is not None
    assert (host.cpu_energy_joules, host.cpu_power_w, host.cpu_power_is_estimate) == (40.0, 20.0, False)


def read_rapl(root: Path, *readings: str) -> list[HostSample]:
    """The host each second, while the counter has these readings."""
    clock, source, found = SettableClock(), None, []
    for clock.now, energy_uj in enumerate(readings):
        make_host(root, energy_uj, f"{100 + clock.now}.0 150.0")
        source = source or HostSource(root, clock)
        host = source.read().host
        assert host is not None
        found.append(host)
    return found


def test_a_rapl_counter_that_wraps_continues(tmp_path: Path) -> None:
    assert read_rapl(tmp_path, "262143328850", "1999999")[1].cpu_energy_joules == pytest.approx(2.0)


def test_a_rapl_counter_that_was_reset_is_missing_once(tmp_path: Path) -> None:
    hosts = read_rapl(tmp_path, "90000000", "100000000", "5000000", "15000000", "25000000")
    assert [host.cpu_energy_joules for host in hosts] == [0.0, 10.0, None, 20.0, 30.0]
    assert [host.cpu_power_w for host in hosts if not host.cpu_power_is_estimate] == [None, 10.0, None, 10.0]


def test_a_rapl_counter_that_does_not_move_is_missing_and_power_is_an_estimate(tmp_path: Path) -> None:
    host = read_rapl(tmp_path, "90000000", "90000000")[1]
    assert (host.cpu_energy_joules, host.cpu_power_is_estimate) == (None, True)
    assert host.cpu_power_w


@pytest.mark.parametrize("reading", ["", "none", "-1 2"])
def test_a_rapl_counter_that_cannot_be_read_for_a_while_loses_nothing(tmp_path: Path, reading: str) -> None:
    hosts = read_rapl(tmp_path, "90000000", "100000000", reading, "120000000")
    assert [host.cpu_energy_joules for host in hosts] == [0.0, 10.0, None, 30.0]


def test_without_rapl_cpu_power_is_an_estimate_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.cpu_count", lambda logical=True: 2)
    make_host(tmp_path, None, "100.0 150.0")
    source = HostSource(tmp_path)
    assert "CPU power is estimated" in source.problems[0]
    source.read()
    make_host(tmp_path, None, "110.0 160.0")
    host = source.read().host
    assert host is not None
    assert host.cpu_utilization == 0.5
    assert (host.cpu_power_w, host.cpu_power_is_estimate) == (pytest.approx(BUSY_WATTS_PER_CORE * 2 * 0.65), True)
    assert host.cpu_energy_joules is None


def test_what_a_sandbox_does_not_have_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise FileNotFoundError("/proc/diskstats")

    monkeypatch.setattr("psutil.virtual_memory", refuse)
    assert HostSource(tmp_path).read().host == HostSample()


def test_a_counter_that_only_root_may_read_is_a_problem_with_its_cure(tmp_path: Path) -> None:
    make_host(tmp_path)
    energy = tmp_path / "sys/class/powercap/intel-rapl:0/energy_uj"
    energy.unlink()
    energy.mkdir()  # root may read any file
    (problem,) = HostSource(tmp_path).problems
    assert f"sudo chmod a+r {energy}" in problem


def test_a_minute_has_the_numbers_of_its_xid_errors_and_keeps_them_in_a_line(tmp_path: Path) -> None:
    builder = MinuteBuilder("n1")
    for second, (xid, total) in enumerate([(0, 0), (79, 1), (79, 1), (79, 2), (31, 4), (31, 4)]):
        builder.add(NodeSample(float(second), devices=(DeviceSample(id="a", xid=xid, xids_total=total),)))
    minute = builder.take()
    assert minute is not None
    assert minute.devices["a"].xids == (79, 79, 31)
    (tmp_path / "n1.jsonl").write_bytes(minute.to_line())
    assert list(NodeMinuteTail(tmp_path / "n1.jsonl").read()) == [minute]
    builder.add(NodeSample(60.0, devices=(DeviceSample(id="a", xid=31, xids_total=4),)))
    later = builder.take()
    assert later is not None
    assert later.devices["a"].xids == ()


def test_of_a_long_file_only_the_last_minutes_are_read(tmp_path: Path) -> None:
    path = tmp_path / "n1.jsonl"
    minutes = [NodeMinute(60.0 * index, 60.0, 60, "n1", Rollups(), {}) for index in range(100)]
    path.write_bytes(b"".join(minute.to_line() for minute in minutes))
    tail = NodeMinuteTail(path, max_bytes=3 * len(minutes[-1].to_line()) + 10)
    assert list(tail.read()) == minutes[-3:]
    with open(path, "ab") as file:
        file.write(minutes[0].to_line())
    assert list(tail.read()) == minutes[:1]


def test_of_chosen_minutes_the_newest_is_always_one(tmp_path: Path) -> None:
    minutes = [NodeMinute(60.0 * index, 60.0, 60, "n1", Rollups(), {}) for index in range(6)]
    lines = [minute.to_line() for minute in minutes]
    (tmp_path / "n1.jsonl").write_bytes(b"".join([*lines[:4], b"no minute\n", lines[4]]))
    tail = NodeMinuteTail(tmp_path / "n1.jsonl")
    chosen = (lines[1].strip(), lines[5].strip())
    assert list(tail.read_chosen(chosen.__contains__)) == [minutes[1], minutes[4]]
    assert list(tail.read_chosen(chosen.__contains__)) == []
    with open(tmp_path / "n1.jsonl", "ab") as file:
        file.write(lines[5])
    assert list(tail.read_chosen(chosen.__contains__)) == [minutes[5]]
