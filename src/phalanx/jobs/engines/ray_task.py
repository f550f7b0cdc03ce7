"""What is told to a job's driver on Ray, what the ends of its nodes mean, and what it says of itself in its log. Values
and functions of values: no Ray here."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from phalanx.errors import ExitCode

FINAL = frozenset({ExitCode.USAGE, ExitCode.DATA, ExitCode.RECIPE, ExitCode.GAVE_UP})
WORDS = FINAL | {ExitCode.UNFINISHED, ExitCode.UNFIT_NODE}
"""Codes with which a node says what it wants."""
LOST = 1 << 16
"""The code of a node that vanished: no program ends with it."""
KILLED = frozenset({137, 143, -9, -15, LOST})
"""How a command ends that was killed, with or without a shell around it: it could not say anything."""
NO_NODE = 3
"""Exit code of who was to send a signal and found no node that runs; any other says that it could not look."""
CODE_FILE = "code.tar"
"""Where a job's code lies in the folder that Ray carries to each machine."""
JOB = "PHALANX_RAY_JOB_ID"
"""The variable in which a driver finds its job's id."""
SPEAKS = "phalanx driver: "
"""Before each line that the driver itself writes."""
PREFACE = "Running entrypoint for job "
"""The last line of what Ray puts before a job's own lines."""


@dataclass(frozen=True)
class Task:
    """One job, as its driver needs it."""

    command: tuple[str, ...]
    folder: str
    """Where it is started; a relative one lies in the code that travelled with the job."""
    nodes: int
    devices: int
    cores: int
    memory: int | None
    limit: float | None
    warning: float
    environment: Mapping[str, str]
    secrets: tuple[str, ...]
    """Names of variables whose values stand in the job's file of secrets."""
    strategy: str
    patience: float
    """Seconds to wait for machines."""
    max_restarts: int

    def text(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def read(text: str) -> "Task":
        fields = json.loads(text)
        return Task(**fields | {key: tuple(fields[key]) for key in ("command", "secrets")})

    def bundle(self) -> dict[str, float]:
        """What one node needs, in Ray's words."""
        wanted: dict[str, float] = {"CPU": self.cores}
        if self.devices:
            wanted["GPU"] = self.devices
        if self.memory is not None:
            wanted["memory"] = self.memory
        return wanted


def secrets_file(folder: str, job: str) -> Path:
    """Where the values of a job's secrets lie until its driver has read them: in its folder, for its owner alone."""
    return Path(folder) / f".phalanx-secrets-{job}"


def actor_name(job: str, node: int) -> str:
    """Under which a node is found by who wants to send it a signal."""
    return f"{job}/{node}"


def verdict(ended: Sequence[tuple[int, int]]) -> int:
    """The code of an attempt from its nodes and their codes, in the order in which they ended. The first bad end
    decides when it says what it wants; else node 0 does, which leads; who was killed may be started again."""
    bad = [(node, code) for node, code in ended if code != 0]
    if not bad:
        return int(ExitCode.DONE)
    first = bad[0][1]
    if first in WORDS:
        return first
    leader = dict(ended).get(0, first)
    if leader in WORDS:
        return leader
    return int(ExitCode.UNFINISHED) if first in KILLED else first


def killed(ended: Sequence[tuple[int, int]]) -> int | None:
    """The code of the program that ended an attempt because it was killed, if it was that, and no machine was lost."""
    first = next((code for _, code in ended if code != 0), None)
    return first if first in KILLED - {LOST} else None


def unfit(ended: Sequence[tuple[int, int]]) -> list[int]:
    """Nodes that said that they are."""
    return [node for node, code in ended if code == ExitCode.UNFIT_NODE]


def room(task: Task, machines: Sequence[Mapping[str, float]]) -> str | None:
    """Why a job cannot have its nodes on machines with these resources; None when it can."""
    wanted = task.bundle()
    places = [min(int(machine.get(key, 0) // amount) for key, amount in wanted.items()) for machine in machines]
    spread = task.strategy == "STRICT_SPREAD"
    found = sum(min(place, 1) if spread else place for place in places)
    if task.strategy == "STRICT_PACK":
        found = max(places, default=0)
    if found >= task.nodes:
        return None
    needs = ", ".join(f"{amount:g} {key}" for key, amount in wanted.items())
    where = "each on a machine of its own" if spread else "on one machine" if "STRICT" in task.strategy else "anywhere"
    return f"{task.nodes} nodes with {needs} are wanted, {where}; of {len(machines)} machines there is room for {found}"


@dataclass(frozen=True)
class Told:
    """What a driver has said of itself."""

    attempts: int = 0
    nodes: tuple[str, ...] = ()
    waits: bool = True
    reason: str | None = None


def told(lines: Sequence[str]) -> Told:
    """What stands in a job's log about its attempts."""
    found = Told()
    for line in lines:
        if line.startswith(SPEAKS):
            text = line.removeprefix(SPEAKS)
            if begun := re.fullmatch(r"attempt (\d+) on (.*)", text):
                found = Told(int(begun[1]), tuple(begun[2].split(", ")), False)
            else:
                found = Told(found.attempts, found.nodes, text.startswith("waits"), text)
    return found


def own_lines(log: str) -> list[str]:
    """A job's lines, without what Ray put before them."""
    lines = log.removesuffix("\n").split("\n") if log else []
    starts = [number for number, line in enumerate(lines) if line.startswith(PREFACE)]
    return lines[starts[0] + 1 :] if starts else []
