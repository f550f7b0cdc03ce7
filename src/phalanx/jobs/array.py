"""Job arrays: several jobs under one name that are submitted together or not at all. Each member has its own state and
attempts; member 2 of the array `sweep` is called `sweep.2` on every backend."""

from collections.abc import Sequence
from dataclasses import replace

from phalanx.errors import PhalanxError, UsageError
from phalanx.jobs.backends.base import ArrayBackend, Backend, SubmitRequest
from phalanx.jobs.spec import Job


def make_array(name: str, jobs: Sequence[Job], max_parallel: int | None = None) -> tuple[Job, ...]:
    """Make jobs the members of an array. Raises UsageError when two of them would train in one run directory."""
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
    """Return what would be submitted: one request if the backend has arrays, else one per member.

    Raises UsageError when the backend cannot run a member, before anything is submitted.
    """
    if isinstance(backend, ArrayBackend):
        return [backend.render_array(jobs)]
    return [backend.render(job) for job in jobs]


def submit_array(backend: Backend, requests: Sequence[SubmitRequest]) -> list[str]:
    """Submit the array and return the ids of its members. If one cannot be submitted, those before it are cancelled,
    and the error says so."""
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
