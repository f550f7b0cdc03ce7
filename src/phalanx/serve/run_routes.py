"""The routes of a run: its page, logs, the comparison with others, and the chat with its model: one model at a time, in
a process of its own."""

import asyncio
import json
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from html import escape

from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from phalanx.data.chat_template import find_chat_template
from phalanx.errors import DataError, PhalanxError, UsageError
from phalanx.observe.compare import compare_runs, render_comparison_body
from phalanx.observe.html_report.chart import Chart, render_chart_rows
from phalanx.observe.html_report.report import render_charts
from phalanx.run import Run
from phalanx.serve.access import Access, describe_refusal, read_body
from phalanx.serve.chat_worker import DONE_LINE, REQUEST_ADAPTER, ChatRequest
from phalanx.serve.job_pages import render_log_tail, render_logs
from phalanx.serve.live_run import X_NAMES, LiveRuns, render_reading_note, render_run
from phalanx.serve.page_context import Message, PageContext
from phalanx.serve.pages import render_problem
from phalanx.serve.run_index import RunIndex

MAX_REQUEST_BYTES = 1 << 20
WORKER_COMMAND = (sys.executable, "-m", "phalanx.serve.chat_worker")
_CHAT_FORM = """<div role="log" aria-label="Dialogue"></div>
<form><textarea name="message" rows="2" required aria-label="Message"></textarea>
<button>Send</button> <button type="button" disabled>Stop</button> <button type="button">Clear</button></form>"""


def render_chat(run: Run, address: str, refusal: str | None) -> str:
    """The chat of a run's page, or why there is none; empty without a chat template."""
    try:
        if find_chat_template(run.companions) is None:
            return ""
    except PhalanxError as error:
        refusal = str(error)
    if refusal is not None:
        return f'<h2>Chat</h2><p class="note">{escape(refusal)}</p>'
    return f'<h2>Chat</h2><div id="chat" data-address="{escape(address)}/chat">{_CHAT_FORM}</div>'


class ChatProcess:
    """The process with the model that was asked last. Requests wait for each other."""

    def __init__(self, command: Sequence[str] = WORKER_COMMAND) -> None:
        self._command = command
        self._lock = asyncio.Lock()
        self._location = ""
        self._process: Process | None = None
        self._is_answering = False

    async def stream_answer(self, location: str, request: ChatRequest) -> AsyncIterator[str]:
        """Yield the server-sent events of an answer. The answer stops when the browser leaves."""
        async with self._lock:
            process = await self._open(location)
            assert process.stdin is not None
            process.stdin.write(REQUEST_ADAPTER.dump_json(request) + b"\n")
            self._is_answering = True
            try:
                while self._is_answering:
                    yield f"data: {await self._read_line(process)}\n\n"
            finally:
                if self._is_answering and process.returncode is None:
                    process.send_signal(signal.SIGINT)

    async def _open(self, location: str) -> Process:
        """Return the process of a run's model; that of another run ends."""
        while self._process is not None and self._is_answering:  # an answer that was stopped
            await self._read_line(self._process)
        if self._process is not None and self._process.returncode is None:
            if location == self._location:
                return self._process
            self._process.kill()
            await self._process.wait()
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            location,
            stdin=PIPE,
            stdout=PIPE,
            start_new_session=True,  # Ctrl-C of the server is not its stop button
        )
        self._location = location
        return self._process

    async def _read_line(self, process: Process) -> str:
        """Return a line of an answer; of a process that ended an error."""
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode().rstrip("\n")
        self._is_answering = line not in ("", DONE_LINE)
        return line or json.dumps({"error": f"The process with the model ended with exit code {await process.wait()}."})


async def answer_chat(chat: ChatProcess, access: Access, request: Request, run: Run) -> Response:
    """Stream the answer to the messages that a browser posts."""
    if (refusal := describe_refusal(access, request)) is not None:
        return PlainTextResponse(refusal, 403)
    if (body := await read_body(request, MAX_REQUEST_BYTES)) is None:
        return PlainTextResponse("The request is too long.", 413)
    try:
        asked = REQUEST_ADAPTER.validate_json(body)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        return PlainTextResponse(f"The request is no dialogue: {where}: {problem['msg']}", 400)
    return StreamingResponse(chat.stream_answer(str(run.path), asked), media_type="text/event-stream")


MAX_COMPARED_RUNS = 6


@dataclass
class RunRoutes:
    """The handlers."""

    index: RunIndex
    context: PageContext
    live_runs: LiveRuns = field(default_factory=LiveRuns)
    chat: ChatProcess = field(default_factory=ChatProcess)

    async def show_run(self, request: Request) -> Response:
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
