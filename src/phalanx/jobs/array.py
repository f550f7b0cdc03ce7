"""Arrays: several jobs under one name that are submitted together or not at all. Each is a job of its own, with its own
end and its own starts; member 2 of the array `sweep` is called `sweep.2`, whichever engine runs it."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from phalanx.errors import PhalanxError, UsageError
from phalanx.jobs.engine import ArrayEngine, Engine, Request
from phalanx.jobs.spec import Job, Status


def array_of(name: str, jobs: Sequence[Job], at_most: int | None = None) -> tuple[Job, ...]:
    """Jobs as the members of an array. UsageError when two of them would train in one run."""
    runs: dict[str, int] = {}
    for index, job in enumerate(jobs):
        if job.run is not None and (other := runs.setdefault(str(job.run), index)) != index:
            raise UsageError(
                f"array {name}: members {other} and {index} would both train in {job.run}; give their recipes "
                "different names"
            )
    return tuple(replace(job, name=f"{name}.{index}", array=name, at_most=at_most) for index, job in enumerate(jobs))


def render_array(engine: Engine, jobs: Sequence[Job]) -> list[Request]:
    """All that would be sent: one request where the engine knows arrays, else one for each member. UsageError when it
    cannot run one of them; nothing has been sent then."""
    if isinstance(engine, ArrayEngine):
        return [engine.render_array(jobs)]
    return [engine.render(job) for job in jobs]


def submit_array(engine: Engine, requests: Sequence[Request]) -> list[str]:
    """Send it; returns the members' ids. When one cannot be sent, those before it are cancelled, and the error says
    so."""
    if isinstance(engine, ArrayEngine):
        (request,) = requests
        return engine.submit_array(request)
    sent: list[str] = []
    try:
        for request in requests:
            sent.append(engine.submit(request))
    except BaseException as error:
        left = [ident for ident in sent if not _cancelled(engine, ident)]
        if not isinstance(error, PhalanxError) or not sent:
            raise
        done = f"the {len(sent)} before it were cancelled" if len(sent) > 1 else "the one before it was cancelled"
        if left:
            done = f"of those before it, {', '.join(left)} could not be cancelled: `phalanx jobs cancel` ends them"
        raise UsageError(f"member {len(sent)} could not be submitted: {error}; {done}") from error
    return sent


def members(statuses: Iterable[Status], word: str) -> list[Status]:
    """Those that belong to an array, given by its name or by its id of an engine that has one."""
    return [
        status
        for status in statuses
        if (status.name.rpartition(".")[0] == word and status.name.rpartition(".")[2].isdecimal())
        or status.id.startswith(f"{word}_")
    ]


def _cancelled(engine: Engine, ident: str) -> bool:
    try:
        engine.cancel(ident)
    except UsageError:
        return False
    return True
