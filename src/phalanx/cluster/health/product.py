"""Check `matmul`: the reference product now, on each device, against what `phalanx calibrate` measured here and
beside the other devices here. Measures with torch: for a process of its own.
"""

import importlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.cluster.description import Measured
from phalanx.cluster.discover import Machine, this_machine
from phalanx.cluster.health.finding import Figure, Finding, Verdict
from phalanx.cluster.health.remembered import remembered
from phalanx.cluster.health.site import Site
from phalanx.cluster.health.thresholds import judge
from phalanx.cluster.probe.key import key_of
from phalanx.cluster.probe.quiet import busy_cores
from phalanx.cluster.probe.reference import KIND, time_reference

SECONDS = 0.3
AGAIN = 8
"""How often a slow one is measured at most: what else runs comes in bursts, and the best counts."""
PAUSE = 0.3
"""Seconds between, so that a burst may pass."""


@dataclass(frozen=True)
class Pace:
    """The reference product on one device: the least seconds of it, and its clock over the highest, if known."""

    seconds: float
    flops: float
    clock: float | None = None
    others: float | None = None
    """Cores that other programs kept busy meanwhile; of CPUs only."""

    @property
    def tflops(self) -> float:
        return self.flops / self.seconds / 1e12


def measure(
    machine: Machine,
    call: Callable[[str, Any], Any],
    baseline: float | None,
    root: Path = Path("/"),
    clock: Callable[[], float] = time.monotonic,
    own: Callable[[], float] = time.process_time,
    sleep: Callable[[float], None] = time.sleep,
) -> Pace:
    """As `time_reference` finds it; again, for a few times, while it is slower than the baseline allows. `own` tells
    how many seconds all threads of this process, in which it is measured, have computed."""
    best: Pace | None = None
    for number in range(AGAIN):
        if number:
            sleep(PAUSE)
        now = _once(machine, call, root, clock, own)
        clocks = [each.clock for each in (best, now) if each is not None and each.clock is not None]
        best = now if best is None or now.seconds < best.seconds else best
        best = replace(best, clock=max(clocks, default=None))
        if baseline is None or judge("matmul slowdown", lost(best.seconds, baseline)) is Verdict.OK:
            break
    assert best is not None
    return best


def _once(
    machine: Machine,
    call: Callable[[str, Any], Any],
    root: Path,
    clock: Callable[[], float],
    own: Callable[[], float],
) -> Pace:
    found: dict[str, Any] = {}
    begun, computed = clock(), own()
    busy = busy_cores(root, lambda _: found.update(time_reference(machine, call, SECONDS)))
    mine = (own() - computed) / max(clock() - begun, 1e-9)
    others = max(0.0, busy - mine) if busy is not None and machine.device == "cpu" else None
    return Pace(found["timed"]["seconds"], found["timed"]["flops"], found["clock_share"], others)


def lost(seconds: float, baseline: float) -> float:
    """The share of the baseline's rate that is missing; negative when it is faster."""
    return 1 - baseline / seconds


def beside(share: float) -> str:
    """A share of a rate that is missing, in words before whom it is held against."""
    if abs(share) < 0.005:
        return "as fast as"
    return f"{abs(share):.0%} {'below' if share > 0 else 'above'}"


def baseline_of(measured: Measured | None) -> float | None:
    """Seconds of the reference product when the machine was probed."""
    operations = measured.operations if measured else []
    return next((timed.seconds for timed in operations if timed.kind == KIND), None)


def evaluate(name: str, paces: Sequence[Pace], baseline: float | None, when: str) -> list[Finding]:
    """One finding a device: against the baseline of that date, else against the median of at least three devices."""
    median = statistics.median(pace.seconds for pace in paces)
    whom, against = (f"the probe of {when}", baseline) if baseline is not None else ("the median of its peers", median)
    found = []
    for index, pace in enumerate(paces):
        check = "matmul" if len(paces) == 1 else f"matmul/gpu{index}"
        told, verdict = f"{pace.tflops:.3g} TFLOP/s", Verdict.OK
        figures: dict[str, Figure] = {
            "device": name,
            "seconds": pace.seconds,
            "tflops": pace.tflops,
            "clock_share": pace.clock,
            "baseline_seconds": baseline,
            "others": pace.others,
        }
        if baseline is None and len(paces) < PEERS:
            told += "; nothing to compare with: `phalanx calibrate` remembers this machine's rate"
        else:
            share = lost(pace.seconds, against or median)
            verdict = judge("matmul slowdown", share)
            told += f", {beside(share)} {whom}"
            if verdict is not Verdict.OK:
                told += _cause(pace.others)
        if pace.clock is not None and verdict is Verdict.OK:
            verdict = judge("clock under load", pace.clock)
            told += f"; clock at {pace.clock:.0%} of its highest" if verdict is not Verdict.OK else ""
        found.append(Finding(check, verdict, told, figures))
    return found


def _cause(others: float | None) -> str:
    """Why it may be slow."""
    if others is not None and judge("busy cores", others) is not Verdict.OK:
        return f"; other programs kept {others:.1f} cores busy meanwhile: end them, or look again when it is quiet"
    return "; see heat and power limits, or what else runs here"


PEERS = 3
"""Devices, or nodes, among which a median says who is slow."""


def check(site: Site) -> list[Finding]:
    machine = this_machine(site.root)
    cluster = remembered(site, key_of(machine, site.root), ignoring={"count"})
    measured = cluster.measured if cluster else None
    baseline = baseline_of(measured)
    each = [measure(machine, on(index), baseline, site.root) for index in range(machine.count)]
    return evaluate(machine.name, each, baseline, measured.when[:10] if measured else "")


def on(index: int) -> Callable[[str, Any], Any]:
    """Calls in this very process, on the GPU of that number where there are any."""

    def call(function: str, payload: dict[str, Any]) -> Any:
        if (device := payload["device"]) != "cpu":
            import torch

            torch.get_device_module(device).set_device(index)
        module, _, name = function.partition(":")
        return getattr(importlib.import_module(module), name)(payload)

    return call
