"""Copies of the state in memory: a loss costs the steps since the last copy, and the run ends in the same bits."""

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab import Ended, Lab, Values, alive, fault, plan_faults, steps_seen, wait_until
from phalanx.errors import ExitCode
from phalanx.run import Run
from phalanx.run.event_types import (
    AttemptStarted,
    CheckpointRejected,
    InMemoryCheckpointSaved,
    InMemoryRestored,
    StepDone,
)
from phalanx.run.hot import MEMORY, PREFIX, hot_file, hot_folder
from phalanx.train.checkpoint import list_checkpoints
from phalanx.train.checkpoint.parts import list_copies, list_parts

QUIET: Values = {"evaluation": {"every": None}, "checkpoint": {"every": None, "in_memory_every": 2}, "steps": 16}
"""No checkpoint but the last."""
SLOW = fault(1, "slow", delay=0.05, attempt=None)
"""Steps between which a copy is whole long before the next is due."""
SHARDED: Values = {**QUIET, "parallelism": {"shard": 2}}


@pytest.fixture(autouse=True)
def swept(lab: Lab) -> Iterator[None]:
    """Runs that a test leaves as if their agent had died leave nothing on this machine all the same."""
    yield
    for folder in MEMORY.glob(f"{PREFIX}-*"):
        if lab.runs in Path((folder / "run").read_text()).parents:
            shutil.rmtree(folder)


def memory_of(run: Run) -> Path:
    """The folder of this node."""
    folder = hot_folder(run)
    assert folder is not None
    return folder


def done_again(ended: Ended) -> int:
    """Steps that appear twice in the events."""
    steps = [event.step for event in ended.kind(StepDone)]
    return len(steps) - len(set(steps))


def nothing_left(run: Run, *bases: Path) -> None:
    for base in (MEMORY, *bases):
        found = [path.name for path in base.glob(f"{PREFIX}-*")] if base.is_dir() else []
        assert not any((base / name / "run").read_text() == os.path.realpath(run.path) for name in found), found
    assert not hot_file(run).exists()


@pytest.mark.parametrize(
    ("changes", "nproc"),
    [pytest.param(QUIET, 1, marks=pytest.mark.slow), (QUIET, 2), (SHARDED, 2)],
    ids=["1", "2", "sharded"],
)
def test_a_killed_worker_costs_the_steps_since_the_last_copy(lab: Lab, changes: Values, nproc: int) -> None:
    ended = lab.train(changes, nproc, faults=[SLOW, fault(11, ranks=[nproc - 1])])
    assert ended.digest == lab.reference(changes, nproc).digest
    (restored,) = ended.kind(InMemoryRestored)
    assert (restored.step, restored.checkpoint_step, restored.fetched_bytes) == (10, 0, 0)
    assert ended.kind(AttemptStarted)[-1].start_step == 10
    assert done_again(ended) <= 1  # its own event died with it, if it led
    assert ended.kind(CheckpointRejected) == []
    nothing_left(ended.run)


def lost(lab: Lab, changes: Values, nproc: int, step: int = 11) -> Run:
    """A run whose worker and agent were killed at this step, and left what they left."""
    run = lab.place()
    lab.lose(changes, nproc, run, [SLOW, fault(step, ranks=[0])])
    assert not list_checkpoints(run.checkpoints)
    assert [step for step, _ in list_copies(memory_of(run))][:2] == [10, 8]
    return run


@pytest.mark.parametrize("file", ["rank-00000.safetensors", pytest.param("rank-00001.json", marks=pytest.mark.slow)])
def test_a_flipped_bit_is_found_and_the_copy_before_is_used(lab: Lab, file: str) -> None:
    run, rng = lost(lab, SHARDED, 2), random.Random(file)
    (newest,) = memory_of(run).glob("step-000000010-*")
    content = bytearray((newest / file).read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    (newest / file).write_bytes(content)
    ended = lab.train(SHARDED, 2, run)
    (rejected,) = ended.kind(CheckpointRejected)
    assert (rejected.path, rejected.file) == (str(newest), file)
    assert ended.kind(AttemptStarted)[-1].start_step == 8
    assert ended.digest == lab.reference(SHARDED, 2).digest
    nothing_left(run)


@pytest.mark.slow
def test_copies_that_are_torn_leave_the_checkpoint(lab: Lab) -> None:
    changes = {**QUIET, "checkpoint": {"every": 5, "in_memory_every": 2}}
    run = lab.place()
    lab.lose(changes, 1, run, [SLOW, fault(9, ranks=[0])])
    for step, token in list_copies(memory_of(run)):
        (record,) = list_parts(memory_of(run) / f"step-{step:09d}-{token}")
        os.truncate(record.with_suffix(".safetensors"), 1000)
    ended = lab.train(changes, 1, run)
    assert {event.file for event in ended.kind(CheckpointRejected)} == {"rank-00000.safetensors"}
    assert ended.kind(AttemptStarted)[-1].start_step == 5
    assert ended.digest == lab.reference(changes, 1).digest


def test_copies_are_read_under_another_layout(lab: Lab) -> None:
    run = lost(lab, SHARDED, 2)
    ended = lab.train({**QUIET, "parallelism": {"replicate": 2}}, 2, run)
    assert ended.kind(AttemptStarted)[-1].start_step == 10
    whole = lab.reference(QUIET, 2)
    assert max(abs(a - b) / b for a, b in zip(ended.losses, whole.losses, strict=True)) < 1e-5
    nothing_left(run)


def test_a_run_that_was_deleted_and_begun_anew_takes_no_copy_of_the_old_one(lab: Lab) -> None:
    run = lost(lab, QUIET, 1)
    shutil.rmtree(run.path)
    ended = lab.train({**QUIET, "seed": 1}, 1, run)
    assert ended.kind(InMemoryRestored) == []
    assert ended.digest == lab.reference({**QUIET, "seed": 1}, 1).digest
    nothing_left(run)


def test_a_run_that_is_stopped_or_given_up_leaves_nothing(lab: Lab) -> None:
    stopped = lab.train(QUIET, 2, faults=[SLOW, fault(7, "term", ranks=[1])])
    assert stopped.code == ExitCode.UNFINISHED
    assert stopped.kind(InMemoryCheckpointSaved)
    nothing_left(stopped.run)
    changes = {**QUIET, "fault_tolerance": {"max_restarts": 1}}
    given_up = lab.train(changes, 2, faults=[SLOW, fault(7, ranks=[0]), fault(7, ranks=[0], attempt=1)])
    assert given_up.code == ExitCode.GAVE_UP
    nothing_left(given_up.run)


class Nodes:
    """Two nodes of one run, each with a folder of its own in place of its memory. `start(0)` is the leading one."""

    def __init__(self, lab: Lab, run: Run, folder: Path, changes: Values):
        self.lab, self.run, self.folder, self.changes = lab, run, folder, changes
        self.token = folder / "token"
        self.token.write_text("0123456789abcdef" * 4)
        self.token.chmod(0o600)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.stack = contextlib.ExitStack()

    def memory(self, name: str) -> Path:
        return self.folder / name

    def start(self, node: int, memory: str) -> "subprocess.Popen[str]":
        variables = {
            "PHALANX_NUM_NODES": "2",
            "PHALANX_NODE_RANK": str(node),
            "PHALANX_LEADER_ADDR": f"127.0.0.1:{self.port}",
        }
        variables |= {"PHALANX_TOKEN_FILE": str(self.token), "PHALANX_IN_MEMORY_DIR": str(self.memory(memory))}
        words = ("train", self.lab.recipe_file(self.changes), "--run", self.run.path, "--nproc-per-node", "1")
        return self.stack.enter_context(self.lab.start(*words, variables=variables))


@pytest.fixture
def nodes(lab: Lab, tmp_path: Path) -> Iterator[Nodes]:
    nodes = Nodes(lab, lab.place(), tmp_path, SHARDED)
    with nodes.stack:
        yield nodes


def parts_of(memory: Path) -> dict[int, list[str]]:
    """The parts of each copy that a node has."""
    (folder,) = memory.glob(f"{PREFIX}-*")
    return {
        step: [record.stem for record in list_parts(folder / f"step-{step:09d}-{token}")]
        for step, token in list_copies(folder)
    }


@pytest.mark.slow
def test_a_lost_nodes_share_comes_from_the_node_that_kept_a_second_copy(lab: Lab, nodes: Nodes) -> None:
    plan_faults(nodes.run, [SLOW, fault(11, "kill-agent", ranks=[1])])
    leader, member = nodes.start(0, "a"), nodes.start(1, "b")
    member.wait(timeout=60)
    assert member.returncode == -signal.SIGKILL
    shutil.rmtree(nodes.memory("b"))  # and all that was in its memory
    wait_until(lambda: "waiting for node 1" in nodes.run.events.read_text(), 30, "the node to be missed")
    assert parts_of(nodes.memory("a"))[10] == ["rank-00000", "rank-00001"]
    another = nodes.start(1, "c")
    _, errors = leader.communicate(timeout=60)
    another.communicate(timeout=20)
    ended = Ended(nodes.run, leader.returncode, errors)
    assert ended.digest == lab.reference(SHARDED, 2).digest
    (restored,) = ended.kind(InMemoryRestored)
    assert restored.step == 10
    assert restored.fetched_bytes > 0
    assert done_again(ended) <= 1
    assert steps_seen(nodes.run) == 16
    nothing_left(nodes.run, nodes.memory("a"), nodes.memory("c"))
    wait_until(lambda: alive(ended) == [] and lab.processes() == set(), 5, "everything to end")
