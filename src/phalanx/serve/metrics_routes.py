"""The route that Prometheus reads."""

from dataclasses import dataclass

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from phalanx.fleet.telemetry.agent_endpoint import METRICS_TYPE
from phalanx.fleet.telemetry.exposition import render_families
from phalanx.serve.agent_streams import AgentStreams
from phalanx.serve.job_pages import JobReader
from phalanx.serve.metrics import MetricSnapshot, build_metrics
from phalanx.serve.node_reader import NodeReader
from phalanx.serve.page_context import PageContext
from phalanx.serve.run_index import RunIndex


@dataclass
class MetricsRoutes:
    """The handler, and what it sends."""

    index: RunIndex
    jobs: JobReader
    nodes: NodeReader
    streams: AgentStreams
    context: PageContext

    async def send_metrics(self, request: Request) -> Response:
        """Runs, jobs and nodes for Prometheus; `?readings=no`: without what agents read, which may be long."""
        snapshot = self.take_snapshot(request.query_params.get("readings") != "no")
        content = await run_in_threadpool(lambda: render_families(build_metrics(snapshot)))
        return Response(content, headers={"content-type": METRICS_TYPE})

    def take_snapshot(self, with_readings: bool) -> MetricSnapshot:
        """What is known now."""
        jobs, nodes = self.jobs.jobs, self.nodes.nodes
        return MetricSnapshot(
            self.context.wall_clock(),
            list(self.index.rows.values()),
            self.index.is_complete,
            None if jobs.read_at is None or jobs.problem else [job.state.value for job in jobs.jobs],
            [node.state for node in nodes.nodes] if nodes.is_current else None,
            self.streams.read_samples() if with_readings else {},
        )
