"""Runs and jobs for `/metrics`. Only running runs have series of their own: 10,000 runs are no burden."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from prometheus_client import Metric
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from phalanx.jobs.spec import JobState
from phalanx.serve.job_pages import JobReader
from phalanx.serve.page_context import AddedPages, PageContext
from phalanx.serve.run_index import RunIndex, RunRow
from phalanx.telemetry.agent_endpoint import METRICS_TYPE
from phalanx.telemetry.exposition import MetricDefinition, render_families

MAX_RUNS = 1000
"""Running runs with series of their own: those that were written last."""
RUN_STATUSES = ("running", "done", "failed", "interrupted", "incomplete", "not started", "unreadable")
RUN_COUNT = MetricDefinition("phalanx_runs", "Runs with this status", ("status",))
JOB_COUNT = MetricDefinition("phalanx_jobs", "Jobs in this state that the backend lists", ("state",))
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


def list_metrics() -> list[MetricDefinition]:
    return [RUN_COUNT, *RUN_METRICS.values(), JOB_COUNT]


def build_metrics(
    now: float, runs: Sequence[RunRow], has_all_runs: bool, job_states: Sequence[str] | None
) -> Iterator[Metric]:
    """The metrics with a value. `has_all_runs`: `runs` are all that were found; `job_states`: None if not readable."""
    statuses = [row.status(now) for row in runs]
    if has_all_runs:
        yield from RUN_COUNT.build(count_states(RUN_STATUSES, statuses))
    running = [row for row, status in zip(runs, statuses, strict=True) if status == "running"]
    running = sorted(running, key=lambda row: row.last_written_at, reverse=True)[:MAX_RUNS]
    for column, metric in RUN_METRICS.items():
        yield from metric.build(((str(row.path),), getattr(row, column)) for row in running)
    if job_states is not None:
        yield from JOB_COUNT.build(count_states(tuple(JobState), job_states))


def count_states(known: Iterable[str], found: Iterable[str]) -> list[tuple[tuple[str], float]]:
    """How often each is found; of the known ones also 0, so that a series does not end."""
    counts = Counter(found)
    return [((name,), float(counts[name])) for name in dict.fromkeys((*known, *counts))]


@dataclass
class MetricsRoutes:
    """The handler, and what it sends."""

    index: RunIndex
    jobs: JobReader
    added: Sequence[AddedPages]
    context: PageContext

    async def send_metrics(self, request: Request) -> Response:
        """Runs, jobs and what added pages know; `?readings=no`: without readings of devices, which may be long."""
        with_readings = request.query_params.get("readings") != "no"
        jobs = self.jobs.jobs
        states = None if jobs.read_at is None or jobs.problem else [job.state.value for job in jobs.jobs]
        own = build_metrics(self.context.wall_clock(), list(self.index.rows.values()), self.index.is_complete, states)
        metrics = (own, *(pages.build_metrics(with_readings) for pages in self.added))
        content = await run_in_threadpool(lambda: render_families(chain.from_iterable(metrics)))
        return Response(content, headers={"content-type": METRICS_TYPE})
