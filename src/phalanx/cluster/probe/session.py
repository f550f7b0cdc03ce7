"""One probe from beginning to end: families of measurements, each with its share of the time, and the cluster that
comes out. No processes here: who calls says how functions are run in others (`Means`).

A family that fails costs only itself; what was not measured is told among what is odd.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.cluster.description import Cluster, Collective, Measured, Overlap, Product, Storage, Timed
from phalanx.cluster.discover import Machine
from phalanx.cluster.gpu_links import scale_up
from phalanx.cluster.probe import storage
from phalanx.cluster.probe.describe import Parts, data_sheet, describe, device_of, look
from phalanx.cluster.probe.key import key_of
from phalanx.cluster.probe.odd import everything_odd, odd_load
from phalanx.cluster.probe.quiet import busy_cores
from phalanx.cluster.probe.reference import time_reference

REFERENCE = 0.15
"""Seconds for the reference product after each family."""
SECONDS = {True: 13.0, False: 145.0}
"""For all measuring, by quickness; starting processes comes on top, so that `--quick` stays below 20 s and a full probe
below 3 minutes on a CPU; with a GPU each process also loads libraries and kernels: `--quick` took 29 to 39 s."""
WEIGHTS = {
    "matrix products": 8.0,
    "operations": 9.0,
    "attention and others": 4.0,
    "overheads": 1.0,
    "processes together": 11.0,
    "storage": 2.0,
    "checkpoint": 1.0,
}
"""How the families share the time, in the order in which they run."""
MOST = {"overheads": 2.0, "storage": 10.0, "checkpoint": 5.0}
"""Seconds beyond which a family would learn nothing more."""
CHECKPOINT = {True: 64 * 10**6, False: 512 * 10**6}
"""Bytes of the checkpoint, by quickness."""
SMALLEST_CHECKPOINT = 8 * 10**6
HERE = "phalanx.cluster.probe"


class NotMeasured(Exception):
    """A family of measurements failed; the text says in a line why."""


@dataclass(frozen=True)
class Means:
    """What a probe needs of the world outside.

    `call` runs `module:function(payload)` in a process of its own, `gather` the same on every rank of a new world of so
    many processes and returns what rank 0 returned; both raise NotMeasured when that fails. `save` writes a checkpoint
    of so many bytes below a folder, and returns the seconds it took. `scratch` is a folder of our own on what shall be
    measured; who made it removes it. `progress` is told what comes next, and how much of the time is over.
    """

    call: Callable[[str, Any], Any]
    gather: Callable[[str, Any, int], Any]
    save: Callable[[Path, int], float]
    scratch: Path
    progress: Callable[[str, float], None] = lambda family, share: None
    clock: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep
    now: Callable[[], str] = lambda: time.strftime("%Y-%m-%dT%H:%M:%S%z")


@dataclass
class Findings:
    """What the families have found so far."""

    products: list[Product] = field(default_factory=list)
    operations: list[Timed] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    overlap: Overlap | None = None
    launch_us: float | None = None
    storage: Storage | None = None
    cache: str | None = None
    checkpoint_gbps: float | None = None
    references: list[float] = field(default_factory=list)
    """Seconds of the reference product, before the first family and after each."""
    clock_share: float | None = None
    failed: list[str] = field(default_factory=list)

    @property
    def drift(self) -> float:
        """By what share the slowest of the references took longer than the fastest."""
        return max(self.references) / min(self.references) - 1


def default_processes(machine: Machine) -> int:
    """How many processes measure together: one for each GPU, else two where there are two cores."""
    return machine.gpus or min(2, machine.cores)


def probe(
    machine: Machine,
    means: Means,
    *,
    quick: bool = False,
    processes: int | None = None,
    seconds: float | None = None,
    root: Path = Path("/"),
) -> Cluster:
    """Measure the machine in about `seconds` (default: `SECONDS`), and say what looks wrong. UsageError when the disk
    has no room."""
    processes = default_processes(machine) if processes is None else processes
    storage.check_room(means.scratch, quick)
    parts, found = look(machine, means.scratch, root), Findings()
    begun, budget = means.clock(), SECONDS[quick] if seconds is None else seconds
    busy = busy_cores(root, means.sleep)
    _reference(machine, means, found)
    _families(machine, means, quick, processes, found, begun, budget)
    measured = Measured(
        when=means.now(),
        key=key_of(machine, root),
        threads=machine.cores if machine.device == "cpu" else None,
        drift=round(found.drift, 4),
        products=found.products,
        operations=found.operations,
        launch_us=found.launch_us,
        collectives=found.collectives,
        overlap=found.overlap,
        storage=found.storage,
        checkpoint_gbps=found.checkpoint_gbps,
    )
    odd = found.failed + odd_load(busy) + _odd(machine, parts, measured, found.clock_share)
    cluster = describe(machine, parts, measured.model_copy(update={"odd": odd}))
    return cluster.model_copy(update={"notes": {**cluster.notes, **_how(found, quick, processes)}})


def _odd(machine: Machine, parts: Parts, measured: Measured, clock_share: float | None) -> list[str]:
    return everything_odd(
        data_sheet(machine) or device_of(machine, measured),
        measured.products,
        measured.operations,
        measured.collectives,
        measured.storage,
        measured.drift,
        clock_share,
        scale_up(parts.gpu_links),
        [each.narrow for each in parts.gpu_links if each.narrow],
    )


def _families(
    machine: Machine, means: Means, quick: bool, processes: int, found: Findings, begun: float, seconds: float
) -> None:
    """Every family in turn, with its share of the time that is left."""
    steps: dict[str, Callable[[float], None]] = {
        "matrix products": lambda share: _products(machine, means, quick, found, share),
        "operations": lambda share: _operations(machine, means, "operations:measure", quick, found, share),
        "attention and others": lambda share: _operations(
            machine, means, "operations:measure_trained", quick, found, share
        ),
        "overheads": lambda share: _overheads(machine, means, found, share),
        "processes together": lambda share: _together(machine, means, quick, processes, found, share),
        "storage": lambda share: _storage(means, quick, found, share),
        "checkpoint": lambda share: _checkpoint(means, quick, found, share),
    }
    if processes < 2:
        del steps["processes together"]
    whole = sum(WEIGHTS[name] for name in steps)
    for name, step in steps.items():
        over = means.clock() - begun
        means.progress(name, over / seconds)
        left = seconds - over - REFERENCE * (len(steps) - list(steps).index(name))
        share = min(max(0.0, left) * WEIGHTS[name] / whole, MOST.get(name, seconds))
        whole -= WEIGHTS[name]
        try:
            step(share)
        except NotMeasured as error:
            found.failed.append(f"{name}: not measured: {error}")
        except OSError as error:
            where = os.fsdecode(error.filename) if error.filename else str(means.scratch.parent)
            found.failed.append(f"{name}: not measured: {where}: {error.strerror or error}")
        _reference(machine, means, found)


def _reference(machine: Machine, means: Means, found: Findings) -> None:
    """Time the reference product; the fastest that there was is the one to compare with later."""
    value = time_reference(machine, means.call, REFERENCE)
    timed = Timed.model_validate(value["timed"])
    found.references.append(timed.seconds)
    if timed.seconds <= min(found.references):
        found.operations = [timed, *(each for each in found.operations if each.kind != timed.kind)]
    if value["clock_share"] is not None:
        found.clock_share = max(value["clock_share"], found.clock_share or 0.0)


def _asked(machine: Machine, quick: bool, share: float) -> dict[str, Any]:
    """What every measurement is told of the machine."""
    return {
        "device": machine.device,
        "threads": machine.cores,
        "memory_bytes": machine.device_memory_bytes,
        "quick": quick,
        "seconds": share,
    }


def _products(machine: Machine, means: Means, quick: bool, found: Findings, share: float) -> None:
    rows = means.call(f"{HERE}.products:measure", _asked(machine, quick, share))
    found.products += [Product.model_validate(row) for row in rows]


def _operations(machine: Machine, means: Means, what: str, quick: bool, found: Findings, share: float) -> None:
    rows = means.call(f"{HERE}.{what}", _asked(machine, quick, share))
    found.operations += [Timed.model_validate(row) for row in rows]


def _overheads(machine: Machine, means: Means, found: Findings, share: float) -> None:
    value = means.call(f"{HERE}.overheads:measure", _asked(machine, False, share))
    found.launch_us = value["launch_us"]
    found.operations += [Timed.model_validate(row) for row in value["operations"]]


def _together(machine: Machine, means: Means, quick: bool, processes: int, found: Findings, share: float) -> None:
    asked = {**_asked(machine, quick, share), "processes": processes}
    if machine.device == "cpu":
        asked["threads"] = max(1, machine.cores // processes)
    value = means.gather(f"{HERE}.together:measure", asked, processes)
    found.collectives = [Collective.model_validate(row) for row in value["collectives"]]
    found.overlap = Overlap.model_validate(value["overlap"])
    found.products += [Product.model_validate(row) for row in value["products"]]
    found.operations += [Timed.model_validate(row) for row in value["operations"]]


def _storage(means: Means, quick: bool, found: Findings, share: float) -> None:
    rates = storage.measure(means.scratch, quick, share, means.clock)
    read = None if rates.read_gbps is None else round(rates.read_gbps, 4)
    write = round(rates.write_gbps, 4)
    found.storage = Storage(
        name="measured", read_gbps=read, write_gbps=write, node_read_gbps=read, node_write_gbps=write
    )
    found.cache = rates.cache


def _checkpoint(means: Means, quick: bool, found: Findings, share: float) -> None:
    nbytes = CHECKPOINT[quick]
    if found.storage is not None and found.storage.node_write_gbps is not None:
        nbytes = max(SMALLEST_CHECKPOINT, min(nbytes, int(found.storage.node_write_gbps * 1e9 * share)))
    found.checkpoint_gbps = round(nbytes / max(means.save(means.scratch, nbytes), 1e-9) / 1e9, 4)


def _how(found: Findings, quick: bool, processes: int) -> dict[str, Any]:
    """How it was measured: what a reader of the figures should know."""
    read = {"direct": "O_DIRECT", "dropped": "page cache dropped", "cached": "only from the page cache: left out"}
    told = {"quick": quick, "processes": processes, "read": read.get(found.cache or "")}
    return {"measured_how": {name: value for name, value in told.items() if value is not None}}
