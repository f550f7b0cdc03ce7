"""Charts of the nodes of a run, from the minutes that agents write."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from phalanx.run import Run
from phalanx.run.telemetry_minutes import NodeMinute, Rollups, ValueRollup
from phalanx.serve import live_run
from phalanx.serve.live_run import NodeCharts


def make_rollups(**means: float) -> Rollups:
    return Rollups({name: ValueRollup(mean, mean, mean, 60) for name, mean in means.items()})


def write_minute(run: Run, node: str, time: float, gpus: Mapping[str, Rollups] | None = None, **host: float) -> None:
    run.telemetry.mkdir(parents=True, exist_ok=True)
    minute = NodeMinute(time, 60.0, 60, node, make_rollups(**host), gpus or {}, cpu_power_is_estimate=True)
    with open(run.telemetry / f"{node}.jsonl", "ab") as file:
        file.write(minute.to_line())


def read_lines(run: Run, start: float = 0.0, end: float = 1e6) -> dict[str, dict[str, list[tuple[float, float]]]]:
    charts = NodeCharts(run)
    charts.read()
    return {
        chart.full_title: {
            line.label: list(zip(line.x.tolist(), line.y.tolist(), strict=True)) for line in chart.series
        }
        for chart in charts.build(start, end)
    }


def test_gpus_of_all_nodes_are_drawn_as_their_lowest_mean_and_highest(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for node, power in (("n1", 600.0), ("n2", 300.0)):
        gpu = make_rollups(power_mean_w=power, utilization=0.5, memory_used_bytes=40e9)
        write_minute(run, node, 60.0, {f"GPU-{node}": gpu}, cpu_power_w=90.0)
    lines = read_lines(run)
    assert list(lines) == ["GPU power, W", "GPU utilization, %", "GPU memory used, GB"]
    assert lines["GPU power, W"] == {"highest": [(90.0, 600.0)], "mean": [(90.0, 450.0)], "lowest": [(90.0, 300.0)]}
    assert lines["GPU utilization, %"]["mean"] == [(90.0, 50.0)]
    assert lines["GPU memory used, GB"]["highest"] == [(90.0, pytest.approx(40.0))]


def test_a_machine_without_gpus_shows_its_cpus(tmp_path: Path) -> None:
    write_minute(Run(tmp_path), "n1", 0.0, cpu_power_w=90.0, cpu_utilization=0.25)
    assert read_lines(Run(tmp_path)) == {
        "CPU power, W (estimated)": {"CPU power": [(30.0, 90.0)]},
        "CPU utilization, %": {"CPU utilization": [(30.0, 25.0)]},
    }


def test_a_minute_that_was_added_is_on_the_chart(tmp_path: Path) -> None:
    run = Run(tmp_path)
    write_minute(run, "n1", 0.0, cpu_utilization=0.5)
    charts = NodeCharts(run)
    charts.read()
    write_minute(run, "n1", 60.0, cpu_utilization=1.0)
    charts.read()
    (chart,) = charts.build(0.0, 1e6)
    assert chart.series[0].y.tolist() == [50.0, 100.0]


def test_minutes_outside_the_run_and_numbers_that_are_none_are_left_out(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for time, value, power_w in ((0.0, 0.1, 5.0), (120.0, 0.2, 5.0), (float("nan"), 0.3, 5.0), (180.0, 0.4, 1e308)):
        write_minute(run, "n1", time, cpu_utilization=value, cpu_power_w=power_w)
    lines = read_lines(run, start=100.0, end=1000.0)
    assert lines["CPU utilization, %"] == {"CPU utilization": [(50.0, 20.0)]}


def test_a_long_file_is_read_from_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path)
    for minute in range(20):
        write_minute(run, "n1", 60.0 * minute, cpu_utilization=0.5)
    monkeypatch.setattr(live_run, "MAX_READ_BYTES", 1000)
    (points,) = read_lines(run)["CPU utilization, %"].values()
    assert points[-1][0] == 60.0 * 19 + 30
    assert len(points) < 10


def test_a_link_among_the_files_is_not_followed(tmp_path: Path) -> None:
    other, run = Run(tmp_path / "other"), Run(tmp_path / "run")
    write_minute(other, "n1", 0.0, cpu_utilization=0.5)
    run.telemetry.mkdir(parents=True)
    (run.telemetry / "n1.jsonl").symlink_to(other.telemetry / "n1.jsonl")
    assert read_lines(run) == {}
    (tmp_path / "third").mkdir()
    Run(tmp_path / "third").telemetry.symlink_to(other.telemetry)
    assert read_lines(Run(tmp_path / "third")) == {}
