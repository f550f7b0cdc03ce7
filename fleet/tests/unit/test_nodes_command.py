"""`phalanx nodes`: nodes and their readings as tables and as JSON, drains and their reasons."""

import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fake_nodes import FakeNodeBackend, add_minute
from fake_nvml import FakeGpu, FakeNvml
from phalanx.cli.main import main
from phalanx.cluster.health import HealthFinding, HealthVerdict
from phalanx.cluster.health.runner import NodeHealthReport
from phalanx.errors import UsageError
from phalanx.jobs.backends import base
from phalanx.jobs.backends.base import BackendNode
from phalanx.jobs.spec import JobState, JobStatus
from phalanx.telemetry.gpu_sources import NvmlSource
from phalanx.telemetry.host import HostSource
from phalanx_fleet import node_list as fleet
from phalanx_fleet.commands.nodes import watch_nodes
from phalanx_fleet.node_list import FleetReader, FleetSources
from phalanx_fleet.node_states import NodeStates


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[FakeGpu]:
    """A node with two GPUs, the second of which has no energy counter and runs hot."""
    gpus = [FakeGpu("GPU-a"), FakeGpu("GPU-b", unsupported={"TOTAL_ENERGY_CONSUMPTION"}, reasons=4 | 64, xids=[79])]

    def read() -> fleet.NodeReading:
        return READ(
            lambda: ([HostSource(tmp_path), NvmlSource(FakeNvml(*gpus))], ["RAPL: cannot be read"]), lambda s: None
        )

    monkeypatch.setattr(fleet, "read_local_node", read)
    return gpus


READ = fleet.read_local_node


def test_show_prints_a_row_for_each_device(node: list[FakeGpu], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nodes", "show"]) == 0
    out, err = capsys.readouterr()
    header, *rows = [line.rstrip() for line in out.splitlines() if "MHz" in line or "DEVICE" in line]
    assert header.split()[:4] == ["DEVICE", "POWER", "CAP", "TEMP"]
    assert rows[0].endswith("none  power cap")
    assert "500 W  700 W  56 C" in rows[0]
    assert rows[1].endswith("79  power cap, thermal (hardware)")
    assert err == "warning: RAPL: cannot be read\n"


def test_show_as_json_has_null_for_what_is_missing(node: list[FakeGpu], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nodes", "show", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    first, second = found["devices"]
    assert (first["id"], first["power_mean_w"], first["slow_reasons"]) == ("GPU-a", 500.0, ["power cap"])
    assert (second["energy_joules"], second["slow_reasons"]) == (None, ["power cap", "thermal (hardware)"])
    assert found["host"]["cpu_temperature_c"] is None
    assert found["problems"] == ["RAPL: cannot be read"]


def test_a_lost_gpu_is_a_row_of_dashes(node: list[FakeGpu], capsys: pytest.CaptureFixture[str]) -> None:
    library = FakeNvml(*node)
    source = NvmlSource(library)
    node[0].is_lost = True
    lost = READ(lambda: ([source], []), lambda seconds: None).sample.devices[0]
    assert (lost.id, lost.power_w, lost.core_clock_hz) == ("GPU-a", None, None)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeNodeBackend:
    """A backend whose node n1 has a reading, and n2 an old one."""
    monkeypatch.setenv("PHALANX_STATE_DIR", str(tmp_path))
    backend = FakeNodeBackend()
    monkeypatch.setattr(base, "open_backend", lambda name: backend)
    now = time.time()
    add_minute(tmp_path / "gpt", "n1", now - 61.0, 100.0)
    add_minute(tmp_path / "gpt", "n2", now - 660.0, 100.0)
    backend.jobs = [JobStatus("7", "gpt", JobState.RUNNING, run_dir=str(tmp_path / "gpt"))]
    return backend


def test_ls_prints_a_late_reading_as_missing_with_its_age(
    backend: FakeNodeBackend, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["nodes", "ls", "--on", "slurm"]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    names = "NODE STATE BACKEND GPUS JOB DRAW GPU DRAW GPU CAP MARGIN AGE REASON"
    assert " ".join(header.split()) == names
    assert re.fullmatch(r"n1 +healthy +idle +0 +- +100 W +- +- +- +[1-9]\.0 s", rows[0])
    assert re.fullmatch(r"n2 +stale +idle +0 +- +- +- +- +- +10 min 0\d s", rows[1])
    assert re.fullmatch(r"n3 +no reading +idle +0 +- +- +- +- +- +-", rows[2])


def test_ls_as_json_has_null_for_a_late_value(backend: FakeNodeBackend, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nodes", "ls", "--on", "slurm", "--json"]) == 0
    first, second, third = json.loads(capsys.readouterr().out)["nodes"]
    assert (first["draw_w"], first["parts"], first["is_late"]) == (100.0, "CPU", False)
    assert (second["draw_w"], second["is_late"], round(second["age_s"], -1)) == (None, True, 600)
    assert (third["draw_w"], third["age_s"], third["is_late"]) == (None, None, True)
    assert [node["state"] for node in (first, second, third)] == ["healthy", "stale", "no reading"]


def test_drain_and_undrain_say_what_they_did_and_ls_why(
    backend: FakeNodeBackend, capsys: pytest.CaptureFixture[str]
) -> None:
    backend.nodes["n1"] = replace(backend.nodes["n1"], jobs=("7",))
    assert main(["nodes", "drain", "n1", "--reason", "fan is loud", "--on", "slurm"]) == 0
    assert capsys.readouterr().out == "drained n1; 7 still runs there\n"
    main(["nodes", "ls", "--on", "slurm"])
    assert re.search(r"n1 +drained +drained .* fan is loud \(\w+\)\n", capsys.readouterr().out)
    assert main(["nodes", "undrain", "n1", "--on", "slurm"]) == 0
    assert capsys.readouterr().out == "undrained n1\n"


def test_drain_needs_a_reason(backend: FakeNodeBackend, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nodes", "drain", "n1", "--on", "slurm"]) == 64
    assert "--reason" in capsys.readouterr().err
    assert main(["nodes", "drain", "n1", "--reason", " ", "--on", "slurm"]) == 64
    assert capsys.readouterr().err == "error: n1: reason ' ': expected why, in one line of text\n"
    assert backend.nodes["n1"].service == "open"


def test_show_of_a_node_has_its_history(backend: FakeNodeBackend, capsys: pytest.CaptureFixture[str]) -> None:
    main(["nodes", "drain", "n1", "--reason", "fan is loud", "--on", "slurm"])
    main(["nodes", "undrain", "n1", "--reason", "fan\u202e replaced", "--on", "slurm"])
    main(["nodes", "undrain", "n1", "--reason", "fan replaced", "--on", "slurm"])
    capsys.readouterr()
    assert main(["nodes", "show", "n1", "--on", "slurm"]) == 0
    _, row, _, header, drained, healthy = capsys.readouterr().out.splitlines()
    assert row.startswith("n1    healthy  idle")
    assert header.split() == ["SINCE", "STATE", "ACTOR", "REASON"]
    assert drained.endswith("fan is loud")
    assert healthy.endswith("fan replaced")
    main(["nodes", "show", "n1", "--on", "slurm", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert [each["state"] for each in found["history"]] == ["drained", "healthy"]


def test_show_of_a_node_that_is_not_there_names_the_nearest(
    backend: FakeNodeBackend, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["nodes", "show", "n33", "--on", "slurm"]) == 64
    assert capsys.readouterr().err.startswith("error: n33: no such node; nearest are n3")


def watch(backend: FakeNodeBackend, tmp_path: Path, sleep: Callable[[float], None]) -> None:
    with NodeStates(tmp_path / "nodes.db") as states:
        watch_nodes(FleetReader(FleetSources(backend), states), 2.0, sleep)  # type: ignore[arg-type]


def test_watch_prints_the_nodes_until_ctrl_c(
    backend: FakeNodeBackend, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slept = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        backend.nodes["n1"] = replace(backend.nodes["n1"], state="allocated")
        if len(slept) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        watch(backend, tmp_path, sleep)
    assert slept == [2.0, 2.0]
    assert re.findall(r"n1 +healthy +(\w+)", capsys.readouterr().out) == ["idle", "allocated"]


def test_watch_keeps_the_last_nodes_while_the_backend_does_not_answer(
    backend: FakeNodeBackend, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> list[BackendNode]:
        raise UsageError("slurm does not answer")

    def sleep(seconds: float) -> None:
        if backend.list_nodes == fail:
            raise KeyboardInterrupt
        backend.list_nodes = fail  # type: ignore[method-assign]

    with pytest.raises(KeyboardInterrupt):
        watch(backend, tmp_path, sleep)
    first, second = capsys.readouterr().out.split("\n\n")[:2]
    assert "warning" not in first
    assert "n3    no reading" in second
    assert second.endswith("warning: slurm does not answer")


def test_test_takes_a_report_of_another_node(
    backend: FakeNodeBackend, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["nodes", "drain", "n1", "--reason", "fan is loud", "--on", "slurm"])
    assert main(["nodes", "test", "n1", "--on", "slurm"]) == 64
    assert "Run `phalanx doctor --json > n1.json` there" in capsys.readouterr().err
    for verdict, code, state in ((HealthVerdict.FAIL, 77, "drained"), (HealthVerdict.PASS, 0, "healthy")):
        report = NodeHealthReport("n1", time.time() + 1, 1.0, (HealthFinding("gpu/xid", verdict, "Xid 79"),))
        (tmp_path / "n1.json").write_text(json.dumps(report.as_json()))
        assert main(["nodes", "test", "n1", "--on", "slurm", "--report", str(tmp_path / "n1.json")]) == code
        assert capsys.readouterr().out.endswith(f"n1 is {state}\n")
