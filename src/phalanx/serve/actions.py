"""What a browser with the token may do: cancel a job, drain a node, add a note to a run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import parse_qs

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from phalanx.errors import UsageError
from phalanx.run import Run
from phalanx.run.notes import add_note
from phalanx.serve.access import Access, describe_refusal
from phalanx.serve.job_pages import JobReader
from phalanx.serve.node_actions import NodeActions

MAX_FORM_BYTES = 1 << 14
Form = Mapping[str, str]
"""Values of a form by name."""


@dataclass(frozen=True)
class Actions:
    """The routes of all actions. Each answers with a sentence."""

    access: Access
    jobs: JobReader
    node_actions: NodeActions
    find_run: Callable[[str], Run | None]
    wall_clock: Callable[[], float]

    def make_routes(self) -> list[Route]:
        """The routes."""
        return [
            Route("/jobs/cancel", self.cancel, methods=["POST"]),
            Route("/run/{id}/note", self.note, methods=["POST"]),
            Route("/nodes/drain", self.drain, methods=["POST"]),
            Route("/nodes/undrain", self.undrain, methods=["POST"]),
        ]

    async def cancel(self, request: Request) -> Response:
        """Cancel a job."""

        def act(form: Form) -> str:
            self.jobs.cancel(form.get("job", ""))
            return f"Job {form.get('job', '')} is being cancelled."

        return await self._act(request, act)

    async def note(self, request: Request) -> Response:
        """Add a note to a run."""
        if (run := self.find_run(request.path_params["id"])) is None:
            return PlainTextResponse("There is no such run.", 404)

        def act(form: Form) -> str:
            add_note(run, self.node_actions.actor, form.get("text", ""), self.wall_clock)
            return "The note is kept."

        return await self._act(request, act)

    async def drain(self, request: Request) -> Response:
        """Drain a node."""

        def act(form: Form) -> str:
            self.node_actions.drain(form.get("node", ""), form.get("reason", ""))
            return f"{form.get('node', '')} is drained."

        return await self._act(request, act)

    async def undrain(self, request: Request) -> Response:
        """Take a node back."""

        def act(form: Form) -> str:
            self.node_actions.undrain(form.get("node", ""), form.get("reason", ""))
            return f"{form.get('node', '')} is taken back."

        return await self._act(request, act)

    async def _act(self, request: Request, act: Callable[[Form], str]) -> Response:
        """Do what a form asks for, if its browser may."""
        if (refusal := describe_refusal(self.access, request)) is not None:
            return PlainTextResponse(refusal, 403)
        if (form := await read_form(request)) is None:
            return PlainTextResponse("The request is too long.", 413)
        try:
            return PlainTextResponse(await run_in_threadpool(act, form))
        except UsageError as error:
            return PlainTextResponse(str(error), 409)


async def read_form(request: Request) -> Form | None:
    """The values of a form; None where it is longer than any of this server's."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_FORM_BYTES:
            return None
    return {name: values[0] for name, values in parse_qs(body.decode(errors="replace")).items()}
