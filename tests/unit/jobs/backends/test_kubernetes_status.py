"""What the states of JobSets, Jobs and pods mean for a job."""

from typing import Any

import pytest

from phalanx.jobs.backends.kubernetes.status import parse_status
from phalanx.jobs.spec import JobState, JobStatus

T0, T1 = "2026-11-22T07:00:00Z", "2026-11-22T07:01:00Z"


def workload(*conditions: tuple[str, str], restarts: int = 0, **spec: Any) -> dict[str, Any]:
    found = [
        {"type": kind, "status": "True", "reason": reason, "message": "m", "lastTransitionTime": T1}
        for kind, reason in conditions
    ]
    metadata = {"name": "gpt", "creationTimestamp": T0, "annotations": {"phalanx-job": "GPT"}, "labels": {}}
    return {"metadata": metadata, "spec": spec, "status": {"conditions": found, "restarts": restarts}}


def pod(index: int, phase: str = "Running", attempt: int = 0, **status: Any) -> dict[str, Any]:
    metadata = {
        "name": f"gpt-workers-0-{index}-abcde",
        "annotations": {"batch.kubernetes.io/job-completion-index": str(index)},
        "labels": {"jobset.sigs.k8s.io/restart-attempt": str(attempt)},
    }
    return {"metadata": metadata, "spec": {"nodeName": f"m{index}"}, "status": {"phase": phase} | status}


def container(**state: Any) -> dict[str, Any]:
    return {"containerStatuses": [{"name": "node", "state": state}]}


def job(reason: str, message: str) -> dict[str, Any]:
    return {"status": {"conditions": [{"type": "Failed", "status": "True", "reason": reason, "message": message}]}}


def ended(code: int) -> tuple[str, str]:
    return (
        "PodFailurePolicy",
        f"Container node for pod a/b failed with exit code {code} matching FailJob rule at index 1",
    )


def read(thing: dict[str, Any], jobs: Any = (), pods: Any = ()) -> JobStatus:
    return parse_status("team-a/jobset/gpt", thing, jobs, pods)


def test_a_job_that_runs_says_where_and_since_when() -> None:
    started = container(running={"startedAt": T1})
    status = read(workload(restarts=2), pods=[pod(1, attempt=2, **started), pod(0, attempt=2), pod(0, attempt=1)])
    assert (status.state, status.nodes, status.num_attempts, status.name) == (JobState.RUNNING, ("m0", "m1"), 3, "GPT")
    assert status.started_at is not None
    assert status.submitted_at == status.started_at - 60


def test_a_job_that_waits_says_why() -> None:
    alone = [{"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available: 3 Insufficient gpu"}]
    status = read(workload(), pods=[pod(0, "Pending", conditions=alone)])
    assert (status.state, status.reason) == (
        JobState.QUEUED,
        "node 0 waits: 0/3 nodes are available: 3 Insufficient gpu",
    )
    assert status.num_attempts == 0


def test_an_image_that_cannot_be_had_is_named() -> None:
    waiting = container(waiting={"reason": "ImagePullBackOff", "message": "no such image x"})
    status = read(workload(), pods=[pod(0), pod(1, "Pending", **waiting)])
    assert status.state is JobState.RUNNING
    assert status.reason == "1 of 2 nodes run; node 1 waits: ImagePullBackOff: no such image x"


def test_a_paused_job_runs_until_its_pods_have_saved_and_ended() -> None:
    thing = workload(suspend=True)
    thing["metadata"]["annotations"]["phalanx-paused"] = "for power"
    assert read(thing, pods=[pod(0), pod(1, "Failed")]).state is JobState.RUNNING
    found = read(thing, pods=[pod(0, "Failed"), pod(1, "Failed")])
    assert (found.state, found.reason) == (JobState.QUEUED, "paused: for power")


def test_a_job_in_a_queue_names_it() -> None:
    thing = workload(suspend=True)
    thing["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "gpus"
    assert (read(thing).state, read(thing).reason) == (JobState.QUEUED, "waits for the queue gpus to admit it")


@pytest.mark.parametrize("name", ["Completed", "Complete"])
def test_a_job_that_is_done_has_code_0(name: str) -> None:
    status = read(
        workload((name, "AllJobsCompleted")), pods=[pod(0, "Succeeded", **container(terminated={"exitCode": 0}))]
    )
    assert (status.state, status.exit_code) == (JobState.DONE, 0)
    assert status.ended_at == status.submitted_at + 60  # type: ignore[operator]


@pytest.mark.parametrize(
    ("code", "state", "told"),
    [
        (93, JobState.FAILED, "it gave up: no progress"),
        (78, JobState.FAILED, "its recipe is bad"),
        (75, JobState.INTERRUPTED, "started again as often as allowed"),
        (77, JobState.INTERRUPTED, "it found its node unfit"),
        (137, JobState.FAILED, "exit code 137"),
    ],
)
def test_the_code_that_ended_a_job_is_read_from_its_condition(code: int, state: JobState, told: str) -> None:
    reason = "ReachedMaxRestarts" if code in (75, 77) else "FailJobSetAction"
    status = read(workload(("Failed", reason), restarts=1), jobs=[job(*ended(code))])
    assert (status.state, status.exit_code, status.num_attempts) == (state, code, 2)
    assert status.reason is not None
    assert told in status.reason


def test_any_other_code_is_read_from_node_0() -> None:
    over = [pod(0, "Failed", **container(terminated={"exitCode": 1, "startedAt": T0})), pod(1, "Running")]
    status = read(workload(("Failed", "FailJobSetAction")), jobs=[job("BackoffLimitExceeded", "too often")], pods=over)
    assert (status.state, status.exit_code, status.reason) == (JobState.FAILED, 1, "BackoffLimitExceeded: too often")


def test_the_time_limit_leaves_a_job_unfinished() -> None:
    status = read(workload(("Failed", "FailJobSetAction")), jobs=[job("DeadlineExceeded", "active too long")])
    assert (status.state, status.reason) == (JobState.INTERRUPTED, "it reached its time limit")


def test_a_job_that_is_being_deleted_is_cancelled() -> None:
    thing = workload()
    thing["metadata"]["deletionTimestamp"] = T1
    assert read(thing, pods=[pod(0)]).state is JobState.CANCELLED
