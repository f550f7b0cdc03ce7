"""What an agent leaves of its node's telemetry, in the run and on the node."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.run import Run
from phalanx.run.telemetry_minutes import NodeEnergy, NodeMinute, NodeMinuteTail, Rollups, ValueRollup
from phalanx.telemetry import record
from phalanx.telemetry.record import MinuteFile, record_telemetry
from phalanx.telemetry.rollup import MinuteBuilder

NODE = os.uname().nodename
MINUTE = NodeMinute(60.0, 60.0, 60, NODE, Rollups({"cpu_power_w": ValueRollup(1.0, 2.0, 3.0, 60)}), {})


def minutes_of(run: Run) -> list[NodeMinute]:
    return list(NodeMinuteTail(run.telemetry / f"{NODE}.jsonl").read())


def test_a_run_has_the_minutes_of_its_node(run: Run) -> None:
    with record_telemetry(run):
        pass
    (minute, *_) = minutes_of(run)
    assert minute.node == NODE
    assert minute.host.values["memory_size_bytes"].num_readings >= 1


def test_two_agents_on_one_node_write_its_minutes_once(run: Run) -> None:
    first, second = MinuteFile(run, NODE), MinuteFile(run, NODE)
    for file in (first, second, first):
        file.write(MINUTE)
    assert [replace(minute, run_energy=None) for minute in minutes_of(run)] == [MINUTE, MINUTE]
    first.close()
    third = MinuteFile(run, NODE)
    third.write(MINUTE)
    third.close()
    assert len(minutes_of(run)) == 3


def test_pods_of_one_node_write_a_file_each_for_their_own_accelerators(run: Run) -> None:
    first, second = MinuteFile(run, NODE, "pod-0"), MinuteFile(run, NODE, "pod-1")
    for file in (first, second, second):
        file.write(MINUTE)
    first.close()
    second.close()
    files = {path.name: len(list(NodeMinuteTail(path).read())) for path in run.telemetry.iterdir()}
    assert files == {f"{NODE}.jsonl": 1, "pod-1.jsonl": 2}


def test_the_energy_of_other_accelerators_of_the_node_is_not_the_run_s(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = {id: Rollups({"power_mean_w": ValueRollup(100.0, 100.0, 100.0, 60)}) for id in ("GPU-1", "GPU-2")}
    monkeypatch.setattr(MinuteBuilder, "take", lambda builder: replace(MINUTE, devices=devices))
    with record_telemetry(run, lambda: ["GPU-2"]):
        pass
    assert [minute.run_energy.device_j for minute in minutes_of(run) if minute.run_energy] == [6000.0]


def test_the_energy_of_a_run_adds_up_over_attempts(run: Run) -> None:
    for _ in range(2):  # an agent, and the one after it
        file = MinuteFile(run, NODE)
        file.write(MINUTE)
        file.close()
    assert [minute.run_energy for minute in minutes_of(run)] == [
        NodeEnergy(cpu_j=120.0, measured_s=60.0),
        NodeEnergy(cpu_j=240.0, measured_s=120.0),
    ]


def test_a_run_without_a_directory_yet_gets_none(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    MinuteFile(run, NODE).write(MINUTE)
    assert not run.path.exists()


def test_storage_that_fails_is_warned_of_once_and_stops_nothing(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(record, "_open_alone", lambda path: os.open("/dev/full", os.O_WRONLY))
    file = MinuteFile(run, NODE)
    file.write(MINUTE)
    file.write(MINUTE)
    file.close()
    assert [message for message in caplog.messages if "No space left" in message] == caplog.messages
    assert len(caplog.messages) == 1


def test_no_minute_is_written_while_the_directory_of_the_run_cannot_be_looked_at(tmp_path: Path) -> None:
    run = Run(tmp_path / ("x" * 300))  # stat fails, as on a file system that has lost its servers
    MinuteFile(run, NODE).write(MINUTE)
