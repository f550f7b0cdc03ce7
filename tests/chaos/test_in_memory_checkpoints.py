"""Copies of the state in memory: a loss costs the steps since the last copy, and the run ends in the same bits."""

import contextlib
import os
import random
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.errors import ExitCode
from phalanx.run import Run
from phalanx.run.authentication import reserve_port
from phalanx.run.event_types import (
    AttemptStarted,
    CheckpointRejected,
    InMemoryCheckpointSaved,
    InMemoryRestored,
    StepDone,
)
from phalanx.run.in_memory_checkpoint import DIR_PREFIX, SHM_DIR, find_node_dir, history_path
from phalanx.train.checkpoint.format import list_checkpoints
from phalanx.train.checkpoint.in_memory.format import list_copies, list_shard_records
from train_harness import (
    HarnessRun,
    TrainHarness,
    Values,
    count_steps,
    list_live_workers,
    plan_fault,
    wait_until,
    write_faults,
)

QUIET: Values = {"evaluation": {"every": None}, "checkpoint": {"every": None, "in_memory_every": 2}, "steps": 16}
"""No checkpoint but the last."""
SLOW = plan_fault(1, "slow", delay=0.05, attempt=None)
"""Steps between which a copy is whole long before the next is due."""
SHARDED: Values = {**QUIET, "parallelism": {"shard": 2}}


@pytest.fixture(autouse=True)
def swept(lab: TrainHarness) -> Iterator[None]:
    """Runs that a test leaves as if their agent had died leave nothing on this machine all the same."""
    yield
    for folder in SHM_DIR.glob(f"{DIR_PREFIX}-*"):
        if lab.runs in Path((folder / "run").read_text()).parents:
            shutil.rmtree(folder)


def memory_of(run: Run) -> Path:
    """The folder of this node."""
    folder = find_node_dir(run)
    assert folder is not None
    return folder


def done_again(ended: HarnessRun) -> int:
    """Steps that appear twice in the events."""
    steps = [event.step for event in ended.events_of_kind(StepDone)]
    return len(steps) - len(set(steps))


def nothing_left(run: Run, *bases: Path) -> None:
    for base in (SHM_DIR, *bases):
        found = [path.name for path in base.glob(f"{DIR_PREFIX}-*")] if base.is_dir() else []
        assert not any((base / name / "run").read_text() == os.path.realpath(run.path) for name in found), found
    assert not history_path(run).exists()


@pytest.mark.parametrize(
    ("changes", "nproc"),
    [pytest.param(QUIET, 1, marks=pytest.mark.slow), (QUIET, 2), (SHARDED, 2)],
    ids=["1", "2", "sharded"],
)
def test_a_killed_worker_costs_the_steps_since_the_last_copy(lab: TrainHarness, changes: Values, nproc: int) -> None:
    ended = lab.train(changes, nproc, faults=[SLOW, plan_fault(11, ranks=[nproc - 1])])
    assert ended.digest == lab.train_reference(changes, nproc).digest
    (restored,) = ended.events_of_kind(InMemoryRestored)
    assert (restored.step, restored.checkpoint_step, restored.fetched_bytes) == (10, 0, 0)
    assert ended.events_of_kind(AttemptStarted)[-1].start_step == 10
    assert done_again(ended) <= 1  # its own event died with it, if it led
    assert ended.events_of_kind(CheckpointRejected) == []
    nothing_left(ended.run)


def lost(lab: TrainHarness, changes: Values, nproc: int, step: int = 11) -> Run:
    """A run whose worker and agent were killed at this step, and left what they left."""
    run = lab.new_run()
    lab.train_until_agent_lost(changes, nproc, run, [SLOW, plan_fault(step, ranks=[0])])
    assert not list_checkpoints(run.checkpoints)
    assert [step for step, _ in list_copies(memory_of(run))][:2] == [10, 8]
    return run


@pytest.mark.parametrize("file", ["rank-00000.safetensors", pytest.param("rank-00001.json", marks=pytest.mark.slow)])
def test_a_flipped_bit_is_found_and_the_copy_before_is_used(lab: TrainHarness, file: str) -> None:
    run, rng = lost(lab, SHARDED, 2), random.Random(file)
    (newest,) = memory_of(run).glob("step-000000010-*")
    content = bytearray((newest / file).read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    (newest / file).write_bytes(content)
    ended = lab.train(SHARDED, 2, run)
    (rejected,) = ended.events_of_kind(CheckpointRejected)
    assert (rejected.path, rejected.file) == (str(newest), file)
    assert ended.events_of_kind(AttemptStarted)[-1].start_step == 8
    assert ended.digest == lab.train_reference(SHARDED, 2).digest
    nothing_left(run)


@pytest.mark.slow
def test_copies_that_are_torn_leave_the_checkpoint(lab: TrainHarness) -> None:
    changes = {**QUIET, "checkpoint": {"every": 5, "in_memory_every": 2}}
    run = lab.new_run()
    lab.train_until_agent_lost(changes, 1, run, [SLOW, plan_fault(9, ranks=[0])])
    for step, token in list_copies(memory_of(run)):
        (record,) = list_shard_records(memory_of(run) / f"step-{step:09d}-{token}")
        os.truncate(record.with_suffix(".safetensors"), 1000)
    ended = lab.train(changes, 1, run)
    assert {event.file for event in ended.events_of_kind(CheckpointRejected)} == {"rank-00000.safetensors"}
    assert ended.events_of_kind(AttemptStarted)[-1].start_step == 5
    assert ended.digest == lab.train_reference(changes, 1).digest


def test_copies_are_read_under_another_layout(lab: TrainHarness) -> None:
    run = lost(lab, SHARDED, 2)
    ended = lab.train({**QUIET, "parallelism": {"replicate": 2}}, 2, run)
    assert ended.events_of_kind(AttemptStarted)[-1].start_step == 10
    whole = lab.train_reference(QUIET, 2)
    assert max(abs(a - b) / b for a, b in zip(ended.losses, whole.losses, strict=True)) < 1e-5
    nothing_left(run)


def test_a_run_that_was_deleted_and_begun_anew_takes_no_copy_of_the_old_one(lab: TrainHarness) -> None:
    run = lost(lab, QUIET, 1)
    shutil.rmtree(run.path)
    ended = lab.train({**QUIET, "seed": 1}, 1, run)
    assert ended.events_of_kind(InMemoryRestored) == []
    assert ended.digest == lab.train_reference({**QUIET, "seed": 1}, 1).digest
    nothing_left(run)


def test_a_run_that_is_stopped_or_given_up_leaves_nothing(lab: TrainHarness) -> None:
    stopped = lab.train(QUIET, 2, faults=[SLOW, plan_fault(7, "term", ranks=[1])])
    assert stopped.code == ExitCode.UNFINISHED
    assert stopped.events_of_kind(InMemoryCheckpointSaved)
    nothing_left(stopped.run)
    changes = {**QUIET, "fault_tolerance": {"max_restarts": 1}}
    given_up = lab.train(changes, 2, faults=[SLOW, plan_fault(7, ranks=[0]), plan_fault(7, ranks=[0], attempt=1)])
    assert given_up.code == ExitCode.GAVE_UP
    nothing_left(given_up.run)


class Nodes:
    """Two nodes of one run, each with a folder of its own in place of its memory. `start(0)` is the leading one."""

    def __init__(self, lab: TrainHarness, run: Run, folder: Path, changes: Values):
        self.lab, self.run, self.folder, self.changes = lab, run, folder, changes
        self.token = folder / "token"
        self.token.write_text(secrets.token_hex(32))
        self.token.chmod(0o600)
        self.stack = contextlib.ExitStack()
        self.port = self.stack.enter_context(reserve_port()).getsockname()[1]

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
def nodes(lab: TrainHarness, tmp_path: Path) -> Iterator[Nodes]:
    nodes = Nodes(lab, lab.new_run(), tmp_path, SHARDED)
    with nodes.stack:
        yield nodes


def parts_of(memory: Path) -> dict[int, list[str]]:
    """The parts of each copy that a node has."""
    (folder,) = memory.glob(f"{DIR_PREFIX}-*")
    return {
        step: [record.stem for record in list_shard_records(folder / f"step-{step:09d}-{token}")]
        for step, token in list_copies(folder)
    }


@pytest.mark.slow
def test_a_lost_nodes_share_comes_from_the_node_that_kept_a_second_copy(lab: TrainHarness, nodes: Nodes) -> None:
    write_faults(nodes.run, [SLOW, plan_fault(11, "kill-agent", ranks=[1])])
    leader, member = nodes.start(0, "a"), nodes.start(1, "b")
    member.wait(timeout=150)
    assert member.returncode == -signal.SIGKILL
    shutil.rmtree(nodes.memory("b"))  # and all that was in its memory
    wait_until(lambda: "waiting for node 1" in nodes.run.events.read_text(), 30, "the node to be missed")
    assert parts_of(nodes.memory("a"))[10] == ["rank-00000", "rank-00001"]
    another = nodes.start(1, "c")
    _, errors = leader.communicate(timeout=150)
    another.communicate(timeout=90)
    ended = HarnessRun(nodes.run, leader.returncode, errors)
    assert ended.digest == lab.train_reference(SHARDED, 2).digest
    (restored,) = ended.events_of_kind(InMemoryRestored)
    assert restored.step == 10
    assert restored.fetched_bytes > 0
    assert done_again(ended) <= 1
    assert count_steps(nodes.run) == 16
    nothing_left(nodes.run, nodes.memory("a"), nodes.memory("c"))
    wait_until(lambda: list_live_workers(ended) == [] and lab.processes() == set(), 5, "everything to end")
