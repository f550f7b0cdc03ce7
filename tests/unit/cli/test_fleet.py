"""`phalanx fleet show`: a node's readings as a table and as JSON."""

import json
from pathlib import Path

import pytest

from fake_nvml import FakeGpu, FakeNvml
from phalanx.app import fleet
from phalanx.cli.main import main
from phalanx.fleet.telemetry.host import HostSource
from phalanx.fleet.telemetry.nvml import NvmlSource


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
    assert main(["fleet", "show"]) == 0
    out, err = capsys.readouterr()
    header, *rows = [line.rstrip() for line in out.splitlines() if "MHz" in line or "DEVICE" in line]
    assert header.split()[:4] == ["DEVICE", "POWER", "CAP", "TEMP"]
    assert rows[0].endswith("none  power cap")
    assert "500 W  700 W  56 C" in rows[0]
    assert rows[1].endswith("79  power cap, thermal (hardware)")
    assert err == "warning: RAPL: cannot be read\n"


def test_show_as_json_has_null_for_what_is_missing(node: list[FakeGpu], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fleet", "show", "--json"]) == 0
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
