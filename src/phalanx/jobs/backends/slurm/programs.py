"""Run Slurm's programs, and read what they say about jobs and nodes: `squeue` lists jobs, `sinfo` nodes, and `scontrol
update` drains and undrains them. There may be no accounting database: what Slurm has forgotten of a job is read from
the result file of its script.
"""

import logging
import math
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from phalanx.errors import UsageError
from phalanx.jobs.backends.base import BackendNode, NodeService
from phalanx.jobs.backends.slurm.batch_script import SlurmResult
from phalanx.jobs.spec import Job, JobState, JobStatus, state_from_exit_code

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
    """Whether a job of Slurm runs a script (the end of its path): the numbers of jobs may start again."""
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
        reason = f"{FINAL_STATES[slurm_state][1]}; it {how}" if slurm_state in FINAL_STATES else how
        return state_from_exit_code(result.exit_code), reason
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


logger = logging.getLogger(__name__)

RunProgram = Callable[[Sequence[str]], tuple[int, str, str]]
"""Runs a program; its exit code (127: there is none), what it printed, and its errors."""

COMMAND_TIMEOUT_S = 600.0
"""Time limit of one of Slurm's programs, which retry for a while to reach a controller."""


SIZES_COMMAND = ("sinfo", "--noheader", "--Node", "--format=%c %m %G")
MAX_CORES_PER_WORKER = 4
"""Cores for each worker on CPUs, where nodes have as many."""
MIN_NODE_MIB = 1024
"""A node with less has no RealMemory in slurm.conf: the default is 1 MiB."""

NODE_COLUMNS = {
    "name": ("nodelist", 256),
    "host": ("nodehost", 256),
    "state": ("statelong", 64),
    "gres": ("gres", 512),
    "user": ("user", 64),
    "reason": ("reason", 1024),
}
"""Columns of `sinfo --Format`, as QUEUE_COLUMNS. The reason comes last: it may hold any character."""
NODE_FORMAT = ",".join(f"{name}:{width}" for name, width in NODE_COLUMNS.values())
SINFO_COMMAND = ("sinfo", "--noheader", "--Node", "--all", f"--Format={NODE_FORMAT}")
SQUEUE_COMMAND = ("squeue", "--noheader", "--all", "--array", "--states=running,completing", "--format=%i %N")
DRAINED_STATES = ("drain", "fail")
"""Beginnings of states in which an administrator keeps new jobs away; `drained*` is one that does not answer, too."""
OPEN_STATES = ("idle", "mixed", "alloc", "comp", "plan", "resv", "reserved", "maint")
PERMISSION_TEXTS = ("Invalid user id", "Access/permission denied")
"""Answers of `scontrol update` to a user that may not change nodes."""
UNKNOWN_TEXTS = ("", "none", "Unknown", "(null)")


def run_program(argv: Sequence[str]) -> tuple[int, str, str]:
    begun = time.perf_counter()
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL, timeout=COMMAND_TIMEOUT_S
        )
    except FileNotFoundError:
        return 127, "", f"{argv[0]}: not found"
    except subprocess.TimeoutExpired:
        return 1, "", f"{argv[0]} did not answer within {COMMAND_TIMEOUT_S:.0f} s"
    logger.debug("%s: exit code %d in %.2f s", shlex.join(argv), done.returncode, time.perf_counter() - begun)
    return done.returncode, done.stdout, done.stderr


def clean_error(err: str) -> str:
    """Slurm's words, in one line, without what it puts before them."""
    if "Could not establish a configuration source" in err:
        return (
            "Slurm's programs find no slurm.conf on this machine; submit from a login node of the cluster, or set "
            "SLURM_CONF to the path of the cluster's slurm.conf"
        )
    lines = [re.sub(r"^(\w+: )?(error: )?", "", line).strip() for line in err.splitlines()]
    return "; ".join(dict.fromkeys(line for line in lines if line)) or "it failed without a word"


@dataclass(frozen=True)
class NodeSize:
    """CPUs, MiB of memory and GPUs of a node."""

    cpus: int
    memory_mib: int
    gpus: int


def parse_node_sizes(text: str) -> list[NodeSize]:
    """Parse what SIZES_COMMAND prints; lines of another form are left out."""
    sizes = []
    for line in text.splitlines():
        if match := re.fullmatch(r"(\d+)\+? (\d+)\+? (.*)", line.strip()):
            gpus = sum(int(count) for count in re.findall(r"\bgpu(?::[^:,()]+)?:(\d+)", match[3]))
            sizes.append(NodeSize(int(match[1]), int(match[2]), gpus))
    return sizes


def add_node_share(job: Job, sizes: Sequence[NodeSize]) -> Job:
    """Return the job with cores and memory, where it leaves them open: of a node the share that its GPUs are, whole
    nodes for all GPUs, and without GPUs a few cores for each worker. `sizes`: the nodes that it may get."""
    fitting = [size for size in sizes if size.gpus >= job.gpus_per_node]
    is_exclusive = job.backend_options.get("exclusive", "no") not in ("no", "false")
    if not fitting:
        logger.warning(
            "job %s: sinfo does not say how large nodes are; the job asks for a few cores a worker", job.name
        )
        return job if job.cpus_per_node else replace(job, cpus_per_node=job.min_cpus_per_node)
    shares = [1.0 if is_exclusive or not job.gpus_per_node else job.gpus_per_node / size.gpus for size in fitting]
    cpus = min(math.floor(size.cpus * share) for size, share in zip(fitting, shares, strict=True))
    if not job.gpus_per_node and not is_exclusive:
        cpus = min(cpus, MAX_CORES_PER_WORKER * job.workers_per_node)
    memory_mib = min(math.floor(size.memory_mib * share) for size, share in zip(fitting, shares, strict=True))
    memory_bytes = memory_mib * 2**20 if job.gpus_per_node and memory_mib >= MIN_NODE_MIB else None
    return replace(job, cpus_per_node=job.cpus_per_node or max(1, cpus), memory_bytes=job.memory_bytes or memory_bytes)


def parse_nodes(nodes_text: str, jobs_text: str) -> list[BackendNode]:
    """Return the nodes of both outputs. A node of several partitions is printed once for each of them."""
    jobs = _parse_jobs(jobs_text)
    found: dict[str, BackendNode] = {}
    for line in nodes_text.splitlines():
        row = split_columns(line, NODE_COLUMNS)
        if row["name"] and row["name"] not in found:
            found[row["name"]] = BackendNode(
                name=row["name"],
                state=row["state"],
                service=_parse_service(row["state"]),
                jobs=tuple(jobs.get(row["name"], ())),
                reason=_format_reason(row),
                num_gpus=count_gpus(row["gres"]),
                host_names=(row["host"],) if row["host"] not in ("", row["name"]) else (),
            )
    return list(found.values())


def count_gpus(gres: str) -> int:
    """Return the GPUs of a node's generic resources: `gpu:h100:8(S:0-1),nic:4` has 8."""
    kinds = (part.split(":") for part in re.sub(r"\([^)]*\)", "", gres).split(","))
    return sum(int(kind[-1]) if kind[-1].isdecimal() else 1 for kind in kinds if kind[0] == "gpu")


def _parse_service(state: str) -> NodeService:
    if state.startswith(DRAINED_STATES):
        return NodeService.DRAINED
    is_answering = not state.endswith("*")
    return NodeService.OPEN if is_answering and state.startswith(OPEN_STATES) else NodeService.DOWN


def _format_reason(row: Mapping[str, str]) -> str | None:
    if row["reason"] in UNKNOWN_TEXTS:
        return None
    user = re.sub(r"\(.*", "", row["user"])  # "ada(1000)"
    return row["reason"] if user in UNKNOWN_TEXTS else f"{row['reason']} ({user})"


def _parse_jobs(text: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        id, _, nodes = line.strip().partition(" ")
        for node in expand_hostlist(nodes):
            found.setdefault(node, []).append(id)
    return found


class SlurmNodes:
    """The nodes of a Slurm: NodeBackend's part of its backend."""

    def __init__(self, run_program: RunProgram):
        self._run_program = run_program

    def list_nodes(self) -> list[BackendNode]:
        """Return the nodes of all partitions, with the jobs of all users on them."""
        return parse_nodes(self._run_checked(SINFO_COMMAND), self._run_checked(SQUEUE_COMMAND))

    def drain_node(self, node: str, reason: str, actor: str) -> None:
        """Drain a node. Slurm records its own user as the actor."""
        self._update_node(node, "State=DRAIN", f"Reason={reason}")

    def undrain_node(self, node: str) -> None:
        self._update_node(node, "State=RESUME")

    def _run_checked(self, argv: Sequence[str], what: str = "slurm") -> str:
        """Run a program and return what it printed. Raises UsageError, with `what` in front, when it fails."""
        code, out, err = self._run_program(argv)
        if code:
            raise UsageError(f"{what}: {clean_error(err)}")
        return out

    def _update_node(self, node: str, *changes: str) -> None:
        code, _, err = self._run_program(("scontrol", "update", f"NodeName={node}", *changes))
        if code and any(text in err for text in PERMISSION_TEXTS):  # Slurm's level of an operator is not enough
            raise UsageError(
                f"{node}: Slurm refuses it to your user; it takes root, SlurmUser, or a user with "
                "`sacctmgr modify user NAME set adminlevel=admin`"
            )
        if code:
            raise UsageError(f"{node}: {clean_error(err)}")
