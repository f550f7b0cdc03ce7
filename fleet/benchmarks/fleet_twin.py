"""Bars of the twin: stops, ETTR, checkpoint intervals, queues, power and speed. `fleet_validation.py` runs it."""

import math
import re
import resource
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from fleet_bars import Bar, Comparison, MissingDataError, measure_all, read_rows
from phalanx.planner.storage_costs import SECONDS_PER_DAY
from phalanx_fleet.power_tree import NodePower
from phalanx_fleet.simulate.cluster_simulation import ClusterSimulation
from phalanx_fleet.simulate.fleet_simulation import NodeTypeGroup, SimulationResult, simulate_fleet
from phalanx_fleet.simulate.job_state import (
    CheckpointCosts,
    LeastServicePolicy,
    SchedulingPolicy,
    ShortestRemainingPolicy,
    SimulatedJob,
    choose_interval,
)
from phalanx_fleet.simulate.node_pool import NodePool
from phalanx_fleet.simulate.power_model import device_power, supply_power
from phalanx_fleet.simulate.random_events import NodeHistory, mean_node_rate, read_job_trace, sample_failures
from phalanx_fleet.simulation_settings import FailureEntry, JobClassEntry, PolicyName, SimulationSettings
from published_policies import FinishTimeFairnessPolicy, RepackingSimulation, ShortestServicePolicy

TWIN_PART = "twin"
POLICIES: tuple[PolicyName, ...] = ("fifo", "srtf", "las")
DGX_H100 = NodePower(8, 700, 75, 4600, 2300)
MURI_POLICIES: dict[str, Callable[[], SchedulingPolicy]] = {
    "SRTF": ShortestRemainingPolicy,
    "SRSF": ShortestServicePolicy,
    "Tiresias-L": LeastServicePolicy,
    "themis": FinishTimeFairnessPolicy,
}
"""By the names of their published results."""
MURI_AT_ZERO = "_t0"
"""Ending of a trace's name with all jobs submitted at 0."""
MURI_POLICIES_AT_ZERO = ("SRTF", "SRSF", "Tiresias-L")
"""Themis has no single optimum there (docs/benchmarks/notes/fleet.md)."""
MURI_GPUS_PER_NODE = 8
MURI_STEP_OVERHEAD = 1.015
"""Time of an iteration in Muri's simulator over that in its traces (jobs.py)."""
MURI_MODELS: dict[int, dict[int, float]] = {
    1: {107: 7, 109: 7, 779: 4, 798: 4, 178: 10, 426: 10, 517: 38, 490: 5},
    2: {191: 7, 205: 7, 881: 5, 850: 4, 195: 10, 464: 10, 525: 39, 495: 5},
    4: {201: 8, 212: 8, 921: 5, 886: 5, 190: 10, 433: 10, 533: 39, 505: 6},
    8: {214: 9, 226: 9, 1010: 7, 957: 5, 192: 10, 437: 10, 555: 46, 509: 6},
    16: {332: 9, 302: 10, 1055: 7, 1006: 7, 244: 10, 491: 10, 567: 46, 525: 8},
    32: {336: 10, 356: 10, 1059: 7, 1019: 8, 260: 10, 514: 10, 585: 46, 546: 8},
}
"""Seconds of a restart by GPUs and milliseconds of an iteration, which name the model (run_sim.py, jobs.py of Muri)."""
DALY_SYSTEM = re.compile(r"d = ([\d.]+) min,.* M = ([\d.]+) min")
LLAMA_RATE = 419 / 54 / 2048 * 1000
"""Unexpected interruptions per 1000 node-days of Llama 3 (arXiv 2407.21783)."""
LLAMA_SAVE_S = 405e9 * 12 / 2e12
"""Seconds of a save of 405e9 parameters (weight and two moments in fp32) at the 2 TB/s that the storage sustains (same
paper, section 3.3.1)."""
FRONTIER_NODE = NodePower(4, 560, 88, 280 + 74.26 + 4 * 20 + 2 * 30, 90 + 74.26 + 4 * 20 + 2 * 30)
"""Constants of ExaDigiT/RAPS: 4 GPUs, CPU, memory, 4 network cards and 2 disks."""
FRONTIER_NODES, FRONTIER_RACKS, FRONTIER_EFFICIENCY = 9472, 74, 0.98 * 0.96
FRONTIER_RACK_W = 32 * 250 + 8473.47 / 3
"""32 switches, and a third of a cooling distribution unit."""
SEREN_DEVICE = NodePower(8, 408, 62, 0, 0)
SEREN_KINDS = ((0.32, 0.02, 100.0), (0.35, 0.11, 60.0), (0.33, 0.74, 3.8))
"""Share of GPUs, mean activity and a + b of its Beta distribution: idle, light work, training. Fitted to the measured
quantiles, for want of the activities themselves."""


def node_power(power: NodePower, activity: float) -> float:
    """Return the watts of a node if all its devices have this activity."""
    rest_w = power.rest_idle_w + activity * (power.rest_max_w - power.rest_idle_w)
    return power.num_devices * device_power(power, activity) + rest_w


def measure_bars(data: Path) -> list[Bar]:
    """Return the bars of the twin."""
    return measure_all(
        TWIN_PART,
        {
            "stops and ETTR of Llama 3": _measure_llama,
            "Daly intervals": lambda: _measure_daly(data),
            "MTTF of RSC": _measure_mttf,
            "Muri's traces": lambda: _measure_muri(data),
            "GPU power of Seren": lambda: _measure_seren(data),
            "power of Frontier": _measure_frontier,
            "mean power with checkpoints": lambda: _measure_swing(data),
            "speed and memory": _measure_speed,
        },
    )


def _within(measure: str, reached: float, wanted: float, tolerance: float, unit: str = "") -> Bar:
    error = reached / wanted - 1
    goal = f"{wanted:,.4g}{unit} ± {100 * tolerance:g} %"
    return Bar(TWIN_PART, measure, goal, f"{reached:,.4g}{unit} ({100 * error:+.2f} %)", abs(error) <= tolerance)


def _measure_llama() -> list[Bar]:
    """54 days of 16,384 GPUs with the cluster's own mean rate: what the simulation adds is the chance, and the account.
    A stop restarts on the same or on spare nodes. The paper gives neither the length of a save nor that of a
    restart: both are assumed, and ETTR hangs on them, so that it is printed for both kinds of save."""
    return [
        bar
        for mode, save_s in (("async", 60.0), ("sync", LLAMA_SAVE_S), ("sync", 60.0))
        for bar in _measure_llama_saves(mode, save_s)
    ]


def _measure_llama_saves(mode: str, save_s: float) -> list[Bar]:
    settings = SimulationSettings(
        days=54,
        spares=0.01,
        jobs={
            "llama": JobClassEntry.model_validate(
                {"count": 1, "devices": {16384: 1}, "median_h": 1e5, "checkpoint": {"mode": mode, "save_s": save_s}}
            )
        },
        failures={"all": FailureEntry(per_1000_node_days=LLAMA_RATE, repair_share=0.3, repair_h=24)},
    )
    group = NodeTypeGroup("h100", DGX_H100, [NodeHistory()] * 2069, 518)
    results = [simulate_fleet([group], settings, seed) for seed in range(10)]
    stops = np.array([result.num_stops for result in results])
    ettr = np.array([result.ettr for result in results])
    sums = max(abs(sum(result.shares.values()) - 1) for result in results)
    near = float(np.mean(np.abs(stops - 419) <= 41))
    return [
        Bar(
            TWIN_PART,
            f"stops of Llama 3 in 54 days, 10 seeds, {mode} saves of {save_s:.1f} s",
            "419 ± 41",
            f"{stops.mean():.0f} ({stops.min()} to {stops.max()}); {100 * near:.0f} % of the seeds within",
            abs(stops.mean() - 419) <= 41,
        ),
        Bar(
            TWIN_PART,
            f"ETTR of Llama 3, {mode} saves of {save_s:.1f} s (stall of async ones 2 s), assumed restarts of 300 s",
            "> 0.90",
            f"{ettr.mean():.3f} (least {ettr.min():.3f})",
            bool(ettr.min() > 0.9),
        ),
        Bar(
            TWIN_PART,
            f"sum of the shares of device time, less 1, {mode} saves of {save_s:.1f} s",
            "1e-9",
            f"{sums:.1e}",
            sums <= 1e-9,
        ),
    ]


def _measure_daly(data: Path) -> list[Bar]:
    """For three MTBFs, and those of the published results among the data."""
    goals = {(5.0, 1440.0): 116.7, (5.0, 360.0): 56.7, (5.0, 15.0): 9.14}
    if (data / "published_results.csv").is_file():
        for row in read_rows(data / "published_results.csv", ("system", "quantity"), ("value",)):
            found = DALY_SYSTEM.fullmatch(row["system"])
            if found is not None and row["quantity"] == "Daly interval":
                goals[float(found[1]), float(found[2])] = float(row["value"])
    return [
        _within(
            f"Daly interval, M = {m:g} min, d = {d:g} min", choose_interval(d * 60, 0, m * 60) / 60, goal, 0.005, " min"
        )
        for (d, m), goal in goals.items()
    ]


def _measure_mttf() -> list[Bar]:
    """Mean time between the stops of one job in the simulation, at RSC-1's rate."""
    bars = []
    for gpus, wanted_h, tolerance, days in ((16384, 1.8, 0.1, 60), (131072, 0.23, 0.1, 7)):
        nodes = [NodeHistory()] * (gpus // 8)
        causes = {"node": FailureEntry(per_1000_node_days=6.5, repair_share=0)}
        until_s, stops = days * SECONDS_PER_DAY, 0
        for seed in range(3):
            costs = CheckpointCosts(choose_interval(60, 0, 1 / (mean_node_rate(causes, nodes, 8) * len(nodes))), 60)
            job = SimulatedJob(0, gpus, 1e9, costs)
            failures = sample_failures(causes, nodes, 8, until_s, np.random.default_rng(seed))
            outcome = ClusterSimulation(
                NodePool(len(nodes), 8), [job], SchedulingPolicy(), failures, until_s=until_s
            ).run()
            stops += sum(outcome.stops_by_cause.values())
        bars.append(
            _within(f"MTTF of a job of {gpus:,} GPUs on RSC-1", 3 * days * 24 / stops, wanted_h, tolerance, " h")
        )
    return bars


def _measure_muri(data: Path) -> list[Bar]:
    """Each trace as it is submitted, and with all jobs submitted at 0, where the authors publish figures."""
    goals = {
        (row["trace"], row["policy"]): row
        for row in read_rows(
            data / "policy_results_muri.csv",
            ("trace", "policy"),
            ("gpus_in_cluster", "mean_jct_s", "makespan_s", "p99_jct_s"),
        )
    }
    traces: dict[str, list[dict[str, str]]] = {}
    numbers = ("job", "gpus", "submit_s", "iterations", "iteration_ms")
    for row in read_rows(data / "jobs_muri_philly.csv", ("trace",), numbers):
        traces.setdefault(row["trace"], []).append(row)
    measures = {}
    for trace, rows in sorted(traces.items()):
        for suffix, policies in (("", MURI_POLICIES), (MURI_AT_ZERO, MURI_POLICIES_AT_ZERO)):
            for name in policies:
                goal = goals.get((trace + suffix, name))
                if goal is not None or not suffix:
                    measures[f"{name}, Muri {trace}{suffix}"] = partial(
                        _measure_queue, trace + suffix, rows, name, goal
                    )
    return measure_all(TWIN_PART, measures)


def _measure_queue(
    trace: str, rows: Sequence[Mapping[str, str]], name: str, goal: Mapping[str, str] | None
) -> list[Bar]:
    if goal is None:
        raise MissingDataError("policy_results_muri.csv: no row of this trace and policy")
    if len(rows) != (num_jobs := 1 + max(int(row["job"]) for row in rows)):
        raise MissingDataError(
            f"jobs_muri_philly.csv: {len(rows)} of {num_jobs} jobs; the published figures are of all"
        )
    ordered = sorted(rows, key=lambda row: (float(row["submit_s"]), int(row["job"])))
    jobs = [
        SimulatedJob(
            submit_s,
            gpus,
            duration_s,
            CheckpointCosts(math.inf, restart_s=find_restart_s(gpus, float(row["iteration_ms"]))),
        )
        for row, (submit_s, gpus, duration_s) in zip(
            ordered, replay_rows(ordered, trace.endswith(MURI_AT_ZERO)), strict=True
        )
    ]
    num_nodes = int(goal["gpus_in_cluster"]) // MURI_GPUS_PER_NODE
    if (most := max(job.devices for job in jobs)) > num_nodes * MURI_GPUS_PER_NODE:
        raise MissingDataError(f"{trace}: a job needs {most} GPUs, and the cluster has {goal['gpus_in_cluster']}")
    pool = NodePool(num_nodes, MURI_GPUS_PER_NODE)
    outcome = RepackingSimulation(pool, jobs, MURI_POLICIES[name]()).run()
    completion_s = np.array([(job.finish_s or math.nan) - job.submit_s for job in jobs])
    return [
        _within(f"{name}, Muri {trace}: {what}", float(reached), float(goal[column]), tolerance, " s")
        for what, reached, column, tolerance in (
            ("mean completion", completion_s.mean(), "mean_jct_s", 0.05),
            ("makespan", outcome.end_s, "makespan_s", 0.03),
            ("p99 of completion", np.percentile(completion_s, 99), "p99_jct_s", 0.2),
        )
    ]


def replay_rows(rows: Sequence[Mapping[str, str]], at_zero: bool) -> list[tuple[float, int, float]]:
    """Return submission, devices and duration of jobs as `phalanx simulate --replay` reads them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "jobs.csv"
        lines = [
            f"{0.0 if at_zero else float(row['submit_s'])},{row['gpus']},"
            f"{int(row['iterations']) * float(row['iteration_ms']) / 1000 * MURI_STEP_OVERHEAD}"
            for row in rows
        ]
        path.write_text("\n".join(["submit_s,gpus,duration_s", *lines]) + "\n")
        return read_job_trace(path)


def find_restart_s(num_gpus: int, iteration_ms: float) -> float:
    """Return the restart of the model that this iteration names, or of the nearest one in the authors' table."""
    gpus = min(MURI_MODELS, key=lambda known: abs(math.log2(known / num_gpus)))
    models = MURI_MODELS[gpus]
    return models[min(models, key=lambda known: abs(known - iteration_ms))]


def _measure_seren(data: Path) -> list[Bar]:
    rng = np.random.default_rng(0)
    watts = np.concatenate(
        [
            [device_power(SEREN_DEVICE, a) for a in rng.beta(mean * total, (1 - mean) * total, int(share * 100_000))]
            for share, mean, total in SEREN_KINDS
        ]
    )
    rows = [
        (float(row["quantile"]), float(row["value"]))
        for row in read_rows(data / "acme_distributions.csv", ("cluster", "quantity"), ("quantile", "value"))
        if (row["cluster"], row["quantity"]) == ("Seren", "gpu_power_w") and 0.05 <= float(row["quantile"]) <= 0.95
    ]
    if not rows:
        raise MissingDataError("acme_distributions.csv: no quantile of gpu_power_w of Seren from .05 to .95")
    errors = [(q, float(np.quantile(watts, q)) - wanted, max(15.0, 0.1 * wanted)) for q, wanted in rows]
    missed = [f"{q:g}" for q, error, most in errors if abs(error) > most]
    worst = max(errors, key=lambda each: abs(each[1]) / each[2])
    reached = f"{len(errors) - len(missed)} of {len(errors)}; largest {worst[1]:+.0f} W at {worst[0]:g}"
    measure = "GPU power of Seren, quantiles .05 to .95 (shares and activities fitted to them)"
    points = [(wanted, wanted + error) for (_, wanted), (_, error, _) in zip(rows, errors, strict=True)]
    comparison = Comparison("device-power", "quantiles .05 to .95", points)
    return [Bar(TWIN_PART, measure, "all within 10 % or 15 W", reached, not missed, comparison)]


def _measure_frontier() -> list[Bar]:
    bars = []
    for state, activity, wanted_mw in (("idle", 0.0, 7.4), ("full", 1.0, 28.3)):
        watts = node_power(FRONTIER_NODE, activity) * FRONTIER_NODES
        site_w = supply_power(watts, FRONTIER_RACKS, FRONTIER_EFFICIENCY, FRONTIER_RACK_W)
        bars.append(_within(f"Frontier, {state}, from RAPS's constants", site_w / 1e6, wanted_mw, 0.05, " MW"))
    return bars


def _measure_swing(data: Path) -> list[Bar]:
    """The row with a save every 500 steps holds idle time, as the data's README says; its share is not comparable."""
    bars = []
    columns = ("checkpoint_every_steps", "share_of_time_below_2200_w", "mean_8gpu_w")
    for row in read_rows(data / "power_checkpoint_h100.csv", (), columns):
        every, share = row["checkpoint_every_steps"], float(row["share_of_time_below_2200_w"])
        predicted_w = 4450 * (1.0 - share) + 1190 * share  # training, and blocking saves
        bars.append(
            _within(f"mean power, a save every {every} steps", predicted_w, float(row["mean_8gpu_w"]), 0.15, " W")
        )
    return bars


def _measure_speed() -> list[Bar]:
    return [bar for policy in POLICIES for bar in _measure_policy_speed(policy)]


def _measure_policy_speed(policy: PolicyName) -> list[Bar]:
    settings = SimulationSettings(
        days=365,
        spares=0.02,
        policy=policy,
        jobs={
            "all": JobClassEntry(
                per_day=274,
                devices={1: 4, 8: 4, 16: 2, 32: 2, 64: 2, 128: 1, 512: 0.3},
                median_h=4,
                sigma=1.7,
                activity=0.7,
            )
        },
        failures={
            "gpu": FailureEntry(per_1000_node_days=4, repair_h=72),
            "software": FailureEntry(per_1000_node_days=2.5, repair_share=0),
        },
    )
    group = NodeTypeGroup("h100", DGX_H100, [NodeHistory(position=index % 4 / 4) for index in range(1000)], 250)
    began = time.process_time()
    result: SimulationResult = simulate_fleet([group], settings, 0)
    seconds = time.process_time() - began
    mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return [
        Bar(
            TWIN_PART,
            f"1,000 nodes, 12 months, {result.num_jobs:,} jobs, {policy}: time on a core",
            "< 60 s",
            f"{seconds:.0f} s",
            seconds < 60,
        ),
        Bar(
            TWIN_PART,
            f"the same, {policy} and those before: highest memory",
            "< 1,000 MiB",
            f"{mib:.0f} MiB",
            mib < 1000,
        ),
    ]
