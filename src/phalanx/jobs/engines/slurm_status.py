"""What Slurm says of a job, read: `scontrol show job` and the result that the job's script leaves, since there need not
be an accounting database. Text goes in, a `Status` comes out."""

from dataclasses import dataclass
from datetime import datetime

from phalanx.jobs.spec import State, Status, state_of

LINES = ("Command", "WorkDir", "Comment", "StdErr", "StdIn", "StdOut")
"""Fields whose value is the rest of the line."""
WAITING = frozenset(
    {"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD", "PREEMPTED"}
)
"""A job that was preempted is queued again, unless the site cancels such jobs; then it is gone from Slurm soon."""
BUSY = frozenset(
    {"RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "STAGE_OUT", "REVOKED"}
)
ENDINGS = {
    "TIMEOUT": (State.UNFINISHED, "its time limit ended it"),
    "NODE_FAIL": (State.UNFINISHED, "a node failed"),
    "BOOT_FAIL": (State.UNFINISHED, "a node did not start"),
    "DEADLINE": (State.FAILED, "its deadline passed"),
    "OUT_OF_MEMORY": (State.FAILED, "the memory that it asked for ran out"),
}
REASONS = {
    "Resources": "waits for nodes to become free",
    "Priority": "waits behind jobs that come first",
    "BeginTime": "was queued again a moment ago",
    "JobArrayTaskLimit": "waits, as many members of its array run as may at once",
    "Dependency": "waits for other jobs",
    "DependencyNeverSatisfied": "waits for jobs that can no longer end as they should",
    "PartitionNodeLimit": "asks for more nodes than its partition gives one job, or than are in service",
    "PartitionTimeLimit": "asks for more time than its partition gives",
    "PartitionDown": "its partition is out of service",
    "ReqNodeNotAvail": "nodes that it needs are out of service",
    "BadConstraints": "no nodes are left that it could run on",
    "job_requeued_in_held_state": "is held; `scontrol release` lets it go on",
    "launch_failed_requeued_held": "could not be started on a node, and is held; `scontrol release` lets it go on",
    "JobHeldUser": "is held; `scontrol release` lets it go on",
    "JobHeldAdmin": "is held by an administrator",
    "QOSMaxJobsPerUserLimit": "waits, as its user has as many jobs running as the QOS allows",
}


KILLED = 128
"""What shells add to the number of the signal that ended a program, to make its exit code."""


@dataclass(frozen=True)
class Result:
    """What the batch script wrote at the end of an attempt."""

    code: int
    attempt: int
    nodes: tuple[str, ...]
    ended: float


def read_result(text: str) -> Result:
    """The contents of a job's `result`."""
    found = dict(line.split(" ", 1) for line in text.splitlines())
    return Result(int(found["code"]), int(found["attempt"]), tuple(found["nodes"].split()), float(found["ended"]))


def fields(text: str) -> dict[str, str]:
    """What `scontrol show job` prints, by name; what Slurm leaves open is not in it."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        name, equals, rest = line.strip().partition("=")
        if equals and name in LINES:
            found[name] = rest
            continue
        for word in line.split():
            name, equals, value = word.partition("=")
            if equals:
                found.setdefault(name, value)
    return {name: value for name, value in found.items() if value not in ("", "(null)", "N/A", "Unknown", "None")}


def live_status(
    id: str, name: str, found: dict[str, str], nodes: tuple[str, ...], submitted: float, result: Result | None
) -> Status:
    """The status of a job that Slurm knows, from its fields. `nodes`: its node list, written out."""
    word = found.get("JobState", "PENDING").partition(" ")[0]
    restarts = int(found.get("Restarts", "0"))
    waits = word in WAITING
    started = "NodeList" in found
    attempts = restarts + (1 if started and not waits else 0)
    over = not waits and word not in BUSY
    current = result if result is not None and (waits or (over and result.attempt == restarts)) else None
    state, reason = _meaning(word, found, current)
    return Status(
        id,
        name,
        state,
        code=_code(found, current, over, word),
        attempts=attempts,
        nodes=nodes or (result.nodes if result is not None else ()),
        reason=reason,
        submitted=submitted,  # Slurm's own changes whenever the job is queued again
        started=_time(found.get("StartTime")) if started and not waits else None,
        ended=_time(found.get("EndTime")) if over else None,
    )


def past_status(id: str, name: str, cancelled: bool, submitted: float, result: Result | None) -> Status:
    """The status of a job that Slurm has forgotten, from what it left in its folder."""
    if cancelled:
        state, reason = State.CANCELLED, "was cancelled"
    elif result is None:
        state, reason = State.UNFINISHED, "Slurm ended it and has forgotten why; its script did not get to its end"
    else:
        state, reason = state_of(result.code), ended_with(result.code)
    return Status(
        id,
        name,
        state,
        code=None if result is None else result.code,
        attempts=0 if result is None else result.attempt + 1,
        nodes=() if result is None else result.nodes,
        reason=reason,
        submitted=submitted,
        ended=None if result is None else result.ended,
    )


def ended_with(code: int) -> str:
    """An exit code in words."""
    return "ended well" if code == 0 else f"ended with exit code {code}"


def _meaning(word: str, found: dict[str, str], result: Result | None) -> tuple[State, str | None]:
    if word in WAITING:
        reason = found.get("Reason", "")
        return State.QUEUED, REASONS.get(reason.partition(",")[0].strip("("), reason or None)
    if word in BUSY:
        return State.RUNNING, None if word == "RUNNING" else word.lower()
    if word == "CANCELLED":
        return State.CANCELLED, "was cancelled"
    if word == "COMPLETED":
        return State.DONE, ended_with(0)
    killed = result is None or result.code >= KILLED
    if result is not None and (word == "FAILED" or (word in ("TIMEOUT", "NODE_FAIL") and not killed)):
        how = ended_with(result.code)
        return state_of(result.code), f"{ENDINGS[word][1]}; it {how}" if word in ENDINGS else how
    if word in ENDINGS:
        return ENDINGS[word]
    return State.FAILED, f"Slurm calls it {word}"


def _code(found: dict[str, str], result: Result | None, over: bool, word: str) -> int | None:
    if result is not None:
        return result.code
    code, _, number = found.get("ExitCode", "").partition(":")
    if not over or word == "CANCELLED" or not code.isdigit():
        return None
    return KILLED + int(number) if number not in ("", "0") else int(code)


def _time(text: str | None) -> float | None:
    try:
        return None if text is None else datetime.fromisoformat(text).timestamp()
    except ValueError:  # the user has set SLURM_TIME_FORMAT
        return None
