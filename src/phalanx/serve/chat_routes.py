"""Chat with the model of a run from its page: one model at a time, in a process of its own."""

import asyncio
import json
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from html import escape

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from phalanx.data.chat_template import find_chat_template
from phalanx.errors import PhalanxError
from phalanx.run import Run
from phalanx.serve.access import Access, describe_refusal
from phalanx.serve.chat_worker import DONE, REQUESTS, ChatRequest

MAX_REQUEST_BYTES = 1 << 20
WORKER_COMMAND = (sys.executable, "-m", "phalanx.serve.chat_worker")
_FORM = """<div role="log" aria-label="Dialogue"></div>
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
    return f'<h2>Chat</h2><div id="chat" data-address="{escape(address)}/chat">{_FORM}</div>'


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
            process.stdin.write(REQUESTS.dump_json(request) + b"\n")
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
        self._is_answering = line not in ("", DONE)
        return line or json.dumps({"error": f"The process with the model ended with exit code {await process.wait()}."})


async def answer_chat(chat: ChatProcess, access: Access, request: Request, run: Run) -> Response:
    """Stream the answer to the messages that a browser posts."""
    if (refusal := describe_refusal(access, request)) is not None:
        return PlainTextResponse(refusal, 403)
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_REQUEST_BYTES:
            return PlainTextResponse("The request is too long.", 413)
    try:
        asked = REQUESTS.validate_json(body)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        return PlainTextResponse(f"The request is no dialogue: {where}: {problem['msg']}", 400)
    return StreamingResponse(chat.stream_answer(str(run.path), asked), media_type="text/event-stream")
