"""What is told to a job's driver on Ray, what the ends of its nodes mean, and what it says of itself in its log. Values
and functions of values: no Ray here."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from phalanx.errors import ExitCode

FINAL_EXIT_CODES = frozenset({ExitCode.USAGE, ExitCode.DATA, ExitCode.RECIPE, ExitCode.GAVE_UP})
MEANINGFUL_EXIT_CODES = FINAL_EXIT_CODES | {ExitCode.UNFINISHED, ExitCode.UNFIT_NODE}
"""Codes with which a node says what it wants."""
LOST_NODE_EXIT_CODE = 1 << 16
"""The code of a node that vanished: no program ends with it."""
KILLED_EXIT_CODES = frozenset({137, 143, -9, -15, LOST_NODE_EXIT_CODE})
"""How a command ends that was killed, with or without a shell around it: it could not say anything."""
NO_NODE = 3
"""Exit code of who was to send a signal and found no node that runs; any other says that it could not look."""
SNAPSHOT_FILE = "code.tar"
"""Where a job's code lies in the folder that Ray carries to each machine."""
JOB_ID_VARIABLE = "PHALANX_RAY_JOB_ID"
"""The variable in which a driver finds its job's id."""
DRIVER_LINE_PREFIX = "phalanx driver: "
"""Before each line that the driver itself writes."""
RAY_PREAMBLE_PREFIX = "Running entrypoint for job "
"""The last line of what Ray puts before a job's own lines."""


@dataclass(frozen=True)
class DriverSpec:
    """One job, as its driver needs it."""

    command: tuple[str, ...]
    working_dir: str
    """Where it is started; a relative one lies in the code that travelled with the job."""
    num_nodes: int
    gpus_per_node: int
    cpus_per_node: int
    memory_bytes: int | None
    time_limit_s: float | None
    warning_s: float
    environment: Mapping[str, str]
    secrets: tuple[str, ...]
    """Names of variables whose values stand in the job's file of secrets."""
    strategy: str
    placement_timeout_s: float
    """Seconds to wait for machines."""
    max_restarts: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "DriverSpec":
        fields = json.loads(text)
        return DriverSpec(**fields | {key: tuple(fields[key]) for key in ("command", "secrets")})

    def make_bundle(self) -> dict[str, float]:
        """What one node needs, in Ray's words."""
        wanted: dict[str, float] = {"CPU": self.cpus_per_node}
        if self.gpus_per_node:
            wanted["GPU"] = self.gpus_per_node
        if self.memory_bytes is not None:
            wanted["memory"] = self.memory_bytes
        return wanted


def secrets_path(folder: str, job_id: str) -> Path:
    """Where the values of a job's secrets lie until its driver has read them: in its folder, for its owner alone."""
    return Path(folder) / f".phalanx-secrets-{job_id}"


def actor_name(job_id: str, node: int) -> str:
    """Under which a node is found by who wants to send it a signal."""
    return f"{job_id}/{node}"


def decide_exit_code(ended: Sequence[tuple[int, int]]) -> int:
    """The code of an attempt from its nodes and their codes, in the order in which they ended. The first bad end
    decides when it says what it wants; else node 0 does, which leads; who was killed may be started again."""
    bad = [(node, code) for node, code in ended if code != 0]
    if not bad:
        return int(ExitCode.DONE)
    first = bad[0][1]
    if first in MEANINGFUL_EXIT_CODES:
        return first
    leader = dict(ended).get(0, first)
    if leader in MEANINGFUL_EXIT_CODES:
        return leader
    return int(ExitCode.UNFINISHED) if first in KILLED_EXIT_CODES else first


def killed(ended: Sequence[tuple[int, int]]) -> int | None:
    """The code of the program that ended an attempt because it was killed, if it was that, and no machine was lost."""
    first = next((code for _, code in ended if code != 0), None)
    return first if first in KILLED_EXIT_CODES - {LOST_NODE_EXIT_CODE} else None


def list_unfit_nodes(ended: Sequence[tuple[int, int]]) -> list[int]:
    """Nodes that said that they are."""
    return [node for node, code in ended if code == ExitCode.UNFIT_NODE]


def describe_shortage(spec: DriverSpec, machine_resources: Sequence[Mapping[str, float]]) -> str | None:
    """Why a job cannot have its nodes on machines with these resources; None when it can."""
    requested = spec.make_bundle()
    fits_per_machine = [
        min(int(machine.get(key, 0) // amount) for key, amount in requested.items()) for machine in machine_resources
    ]
    spread = spec.strategy == "STRICT_SPREAD"
    found = sum(min(fits, 1) if spread else fits for fits in fits_per_machine)
    if spec.strategy == "STRICT_PACK":
        found = max(fits_per_machine, default=0)
    if found >= spec.num_nodes:
        return None
    needs = ", ".join(f"{amount:g} {key}" for key, amount in requested.items())
    placement_text = (
        "each on a machine of its own" if spread else "on one machine" if "STRICT" in spec.strategy else "anywhere"
    )
    return (
        f"{spec.num_nodes} nodes with {needs} are wanted, {placement_text}; of {len(machine_resources)} machines "
        f"there is room for {found}"
    )


@dataclass(frozen=True)
class DriverState:
    """What a driver has said of itself."""

    num_attempts: int = 0
    nodes: tuple[str, ...] = ()
    is_waiting: bool = True
    reason: str | None = None


def parse_driver_state(lines: Sequence[str]) -> DriverState:
    """What stands in a job's log about its attempts."""
    found = DriverState()
    for line in lines:
        if line.startswith(DRIVER_LINE_PREFIX):
            text = line.removeprefix(DRIVER_LINE_PREFIX)
            if started := re.fullmatch(r"attempt (\d+) on (.*)", text):
                found = DriverState(int(started[1]), tuple(started[2].split(", ")), False)
            else:
                found = DriverState(found.num_attempts, found.nodes, text.startswith("waits"), text)
    return found


def strip_ray_preamble(log: str) -> list[str]:
    """A job's lines, without what Ray put before them."""
    lines = log.removesuffix("\n").split("\n") if log else []
    starts = [number for number, line in enumerate(lines) if line.startswith(RAY_PREAMBLE_PREFIX)]
    return lines[starts[0] + 1 :] if starts else []
