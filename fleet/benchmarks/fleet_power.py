"""Bars of power control: random histories, the answer of the guard to a step, and caps by sweeps on the curves of
Zeus (`zeus_powerlimit.csv`, next to the fleet's data).

    python fleet/benchmarks/fleet_power.py DATA [--histories 100000]
"""

import argparse
import os
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from faulty_fleet import FakeClock, FakeLinks, FakeNetwork, make_fake_nodes
from fleet_bars import Bar, Comparison, MissingDataError, measure_all, read_rows, to_table
from fleet_power_histories import run_many
from phalanx_fleet.power.allocation import NodeCaps, PoweredJob, allocate_caps
from phalanx_fleet.power.guard import GuardIdentity, PowerGuard, plan_fallbacks
from phalanx_fleet.power.speed_curve import SpeedCurve, SweepPoint, choose_sweep_caps
from phalanx_fleet.power_settings import PowerSettings
from phalanx_fleet.power_tree import BudgetLevel, NodePower, PoweredNode, PowerTree

NUM_HISTORIES = 100_000
QUICK_HISTORIES = 1000
"""Without `--histories`: all of them take up to an hour on 2 cores."""
DEAD_TIMES_S = (0.1, 0.3, 1.0, 2.0, 3.0)
STEP_SHARE, STEP_LIMIT_S, MAX_REVERSALS = 0.3, 10.0, 2
NUM_SWEPT_CAPS, NUM_MIXES, JOBS_PER_MIX = 5, 60, 16
BUDGET_SHARES = (0.6, 0.7)
GPU_NAMES = {"v100": "V100", "a40": "A40", "rtx6000": "RTX 6000", "p100": "P100"}
ZEUS_FILE = "zeus_powerlimit.csv"
ZEUS_KEYS = ("gpu", "dataset", "network", "batch_size", "optimizer")
ZEUS_VALUES = ("power_limit", "time_per_epoch", "average_power")
MARGIN = 0.02


@dataclass(frozen=True)
class MeasuredJob:
    """A job of Zeus with the points of all limits, lowest first."""

    workload: str
    points: tuple[SweepPoint, ...]

    def choose_points(self) -> list[SweepPoint]:
        """Return the measured points next to the caps that a sweep chooses."""
        left = list(self.points)
        for wanted_w in choose_sweep_caps(self.points[0].cap_w, self.points[-1].cap_w, NUM_SWEPT_CAPS):
            left.remove(min(left, key=lambda point: abs(point.cap_w - wanted_w)))
        return [point for point in self.points if point not in left]

    def sweep(self) -> SpeedCurve:
        """Fit a sweep of these caps."""
        return SpeedCurve.fit(self.choose_points())

    def raw_curve(self) -> SpeedCurve:
        """Return what was measured, as it is."""
        full = self.points[-1].rate
        return SpeedCurve(
            tuple(p.cap_w for p in self.points),
            tuple(p.rate / full for p in self.points),
            tuple(p.draw_w for p in self.points),
        )


def read_zeus_jobs(data: Path) -> dict[str, list[MeasuredJob]]:
    """Return the jobs by GPU that have its lowest and its highest limit and more limits than a sweep. Rows of one limit
    count by their means. The file is in the directory of the data, or next to it."""
    path = next(
        (folder / ZEUS_FILE for folder in (data, data.parent) if (folder / ZEUS_FILE).is_file()), data / ZEUS_FILE
    )
    found: dict[tuple[str, ...], dict[float, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for row in read_rows(path, ZEUS_KEYS, ZEUS_VALUES):
        limit_w, epoch_s, draw_w = (float(row[name]) for name in ZEUS_VALUES)
        if not min(limit_w, epoch_s, draw_w) > 0:
            raise MissingDataError(f"{path.name}: {row}: expected a positive limit, time and power")
        found[tuple(row[name] for name in ZEUS_KEYS)][limit_w].append((epoch_s, draw_w))
    limits: dict[str, list[float]] = defaultdict(list)
    for key, points in found.items():
        limits[key[0]] += points
    jobs: dict[str, list[MeasuredJob]] = defaultdict(list)
    for key, points in found.items():
        if len(points) > NUM_SWEPT_CAPS and {min(limits[key[0]]), max(limits[key[0]])} <= points.keys():
            means = {cap: [statistics.fmean(each) for each in zip(*rows, strict=True)] for cap, rows in points.items()}
            swept = tuple(SweepPoint(cap, 1 / epoch_s, draw_w) for cap, (epoch_s, draw_w) in sorted(means.items()))
            jobs[key[0]].append(MeasuredJob(key[2], swept))
    return jobs


def predict_speeds(jobs: Sequence[MeasuredJob]) -> list[tuple[float, float]]:
    """Return measured and predicted speed at each cap that was not swept."""
    found = []
    for job in jobs:
        curve, raw, swept = job.sweep(), job.raw_curve(), {point.cap_w for point in job.choose_points()}
        for cap, speed in zip(raw.caps_w, raw.speeds, strict=True):
            if cap not in swept:
                found.append((speed, curve.speed_at(cap)))
    return found


@dataclass(frozen=True)
class MixResult:
    """Mean speed and joules per unit of work, over those without caps, of one mix of jobs."""

    equal: float
    chosen: float
    best: float
    equal_energy: float
    chosen_energy: float


def allocate_mix(jobs: Sequence[MeasuredJob], share: float, margin: float) -> MixResult:
    """Divide a share of the sum of limits among jobs of one device each, by sweeps, by all measured points, and
    equally."""
    limit_w = jobs[0].points[-1].cap_w
    lowest_w = jobs[0].points[0].cap_w
    power = NodePower(1, limit_w, 0.0, 0.0, 0.0, lowest_w)
    tree = PowerTree(
        (BudgetLevel("site", "s", share * limit_w * len(jobs) * (1 + margin)),),
        tuple(PoweredNode(f"n{index}", "g", power, 0) for index in range(len(jobs))),
    )
    limits = [NodeCaps(lowest_w, limit_w, 1)] * len(jobs)

    def measure(curves: Sequence[SpeedCurve | None]) -> tuple[float, float]:
        powered = [
            PoweredJob(f"j{index}", {index: (0,)}, {} if curve is None else {"g": curve})
            for index, curve in enumerate(curves)
        ]
        caps = allocate_caps(tree, limits, powered, [tree.levels[0].budget_w], margin, 0.0).caps_w
        raws = [job.raw_curve() for job in jobs]
        speeds = [raw.speed_at(cap[0]) for raw, cap in zip(raws, caps, strict=True)]
        energies = [
            float(np.interp(cap[0], raw.caps_w, raw.draws_w)) / speed / raw.draws_w[-1]
            for raw, cap, speed in zip(raws, caps, speeds, strict=True)
        ]
        return statistics.fmean(speeds), statistics.fmean(energies)

    equal, equal_energy = measure([None] * len(jobs))
    chosen, chosen_energy = measure([job.sweep() for job in jobs])
    best, _ = measure([SpeedCurve.fit(job.points) for job in jobs])
    return MixResult(equal, chosen, best, equal_energy, chosen_energy)


def measure_sweeps(data: Path) -> list[Bar]:
    """Return the bars of caps by sweeps of each GPU."""
    found = read_zeus_jobs(data)
    if not found:
        raise MissingDataError(f"{ZEUS_FILE}: no job with the lowest and highest limit of its GPU and others between")
    names = {gpu: GPU_NAMES.get(gpu, gpu) for gpu in [*GPU_NAMES, *sorted(found.keys() - GPU_NAMES.keys())]}
    return measure_all(
        "power",
        {
            f"caps by sweeps, {name}, Zeus": partial(_measure_gpu, name, found.get(gpu, []))
            for gpu, name in names.items()
        },
    )


def _measure_gpu(name: str, jobs: Sequence[MeasuredJob]) -> list[Bar]:
    """A curve is a job's own sweep, and no constant is fitted to others. So each workload is left out of the mixes in
    turn, and the least gain counts."""
    if not jobs:
        raise MissingDataError(f"{ZEUS_FILE}: no job with the lowest and highest limit of this GPU and others between")
    bars, speeds = [], predict_speeds(jobs)
    error = statistics.fmean(abs(predicted / measured - 1) for measured, predicted in speeds)
    most = max(len(job.points) for job in jobs)
    goal = f"speed at unswept caps, {name}, mean error ({NUM_SWEPT_CAPS} of {most} caps swept, Zeus)"
    comparison = Comparison("capped-speed", name, speeds)
    bars.append(Bar("power", goal, "<= 3%", f"{error:.2%}", error <= 0.03, comparison))
    workloads = sorted({job.workload for job in jobs})
    if len(workloads) < 2:
        text = f"{ZEUS_FILE}: one workload on this GPU; none can be left out"
        return [*bars, Bar("power", f"gain over one cap for all, {name}", "data", text, None)]
    source = random.Random(0)
    shares, least, results = [], 1.0, []
    for left_out in workloads:
        rest = [job for job in jobs if job.workload != left_out]
        mixes = [
            allocate_mix(source.choices(rest, k=JOBS_PER_MIX), share, MARGIN)
            for share in BUDGET_SHARES
            for _ in range(NUM_MIXES // 10)
        ]
        possible = sum(mix.best - mix.equal for mix in mixes)
        shares.append(sum(mix.chosen - mix.equal for mix in mixes) / possible)
        least = min(least, *(mix.chosen - mix.equal for mix in mixes))
        results += mixes
    gain = (
        f"gain over one cap for all, {name}, share of that with all measured points, least of {len(workloads)} "
        "left-out workloads"
    )
    bars.append(Bar("power", gain, ">= 70%", f"{min(shares):.0%}", min(shares) >= 0.7))
    worse = f"never worse than one cap for all, {name}: least difference of mean speed over {len(results)} mixes"
    bars.append(Bar("power", worse, ">= 0", f"{least:+.2%}", least >= 0))
    energies = [statistics.fmean(e) for e in zip(*((r.equal_energy, r.chosen_energy) for r in results), strict=True)]
    text = f"one cap {energies[0]:.2f}, swept {energies[1]:.2f}"
    bars.append(Bar("power", f"energy per unit of work, {name}, over that without caps", "reported", text, True))
    return bars


def simulate_step(dead_time_s: float, seed: int = 0) -> tuple[float, int]:
    """Cut the budget of 16 nodes by 30%; return the seconds until the draw is below for good, and how often it
    changes direction by more than 2% of the step."""
    power = NodePower(8, 700.0, 75.0, 1000.0, 500.0, 200.0)
    budget_w = 0.9 * 16 * power.max_w
    racks = [BudgetLevel("rack", f"k{rack}", None, 0) for rack in range(4)]
    nodes = tuple(PoweredNode(f"n{index}", "h", power, 1 + index // 4) for index in range(16))
    tree, clock = PowerTree((BudgetLevel("site", "s", budget_w), *racks), nodes), FakeClock()
    settings = PowerSettings(dead_time_s=dead_time_s)
    fakes = make_fake_nodes(nodes, clock, seed, dead_time_s, noise_share=0.01)
    links = FakeLinks(fakes, clock, FakeNetwork((0.01, 0.1)), random.Random(seed))
    budgets: list[float | None] = [level.budget_w for level in tree.levels]
    jobs = [PoweredJob(f"j{index}", {index: tuple(range(8))}) for index in range(16)]
    fallbacks, _ = plan_fallbacks(tree, budgets, settings)
    guard = PowerGuard(tree, settings, GuardIdentity(1, "g"), links, lambda: jobs, lambda: budgets, fallbacks)
    step_at, due, draws = 60.3 + 0.1 * (seed % 30), 0.0, []
    while clock.now < step_at + 60:
        if clock.now >= step_at and budgets[0] == budget_w:
            budgets[0], due = (1 - STEP_SHARE) * budget_w, clock.now
        if clock.now >= due:
            guard.step(clock.now)
            due = clock.now + settings.period_s
        if clock.now >= step_at:
            draws.append(sum(d.draw_at(clock.now) for node in fakes for d in node.devices) + 16 * power.rest_max_w)
        for node in fakes:
            node.check()
        clock.now = round(clock.now + 0.1, 3)
        guard.receive()
    above = [index for index, watts in enumerate(draws) if watts > (1 - STEP_SHARE) * budget_w]
    turning, direction, reversals = draws[0], 0, 0
    for watts in draws:
        if abs(watts - turning) > 0.02 * STEP_SHARE * budget_w:
            new = 1 if watts > turning else -1
            reversals += direction not in (0, new)
            turning, direction = watts, new
    return 0.1 * (above[-1] + 1) if above else 0.0, reversals


def measure_guard() -> list[Bar]:
    """Return the bars of the guard's answer to a step, by dead time."""
    bars = []
    for dead_time_s in DEAD_TIMES_S:
        results = [simulate_step(dead_time_s, seed) for seed in range(3)]
        slowest, reversals = max(each[0] for each in results), max(each[1] for each in results)
        is_met = slowest <= STEP_LIMIT_S and reversals < MAX_REVERSALS
        goal = f"below within {STEP_LIMIT_S:.0f} s, < {MAX_REVERSALS} reversals"
        text = f"{slowest:.1f} s, {reversals} reversals"
        bars.append(Bar("power", f"budget cut by 30%, dead time {dead_time_s} s, 16 fake nodes", goal, text, is_met))
    return bars


def measure_histories(num_histories: int) -> list[Bar]:
    """Return the bar of random histories."""
    began = time.monotonic()
    violations = run_many(num_histories, os.cpu_count() or 1)
    text = f"{len({each.seed for each in violations})} of {num_histories} ({time.monotonic() - began:.0f} s)"
    is_met = not violations and num_histories >= NUM_HISTORIES
    return [
        Bar(
            "power",
            "random histories in which real committed power exceeds a budget",
            f"0 of {NUM_HISTORIES}",
            text,
            is_met,
        )
    ]


def measure_bars(data: Path, num_histories: int = QUICK_HISTORIES) -> list[Bar]:
    """Return all bars of power control."""
    return measure_all(
        "power",
        {
            "caps by sweeps, Zeus": lambda: measure_sweeps(data),
            "budget cut by 30%": measure_guard,
            "random histories": lambda: measure_histories(num_histories),
        },
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="directory with the validation data")
    parser.add_argument("--histories", type=int, default=QUICK_HISTORIES)
    options = parser.parse_args()
    print(to_table(measure_bars(options.data, options.histories)))
