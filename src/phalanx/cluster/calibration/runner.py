"""Run a calibration: measure families of operations, each with a share of the time budget, and build the cluster file,
with data-sheet values from the catalogue where it has the device.

Starts no process: the caller passes an `Executor` that runs functions in other processes. When a family fails, the
others are still measured, and the failure is listed in `Measurements.odd`.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.cluster.calibration import location_speed
from phalanx.cluster.calibration.anomalies import best_gemm_tflops, find_anomalies, measured_memory_bandwidth
from phalanx.cluster.calibration.hardware_key import hardware_key
from phalanx.cluster.calibration.timing import time_reference_gemm
from phalanx.cluster.catalog import find_accelerator, find_data_sheet, find_entry
from phalanx.cluster.device_links import choose_scale_out, choose_scale_up, discover_gpu_links, discover_nics
from phalanx.cluster.discovery import Machine
from phalanx.cluster.spec import (
    AcceleratorSpec,
    Cluster,
    CollectiveTiming,
    GemmTiming,
    Measurements,
    NodeSpec,
    OpTiming,
    ScaleUpNetwork,
    StorageSpec,
)
from phalanx.cluster.system_files import count_busy_cores

REFERENCE_DURATION_S = 0.15
"""Seconds for the reference product after each family."""
TOTAL_DURATION_S = {True: 13.0, False: 145.0}
"""Seconds of all measurements, by `quick`. Process starts are extra: on a CPU `--quick` stays below 20 s and a full
calibration below 3 minutes. With a GPU, each process also loads libraries and kernels: `--quick` took 29 to 39 s."""
TIME_WEIGHTS = {
    "matrix products": 8.0,
    "operations": 9.0,
    "attention": 4.0,
    "overheads": 1.0,
    "processes together": 11.0,
    "storage": 2.0,
}
"""Weights by which the families share the time, in the order in which they run."""
MAX_DURATION_S = {"overheads": 2.0, "storage": 10.0}
"""Maximum seconds of a family; more would not improve its result."""
CALIBRATION_PACKAGE = "phalanx.cluster.calibration"


class MeasurementFailed(Exception):
    """A family of measurements failed; the text gives the reason in one line."""


@dataclass(frozen=True)
class Executor:
    """Functions with side effects that a calibration calls. `run_in_process` runs `module:function(payload)` in a
    separate process, `run_in_world` on every rank of a new world of the given size, of which rank 0 returns.
    `scratch_dir` is a private directory on the disk to measure."""

    run_in_process: Callable[[str, Any], Any]
    run_in_world: Callable[[str, Any, int], Any]
    scratch_dir: Path
    report_progress: Callable[[str, float], None] = lambda family, share: None
    clock: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep
    timestamp: Callable[[], str] = lambda: time.strftime("%Y-%m-%dT%H:%M:%S%z")


@dataclass
class Results:
    """Results of the families so far."""

    gemms: list[GemmTiming] = field(default_factory=list)
    ops: list[OpTiming] = field(default_factory=list)
    collectives: list[CollectiveTiming] = field(default_factory=list)
    launch_us: float | None = None
    storage: StorageSpec | None = None
    reference_times_s: list[float] = field(default_factory=list)
    """Seconds of the reference product, before the first family and after each."""
    failures: list[str] = field(default_factory=list)

    def add_gemms(self, rows: list[dict[str, Any]]) -> None:
        self.gemms += [GemmTiming.model_validate(row) for row in rows]

    def add_ops(self, rows: list[dict[str, Any]]) -> None:
        self.ops += [OpTiming.model_validate(row) for row in rows]

    @property
    def drift(self) -> float:
        """Share by which the slowest reference product took longer than the fastest."""
        return max(self.reference_times_s) / min(self.reference_times_s) - 1


def default_num_processes(machine: Machine) -> int:
    """Return the number of processes that measure together: one per GPU, else 2 if there are at least 2 cores."""
    return machine.num_gpus or min(2, machine.physical_cores)


def calibrate_machine(
    machine: Machine,
    executor: Executor,
    *,
    quick: bool = False,
    processes: int | None = None,
    seconds: float | None = None,
    root: Path = Path("/"),
) -> Cluster:
    """Measure the machine in about `seconds` (default: `TOTAL_DURATION_S`) and list anomalies. Raises UsageError when
    the disk has too little free space."""
    processes = default_num_processes(machine) if processes is None else processes
    location_speed.check_free_space(executor.scratch_dir, quick)
    scale_up = choose_scale_up(discover_gpu_links()) if machine.num_gpus else None
    results = Results()
    started, budget_s = executor.clock(), TOTAL_DURATION_S[quick] if seconds is None else seconds
    busy_cores_before = count_busy_cores(root, executor.sleep)
    _time_reference(machine, executor, results)
    _run_families(machine, executor, quick, processes, results, started, budget_s)
    measurements = Measurements(
        when=executor.timestamp(),
        key=hardware_key(machine, root),
        threads=machine.physical_cores if machine.device == "cpu" else None,
        drift=round(results.drift, 4),
        busy_cores=round(busy_cores_before or 0.0, 2),
        products=results.gemms,
        operations=results.ops,
        launch_us=results.launch_us,
        collectives=results.collectives,
        storage=results.storage,
    )
    data_sheet = data_sheet_of(machine) or describe_accelerator(machine, measurements)
    anomalies = results.failures + find_anomalies(data_sheet, measurements, scale_up)
    return describe_cluster(machine, scale_up, measurements.model_copy(update={"odd": anomalies}), root)


def _run_families(
    machine: Machine, executor: Executor, quick: bool, processes: int, results: Results, started: float, seconds: float
) -> None:
    """Run every family in turn, with its share of the time that is left."""

    def payload(budget_s: float) -> dict[str, Any]:
        return {
            "device": machine.device,
            "threads": machine.physical_cores,
            "memory_bytes": machine.device_memory_bytes,
            "quick": quick,
            "seconds": budget_s,
        }

    def measure(function: str, budget_s: float) -> Any:
        return executor.run_in_process(f"{CALIBRATION_PACKAGE}.{function}", payload(budget_s))

    def measure_overheads(budget_s: float) -> None:
        value = measure("op_benchmark:measure_overheads", budget_s)
        results.launch_us = value["launch_us"]
        results.add_ops(value["operations"])

    def measure_concurrently(budget_s: float) -> None:
        threads = max(1, machine.physical_cores // processes) if machine.device == "cpu" else machine.physical_cores
        value = executor.run_in_world(
            f"{CALIBRATION_PACKAGE}.collectives:measure_concurrently",
            {**payload(budget_s), "processes": processes, "threads": threads},
            processes,
        )
        results.collectives = [CollectiveTiming.model_validate(row) for row in value["collectives"]]
        results.add_gemms(value["products"])
        results.add_ops(value["operations"])

    steps: dict[str, Callable[[float], None]] = {
        "matrix products": lambda budget_s: results.add_gemms(measure("gemm:measure_gemms", budget_s)),
        "operations": lambda budget_s: results.add_ops(measure("op_benchmark:measure_memory_ops", budget_s)),
        "attention": lambda budget_s: results.add_ops(measure("op_benchmark:measure_attention", budget_s)),
        "overheads": measure_overheads,
        "processes together": measure_concurrently,
        "storage": lambda budget_s: _measure_storage(executor, quick, results, budget_s),
    }
    if processes < 2:
        del steps["processes together"]
    if machine.num_gpus:  # predictions of GPUs read neither
        del steps["attention"], steps["overheads"]
    weight_left = sum(TIME_WEIGHTS[name] for name in steps)
    for name, step in steps.items():
        elapsed = executor.clock() - started
        executor.report_progress(name, elapsed / seconds)
        remaining_s = seconds - elapsed - REFERENCE_DURATION_S * (len(steps) - list(steps).index(name))
        budget_s = min(max(0.0, remaining_s) * TIME_WEIGHTS[name] / weight_left, MAX_DURATION_S.get(name, seconds))
        weight_left -= TIME_WEIGHTS[name]
        try:
            step(budget_s)
        except MeasurementFailed as error:
            results.failures.append(f"{name}: not measured: {error}")
        except OSError as error:
            where = os.fsdecode(error.filename) if error.filename else str(executor.scratch_dir.parent)
            results.failures.append(f"{name}: not measured: {where}: {error.strerror or error}")
        _time_reference(machine, executor, results)


def _time_reference(machine: Machine, executor: Executor, results: Results) -> None:
    """Time the reference product; the fastest that there was is the one to compare with later."""
    timed = OpTiming.model_validate(time_reference_gemm(machine, executor.run_in_process, REFERENCE_DURATION_S))
    results.reference_times_s.append(timed.seconds)
    if timed.seconds <= min(results.reference_times_s):
        results.ops = [timed, *(each for each in results.ops if each.kind != timed.kind)]


def _measure_storage(executor: Executor, quick: bool, results: Results, budget_s: float) -> None:
    max_bytes = location_speed.MAX_WRITTEN_BYTES[quick]
    write_gbps, read_gbps = location_speed.measure_storage(executor.scratch_dir, max_bytes, budget_s, executor.clock)
    write, read = round(write_gbps, 4), None if read_gbps is None else round(read_gbps, 4)
    results.storage = StorageSpec(
        name="measured", read_gbps=read, write_gbps=write, node_read_gbps=read, node_write_gbps=write
    )


def data_sheet_of(machine: Machine) -> AcceleratorSpec | None:
    """Return the data sheet of the device: of the catalogue, or computed for a CPU. None if unknown."""
    if machine.num_gpus:
        return find_accelerator(machine.device_name) if find_entry("accelerators", machine.device_name) else None
    sheet = find_data_sheet(machine)
    if sheet is None:
        return None
    rates: Any = sheet.tflops
    return AcceleratorSpec(
        name=machine.device_name, vendor=machine.cpu.vendor, tflops=rates, memory_gib=_memory_gib(machine)
    )


def describe_accelerator(machine: Machine, measurements: Measurements) -> AcceleratorSpec:
    """Add measured rates to the data sheet. They may raise a CPU's peak: boost clocks exceed the nominal clock."""
    best: Any = {name: round(rate, 4) for name, rate in best_gemm_tflops(measurements.products).items() if rate >= 1e-4}
    accelerator = data_sheet_of(machine)
    if accelerator is None:
        accelerator = AcceleratorSpec(name=machine.device_name, tflops=best, memory_gib=_memory_gib(machine))
    rates = dict(accelerator.tflops)
    if machine.device == "cpu":
        accelerator = accelerator.model_copy(update={"generation": "cpu"})
        rates = {name: max(rate, best.get(name, 0.0)) for name, rate in {**best, **rates}.items()}
    update: dict[str, Any] = {"tflops": rates, "memory_gib": _memory_gib(machine), "achieved_tflops": best}
    if machine.device == "cpu" and measurements.launch_us is not None:  # a GPU's kernels do not wait for each launch
        update["kernel_us"] = measurements.launch_us
    if (
        accelerator.memory_gbps is None
        and (rate := measured_memory_bandwidth(measurements.operations, machine.device)) is not None
    ):
        update["memory_gbps"] = round(rate, 2)
    return AcceleratorSpec.model_validate({**accelerator.model_dump(), **update})


def describe_cluster(
    machine: Machine, scale_up: ScaleUpNetwork | None, measurements: Measurements, root: Path = Path("/")
) -> Cluster:
    """Return a cluster of one node."""
    node = NodeSpec(
        name=_squeeze(machine.device_name),
        accelerator=describe_accelerator(machine, measurements),
        count=machine.device_count,
        scale_up=scale_up,
        scale_out=choose_scale_out(discover_nics(root)),
        host_memory_gib=round(machine.memory_bytes / 2**30, 2),
        cores=machine.physical_cores,
    )
    storage = measurements.storage or StorageSpec()
    count_text = f"{machine.device_count} x " if machine.device_count > 1 else ""
    name = f"{count_text}{_squeeze(machine.device_name)}"
    return Cluster(name=name, nodes=1, node=node, storage=storage, measured=measurements)


def _memory_gib(machine: Machine) -> float:
    return round(machine.device_memory_bytes / 2**30, 2)


def _squeeze(name: str) -> str:
    return " ".join(name.split())
