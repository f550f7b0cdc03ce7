"""`phalanx calibrate` with a measurement that is made up: what it prints, where it writes, and what it refuses."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phalanx import cluster
from phalanx.app import calibrate
from phalanx.cli import main
from phalanx.cli.calibrate import format_page
from phalanx.cluster import Cluster, load_cluster
from phalanx.cluster.calibration.hardware_key import default_calibration_path
from phalanx.cluster.discovery import Cpu, Machine
from phalanx.cluster.spec import AcceleratorSpec as Device
from phalanx.cluster.spec import (
    CollectiveTiming,
    GemmTiming,
    LocationSpeed,
    Measurements,
    NodeSpec,
    OpTiming,
    StorageSpec,
)

CPU = Cpu("AMD EPYC 9654", "AuthenticAMD", 25, 17, 2.6, ("avx2", "avx512f", "avx512_bf16"))
MACHINE = Machine("host", "cpu", CPU.name, 1, 2, 2, 2**34, 2**34, CPU)


def timed(kind: str, nbytes: float, seconds: float, **given: Any) -> OpTiming:
    return OpTiming(kind=kind, precision="fp32", bytes=nbytes, seconds=seconds, **given)


def reduce(nbytes: int, seconds: float) -> CollectiveTiming:
    busbw = nbytes / seconds / 1e9
    return CollectiveTiming(kind="all_reduce", backend="gloo", ranks=2, bytes=nbytes, seconds=seconds, busbw_gbps=busbw)


def found(**given: Any) -> Cluster:
    """A measured machine of two cores."""
    whole: dict[str, Any] = {
        "when": "2026-11-21T12:00:00+0000",
        "key": {"device": CPU.name, "torch": "2.13.0"},
        "threads": 2,
        "drift": 0.012,
        "products": [
            GemmTiming(precision="fp32", m=1024, n=1024, k=1024, seconds=0.0125),
            GemmTiming(precision="bf16", m=1024, n=1024, k=1024, seconds=0.005),
            GemmTiming(precision="fp32", m=1024, n=1024, k=1024, seconds=0.03, processes=2),
        ],
        "operations": [
            timed("add", 5e7, 0.00125),
            timed("attention", 4e6, 0.002, flops=1.4e8),
            timed("attention_backward", 8e6, 0.005, flops=3.5e8),
            timed("eager_op", 192, 1.44e-5),
        ],
        "launch_us": 1.5,
        "collectives": [reduce(1024, 3e-4), reduce(2**24, 0.01)],
        "storage": StorageSpec(node_write_gbps=1.05, node_read_gbps=1.18),
    }
    device = Device(name=CPU.name, tflops={"fp32": 0.333, "bf16": 0.666}, memory_gib=16)
    node = NodeSpec(accelerator=device, count=1)
    return Cluster(name="here", nodes=1, node=node, measured=Measurements(**{**whole, **given}))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder and a cache of our own; this machine, and what is measured of it, are made up."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PHALANX_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cluster, "discover_machine", lambda: MACHINE)
    monkeypatch.setattr(calibrate, "calibrate", lambda machine, **given: found())
    before = signal.getsignal(signal.SIGTERM)
    yield tmp_path
    signal.signal(signal.SIGTERM, before)


def test_the_page_shows_measured_next_to_the_data_sheet_with_units() -> None:
    lines = [" ".join(line.split()) for line in format_page(found(), MACHINE)]
    for line in (
        "AMD EPYC 9654, 2 cores, 16 GiB, 2 threads; torch 2.13.0",
        "matrix products, best, fp32 0.172 TFLOP/s 0.166 TFLOP/s 103%",
        "memory 40.0 GB/s",
        "launch of an operation 1.5 us",
        "attention, best, fp32 0.0700 TFLOP/s",
        "all_reduce of 2 processes, gloo 300 us for 1.02 kB, bus 1.68 GB/s at 16.8 MB",
        "disk, write 1.05 GB/s",
        "disk, read 1.18 GB/s",
        "no warnings",
    ):
        assert line in lines


def test_the_page_shows_what_was_measured_of_a_recipe() -> None:
    speed = LocationSpeed(location="s3://bucket/run", write_gbps=0.5)
    assert "s3://bucket/run  write 500 MB/s" in format_page(found(locations=[speed]), MACHINE)


def test_a_recipe_names_what_is_measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(calibrate, "calibrate", lambda machine, **values: given.update(values) or found())
    Path("small.yaml").write_text("data: {source: {text: 'text/*.txt'}}")
    assert main.main(["calibrate", "small.yaml", "steps=5", "--run", "s3://bucket/run", "--out", "mine.yaml"]) == 0
    assert [each.location for each in given["locations"]] == ["s3://bucket/run", str(folder / "text")]


def test_warnings_are_listed_last() -> None:
    assert format_page(found(odd=["the disk writes 20 MB/s"]), MACHINE)[-1] == "  - the disk writes 20 MB/s"


def test_a_quantity_that_was_not_measured_has_no_row() -> None:
    empty = {"products": [], "operations": [], "collectives": [], "storage": None}
    assert len(format_page(found(**empty, launch_us=None), MACHINE)) == 6


def test_the_file_goes_to_the_cache_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["calibrate", "--quick"]) == 0
    file = default_calibration_path(MACHINE)
    assert load_cluster(str(file)) == found()
    assert capsys.readouterr().out.endswith(f"\nwrote {file}\n")


def test_a_cache_directory_that_cannot_be_made_is_said_before_measuring(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibrate, "calibrate", lambda *_, **__: pytest.fail("it measured"))
    (folder / "cache").write_text("a file in its way")
    assert main.main(["calibrate"]) == 64
    said = capsys.readouterr().err
    assert said.startswith(f"error: the cache directory {default_calibration_path(MACHINE).parent} cannot be created: ")
    assert said.endswith("; choose a cluster file with --out FILE\n")


def test_the_file_goes_where_it_shall(folder: Path) -> None:
    assert main.main(["calibrate", "--out", "mine.yaml"]) == 0
    assert load_cluster("mine.yaml") == found()
    assert not (folder / "cache").exists()


def test_json_is_the_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["calibrate", "--json", "--out", "mine.yaml"]) == 0
    assert Cluster.model_validate(json.loads(capsys.readouterr().out)) == found()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--out", "nowhere/x.yaml"], "error: --out nowhere/x.yaml: there is no folder"),
        (["--out", "/proc/x.yaml"], "error: --out /proc/x.yaml: cannot be written: "),
        (["--dir", "nowhere"], "error: --dir nowhere: no such directory"),
    ],
)
def test_what_cannot_be_is_refused(options: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["calibrate", *options]) == 64
    assert capsys.readouterr().err.startswith(text)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_writes_nothing(
    number: int, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibrate, "calibrate", lambda machine, **given: os.kill(os.getpid(), number))
    assert main.main(["calibrate", "--out", "mine.yaml"]) == 75
    assert capsys.readouterr().err == "error: interrupted\n"
    assert list(folder.iterdir()) == []
