"""A whole probe with measurers that are made up: shares of the time, what fails, and the cluster that comes out."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from phalanx.cluster import Cluster
from phalanx.cluster.calibration import location_speed
from phalanx.cluster.calibration.runner import (
    TOTAL_DURATION_S,
    Executor,
    MeasurementFailed,
    calibrate_machine,
    default_num_processes,
)
from phalanx.cluster.discovery import Cpu, Machine
from phalanx.cluster.spec import Measurements

CPU = Cpu("AMD EPYC 9654", "AuthenticAMD", 25, 17, 2.6, ("avx2", "avx512f", "avx512_bf16"))
MACHINE = Machine("host", "cpu", CPU.name, 1, 2, 2, 2**34, 2**34, CPU)


STAT = "cpu  {user} 0 0 {idle} 0 0 0 {steal} 0 0\ncpu0 1\ncpu1 1\ncpu2 1\ncpu3 1\nintr 5\n"


def timed(kind: str, seconds: float, **given: Any) -> dict[str, Any]:
    row = {"kind": kind, "precision": "fp32", "bytes": 3e7, "flops": 0.0, "seconds": seconds, "shape": [8]}
    return {**row, **given}


@dataclass
class World:
    """A machine whose measurers answer at once with made-up rows, and take as long as they may."""

    scratch_dir: Path
    references: list[float] = field(default_factory=lambda: [0.01])
    """Seconds of the reference product; the last for ever."""
    fails: str = ""
    timestamp: float = 0.0
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    told: list[str] = field(default_factory=list)

    def run_in_process(self, function: str, payload: Any) -> Any:
        name = function.removeprefix("phalanx.cluster.calibration.")
        self.asked.append((name, payload))
        self.timestamp += payload["seconds"]
        if name == self.fails:
            raise MeasurementFailed("the trial process ended with SIGKILL")
        product = {"precision": "fp32", "m": 1024, "n": 1024, "k": 1024, "seconds": 0.02, "layout": "nt"}
        return {
            "timing:measure_reference": lambda: timed("reference", self.reference()),
            "gemm:measure_gemms": lambda: [product, {**product, "precision": "bf16", "seconds": 0.01}],
            "op_benchmark:measure_memory_ops": lambda: [timed("add", 0.001)],
            "op_benchmark:measure_attention": lambda: [timed("attention", 0.01), timed("attention_backward", 0.02)],
            "op_benchmark:measure_overheads": lambda: {
                "launch_us": 1.5,
                "operations": [timed("eager_op", 5e-6)],
            },
        }[name]()

    def wait(self, seconds: float) -> None:
        """While we wait, others use half of four cores, if this machine has a /proc at all."""
        self.timestamp += seconds
        if (self.scratch_dir / "proc/stat").exists():
            (self.scratch_dir / "proc/stat").write_text(STAT.format(user=100 + 2 * 40 - 8, idle=1000 + 2 * 40, steal=8))

    def reference(self) -> float:
        return self.references.pop(0) if len(self.references) > 1 else self.references[0]

    def run_in_world(self, function: str, payload: Any, world: int) -> Any:
        name = function.removeprefix("phalanx.cluster.calibration.")
        self.asked.append((name, payload))
        self.timestamp += payload["seconds"]
        if name == self.fails:
            raise MeasurementFailed("worker 1 was killed by SIGKILL")
        row = {"kind": "all_reduce", "backend": "gloo", "ranks": world, "bytes": 1024, "seconds": 1e-4}
        found = {"collectives": [{**row, "busbw_gbps": 0.01}]}
        return {**found, "products": [], "operations": [timed("add", 0.002, processes=world)]}

    def calibrate(self, machine: Machine = MACHINE, **options: Any) -> tuple[Cluster, Measurements]:
        """The cluster and what was measured of it."""
        executor = Executor(
            run_in_process=self.run_in_process,
            run_in_world=self.run_in_world,
            scratch_dir=self.scratch_dir,
            report_progress=lambda family, share: self.told.append(family),
            clock=lambda: self.timestamp,
            sleep=self.wait,
            timestamp=lambda: "2026-11-21T12:00:00+0000",
        )
        cluster = calibrate_machine(machine, executor, root=self.scratch_dir, **{"quick": True, **options})
        assert cluster.measured is not None
        return cluster, cluster.measured


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(location_speed, "measure_storage", lambda folder, quick, seconds, clock: (0.5, 1.5))
    return World(tmp_path)


def test_every_family_is_in_the_cluster(world: World) -> None:
    cluster, measured = world.calibrate()
    assert {each.precision for each in measured.products} == {"fp32", "bf16"}
    assert [each.kind for each in measured.operations] == [
        "reference",
        "add",
        "attention",
        "attention_backward",
        "eager_op",
        "add",
    ]
    assert measured.operations[-1].processes == 2
    assert (measured.launch_us, measured.threads) == (1.5, 2)
    assert measured.storage is not None
    assert (measured.storage.node_write_gbps, measured.storage.node_read_gbps) == (0.5, 1.5)
    assert measured.odd == []
    device = cluster.node.accelerator
    assert device.tflops["bf16"] > device.achieved_tflops["bf16"] == pytest.approx(0.2147, abs=1e-4)
    assert (device.memory_gbps, device.kernel_us) == (30.0, 1.5)
    (payload,) = (payload for name, payload in world.asked if name == "collectives:measure_concurrently")
    assert (payload["processes"], payload["threads"]) == (2, 1)  # which share the cores


def test_of_a_gpu_nothing_is_measured_that_no_prediction_reads(world: World) -> None:
    gpu = Machine("host", "cuda", "NVIDIA H100 80GB HBM3", 1, 16, 16, 2**37, 80 * 2**30, CPU)
    cluster, measured = world.calibrate(gpu)
    assert {each.kind for each in measured.operations} == {"reference", "add"}
    assert (measured.launch_us, cluster.node.accelerator.kernel_us) == (None, None)


def test_a_cpu_that_is_faster_than_on_paper_raises_its_peak(world: World) -> None:
    slow = Machine("host", "cpu", "old", 1, 1, 1, 2**34, 2**34, Cpu("old", ghz=1.0))
    device = world.calibrate(slow)[0].node.accelerator
    assert device.tflops["fp32"] == device.achieved_tflops["fp32"]


@pytest.mark.parametrize("quick", [True, False])
def test_all_families_together_keep_to_the_time(world: World, quick: bool) -> None:
    world.calibrate(quick=quick)
    assert world.timestamp <= TOTAL_DURATION_S[quick] + 0.2
    assert all(payload["seconds"] > 0 for _, payload in world.asked)


def test_when_the_time_is_over_the_rest_gets_none(world: World) -> None:
    world.calibrate(seconds=0.7)
    assert world.timestamp < 2.0  # waiting and the reference products


def test_one_process_measures_nothing_together(world: World) -> None:
    _, measured = world.calibrate(processes=1)
    assert measured.collectives == []
    assert "processes together" not in world.told


def test_by_default_two_of_two_cores_and_all_gpus_measure() -> None:
    assert default_num_processes(MACHINE) == 2
    assert default_num_processes(Machine("h", "cpu", "x", 1, 1, 2, 1, 1, CPU)) == 1
    assert default_num_processes(Machine("h", "cuda", "x", 8, 64, 128, 1, 1, CPU)) == 8


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gemm:measure_gemms", "matrix products: not measured: the trial process ended with SIGKILL"),
        ("collectives:measure_concurrently", "processes together: not measured: worker 1 was killed by SIGKILL"),
    ],
)
def test_a_family_that_fails_costs_only_itself(world: World, name: str, text: str) -> None:
    world.fails = name
    _, measured = world.calibrate()
    assert measured.odd == [text]
    assert measured.storage is not None


def test_a_disk_that_fails_is_told(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise OSError(28, "No space left on device", "/x/probe.bin")

    monkeypatch.setattr(location_speed, "measure_storage", fail)
    _, measured = world.calibrate()
    assert measured.odd == ["storage: not measured: /x/probe.bin: No space left on device"]


def test_drift_is_that_of_the_slowest_reference_against_the_fastest(world: World) -> None:
    world.references = [0.011, 0.010, 0.012, 0.011]
    _, measured = world.calibrate()
    assert measured.drift == pytest.approx(0.2)
    assert "up to 20% longer" in measured.odd[0]
    assert measured.operations[0].seconds == 0.010  # the fastest stands for the machine


def test_a_load_that_never_changes_is_told(world: World) -> None:
    (world.scratch_dir / "proc").mkdir()
    (world.scratch_dir / "proc/stat").write_text(STAT.format(user=100, idle=1000, steal=0))
    _, measured = world.calibrate()
    assert measured.odd == [
        "other processes used 2.0 cores before the measurements: all rates are too low; run on an idle machine"
    ]
