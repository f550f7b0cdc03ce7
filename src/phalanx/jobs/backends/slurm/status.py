"""Parse the status of a job from `squeue` and from the result file of the job's script: there may be no accounting
database. Pure: text in, `JobStatus` out."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from phalanx.jobs.spec import JobState, JobStatus, state_from_exit_code

QUEUE_COLUMNS = {
    "JobId": ("jobarrayid", 64),
    "JobState": ("state", 32),
    "Restarts": ("restartcnt", 16),
    "ExitCode": ("exit_code", 16),
    "StartTime": ("starttime", 32),
    "EndTime": ("endtime", 32),
    "Reason": ("reason", 256),
    "NodeList": ("nodelist", 1024),
    "Command": ("command", 1024),
}
"""Fields of a job by the names of `scontrol show job`, and the columns of `squeue --Format`: name and width, at which
squeue truncates. The command comes last: its path may hold any character, and squeue counts bytes."""
QUEUE_FORMAT = ",".join(f"{name}:{width}" for name, width in QUEUE_COLUMNS.values())
UNSET_VALUES = ("", "(null)", "N/A", "Unknown", "None", "NONE")
QUEUED_STATES = frozenset(
    {"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD", "PREEMPTED"}
)
"""A preempted job is requeued, unless the site cancels such jobs; then Slurm soon forgets it."""
RUNNING_STATES = frozenset(
    {"RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "STAGE_OUT", "REVOKED"}
)
FINAL_STATES = {
    "TIMEOUT": (JobState.INTERRUPTED, "its time limit ended it"),
    "NODE_FAIL": (JobState.INTERRUPTED, "a node failed"),
    "BOOT_FAIL": (JobState.INTERRUPTED, "a node did not start"),
    "DEADLINE": (JobState.FAILED, "its deadline passed"),
    "OUT_OF_MEMORY": (JobState.FAILED, "the memory that it asked for ran out"),
}
REASON_TEXTS = {
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
    "job_requeued_in_held_state": "is held; `scontrol release` continues it",
    "launch_failed_requeued_held": "could not be started on a node, and is held; `scontrol release` continues it",
    "JobHeldUser": "is held; `scontrol release` continues it",
    "JobHeldAdmin": "is held by an administrator",
    "QOSMaxJobsPerUserLimit": "waits, as its user has as many jobs running as the QOS allows",
}


HELD_REASONS = ("job_requeued_in_held_state", "launch_failed_requeued_held", "JobHeldUser", "JobHeldAdmin")
COMPLETING_REASON = "completing"
"""Reason of a job that has ended, while Slurm frees its nodes."""
SIGNAL_EXIT_BASE = 128
"""Shells report a program that was ended by a signal with this plus the signal's number."""


@dataclass(frozen=True)
class SlurmResult:
    """Result file of the batch script at the end of an attempt."""

    exit_code: int
    attempt: int
    nodes: tuple[str, ...]
    ended: float


def parse_result(text: str) -> SlurmResult:
    """The contents of a job's `result`."""
    found = dict(line.split(" ", 1) for line in text.splitlines())
    return SlurmResult(int(found["code"]), int(found["attempt"]), tuple(found["nodes"].split()), float(found["ended"]))


def split_columns(line: str, columns: Mapping[str, tuple[str, int]]) -> dict[str, str]:
    """Return the columns of a line of squeue or sinfo by their names. `columns`: Slurm's name and width of each."""
    row, start = {}, 0
    for name, (_, width) in columns.items():
        row[name] = line[start : start + width].strip()
        start += width
    return row


def parse_queue(text: str) -> dict[str, dict[str, str]]:
    """What `squeue --noheader --Format=QUEUE_FORMAT` prints, by id: fields by name, without unset ones."""
    jobs = {}
    for line in text.removesuffix("\n").split("\n"):
        found = split_columns(line, QUEUE_COLUMNS)
        found["Reason"] = found["Reason"].replace(" ", "_")  # as scontrol writes it
        if found["ExitCode"].isdecimal():  # a status as of wait(2)
            status = int(found["ExitCode"])
            found["ExitCode"] = f"{status >> 8}:{status & 0x7F}"
        jobs[found["JobId"]] = {name: value for name, value in found.items() if value not in UNSET_VALUES}
    return jobs


def is_held(found: Mapping[str, str]) -> bool:
    """Whether a pending job waits to be released."""
    return found.get("Reason", "").strip("()") in HELD_REASONS


def is_command(found: Mapping[str, str], script: str) -> bool:
    """Whether a job that Slurm shows runs a script, given by the end of its path: after a restart of Slurm's numbers
    another job may have the same one."""
    command = found.get("Command", "")
    was_cut = len(command.encode()) >= QUEUE_COLUMNS["Command"][1]
    return command.endswith(script) or was_cut


def expand_hostlist(text: str) -> tuple[str, ...]:
    """Names of nodes as Slurm abbreviates them: `n[1-2,05],gpu7` is n1, n2, n05 and gpu7."""
    names: list[str] = []
    whole = re.sub(r"[^,]*\[[^]]*$", "", text)  # without what squeue has cut
    for part in re.findall(r"(?:[^,\[]|\[[^]]*\])+", whole):
        expanded = [""]
        for literal, ranges in re.findall(r"([^\[]+)|\[([^]]*)\]", part):
            numbers = [number for each in ranges.split(",") for number in _expand_range(each)] if ranges else [literal]
            expanded = [name + number for name in expanded for number in numbers]
        names += expanded
    return tuple(names)


def _expand_range(text: str) -> list[str]:
    first, _, last = text.partition("-")
    return [f"{number:0{len(first)}}" for number in range(int(first), int(last or first) + 1)]


def parse_live_status(
    id: str, name: str, found: Mapping[str, str], submitted: float, result: SlurmResult | None
) -> JobStatus:
    """The status of a job that Slurm knows, from its fields."""
    nodes = expand_hostlist(found.get("NodeList", ""))
    slurm_state = found.get("JobState", "PENDING").partition(" ")[0]
    restarts = int(found.get("Restarts", "0"))
    is_queued = slurm_state in QUEUED_STATES
    started = "NodeList" in found
    attempts = restarts + (1 if started and not is_queued else 0)
    is_over = not is_queued and slurm_state not in RUNNING_STATES
    current = result if result is not None and (is_queued or (is_over and result.attempt == restarts)) else None
    state, reason = _translate_state(slurm_state, found, current)
    return JobStatus(
        id,
        name,
        state,
        exit_code=_parse_exit_code(found, current, is_over, slurm_state),
        num_attempts=attempts,
        nodes=nodes or (result.nodes if result is not None else ()),
        reason=reason,
        submitted_at=submitted,  # Slurm's own changes whenever the job is queued again
        started_at=_parse_time(found.get("StartTime")) if started and not is_queued else None,
        ended_at=_parse_time(found.get("EndTime")) if is_over else None,
    )


def parse_past_status(id: str, name: str, cancelled: bool, submitted: float, result: SlurmResult | None) -> JobStatus:
    """The status of a job that Slurm has forgotten, from what it left in its folder."""
    if cancelled:
        state, reason = JobState.CANCELLED, "was cancelled"
    elif result is None:
        state, reason = JobState.INTERRUPTED, "Slurm ended it and has forgotten why; its script did not get to its end"
    else:
        state, reason = state_from_exit_code(result.exit_code), describe_exit(result.exit_code)
    return JobStatus(
        id,
        name,
        state,
        exit_code=None if result is None else result.exit_code,
        num_attempts=0 if result is None else result.attempt + 1,
        nodes=() if result is None else result.nodes,
        reason=reason,
        submitted_at=submitted,
        ended_at=None if result is None else result.ended,
    )


def describe_exit(code: int) -> str:
    return "ended well" if code == 0 else f"ended with exit code {code}"


def _translate_state(
    slurm_state: str, found: Mapping[str, str], result: SlurmResult | None
) -> tuple[JobState, str | None]:
    if slurm_state in QUEUED_STATES:
        reason = found.get("Reason", "")
        return JobState.QUEUED, REASON_TEXTS.get(reason.partition(",")[0].strip("("), reason or None)
    if slurm_state in RUNNING_STATES:
        return JobState.RUNNING, None if slurm_state == "RUNNING" else slurm_state.lower()
    if slurm_state == "CANCELLED":
        return JobState.CANCELLED, "was cancelled"
    if slurm_state == "COMPLETED":
        return JobState.DONE, describe_exit(0)
    killed = result is None or result.exit_code >= SIGNAL_EXIT_BASE
    if result is not None and (slurm_state == "FAILED" or (slurm_state in ("TIMEOUT", "NODE_FAIL") and not killed)):
        how = describe_exit(result.exit_code)
        return state_from_exit_code(
            result.exit_code
        ), f"{FINAL_STATES[slurm_state][1]}; it {how}" if slurm_state in FINAL_STATES else how
    if slurm_state in FINAL_STATES:
        return FINAL_STATES[slurm_state]
    return JobState.FAILED, f"Slurm calls it {slurm_state}"


def _parse_exit_code(found: Mapping[str, str], result: SlurmResult | None, over: bool, word: str) -> int | None:
    if result is not None:
        return result.exit_code
    code, _, number = found.get("ExitCode", "").partition(":")
    if not over or word == "CANCELLED" or not code.isdigit():
        return None
    return SIGNAL_EXIT_BASE + int(number) if number not in ("", "0") else int(code)


def _parse_time(text: str | None) -> float | None:
    try:
        return None if text is None else datetime.fromisoformat(text).timestamp()
    except ValueError:  # the user has set SLURM_TIME_FORMAT
        return None
