"""Convert Kubernetes objects to the status of jobs and nodes. Pure: the objects come from the API
server; no requests are made.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from phalanx.errors import ExitCode
from phalanx.jobs.backends.base import PAUSED_PREFIX, BackendNode, NodeService
from phalanx.jobs.backends.kubernetes.manifest import (
    CONTAINER_NAME,
    INDEX_ANNOTATION,
    NAME_ANNOTATION,
    PAUSE_ANNOTATION,
    QUEUE_LABEL,
    RUN_ANNOTATION,
)
from phalanx.jobs.spec import JobState, JobStatus, state_from_exit_code

KubernetesObject = Mapping[str, Any]

ATTEMPT_LABEL = "jobset.sigs.k8s.io/restart-attempt"
EXIT_CODE_PATTERN = re.compile(r"failed with exit code (\d+) ")
"""The exit code in a message of the Job controller."""
EXIT_CODE_MEANINGS: Mapping[int | None, str] = {
    ExitCode.USAGE: "it was called wrongly",
    ExitCode.DATA: "its data are bad",
    ExitCode.RECIPE: "its recipe is bad",
    ExitCode.GAVE_UP: "it gave up: no progress",
    ExitCode.UNFINISHED: "it stopped before its end",
    ExitCode.UNFIT_NODE: "it found its node unfit",
}

REASON_ANNOTATION, ACTOR_ANNOTATION = "phalanx-drain-reason", "phalanx-drain-actor"
"""Annotations of a node that Phalanx has cordoned."""
GPU_RESOURCES = ("nvidia.com/gpu", "amd.com/gpu")


def parse_status(
    job_id: str, workload: KubernetesObject, jobs: Sequence[KubernetesObject], pods: Sequence[KubernetesObject]
) -> JobStatus:
    """Return the status of a job from its JobSet or TrainJob, its Jobs and its pods."""
    metadata, status = workload["metadata"], workload.get("status") or {}
    pods = select_latest_pods(pods)
    done, failed = find_condition(status, "Completed", "Complete"), find_condition(status, "Failed")
    over = done or failed
    state, code, reason = JobState.QUEUED, None, None
    if done:
        state, code = JobState.DONE, 0
    elif failed:
        state, code, reason = _parse_failure(failed, jobs, pods)
    elif metadata.get("deletionTimestamp"):
        state, reason = JobState.CANCELLED, "it is being ended"
    elif workload.get("spec", {}).get("suspend") or find_condition(status, "Suspended"):
        state, reason = _parse_suspended(metadata, pods)
    else:
        state, reason = _parse_running(pods)
    restarts = status.get("restarts", 0)
    started = [when for when in map(_pod_started_at, pods) if when is not None]
    return JobStatus(
        id=job_id,
        name=metadata.get("annotations", {}).get(NAME_ANNOTATION, metadata["name"]),
        state=state,
        exit_code=code,
        num_attempts=restarts + bool(started or over or restarts),
        nodes=tuple(dict.fromkeys(pod["spec"]["nodeName"] for pod in pods if pod["spec"].get("nodeName"))),
        reason=reason,
        submitted_at=parse_timestamp(metadata.get("creationTimestamp")),
        started_at=min(started, default=None),
        ended_at=parse_timestamp(over.get("lastTransitionTime")) if over else None,
        run_dir=metadata.get("annotations", {}).get(RUN_ANNOTATION),
    )


def select_latest_pods(pods: Iterable[KubernetesObject]) -> list[KubernetesObject]:
    """The pods of the last attempt, in the order of their nodes."""
    pods = list(pods)
    last = max(map(_pod_attempt, pods), default=0)
    return sorted((pod for pod in pods if _pod_attempt(pod) == last), key=pod_index)


def pod_index(pod: KubernetesObject) -> int:
    """Which node of its job a pod is."""
    metadata = pod["metadata"]
    return int({**metadata.get("labels", {}), **metadata.get("annotations", {})}.get(INDEX_ANNOTATION, 0))


def find_condition(status: KubernetesObject, *names: str) -> KubernetesObject | None:
    """The first of an object's conditions with one of these names that holds."""
    for found in status.get("conditions") or ():
        if found["type"] in names and found["status"] == "True":
            return dict(found)
    return None


def parse_timestamp(timestamp: str | None) -> float | None:
    """Unix seconds of a time as Kubernetes writes it."""
    return None if timestamp is None else datetime.fromisoformat(timestamp).timestamp()


def _parse_failure(
    failed: KubernetesObject, jobs: Sequence[KubernetesObject], pods: Sequence[KubernetesObject]
) -> tuple[JobState, int | None, str]:
    """Return state, exit code and reason of a failed job, by the Job's condition: the JobSet's says less."""
    causes = [cause for cause in (find_condition(job.get("status") or {}, "Failed") for job in jobs) if cause]
    cause = min(causes, key=lambda one: str(one.get("lastTransitionTime", "")), default=failed)
    message = f"{cause.get('reason', '')}: {cause.get('message', '')}".strip(": ")
    if cause.get("reason") == "DeadlineExceeded":
        return JobState.INTERRUPTED, _leader_code(pods), "it reached its time limit"
    named = EXIT_CODE_PATTERN.search(message)
    code = int(named[1]) if named else _leader_code(pods)
    if code in EXIT_CODE_MEANINGS:
        message = f"{EXIT_CODE_MEANINGS[code]} ({message})"
    if failed.get("reason") == "ReachedMaxRestarts":
        message = f"started again as often as allowed; {message}"
    state = JobState.FAILED if code in (None, 0) else state_from_exit_code(code)
    return state, code, message


def _parse_suspended(metadata: KubernetesObject, pods: Sequence[KubernetesObject]) -> tuple[JobState, str]:
    """Return state and reason of a suspended job: it runs until its pods have saved and ended."""
    if any(pod.get("status", {}).get("phase") == "Running" for pod in pods):
        return JobState.RUNNING, "saves, since it is suspended"
    if (pause_reason := metadata.get("annotations", {}).get(PAUSE_ANNOTATION)) is not None:
        return JobState.QUEUED, f"{PAUSED_PREFIX}{pause_reason}"
    queue = metadata.get("labels", {}).get(QUEUE_LABEL)
    return JobState.QUEUED, "it is suspended" if queue is None else f"waits for the queue {queue} to admit it"


def _parse_running(pods: Sequence[KubernetesObject]) -> tuple[JobState, str | None]:
    if not pods:
        return JobState.QUEUED, "its pods are not there yet"
    waiting = [pod for pod in pods if pod.get("status", {}).get("phase", "Pending") == "Pending"]
    if not waiting:
        return JobState.RUNNING, None
    why = f"node {pod_index(waiting[0])} waits: {_why_pod_waits(waiting[0])}"
    if len(waiting) == len(pods):
        return JobState.QUEUED, why
    return JobState.RUNNING, f"{len(pods) - len(waiting)} of {len(pods)} nodes run; {why}"


def _why_pod_waits(pod: KubernetesObject) -> str:
    """Return why a pod does not run: it cannot be scheduled, or its container cannot be created."""
    status = pod.get("status", {})
    for found in status.get("conditions") or ():
        if found["type"] == "PodScheduled" and found["status"] == "False":
            return found.get("message") or "no machine has enough free resources"
    for container in status.get("containerStatuses") or ():
        waiting_state = container.get("state", {}).get("waiting")
        if waiting_state:
            return ": ".join(filter(None, (waiting_state.get("reason"), waiting_state.get("message"))))
    return "its container is being made"


def _leader_code(pods: Sequence[KubernetesObject]) -> int | None:
    """The exit code of node 0."""
    for pod in pods:
        if pod_index(pod) == 0:
            for container in pod.get("status", {}).get("containerStatuses") or ():
                ended = container.get("state", {}).get("terminated")
                if container["name"] == CONTAINER_NAME and ended:
                    return int(ended["exitCode"])
    return None


def _pod_started_at(pod: KubernetesObject) -> float | None:
    for container in pod.get("status", {}).get("containerStatuses") or ():
        for state in ("running", "terminated"):
            moment = container.get("state", {}).get(state, {}).get("startedAt")
            if moment:
                return parse_timestamp(moment)
    return None


def _pod_attempt(pod: KubernetesObject) -> int:
    return int(pod["metadata"].get("labels", {}).get(ATTEMPT_LABEL, 0))


def parse_node(
    node: KubernetesObject, pods: Iterable[KubernetesObject], jobs: Mapping[str, tuple[str, ...]]
) -> BackendNode:
    """Return a node. `pods`: those of jobs on any node; `jobs`: ids of the jobs on each node, by its name."""
    metadata, spec, status = node["metadata"], node.get("spec") or {}, node.get("status") or {}
    name, annotations = metadata["name"], metadata.get("annotations") or {}
    is_ready = find_condition(status, "Ready") is not None
    is_cordoned = bool(spec.get("unschedulable"))
    own_pods = (pod for pod in pods if pod["spec"].get("nodeName") == name)
    reason = annotations.get(REASON_ANNOTATION) if is_cordoned else None
    if reason is not None and (actor := annotations.get(ACTOR_ANNOTATION)):
        reason = f"{reason} ({actor})"
    return BackendNode(
        name=name,
        state=("Ready" if is_ready else "NotReady") + (",SchedulingDisabled" if is_cordoned else ""),  # as in kubectl
        service=NodeService.DRAINED if is_cordoned else NodeService.OPEN if is_ready else NodeService.DOWN,
        jobs=jobs.get(name, ()),
        reason=reason if is_ready or reason else _why_not_ready(status),
        num_gpus=sum(int((status.get("capacity") or {}).get(resource, 0)) for resource in GPU_RESOURCES),
        host_names=tuple(pod["spec"].get("hostname") or pod["metadata"]["name"] for pod in own_pods),
    )


def make_cordon(reason: str | None, actor: str | None) -> dict[str, Any]:
    """Return the change that cordons a node, or without a reason uncordons it. None removes an annotation."""
    return {
        "metadata": {"annotations": {REASON_ANNOTATION: reason, ACTOR_ANNOTATION: actor}},
        "spec": {"unschedulable": reason is not None},
    }


def _why_not_ready(status: KubernetesObject) -> str | None:
    for condition in status.get("conditions") or ():
        if condition["type"] == "Ready":
            return str(condition.get("message") or condition.get("reason"))
    return "its kubelet has not reported"
