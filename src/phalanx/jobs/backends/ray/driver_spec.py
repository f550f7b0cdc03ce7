"""Input of a job's driver on Ray, the meaning of its nodes' exit codes, and the state that it prints in its log. Values
and pure functions; does not import Ray."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from phalanx.errors import ExitCode
from phalanx.jobs.backends.base import PAUSED_PREFIX

FINAL_EXIT_CODES = frozenset({ExitCode.USAGE, ExitCode.DATA, ExitCode.RECIPE, ExitCode.GAVE_UP})
MEANINGFUL_EXIT_CODES = FINAL_EXIT_CODES | {ExitCode.UNFINISHED, ExitCode.UNFIT_NODE}
"""Exit codes that determine the exit code of the job."""
LOST_NODE_EXIT_CODE = 1 << 16
"""Code of a node that was lost; no program can exit with it."""
KILLED_EXIT_CODES = frozenset({137, 143, -9, -15, LOST_NODE_EXIT_CODE})
"""Exit codes of a killed command, with or without a shell around it."""
NO_NODE = 3
"""Exit code of the signal command when no node runs; any other code means that it failed."""
NOT_PAUSED = 4
"""Exit code of the resume command for a job that is not paused."""
SNAPSHOT_FILE = "code.tar"
"""Name of the snapshot in the directory that Ray copies to each machine."""
JOB_ID_VARIABLE = "PHALANX_RAY_JOB_ID"
"""Environment variable with the id of the driver's job."""
DRIVER_LINE_PREFIX = "phalanx driver: "
"""Prefix of lines that the driver prints."""
RAY_PREAMBLE_PREFIX = "Running entrypoint for job "
"""Last line that Ray prints before the job's own lines."""


@dataclass(frozen=True)
class DriverSpec:
    """The input of a job's driver."""

    command: tuple[str, ...]
    working_dir: str
    """Working directory; a relative path is below the snapshot."""
    num_nodes: int
    gpus_per_node: int
    cpus_per_node: int
    memory_bytes: int | None
    time_limit_s: float | None
    warning_s: float
    environment: Mapping[str, str]
    secrets: tuple[str, ...]
    """Names of variables with values in the job's secrets file."""
    strategy: str
    placement_timeout_s: float
    """Seconds to wait for machines."""
    max_restarts: int
    min_nodes: int | None = None
    """With how many nodes it may run; None: only with all of them."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "DriverSpec":
        fields = json.loads(text)
        return DriverSpec(**fields | {key: tuple(fields[key]) for key in ("command", "secrets")})

    @property
    def nodes_variable(self) -> str:
        """The value of PHALANX_NUM_NODES: N, or MIN:MAX."""
        return str(self.num_nodes) if self.min_nodes is None else f"{self.min_nodes}:{self.num_nodes}"

    def make_bundle(self) -> dict[str, float]:
        """Return the resources of one node as a Ray bundle."""
        wanted: dict[str, float] = {"CPU": self.cpus_per_node}
        if self.gpus_per_node:
            wanted["GPU"] = self.gpus_per_node
        if self.memory_bytes is not None:
            wanted["memory"] = self.memory_bytes
        return wanted


def secrets_path(folder: str, job_id: str) -> Path:
    """Return the path of the job's secrets file, which only its owner can read and which the driver removes."""
    return Path(folder) / f".phalanx-secrets-{job_id}"


def actor_name(job_id: str, node: int) -> str:
    """Return the actor name of a node, by which a signal reaches it."""
    return f"{job_id}/{node}"


def decide_exit_code(ended: Sequence[tuple[int, int]], min_nodes: int | None = None) -> int:
    """Return the exit code of an attempt from (node, code) pairs in the order in which the nodes ended. The first
    failure decides if its code is meaningful, else the leader, node 0, does. A killed node makes the attempt
    unfinished, so that it can be restarted."""
    bad = [(node, code) for node, code in ended if code != 0]
    if not bad or (min_nodes is not None and len(bad) < len(ended)):  # a node ends with 0 only when the run is done
        return int(ExitCode.DONE)
    first = bad[0][1]
    if first in MEANINGFUL_EXIT_CODES:
        return first
    leader = dict(ended).get(0, first)
    if leader in MEANINGFUL_EXIT_CODES:
        return leader
    return int(ExitCode.UNFINISHED) if first in KILLED_EXIT_CODES else first


def killed(ended: Sequence[tuple[int, int]]) -> int | None:
    """Return the exit code of the killed program that ended an attempt; None for another cause, or a lost machine."""
    first = next((code for _, code in ended if code != 0), None)
    return first if first in KILLED_EXIT_CODES - {LOST_NODE_EXIT_CODE} else None


def list_unfit_nodes(ended: Sequence[tuple[int, int]]) -> list[int]:
    """Return the nodes that ended with 77 (unfit node)."""
    return [node for node, code in ended if code == ExitCode.UNFIT_NODE]


def count_fitting_nodes(spec: DriverSpec, machine_resources: Sequence[Mapping[str, float]]) -> int:
    """Return how many nodes of a job fit on machines with these resources."""
    requested = spec.make_bundle()
    fits_per_machine = [
        min(int(machine.get(key, 0) // amount) for key, amount in requested.items()) for machine in machine_resources
    ]
    spread = spec.strategy == "STRICT_SPREAD"
    found = sum(min(fits, 1) if spread else fits for fits in fits_per_machine)
    if spec.strategy == "STRICT_PACK":
        found = max(fits_per_machine, default=0)
    return found


def describe_shortage(spec: DriverSpec, machine_resources: Sequence[Mapping[str, float]]) -> str | None:
    """Return why the nodes of a job do not fit on machines with these resources; None if they fit."""
    found = count_fitting_nodes(spec, machine_resources)
    if found >= (spec.min_nodes or spec.num_nodes):
        return None
    needs = ", ".join(f"{amount:g} {key}" for key, amount in spec.make_bundle().items())
    spread = spec.strategy == "STRICT_SPREAD"
    placement_text = (
        "each on a separate machine" if spread else "on one machine" if "STRICT" in spec.strategy else "on any machines"
    )
    return (
        f"the job needs {spec.min_nodes or spec.num_nodes} nodes with {needs}, {placement_text}; {found} fit on "
        f"{len(machine_resources)} machines"
    )


@dataclass(frozen=True)
class DriverState:
    """State of a driver, from its lines in the log."""

    num_attempts: int = 0
    nodes: tuple[str, ...] = ()
    is_waiting: bool = True
    reason: str | None = None


def parse_driver_state(lines: Sequence[str]) -> DriverState:
    """Parse the state of the driver from a job's log."""
    found = DriverState()
    for line in lines:
        if line.startswith(DRIVER_LINE_PREFIX):
            text = line.removeprefix(DRIVER_LINE_PREFIX)
            if started := re.fullmatch(r"attempt (\d+) on (.*)", text):
                found = DriverState(int(started[1]), tuple(started[2].split(", ")), False)
            else:
                found = DriverState(found.num_attempts, found.nodes, text.startswith(("waits", PAUSED_PREFIX)), text)
    return found


def strip_ray_preamble(log: str) -> list[str]:
    """A job's lines, without what Ray put before them."""
    lines = log.removesuffix("\n").split("\n") if log else []
    starts = [number for number, line in enumerate(lines) if line.startswith(RAY_PREAMBLE_PREFIX)]
    return lines[starts[0] + 1 :] if starts else []
