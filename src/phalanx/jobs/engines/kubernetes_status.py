"""What Kubernetes says of a job, in the words of `Status`. Pure: it reads the objects that the API server answered with
and asks nobody."""

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from phalanx.errors import ExitCode
from phalanx.jobs.engines.kubernetes_manifest import CONTAINER, INDEX, NAME, RUN
from phalanx.jobs.spec import State, Status, state_of

Object = Mapping[str, Any]

ATTEMPT = "jobset.sigs.k8s.io/restart-attempt"
CODE = re.compile(r"failed with exit code (\d+) ")
"""How the Job controller tells which code made it fail."""
MEANING: Mapping[int | None, str] = {
    ExitCode.USAGE: "it was called wrongly",
    ExitCode.DATA: "its data are bad",
    ExitCode.RECIPE: "its recipe is bad",
    ExitCode.GAVE_UP: "it gave up: no progress",
    ExitCode.UNFINISHED: "it stopped before its end",
    ExitCode.UNFIT_NODE: "it found its node unfit",
}


def status_of(job_id: str, workload: Object, jobs: Sequence[Object], pods: Sequence[Object]) -> Status:
    """What is known of a job from its JobSet or TrainJob, that one's Jobs and its pods."""
    metadata, status = workload["metadata"], workload.get("status") or {}
    pods = latest(pods)
    done, failed = condition(status, "Completed", "Complete"), condition(status, "Failed")
    over = done or failed
    state, code, reason = State.QUEUED, None, None
    if done:
        state, code = State.DONE, 0
    elif failed:
        state, code, reason = _failure(failed, jobs, pods)
    elif metadata.get("deletionTimestamp"):
        state, reason = State.CANCELLED, "it is being ended"
    elif workload.get("spec", {}).get("suspend") or condition(status, "Suspended"):
        queue = metadata.get("labels", {}).get("kueue.x-k8s.io/queue-name")
        reason = "it is suspended" if queue is None else f"waits for the queue {queue} to admit it"
    else:
        state, reason = _living(pods)
    restarts = status.get("restarts", 0)
    started = [when for when in map(_started, pods) if when is not None]
    return Status(
        id=job_id,
        name=metadata.get("annotations", {}).get(NAME, metadata["name"]),
        state=state,
        code=code,
        attempts=restarts + bool(started or over or restarts),
        nodes=tuple(dict.fromkeys(pod["spec"]["nodeName"] for pod in pods if pod["spec"].get("nodeName"))),
        reason=reason,
        submitted=seconds(metadata.get("creationTimestamp")),
        started=min(started, default=None),
        ended=seconds(over.get("lastTransitionTime")) if over else None,
        run=metadata.get("annotations", {}).get(RUN),
    )


def latest(pods: Iterable[Object]) -> list[Object]:
    """The pods of the last attempt, in the order of their nodes."""
    pods = list(pods)
    last = max(map(_attempt, pods), default=0)
    return sorted((pod for pod in pods if _attempt(pod) == last), key=index_of)


def index_of(pod: Object) -> int:
    """Which node of its job a pod is."""
    metadata = pod["metadata"]
    return int({**metadata.get("labels", {}), **metadata.get("annotations", {})}.get(INDEX, 0))


def condition(status: Object, *names: str) -> Object | None:
    """The first of an object's conditions with one of these names that holds."""
    for found in status.get("conditions") or ():
        if found["type"] in names and found["status"] == "True":
            return dict(found)
    return None


def seconds(moment: str | None) -> float | None:
    """Unix seconds of a time as Kubernetes writes it."""
    return None if moment is None else datetime.fromisoformat(moment).timestamp()


def _failure(failed: Object, jobs: Sequence[Object], pods: Sequence[Object]) -> tuple[State, int | None, str]:
    """The Job's own condition tells more than the JobSet's, which only says that some Job failed."""
    causes = [cause for cause in (condition(job.get("status") or {}, "Failed") for job in jobs) if cause]
    cause = min(causes, key=lambda one: str(one.get("lastTransitionTime", "")), default=failed)
    message = f"{cause.get('reason', '')}: {cause.get('message', '')}".strip(": ")
    if cause.get("reason") == "DeadlineExceeded":
        return State.UNFINISHED, _leader_code(pods), "it reached its time limit"
    named = CODE.search(message)
    code = int(named[1]) if named else _leader_code(pods)
    if code in MEANING:
        message = f"{MEANING[code]} ({message})"
    if failed.get("reason") == "ReachedMaxRestarts":
        message = f"started again as often as allowed; {message}"
    state = State.FAILED if code in (None, 0) else state_of(code)
    return state, code, message


def _living(pods: Sequence[Object]) -> tuple[State, str | None]:
    if not pods:
        return State.QUEUED, "its pods are not there yet"
    waiting = [pod for pod in pods if pod.get("status", {}).get("phase", "Pending") == "Pending"]
    if not waiting:
        return State.RUNNING, None
    why = f"node {index_of(waiting[0])} waits: {_why(waiting[0])}"
    if len(waiting) == len(pods):
        return State.QUEUED, why
    return State.RUNNING, f"{len(pods) - len(waiting)} of {len(pods)} nodes run; {why}"


def _why(pod: Object) -> str:
    """Why a pod does not run: nowhere to put it, or its container cannot be made."""
    status = pod.get("status", {})
    for found in status.get("conditions") or ():
        if found["type"] == "PodScheduled" and found["status"] == "False":
            return found.get("message") or "no machine has room for it"
    for container in status.get("containerStatuses") or ():
        told = container.get("state", {}).get("waiting")
        if told:
            return ": ".join(filter(None, (told.get("reason"), told.get("message"))))
    return "its container is being made"


def _leader_code(pods: Sequence[Object]) -> int | None:
    """The exit code of node 0."""
    for pod in pods:
        if index_of(pod) == 0:
            for container in pod.get("status", {}).get("containerStatuses") or ():
                ended = container.get("state", {}).get("terminated")
                if container["name"] == CONTAINER and ended:
                    return int(ended["exitCode"])
    return None


def _started(pod: Object) -> float | None:
    for container in pod.get("status", {}).get("containerStatuses") or ():
        for state in ("running", "terminated"):
            moment = container.get("state", {}).get(state, {}).get("startedAt")
            if moment:
                return seconds(moment)
    return None


def _attempt(pod: Object) -> int:
    return int(pod["metadata"].get("labels", {}).get(ATTEMPT, 0))
