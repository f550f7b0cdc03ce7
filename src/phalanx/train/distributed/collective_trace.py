"""Trace the collectives of this worker: what its main thread waits in, for the agent, and a check that all ranks issue
the same ones.

torch's flight recorder keeps the last collectives of gloo's process groups in a ring, without messages between two
ranks (send and receive). That of NCCL is not read: there the device waits, and not the host. Nothing is added to a
collective itself.
"""

import linecache
import math
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

from phalanx.compat import list_process_groups, read_flight_recorder
from phalanx.errors import RecipeError
from phalanx.run.messages import send
from phalanx.run.process_messages import PendingCollective, WaitingInCollective
from phalanx.train.callbacks import TrainerCallback
from phalanx.train.distributed.environment import DistEnv
from phalanx.train.distributed.object_collectives import all_gather_json
from phalanx.train.step_metrics import StepResult

CHECK_VARIABLE = "PHALANX_CHECK_COLLECTIVES"
"""Set to 1 to compare the collectives of all ranks after each step and each evaluation."""
RING_VARIABLE = "TORCH_FR_BUFFER_SIZE"
RING_ENTRIES, CHECKED_RING_ENTRIES = 2000, 50_000
SAMPLE_INTERVAL_S = 1.0
MIN_WAITING_SAMPLES = 4
"""Samples in which the main thread sleeps in the same place, and uses no processor time, until it counts as waiting."""
MAX_STACK_CHARS = 6000
SAME_SIZE_OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
"""Operations in which all ranks have inputs of one size."""


@dataclass(frozen=True)
class Collective:
    """The `number`-th collective of a process group, by its name. `record`: the number in the recorder."""

    group: str
    number: int
    operation: str
    is_pending: bool
    thread: int
    record: int


def read_collectives(after_record: int = -1) -> list[Collective]:
    """Return the last collectives of this worker, oldest first: those after a number in the recorder."""
    found = [
        Collective(
            str(entry["process_group"][0]),
            int(entry["collective_seq_id"]),
            _describe_operation(entry),
            not entry["retired"],
            int(entry["thread_id"]),
            int(entry["record_id"]),
        )
        for entry in read_flight_recorder()
        if not entry["is_p2p"]
        and int(entry["record_id"]) > after_record
        and str(entry["profiling_name"]).startswith("gloo:")
    ]
    return sorted(found, key=lambda collective: collective.record)


def _describe_operation(entry: Mapping[str, Any]) -> str:
    name = str(entry["profiling_name"]).partition(":")[2]
    if not any(word in name for word in SAME_SIZE_OPERATIONS):
        return name
    sizes = [size if isinstance(size, int) else math.prod(size) for size in entry["input_sizes"]]
    return f"{name} of {sum(sizes)} {', '.join(sorted(set(entry['input_dtypes'])))}"


def read_last_record() -> int:
    """Return the number of the newest collective in the recorder; -1 before the first."""
    return max((each.record for each in read_collectives()), default=-1)


def enable_trace(environment: Mapping[str, str]) -> None:
    """Have torch keep a trace of collectives; call it before the first process group. Without a check the ring is
    small: writing an entry takes a microsecond, and reading happens only when this worker waits."""
    entries = CHECKED_RING_ENTRIES if environment.get(CHECK_VARIABLE) == "1" else RING_ENTRIES
    os.environ.setdefault(RING_VARIABLE, str(entries))


class CollectiveCheck(TrainerCallback):
    """Compares the collectives of all ranks since the last comparison."""

    @classmethod
    def where_asked(cls, dist_env: DistEnv, environment: Mapping[str, str] = os.environ) -> "list[CollectiveCheck]":
        """Empty unless the user asks for it, and in a world of one."""
        return [cls(dist_env)] if environment.get(CHECK_VARIABLE) == "1" and dist_env.world_size > 1 else []

    def __init__(self, dist_env: DistEnv):
        self._dist_env = dist_env
        self._last_record = read_last_record()

    def pre_step(self, step: int) -> None:
        self._step = step

    def post_step(self, result: StepResult, lr: float) -> None:
        self.compare(f"step {self._step}")

    def between_steps(self, due_steps: Sequence[int], is_done: bool) -> None:
        self.compare(f"evaluation after step {self._step}")

    def compare(self, where: str) -> None:
        """Raise RecipeError on all ranks if ranks of a process group issued different collectives; every rank calls
        it. `where` is the step or evaluation that is done."""
        own: dict[str, dict[str, str]] = {}
        for each in read_collectives(self._last_record):
            own.setdefault(each.group, {})[str(each.number)] = each.operation
        ranks = {name: list(ranks) for name, ranks in list_process_groups().items()}
        gathered = all_gather_json(self._dist_env, {name: [ranks.get(name, []), own[name]] for name in own})
        self._last_record = read_last_record()
        if (problem := find_difference(gathered)) is not None:
            raise RecipeError(
                f"{where}: {problem}; every rank of a process group must issue the same collectives in the same order: "
                "look for a branch on what one rank alone sees (its batch, its files, its clock)"
            )


def find_difference(gathered: Sequence[Mapping[str, tuple[Sequence[int], Mapping[str, str]]]]) -> str | None:
    """Describe the first collective in which ranks of a process group differ. `gathered`: by rank and name of the
    group, its ranks, and the operations by number."""
    for rank, groups in enumerate(gathered):
        for name, (ranks, operations) in groups.items():
            peers = [peer for peer in ranks if peer < len(gathered)]
            for number in sorted(operations, key=int):
                for peer in peers:
                    theirs = gathered[peer].get(name, ((), {}))[1].get(number)
                    if theirs not in (None, operations[number]):  # a thread of a peer may issue one a moment later
                        return (
                            f"collective {number} of the process group of ranks {', '.join(map(str, ranks))} is "
                            f"{operations[number]} on worker {rank} and {theirs} on worker {peer}"
                        )
    return None


_watches: "list[CollectiveWatch]" = []


def watch_collectives(environment: Mapping[str, str]) -> None:
    """Report to the agent what the main thread waits in, from a thread; without an agent do nothing. Call it in each
    new world of a process: one watch serves them all, and collectives of earlier ones do not count."""
    if _watches:
        _watches[0].start_world()
    elif fd := environment.get("PHALANX_EVENTS_FD"):
        events = socket.socket(fileno=os.dup(int(fd)))
        _watches.append(CollectiveWatch(int(environment["RANK"]), int(environment["WORLD_SIZE"]), events))
        threading.Thread(target=_watches[0].run, name="collective watch", daemon=True).start()


class CollectiveWatch:
    """Samples the main thread of this process, and reports once a second as long as it waits in a collective."""

    def __init__(self, rank: int, world_size: int, events: socket.socket):
        self._rank, self._world_size, self._events = rank, world_size, events
        self._main = threading.main_thread()
        self._state: object = None
        self._num_samples = 0
        self.start_world()

    def start_world(self) -> None:
        """Begin to watch another world."""
        self._last_record = read_last_record()

    def run(self) -> None:
        """Sample until the agent is gone."""
        while True:
            time.sleep(SAMPLE_INTERVAL_S)
            try:
                self.sample()
            except OSError:
                return
            except (KeyError, RuntimeError, ValueError):  # the main thread has changed the groups meanwhile
                self._num_samples = 0

    def sample(self) -> None:
        """Look at the main thread, and report if it has waited for `MIN_WAITING_SAMPLES`."""
        frame = sys._current_frames().get(self._main.ident or 0)
        if frame is None or not is_in_collective(frame):
            self._num_samples = 0
            return
        state = (id(frame), frame.f_lasti, read_main_thread_state())
        self._num_samples = self._num_samples + 1 if state == self._state and state[2][0] == "S" else 0
        self._state = state
        is_whole_world = dist.is_initialized() and dist.get_world_size() == self._world_size
        if self._num_samples + 1 < MIN_WAITING_SAMPLES or not is_whole_world or dist.get_rank() != self._rank:
            return
        collectives, groups = read_collectives(self._last_record), list_process_groups()
        pending = tuple(
            PendingCollective(
                group=_name_with_ranks(each.group, groups),
                ranks=groups[each.group],
                number=each.number,
                operation=each.operation,
            )
            for each in collectives
            if each.is_pending and each.group in groups and each.thread == self._main.ident
        )
        stack = "".join(traceback.format_stack(frame))[-MAX_STACK_CHARS:]
        if pending:
            issued = count_issued(collectives, groups, self._last_record + 1)
            send(self._events, WaitingInCollective(rank=self._rank, pending=pending, issued=issued, stack=stack))


def count_issued(
    collectives: Sequence[Collective], groups: Mapping[str, tuple[int, ...]], first_record: int
) -> dict[str, int]:
    """Return how many collectives this worker has issued in each process group, leaving out groups of which the ring
    may have lost all entries. `first_record`: of the first collective in this world."""
    numbers = {each.group: each.number for each in collectives}
    is_complete = not collectives or collectives[0].record == first_record
    return {_name_with_ranks(name, groups): numbers.get(name, 0) for name in groups if name in numbers or is_complete}


def _name_with_ranks(name: str, groups: Mapping[str, tuple[int, ...]]) -> str:
    """Return a name of a group that is the same on its ranks only: torch counts groups in each process."""
    return f"{name} of {', '.join(map(str, groups[name]))}"


def is_in_collective(frame: FrameType) -> bool:
    """Return whether a thread is in a call of torch.distributed, or waits for one: a computation or a read is not."""
    name = frame.f_code.co_filename
    return "/torch/distributed/" in name or ".wait(" in linecache.getline(name, frame.f_lineno)


def read_main_thread_state() -> tuple[str, int]:
    """Return the state of this process's main thread (S: it sleeps), and the ticks of processor time that it used."""
    fields = Path(f"/proc/self/task/{os.getpid()}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[11]) + int(fields[12])
