"""The routes of a run: its page, logs, and the comparison with others."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from phalanx.errors import DataError, UsageError
from phalanx.observe.compare import compare_runs, render_comparison_body
from phalanx.observe.html_report.page import Chart, render_chart_rows
from phalanx.observe.html_report.report import render_charts
from phalanx.run import Run
from phalanx.serve.access import describe_refusal
from phalanx.serve.chat_routes import ChatProcess, answer_chat, render_chat
from phalanx.serve.live_run import X_NAMES, LiveRuns, render_reading_note, render_run
from phalanx.serve.log_pages import render_log_tail, render_logs
from phalanx.serve.page_context import Message, PageContext
from phalanx.serve.pages import render_problem
from phalanx.serve.run_index import RunIndex

MAX_COMPARED_RUNS = 6


@dataclass
class RunRoutes:
    """The handlers."""

    index: RunIndex
    context: PageContext
    live_runs: LiveRuns = field(default_factory=LiveRuns)
    chat: ChatProcess = field(default_factory=ChatProcess)

    async def show_run(self, request: Request) -> Response:
        """The page of a run."""
        if (run := self.index.find_run(request.path_params["id"])) is None:
            return self._missing_run()
        try:
            page = await run_in_threadpool(self.live_runs.find(run).read_page)
        except DataError as error:
            return self.context.render("Run", "Runs", render_problem(str(run.path), str(error)), status=422)
        address, x_name = f"run/{request.path_params['id']}", _read_x_name(request)
        body = await run_in_threadpool(render_run, page, run, address, x_name)
        refusal = describe_refusal(self.context.access, request)
        body += await run_in_threadpool(render_chat, run, address, refusal)
        return self.context.render(page.title, "Runs", body, f"{address}/stream?x={x_name}")

    async def stream_run(self, request: Request) -> Response:
        """The parts of a run's page that change, and its charts."""
        if (run := self.index.find_run(request.path_params["id"])) is None:
            return self._missing_run()
        live, x_name = self.live_runs.find(run), _read_x_name(request)
        shown_titles, shown_version = [""], [0]

        async def read() -> Message:
            try:
                page = await run_in_threadpool(live.read_page)
            except DataError as error:
                return {"sections": {"reading": render_problem(str(run.path), str(error))}}
            if not run.path.is_dir():
                gone = "The directory of this run is no longer there. What follows is the last that was read."
                return {"sections": {"reading": f'<p class="note problem">{gone}</p>'}}
            log_tail = await run_in_threadpool(render_log_tail, run)
            sections = {"reading": render_reading_note(page), **page.sections, "log-tail": log_tail}
            message: Message = {"sections": sections}
            titles = " ".join(chart.full_title for chart in page.charts)
            if page.version != shown_version[0]:
                charts = await run_in_threadpool(page.rescale_charts, x_name)
                message["charts"] = make_chart_message(charts, is_same=titles == shown_titles[0])
            shown_titles[0], shown_version[0] = titles, page.version
            return message

        return self.context.stream(read)

    async def show_logs(self, request: Request) -> Response:
        """Output of the workers of a run."""
        if (run := self.index.find_run(request.path_params["id"])) is None:
            return self._missing_run()
        body = await run_in_threadpool(render_logs, run, request.path_params["id"], request.query_params.get("log"))
        return self.context.render("Logs", "Runs", body)

    async def answer_chat(self, request: Request) -> Response:
        """The answer to the messages of a page."""
        if (run := self.index.find_run(request.path_params["id"])) is None:
            return self._missing_run()
        return await answer_chat(self.chat, self.context.access, request, run)

    async def show_comparison(self, request: Request) -> Response:
        """The runs that were ticked, side by side."""
        rows = [row for id in request.query_params.getlist("run") if (row := self.index.find(id)) is not None]
        if not 2 <= len(rows) <= MAX_COMPARED_RUNS:
            text = f"Tick 2 to {MAX_COMPARED_RUNS} runs in the list, then compare them."
            return self.context.render("Compare", "Runs", render_problem("Compare runs", text), status=400)
        try:
            comparison = await run_in_threadpool(compare_runs, [Run(row.path) for row in rows])
        except (DataError, UsageError) as error:
            return self.context.render("Compare", "Runs", render_problem("Compare runs", str(error)), status=422)
        return self.context.render("Compare", "Runs", render_comparison_body(comparison))

    def _missing_run(self) -> Response:
        text = "No run with this address. It was moved or removed, or the server has not found it yet."
        return self.context.render("Run", "Runs", render_problem("No such run", text), status=404)


def _read_x_name(request: Request) -> str:
    name = request.query_params.get("x", "")
    return name if name in X_NAMES else X_NAMES[0]


def make_chart_message(charts: Sequence[Chart], is_same: bool) -> Message:
    """The charts: new figures, or new values for those that the page has."""
    if not is_same:
        return {"html": render_charts(charts)}
    return {
        "charts": [
            {"json": chart.to_json(), "description": chart.describe(), "rows": render_chart_rows(chart)}
            for chart in charts
        ]
    }
