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
from phalanx.cli.calibrate_output import format_lines, format_row
from phalanx.cluster import Cluster, load_cluster
from phalanx.cluster.calibration import default_calibration_path
from phalanx.cluster.calibration.to_cluster import DiscoveredHardware
from phalanx.cluster.discovery import Cpu, Machine
from phalanx.cluster.disks import Disk, Mount
from phalanx.cluster.nics import Nic
from phalanx.cluster.spec import AcceleratorSpec as Device
from phalanx.cluster.spec import (
    CollectiveTiming,
    GemmTiming,
    Measurements,
    NodeSpec,
    OpTiming,
    OverlapSlowdown,
    StorageSpec,
)
from phalanx.errors import UsageError

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
            timed("autograd_op", 192, 4.6e-6),
            timed("eager_op", 192, 1.44e-5),
            timed("fresh_memory", 2**26, 0.016),
        ],
        "launch_us": 1.5,
        "collectives": [reduce(1024, 3e-4), reduce(2**24, 0.01)],
        "overlap": OverlapSlowdown(compute=1.5, communication=2.25),
        "storage": StorageSpec(node_write_gbps=1.05, node_read_gbps=1.18),
        "checkpoint_gbps": 0.43,
    }
    device = Device(name=CPU.name, tflops={"fp32": 0.333, "bf16": 0.666}, memory_gib=16)
    nic, disk = Nic("eth0", "ethernet", is_up=True), Disk("vda", 274877906944, rotational=True)
    found = DiscoveredHardware((nic,), (disk,), (), Mount("/", "/dev/vda", "ext4"))
    notes = {**found.notes(), "measured_how": {"quick": True, "processes": 2, "read": "O_DIRECT"}}
    node = NodeSpec(accelerator=device, count=1)
    return Cluster(name="here", nodes=1, node=node, measured=Measurements(**{**whole, **given}), notes=notes)


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


def test_the_page_shows_measured_beside_the_data_sheet_with_units() -> None:
    text = "\n".join(format_lines(found(), MACHINE))
    for line in (
        "AMD EPYC 9654, 2 cores, 16 GiB, 2 threads; torch 2.13.0",
        "matrix products, best, fp32       0.172 TFLOP/s     0.166 TFLOP/s      103%",
        "  2 processes at once, sum        fp32 0.143 TFLOP/s",
        "memory                            40.0 GB/s",
        "launch of an operation            1.5 us",
        "  in a model, on average          14 us",
        "attention, best, fp32             0.0700 TFLOP/s forward, 0.0700 backward",
        "memory used for the first time    4.19 GB/s",
        "collectives of 2 processes, gloo",
        "  all_reduce                      300 us for 1.02 kB, bus 1.68 GB/s at 16.8 MB",
        "  both at once, against alone     computing 1.50 x, communicating 2.25 x",
        "disk (ext4), write and fsync      1.05 GB/s",
        "disk (ext4), read                 1.18 GB/s         O_DIRECT",
        "checkpoint                        430 MB/s",
        "network   eth0, ethernet, speed unknown to its driver",
        "disk      vda, 275 GB",
        "no warnings",
    ):
        assert line in text.splitlines()


def test_what_looks_wrong_is_listed_last() -> None:
    shown = format_lines(found(odd=["the disk writes 20 MB/s"]), MACHINE)
    assert shown[-2:] == ["warnings:", "  - the disk writes 20 MB/s"]


def test_what_was_not_measured_is_left_out() -> None:
    empty = {"products": [], "operations": [], "collectives": [], "storage": None, "overlap": None}
    text = "\n".join(format_lines(found(**empty, launch_us=None, checkpoint_gbps=None), MACHINE))
    assert "GB/s" not in text
    assert "collectives" not in text


def test_a_row_ends_with_the_share_of_the_data_sheet() -> None:
    assert format_row("x", "1 TFLOP/s", "2 TFLOP/s", 0.5).endswith("2 TFLOP/s           50%")


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


def test_options_are_passed_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(calibrate, "calibrate", lambda machine, **options: given.update(options) or found())
    (folder / "disk").mkdir()
    assert main.main(["calibrate", "--quick", "--nproc-per-node", "3", "--dir", "disk"]) == 0
    assert given.pop("progress")
    assert given == {"quick": True, "num_processes": 3, "folder": Path("disk")}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--out", "nowhere/x.yaml"], "error: --out nowhere/x.yaml: there is no folder"),
        (["--out", "/proc/x.yaml"], "error: --out /proc/x.yaml: cannot be written: "),
        (["--dir", "nowhere"], "error: --dir nowhere: no such directory"),
        (["--nproc-per-node", "0"], "error: Invalid value for '--nproc-per-node'"),
    ],
)
def test_what_cannot_be_is_refused(options: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["calibrate", *options]) == 64
    assert capsys.readouterr().err.startswith(text)


def test_more_processes_than_gpus_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpus = Machine("host", "cuda", "NVIDIA H100", 2, 64, 128, 2**36, 2**36, CPU)
    monkeypatch.setattr(cluster, "discover_machine", lambda: gpus)
    assert main.main(["calibrate", "--nproc-per-node", "3"]) == 64
    assert capsys.readouterr().err == (
        "error: 3 workers on a node with 2 GPUs: each worker takes one; use --nproc-per-node 2, or device=cpu to train "
        "on the CPU\n"
    )


def test_no_room_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def full(machine: Machine, **given: Any) -> Cluster:
        raise UsageError("/x: too little free space to measure the disk")

    monkeypatch.setattr(calibrate, "calibrate", full)
    assert main.main(["calibrate"]) == 64
    assert capsys.readouterr().err == "error: /x: too little free space to measure the disk\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_writes_nothing(
    number: int, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibrate, "calibrate", lambda machine, **given: os.kill(os.getpid(), number))
    assert main.main(["calibrate", "--out", "mine.yaml"]) == 75
    assert capsys.readouterr().err == "error: interrupted\n"
    assert list(folder.iterdir()) == []
