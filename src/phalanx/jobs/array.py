"""Arrays: several jobs under one name that are submitted together or not at all. Each is a job of its own, with its own
end and its own starts; member 2 of the array `sweep` is called `sweep.2`, whichever engine runs it."""

from collections.abc import Sequence
from dataclasses import replace

from phalanx.errors import PhalanxError, UsageError
from phalanx.jobs.backends.base import ArrayBackend, Backend, SubmitRequest
from phalanx.jobs.spec import Job


def make_array(name: str, jobs: Sequence[Job], max_parallel: int | None = None) -> tuple[Job, ...]:
    """Jobs as the members of an array. UsageError when two of them would train in one run."""
    runs: dict[str, int] = {}
    for index, job in enumerate(jobs):
        if job.run_dir is not None and (earlier := runs.setdefault(str(job.run_dir), index)) != index:
            raise UsageError(
                f"array {name}: members {earlier} and {index} would both train in {job.run_dir}; give their recipes "
                "different names"
            )
    return tuple(
        replace(job, name=f"{name}.{index}", array_name=name, max_parallel=max_parallel)
        for index, job in enumerate(jobs)
    )


def render_array(backend: Backend, jobs: Sequence[Job]) -> list[SubmitRequest]:
    """All that would be sent: one request where the engine knows arrays, else one for each member. UsageError when it
    cannot run one of them; nothing has been sent then."""
    if isinstance(backend, ArrayBackend):
        return [backend.render_array(jobs)]
    return [backend.render(job) for job in jobs]


def submit_array(backend: Backend, requests: Sequence[SubmitRequest]) -> list[str]:
    """Send it; returns the members' ids. When one cannot be sent, those before it are cancelled, and the error says
    so."""
    if isinstance(backend, ArrayBackend):
        (request,) = requests
        return backend.submit_array(request)
    submitted: list[str] = []
    try:
        for request in requests:
            submitted.append(backend.submit(request))
    except BaseException as error:
        not_cancelled = [job_id for job_id in submitted if not _try_cancel(backend, job_id)]
        if not isinstance(error, PhalanxError) or not submitted:
            raise
        cancelled_text = (
            f"the {len(submitted)} before it were cancelled"
            if len(submitted) > 1
            else "the one before it was cancelled"
        )
        if not_cancelled:
            cancelled_text = (
                f"of those before it, {', '.join(not_cancelled)} could not be cancelled: `phalanx jobs cancel` ends "
                "them"
            )
        raise UsageError(f"member {len(submitted)} could not be submitted: {error}; {cancelled_text}") from error
    return submitted


def _try_cancel(backend: Backend, job_id: str) -> bool:
    try:
        backend.cancel(job_id)
    except UsageError:
        return False
    return True
