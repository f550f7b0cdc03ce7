"""Run a calibration: measure families of operations, each with a share of the time budget, and build the cluster file.

Starts no process: the caller passes an `Executor` that runs functions in other processes. When a family fails, the
others are still measured, and the failure is listed in `Measurements.odd`.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.cluster.calibration import storage
from phalanx.cluster.calibration.anomalies import find_anomalies, find_background_load
from phalanx.cluster.calibration.background_load import count_busy_cores
from phalanx.cluster.calibration.hardware_key import hardware_key
from phalanx.cluster.calibration.reference_gemm import time_reference_gemm
from phalanx.cluster.calibration.to_cluster import (
    DiscoveredHardware,
    data_sheet_of,
    describe_accelerator,
    describe_cluster,
    discover_hardware,
)
from phalanx.cluster.discovery import Machine
from phalanx.cluster.gpu_topology import choose_scale_up
from phalanx.cluster.spec import (
    Cluster,
    CollectiveTiming,
    GemmTiming,
    Measurements,
    OpTiming,
    OverlapSlowdown,
    StorageSpec,
)

REFERENCE_DURATION_S = 0.15
"""Seconds for the reference product after each family."""
TOTAL_DURATION_S = {True: 13.0, False: 145.0}
"""Seconds of all measurements, by `quick`. Process starts are extra: on a CPU `--quick` stays below 20 s and a full
calibration below 3 minutes. With a GPU, each process also loads libraries and kernels: `--quick` took 29 to 39 s."""
TIME_WEIGHTS = {
    "matrix products": 8.0,
    "operations": 9.0,
    "attention and others": 4.0,
    "overheads": 1.0,
    "processes together": 11.0,
    "storage": 2.0,
    "checkpoint": 1.0,
}
"""Weights by which the families share the time, in the order in which they run."""
MAX_DURATION_S = {"overheads": 2.0, "storage": 10.0, "checkpoint": 5.0}
"""Maximum seconds of a family; more would not improve its result."""
CHECKPOINT_BYTES = {True: 64 * 10**6, False: 512 * 10**6}
"""Bytes of the checkpoint, by `quick`."""
MIN_CHECKPOINT_BYTES = 8 * 10**6
CALIBRATION_PACKAGE = "phalanx.cluster.calibration"


class MeasurementFailed(Exception):
    """A family of measurements failed; the text gives the reason in one line."""


@dataclass(frozen=True)
class Executor:
    """Functions with side effects that a calibration calls.

    `run_in_process` runs `module:function(payload)` in a separate process; `run_in_world` runs it on every rank of a
    new world of the given size and returns the value of rank 0. Both raise MeasurementFailed on failure.
    `save_checkpoint` writes a checkpoint of the given bytes below a directory and returns seconds. `scratch_dir` is a
    private directory on the disk to measure; the caller removes it. `report_progress` gets the next step and the share
    of time that has passed.
    """

    run_in_process: Callable[[str, Any], Any]
    run_in_world: Callable[[str, Any, int], Any]
    save_checkpoint: Callable[[Path, int], float]
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
    overlap: OverlapSlowdown | None = None
    launch_us: float | None = None
    storage: StorageSpec | None = None
    read_mode: str | None = None
    checkpoint_gbps: float | None = None
    reference_times_s: list[float] = field(default_factory=list)
    """Seconds of the reference product, before the first family and after each."""
    clock_share: float | None = None
    failures: list[str] = field(default_factory=list)

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
    """Measure the machine in about `seconds` (default: `TOTAL_DURATION_S`) and list anomalies.

    Raises UsageError when the disk has too little free space.
    """
    processes = default_num_processes(machine) if processes is None else processes
    storage.check_free_space(executor.scratch_dir, quick)
    hardware, results = discover_hardware(machine, executor.scratch_dir, root), Results()
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
        overlap=results.overlap,
        storage=results.storage,
        checkpoint_gbps=results.checkpoint_gbps,
    )
    anomalies = (
        results.failures
        + find_background_load(busy_cores_before)
        + _find_anomalies(machine, hardware, measurements, results.clock_share)
    )
    cluster = describe_cluster(machine, hardware, measurements.model_copy(update={"odd": anomalies}))
    return cluster.model_copy(update={"notes": {**cluster.notes, **_describe_measurement(results, quick, processes)}})


def _find_anomalies(
    machine: Machine, hardware: DiscoveredHardware, measurements: Measurements, clock_share: float | None
) -> list[str]:
    return find_anomalies(
        data_sheet_of(machine) or describe_accelerator(machine, measurements),
        measurements,
        clock_share,
        choose_scale_up(hardware.gpu_links),
        [each.narrow_link_warning for each in hardware.gpu_links if each.narrow_link_warning],
    )


def _run_families(
    machine: Machine, executor: Executor, quick: bool, processes: int, results: Results, started: float, seconds: float
) -> None:
    """Every family in turn, with its share of the time that is left."""
    steps: dict[str, Callable[[float], None]] = {
        "matrix products": lambda budget_s: _measure_gemms(machine, executor, quick, results, budget_s),
        "operations": lambda budget_s: _measure_ops(
            machine, executor, "op_benchmark:measure_memory_ops", quick, results, budget_s
        ),
        "attention and others": lambda budget_s: _measure_ops(
            machine, executor, "op_benchmark:measure_autograd_ops", quick, results, budget_s
        ),
        "overheads": lambda budget_s: _measure_overheads(machine, executor, results, budget_s),
        "processes together": lambda budget_s: _measure_concurrent(
            machine, executor, quick, processes, results, budget_s
        ),
        "storage": lambda budget_s: _measure_storage(executor, quick, results, budget_s),
        "checkpoint": lambda budget_s: _measure_checkpoint(executor, quick, results, budget_s),
    }
    if processes < 2:
        del steps["processes together"]
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
    value = time_reference_gemm(machine, executor.run_in_process, REFERENCE_DURATION_S)
    timed = OpTiming.model_validate(value["timed"])
    results.reference_times_s.append(timed.seconds)
    if timed.seconds <= min(results.reference_times_s):
        results.ops = [timed, *(each for each in results.ops if each.kind != timed.kind)]
    if value["clock_share"] is not None:
        results.clock_share = max(value["clock_share"], results.clock_share or 0.0)


def _measurement_payload(machine: Machine, quick: bool, budget_s: float) -> dict[str, Any]:
    """Return the part of the payload that is the same for every measurement."""
    return {
        "device": machine.device,
        "threads": machine.physical_cores,
        "memory_bytes": machine.device_memory_bytes,
        "quick": quick,
        "seconds": budget_s,
    }


def _measure_gemms(machine: Machine, executor: Executor, quick: bool, results: Results, budget_s: float) -> None:
    rows = executor.run_in_process(
        f"{CALIBRATION_PACKAGE}.gemm:measure_gemms", _measurement_payload(machine, quick, budget_s)
    )
    results.gemms += [GemmTiming.model_validate(row) for row in rows]


def _measure_ops(
    machine: Machine, executor: Executor, function: str, quick: bool, results: Results, budget_s: float
) -> None:
    rows = executor.run_in_process(f"{CALIBRATION_PACKAGE}.{function}", _measurement_payload(machine, quick, budget_s))
    results.ops += [OpTiming.model_validate(row) for row in rows]


def _measure_overheads(machine: Machine, executor: Executor, results: Results, budget_s: float) -> None:
    value = executor.run_in_process(
        f"{CALIBRATION_PACKAGE}.launch_overheads:measure_overheads", _measurement_payload(machine, False, budget_s)
    )
    results.launch_us = value["launch_us"]
    results.ops += [OpTiming.model_validate(row) for row in value["operations"]]


def _measure_concurrent(
    machine: Machine, executor: Executor, quick: bool, processes: int, results: Results, budget_s: float
) -> None:
    payload = {**_measurement_payload(machine, quick, budget_s), "processes": processes}
    if machine.device == "cpu":
        payload["threads"] = max(1, machine.physical_cores // processes)
    value = executor.run_in_world(f"{CALIBRATION_PACKAGE}.concurrent:measure_concurrently", payload, processes)
    results.collectives = [CollectiveTiming.model_validate(row) for row in value["collectives"]]
    results.overlap = OverlapSlowdown.model_validate(value["overlap"])
    results.gemms += [GemmTiming.model_validate(row) for row in value["products"]]
    results.ops += [OpTiming.model_validate(row) for row in value["operations"]]


def _measure_storage(executor: Executor, quick: bool, results: Results, budget_s: float) -> None:
    rates = storage.measure_storage(executor.scratch_dir, quick, budget_s, executor.clock)
    read = None if rates.read_gbps is None else round(rates.read_gbps, 4)
    write = round(rates.write_gbps, 4)
    results.storage = StorageSpec(
        name="measured", read_gbps=read, write_gbps=write, node_read_gbps=read, node_write_gbps=write
    )
    results.read_mode = rates.read_mode


def _measure_checkpoint(executor: Executor, quick: bool, results: Results, budget_s: float) -> None:
    nbytes = CHECKPOINT_BYTES[quick]
    if results.storage is not None and results.storage.node_write_gbps is not None:
        nbytes = max(MIN_CHECKPOINT_BYTES, min(nbytes, int(results.storage.node_write_gbps * 1e9 * budget_s)))
    results.checkpoint_gbps = round(nbytes / max(executor.save_checkpoint(executor.scratch_dir, nbytes), 1e-9) / 1e9, 4)


def _describe_measurement(results: Results, quick: bool, processes: int) -> dict[str, Any]:
    """Return notes for readers on how the figures were measured."""
    read_modes = {"direct": "O_DIRECT", "dropped": "page cache dropped", "cached": "only from the page cache: left out"}
    notes = {"quick": quick, "processes": processes, "read": read_modes.get(results.read_mode or "")}
    return {"measured_how": {name: value for name, value in notes.items() if value is not None}}
