"""Jobs of a simulation: drawn from distributions, or read from a trace."""

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from phalanx.errors import DataError
from phalanx.planner.storage_costs import SECONDS_PER_DAY
from phalanx_fleet.csv_table import open_csv
from phalanx_fleet.simulate.failures import SECONDS_PER_HOUR, FailureRates
from phalanx_fleet.simulate.job_state import CheckpointCosts, SimulatedJob, choose_interval
from phalanx_fleet.simulation_settings import CheckpointEntry, JobClassEntry

TRACE_COLUMNS = ("submit_s", "duration_s", "gpus")


def make_costs(entry: CheckpointEntry, num_nodes: int, rates: FailureRates) -> CheckpointCosts:
    """Return what saves cost a job on this number of nodes."""
    blocked_s, lag_s = (entry.save_s, 0.0) if entry.mode == "sync" else (entry.stall_s, entry.save_s)
    failures_per_s = rates.of_job(num_nodes)
    mtbf_s = math.inf if failures_per_s == 0 else 1.0 / failures_per_s
    interval_s = choose_interval(blocked_s, lag_s, mtbf_s) if entry.interval_s == "daly" else entry.interval_s
    return CheckpointCosts(interval_s, blocked_s, lag_s, entry.restart_s)


def sample_jobs(
    classes: Mapping[str, JobClassEntry],
    days: float,
    devices_per_node: int,
    rates: FailureRates,
    rng: np.random.Generator,
) -> list[SimulatedJob]:
    """Draw the jobs of all classes, in the order of submission."""
    jobs: list[SimulatedJob] = []
    for kind, entry in enumerate(classes.values()):
        number = entry.count + int(rng.poisson(entry.per_day * days))
        submitted = np.concatenate(
            [np.zeros(entry.count), rng.uniform(0.0, days * SECONDS_PER_DAY, number - entry.count)]
        )
        weights = np.array(list(entry.devices.values()))
        devices = rng.choice(np.array(list(entry.devices)), number, p=weights / weights.sum())
        medians_h = np.array([entry.hours.get(size, entry.median_h) for size in devices.tolist()])
        work_s = medians_h * SECONDS_PER_HOUR * np.exp(entry.sigma * rng.standard_normal(number))
        activities = np.full(number, entry.activity)
        if entry.activity_spread > 0 and 0 < entry.activity < 1:
            total = 1.0 / entry.activity_spread
            activities = rng.beta(entry.activity * total, (1.0 - entry.activity) * total, number)
        costs = {
            size: make_costs(entry.checkpoint, math.ceil(size / devices_per_node), rates) for size in entry.devices
        }
        jobs += [
            SimulatedJob(submit_s, size, work, costs[size], kind, activity)
            for submit_s, size, work, activity in zip(
                submitted.tolist(), devices.tolist(), work_s.tolist(), activities.tolist(), strict=True
            )
        ]
    return sorted(jobs, key=lambda job: job.submit_s)


def read_job_trace(path: Path) -> list[tuple[float, int, float]]:
    """Read a CSV file with the columns submit_s, gpus and duration_s; others are ignored. Return submission, devices
    and duration of each job, in the order of submission. Raises DataError with line, column and value."""
    rows: list[tuple[float, int, float]] = []
    with open_csv(path) as table:
        if missing := [name for name in TRACE_COLUMNS if name not in table.columns]:
            raise DataError(
                f"{path}: no column {missing[0]}; expected {', '.join(TRACE_COLUMNS)}, found {table.describe_columns()}"
            )
        for line, row in table.iterate({name: name for name in TRACE_COLUMNS}):
            submit_s, duration_s, gpus = (_read_number(path, line, name, row[name]) for name in TRACE_COLUMNS)
            if gpus < 1 or gpus != int(gpus):
                raise DataError(f"{path}:{line}: gpus: expected a whole number above 0, found {gpus:g}")
            rows.append((submit_s, int(gpus), duration_s))
    if not rows:
        raise DataError(f"{path}: no jobs")
    return sorted(rows, key=lambda row: row[0])  # jobs of one second stay in the order of the file


def _read_number(path: Path, line: int, column: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise DataError(f"{path}:{line}: {column}: expected a number of 0 or more, found {text!r}")
    return value
