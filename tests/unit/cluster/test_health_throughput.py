"""Rates of matrix products and of a disk, held against a probe that is remembered; everything is made up but a file."""

from pathlib import Path
from typing import Any

import pytest

from phalanx.cluster import Cluster, save_cluster
from phalanx.cluster.calibration.storage import StorageRates
from phalanx.cluster.calibration.to_cluster import DiscoveredHardware
from phalanx.cluster.discovery import Cpu, Machine
from phalanx.cluster.disks import Mount
from phalanx.cluster.health import CheckContext, HealthVerdict
from phalanx.cluster.health.baseline import find_baseline
from phalanx.cluster.health.checks import disk_throughput, matmul
from phalanx.cluster.health.checks.matmul import MatmulTiming
from phalanx.cluster.spec import AcceleratorSpec, Measurements, NodeSpec, OpTiming, StorageSpec

CPU = Cpu("AMD EPYC", "AuthenticAMD")
MACHINE = Machine("host", "cpu", CPU.name, 1, 2, 2, 2**34, 2**34, CPU)
KEY = {"cpu": "AMD EPYC", "kernel": "6.1", "torch": "2.13.0", "count": "1"}


def probed(**given: Any) -> Cluster:
    reference = OpTiming(kind="reference", precision="fp32", bytes=1e7, flops=2e9, seconds=0.010)
    storage = StorageSpec(node_write_gbps=1.0, node_read_gbps=2.0)
    whole = {"when": "2026-11-21T12:00:00+0000", "key": KEY, "operations": [reference], "storage": storage, **given}
    node = NodeSpec(accelerator=AcceleratorSpec(name="AMD EPYC", tflops={"fp32": 0.2}, memory_gib=16), count=1)
    notes = DiscoveredHardware((), (), (), Mount("/", "/dev/vda", "ext4")).notes()
    return Cluster(name="here", nodes=1, node=node, measured=Measurements(**whole), notes=notes)


def kept(root: Path, cluster: Cluster, name: str = "one.yaml") -> CheckContext:
    (root / "clusters").mkdir(exist_ok=True)
    save_cluster(cluster, root / "clusters" / name)
    return CheckContext(root, root, root)


class Products:
    """Reference products that take so long, one after another."""

    def __init__(self, *seconds: float) -> None:
        self.seconds = list(seconds)

    def __call__(self, function: str, payload: Any) -> Any:
        return {"timed": {"seconds": self.seconds.pop(0), "flops": 2e9}, "clock_share": None}


@pytest.mark.parametrize(
    ("seconds", "verdict"),
    [
        (0.009, HealthVerdict.PASS),
        (0.0105, HealthVerdict.PASS),
        (0.0108, HealthVerdict.WARN),
        (0.0124, HealthVerdict.WARN),
        (0.0126, HealthVerdict.FAIL),
    ],
)
def test_a_product_is_held_against_the_probe(seconds: float, verdict: HealthVerdict) -> None:
    (found,) = matmul.evaluate_matmul("AMD EPYC", [MatmulTiming(seconds, 2e9)], 0.010, "2026-11-21")
    assert found.verdict is verdict
    assert "the calibration of 2026-11-21" in found.reason


def test_without_a_probe_there_is_nothing_to_compare_with() -> None:
    (found,) = matmul.evaluate_matmul("AMD EPYC", [MatmulTiming(0.010, 2e9)], None, "")
    assert found.verdict is HealthVerdict.PASS
    assert found.reason.startswith("0.2 TFLOP/s; nothing to compare with")


def test_the_slow_gpu_among_its_peers_is_named() -> None:
    found = matmul.evaluate_matmul(
        "H100", [MatmulTiming(0.010, 2e9), MatmulTiming(0.010, 2e9), MatmulTiming(0.014, 2e9)], None, ""
    )
    assert [each.verdict for each in found] == [HealthVerdict.PASS, HealthVerdict.PASS, HealthVerdict.FAIL]
    assert found[2].check == "matmul/gpu2"


def test_a_low_clock_is_told_although_the_rate_is_right() -> None:
    (found,) = matmul.evaluate_matmul("AMD EPYC", [MatmulTiming(0.010, 2e9, clock_share=0.5)], 0.010, "2026-11-21")
    assert found.verdict is HealthVerdict.WARN
    assert "clock at 50% of its maximum" in found.reason


def test_a_slow_product_is_measured_again_and_the_best_counts(tmp_path: Path) -> None:
    calls = Products(0.020, 0.0101, 0.009)
    assert matmul.measure_matmul_timing(MACHINE, calls, 0.010, tmp_path, sleep=lambda seconds: None).time_s == 0.0101
    assert calls.seconds == [0.009]


def test_a_product_that_stays_slow_is_not_measured_for_ever(tmp_path: Path) -> None:
    calls, pauses = Products(*[0.020] * 5, 0.019, 0.021, 0.021), list[float]()
    assert matmul.measure_matmul_timing(MACHINE, calls, 0.010, tmp_path, sleep=pauses.append).time_s == 0.019
    assert calls.seconds == []
    assert len(pauses) == 7


def test_who_else_computes_meanwhile_is_told(tmp_path: Path) -> None:
    stat = tmp_path / "proc/stat"
    stat.parent.mkdir()
    stat.write_text("cpu  0 0 0 0 0 0 0 0\ncpu0 0\ncpu1 0\n")

    def call(function: str, payload: Any) -> Any:
        # in a second both cores were busy all the time, and this process had 0.8 s of theirs
        stat.write_text("cpu  200 0 0 0 0 0 0 0\ncpu0 0\ncpu1 0\n")
        return Products(0.020)(function, payload)

    clock, own = iter((0.0, 1.0)), iter((0.0, 0.8))
    pace = matmul.measure_matmul_timing(MACHINE, call, None, tmp_path, lambda: next(clock), lambda: next(own))
    assert pace.other_busy_cores == pytest.approx(1.2)
    (found,) = matmul.evaluate_matmul("AMD EPYC", [pace], 0.010, "2026-11-21")
    assert "other programs used 1.2 cores" in found.reason


def test_a_probe_is_found_by_what_must_be_alike(tmp_path: Path) -> None:
    site = kept(tmp_path, probed())
    assert find_baseline(site, {"cpu": "AMD EPYC", "kernel": "6.1"}) is not None
    assert find_baseline(site, {"cpu": "AMD EPYC", "kernel": "6.2"}) is None
    assert find_baseline(site, {"cpu": "AMD EPYC", "count": "8"}, ignored_fields={"count"}) is not None


def test_a_torn_probe_is_passed_over(tmp_path: Path) -> None:
    site = kept(tmp_path, probed())
    (tmp_path / "clusters/two.yaml").write_text("nodes: [")
    assert find_baseline(site, {"cpu": "AMD EPYC"}) is not None


def test_without_probes_nothing_is_remembered(tmp_path: Path) -> None:
    assert find_baseline(CheckContext(tmp_path, tmp_path, tmp_path), {}) is None


@pytest.mark.parametrize(
    ("write", "read", "verdict"),
    [
        (0.9, 1.9, HealthVerdict.PASS),
        (0.4, 1.9, HealthVerdict.WARN),
        (0.9, 0.15, HealthVerdict.FAIL),
        (0.9, None, HealthVerdict.PASS),
        (0.004, 1.9, HealthVerdict.FAIL),
    ],
)
def test_a_disk_is_held_against_the_probe(write: float, read: float | None, verdict: HealthVerdict) -> None:
    (found,) = disk_throughput.evaluate_disk_throughput(StorageRates(write, read, 2**27, "direct"), (1.0, 2.0))
    assert found.verdict is verdict


def test_a_slow_disk_is_slow_without_a_probe_too() -> None:
    (found,) = disk_throughput.evaluate_disk_throughput(StorageRates(0.03, 1.0, 2**27, "direct"), (None, None))
    assert found.verdict is HealthVerdict.WARN
    assert "written at 30.0 MB/s" in found.reason


def test_another_disk_than_the_probes_is_not_held_against_it() -> None:
    assert disk_throughput.baseline_rates(probed(), "/") == (1.0, 2.0)
    assert disk_throughput.baseline_rates(probed(), "/scratch") == (None, None)
    assert disk_throughput.baseline_rates(None, "/") == (None, None)


def test_a_measurement_that_was_killed_is_cleaned_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getppid", lambda: 42)
    for name in (".phalanx-doctor-42-x", ".phalanx-doctor-43-x"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "probe.bin").write_bytes(b"x")
    disk_throughput.remove_scratch(CheckContext(tmp_path, tmp_path, tmp_path).as_json())
    assert [each.name for each in tmp_path.iterdir()] == [".phalanx-doctor-43-x"]
