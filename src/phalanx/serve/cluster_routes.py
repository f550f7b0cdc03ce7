"""The routes of the cluster: usage over all runs."""

from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.responses import Response

from phalanx.cluster.spec import Prices
from phalanx.serve.cluster_page import find_period, render_cluster, render_cluster_page
from phalanx.serve.page_context import PageContext
from phalanx.serve.page_stream import Message
from phalanx.serve.run_accounts import AccountReader
from phalanx.serve.run_index import RunIndex

USAGE_INTERVAL_S = 5.0


@dataclass
class ClusterRoutes:
    """The handlers."""

    index: RunIndex
    accounts: AccountReader
    prices: Prices | None
    context: PageContext
    _usages: dict[str, tuple[float, str]] = field(default_factory=dict, init=False)

    async def show_cluster(self, request: Request) -> Response:
        """Usage over all runs."""
        period = find_period([request.query_params.get("period", "")])
        body = render_cluster_page(self._render_cluster(period), period)
        return self.context.render("Cluster", "Cluster", body, f"stream/cluster?period={period}")

    async def stream_cluster(self, request: Request) -> Response:
        """Usage again."""
        period = find_period([request.query_params.get("period", "")])

        async def read() -> Message:
            return {"sections": {"cluster": self._render_cluster(period)}}

        return self.context.stream(read)

    def _render_cluster(self, period: str) -> str:
        """Usage over a period; browsers share it for some seconds, since it sums over all runs."""
        now = self.context.wall_clock()
        found = self._usages.get(period)
        if found is None or now - found[0] > USAGE_INTERVAL_S:
            html = render_cluster(self.index.rows, self.accounts.accounts, self.prices or Prices(), period, now)
            found = self._usages[period] = (now, html)
        return found[1]
