"""Runs, jobs and nodes as metrics, for `/metrics`. Only running runs have series of their own: a folder of 10,000 runs
is no burden for what stores them."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import Metric

from phalanx.fleet.fleet_node import DOWN_STATE
from phalanx.fleet.latest_reading import LATE_AFTER_PERIODS
from phalanx.fleet.node_states import NodeState
from phalanx.fleet.telemetry.exposition import build_node_metrics, list_node_metrics
from phalanx.fleet.telemetry.metric_definition import MetricDefinition
from phalanx.fleet.telemetry.sample import SAMPLE_INTERVAL_S, NodeSample
from phalanx.jobs.spec import JobState
from phalanx.serve.run_row import RunRow

MAX_RUNS = 1000
"""Running runs with series of their own: those that were written last."""
RUN_STATUSES = ("running", "done", "failed", "interrupted", "incomplete", "not started", "unreadable")
RUN_COUNT = MetricDefinition("phalanx_runs", "Runs with this status", ("status",))
JOB_COUNT = MetricDefinition("phalanx_jobs", "Jobs in this state that the backend lists", ("state",))
NODE_COUNT = MetricDefinition("phalanx_nodes", "Nodes in this state", ("state",))
RUN_METRICS = {
    "step": MetricDefinition("phalanx_run_step", "Steps done", ("run",)),
    "total_steps": MetricDefinition("phalanx_run_total_steps", "Steps of the whole run", ("run",)),
    "loss": MetricDefinition("phalanx_run_loss", "Training loss of the newest step", ("run",)),
    "validation_loss": MetricDefinition("phalanx_run_validation_loss", "Newest validation loss", ("run",)),
    "units_per_s": MetricDefinition("phalanx_run_units_per_second", "Speed in units of data, such as tokens", ("run",)),
    "step_s": MetricDefinition("phalanx_run_step_seconds", "Mean time of the newest steps", ("run",)),
    "world_size": MetricDefinition("phalanx_run_workers", "Workers", ("run",)),
    "last_written_at": MetricDefinition(
        "phalanx_run_last_written_timestamp_seconds", "When the run last wrote something, unix seconds", ("run",)
    ),
}
"""The metric of each column of a running run."""


@dataclass(frozen=True)
class MetricSnapshot:
    """What is known at `time`."""

    time: float
    runs: Sequence[RunRow]
    has_all_runs: bool
    """Whether every run that was found is among them."""
    job_states: Sequence[str] | None
    """None where the jobs could not be read."""
    node_states: Sequence[str] | None
    """None where the nodes could not be read."""
    samples: Mapping[str, NodeSample]
    """The newest sample of each node with an agent that answers."""


def list_metrics() -> list[MetricDefinition]:
    """All metrics, without dcgm-exporter's names."""
    return [RUN_COUNT, *RUN_METRICS.values(), JOB_COUNT, NODE_COUNT, *list_node_metrics()]


def build_metrics(snapshot: MetricSnapshot) -> Iterator[Metric]:
    """The metrics that have a value. Samples that are late have none."""
    statuses = [row.status(snapshot.time) for row in snapshot.runs]
    if snapshot.has_all_runs:
        yield from RUN_COUNT.build(_count(RUN_STATUSES, statuses))
    running = [row for row, status in zip(snapshot.runs, statuses, strict=True) if status == "running"]
    running = sorted(running, key=lambda row: row.last_written_at, reverse=True)[:MAX_RUNS]
    for column, metric in RUN_METRICS.items():
        yield from metric.build(((str(row.path),), getattr(row, column)) for row in running)
    if snapshot.job_states is not None:
        yield from JOB_COUNT.build(_count(tuple(JobState), snapshot.job_states))
    if snapshot.node_states is not None:
        yield from NODE_COUNT.build(_count((*NodeState, DOWN_STATE), snapshot.node_states))
    late_after_s = LATE_AFTER_PERIODS * SAMPLE_INTERVAL_S
    in_time = {
        node: sample for node, sample in snapshot.samples.items() if abs(snapshot.time - sample.time) <= late_after_s
    }
    yield from build_node_metrics(in_time)


def _count(known: Iterable[str], found: Iterable[str]) -> list[tuple[tuple[str], float]]:
    """How often each is found; of the known ones also 0, so that a series does not end."""
    counts = Counter(found)
    return [((name,), float(counts[name])) for name in dict.fromkeys((*known, *counts))]
