"""Rates of matrix products, compared with a calibration."""

from pathlib import Path
from typing import Any

import pytest

from phalanx.cluster import Cluster, save_cluster
from phalanx.cluster.discovery import Cpu, Machine
from phalanx.cluster.health import CheckContext, HealthVerdict
from phalanx.cluster.health.checks import matmul
from phalanx.cluster.health.checks.matmul import MatmulTiming
from phalanx.cluster.spec import AcceleratorSpec, Measurements, NodeSpec, OpTiming

CPU = Cpu("AMD EPYC", "AuthenticAMD")
MACHINE = Machine("host", "cpu", CPU.name, 1, 2, 2, 2**34, 2**34, CPU)
KEY = {"cpu": "AMD EPYC", "kernel": "6.1", "torch": "2.13.0", "count": "1"}


def probed(**given: Any) -> Cluster:
    reference = OpTiming(kind="reference", precision="fp32", bytes=1e7, flops=2e9, seconds=0.010)
    whole = {"when": "2026-11-21T12:00:00+0000", "key": KEY, "operations": [reference], **given}
    node = NodeSpec(accelerator=AcceleratorSpec(name="AMD EPYC", tflops={"fp32": 0.2}, memory_gib=16), count=1)
    return Cluster(name="here", nodes=1, node=node, measured=Measurements(**whole))


def kept(root: Path, cluster: Cluster, name: str = "one.yaml") -> CheckContext:
    (root / "clusters").mkdir(exist_ok=True)
    save_cluster(cluster, root / "clusters" / name)
    return CheckContext(root, root, root)


class Products:
    """Reference products that take so long, one after another."""

    def __init__(self, *seconds: float) -> None:
        self.seconds = list(seconds)

    def __call__(self, function: str, payload: Any) -> Any:
        return {"seconds": self.seconds.pop(0), "flops": 2e9}


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


def test_a_slow_product_is_measured_again_and_the_best_counts() -> None:
    calls = Products(0.020, 0.0101, 0.009)
    assert matmul.measure_matmul_timing(MACHINE, calls, 0.010, sleep=lambda seconds: None).time_s == 0.0101
    assert calls.seconds == [0.009]


def test_a_product_that_stays_slow_is_not_measured_for_ever() -> None:
    calls, pauses = Products(*[0.020] * 5, 0.019, 0.021, 0.021), list[float]()
    assert matmul.measure_matmul_timing(MACHINE, calls, 0.010, sleep=pauses.append).time_s == 0.019
    assert calls.seconds == []
    assert len(pauses) == 7


def test_a_probe_is_found_by_what_must_be_alike(tmp_path: Path) -> None:
    site = kept(tmp_path, probed())
    assert matmul.find_calibration(site, {"cpu": "AMD EPYC", "kernel": "6.1"}) is not None
    assert matmul.find_calibration(site, {"cpu": "AMD EPYC", "kernel": "6.2"}) is None
    assert matmul.find_calibration(site, {"cpu": "AMD EPYC", "count": "8"}) is not None
    assert matmul.find_calibration(CheckContext(tmp_path, tmp_path / "none", tmp_path), {}) is None


def test_a_torn_probe_is_passed_over(tmp_path: Path) -> None:
    site = kept(tmp_path, probed())
    (tmp_path / "clusters/two.yaml").write_text("nodes: [")
    assert matmul.find_calibration(site, {"cpu": "AMD EPYC"}) is not None
