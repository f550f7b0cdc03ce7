"""Runs with `--nodes MIN:MAX`: nodes are lost and return, and the run trains on those that are there."""

import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from phalanx.errors import ExitCode
from phalanx.run.event_types import AttemptStarted, InMemoryRestored, StepDone, WorkerFailure
from run_nodes import Nodes, make_nodes
from train_harness import HarnessRun, TrainHarness, count_steps, plan_fault, wait_until, write_faults

ELASTIC = {"determinism": "elastic"}


@pytest.fixture
def nodes(lab: TrainHarness, tmp_path: Path) -> Iterator[Nodes]:
    nodes = make_nodes(lab, tmp_path)
    nodes.count, nodes.num_nodes = 3, "1:3"
    with nodes.stack:
        yield nodes


def world_sizes(ended: HarnessRun) -> list[int]:
    return [event.world_size for event in ended.events_of_kind(AttemptStarted)]


def said_by(processes: Sequence["subprocess.Popen[str]"], code: int = 0) -> list[str]:
    """What they said, after all have ended with this code."""
    said = [process.communicate(timeout=150)[1] for process in processes]
    assert [process.returncode for process in processes] == [code] * len(processes), said
    return said


def slow_from_step_one(nodes: Nodes, **changes: Any) -> None:
    write_faults(nodes.run, [plan_fault(1, "slow", **{"attempt": None, "delay": 0.2, **changes})])


def ask_to_go(nodes: Nodes, node: "subprocess.Popen[str]") -> None:
    """After three steps."""
    wait_until(lambda: count_steps(nodes.run) >= 3, 150)
    node.send_signal(signal.SIGTERM)


def test_three_nodes_then_two_then_one_then_three_end_in_the_undisturbed_bits(
    lab: TrainHarness, nodes: Nodes, tmp_path: Path
) -> None:
    nodes.changes = {**ELASTIC, "steps": 150}
    until = tmp_path / "returned"
    write_faults(
        nodes.run,
        [
            plan_fault(5, "kill-agent", ranks=[2], attempt=0),
            plan_fault(9, "kill-agent", ranks=[1], attempt=1),
            plan_fault(10, "slow", attempt=2, delay=0.5, until=str(until)),
        ],
    )
    leader, first, second = nodes.start(0), nodes.start(1), nodes.start(2)
    first.wait(timeout=150)
    wait_until(lambda: "training on 1 of 3" in nodes.run.events.read_text())
    returned = nodes.start(1), nodes.start(2)
    wait_until(lambda: "saving a checkpoint, then restarting on" in nodes.run.events.read_text(), 150)
    until.touch()
    ended = nodes.end(leader, *returned)
    assert second.wait(timeout=90) == -signal.SIGKILL
    sizes = world_sizes(ended)
    assert (sizes[:3], sizes[-1]) == ([3, 2, 1], 3), sizes
    assert ended.digest == lab.train_reference(nodes.changes, 3).digest
    assert [event.what for event in ended.events_of_kind(WorkerFailure)] == ["node lost", "node lost"]


def test_shards_are_divided_again_and_read_from_the_memory_of_the_surviving_nodes(
    lab: TrainHarness, nodes: Nodes
) -> None:
    nodes.changes = {"parallelism": {"shard": 3}, "checkpoint": {"every": None, "in_memory_every": 1}}
    write_faults(nodes.run, [plan_fault(7, "kill-agent", ranks=[2])])
    leader, member, lost = nodes.start(0), nodes.start(1), nodes.start(2)
    ended = nodes.end(leader, member)
    assert lost.wait(timeout=90) == -signal.SIGKILL
    assert world_sizes(ended) == [3, 2]
    (restored,) = ended.events_of_kind(InMemoryRestored)
    assert restored.step > restored.checkpoint_step
    assert ended.losses == pytest.approx(lab.train_reference({}, 3).losses, abs=1e-6, rel=0)


def test_a_recipe_that_cannot_be_divided_among_the_least_nodes_is_refused_before_any_work(nodes: Nodes) -> None:
    nodes.changes = {"batch": {"global_size": 8, "micro_size": "auto"}}
    nodes.count, nodes.num_nodes = 4, "3:4"
    leader, *others = (nodes.start(node) for node in range(4))
    ended = nodes.end(leader, *others)
    assert ended.code == ExitCode.RECIPE
    assert "the run cannot train on 3 of 4 nodes" in str(ended.message)
    assert "8 samples cannot be divided among 3 workers" in str(ended.message)
    assert not nodes.run.path.exists()


def test_an_unfit_node_leaves_and_the_others_train_on(nodes: Nodes) -> None:
    nodes.changes = {"fault_tolerance": {"max_restarts": 2}}
    write_faults(nodes.run, [plan_fault(1, "lose-gpu", ranks=[2], attempt=None)])
    leader, member, unfit = (nodes.start(node) for node in range(3))
    ended = nodes.end(leader, member)
    assert ended.code == ExitCode.DONE, ended.message
    assert unfit.wait(timeout=90) == ExitCode.UNFIT_NODE
    assert world_sizes(ended)[-1] == 2


def test_another_node_leads_when_the_leader_is_lost_and_the_lost_one_returns_as_a_node(
    lab: TrainHarness, nodes: Nodes, tmp_path: Path
) -> None:
    nodes.changes = {**ELASTIC, "steps": 150}
    until = tmp_path / "returned"
    write_faults(
        nodes.run,
        [
            plan_fault(5, "kill-agent", ranks=[0], attempt=0),
            plan_fault(10, "slow", attempt=1, delay=0.5, until=str(until)),
        ],
    )
    leader, *members = (nodes.start(node) for node in range(3))
    assert leader.wait(timeout=150) == -signal.SIGKILL
    wait_until(lambda: "training on 2 of 3 nodes" in nodes.run.events.read_text(), 150)
    returned = nodes.start(0)
    wait_until(lambda: "saving a checkpoint, then restarting on 3 nodes" in nodes.run.events.read_text(), 150)
    until.touch()
    said = said_by([*members, returned])
    ended = HarnessRun(nodes.run, 0, None)
    assert world_sizes(ended) == [3, 2, 3]
    assert ended.digest == lab.train_reference(nodes.changes, 3).digest
    assert sum("this node leads the run now" in text for text in said) == 1


def test_a_leading_node_that_is_unfit_hands_over(nodes: Nodes) -> None:
    nodes.changes = {"fault_tolerance": {"max_restarts": 2}}
    write_faults(nodes.run, [plan_fault(1, "lose-gpu", ranks=[0], attempt=number) for number in (0, 1)])
    leader, *members = (nodes.start(node) for node in range(3))
    assert leader.wait(timeout=150) == ExitCode.UNFIT_NODE
    said = said_by(members)
    sizes = world_sizes(HarnessRun(nodes.run, 0, None))
    assert sizes[-1] == 2, (sizes, said)


@pytest.mark.parametrize("leads", [False, True])
def test_a_node_that_is_asked_to_go_leaves_after_a_save_and_the_others_train_on(
    lab: TrainHarness, nodes: Nodes, tmp_path: Path, leads: bool
) -> None:
    """Where it leads, it hands over."""
    nodes.changes = {**ELASTIC, "steps": 40}
    until = tmp_path / "gone"
    slow_from_step_one(nodes, attempt=0, until=str(until))
    started = [nodes.start(node) for node in range(3)]
    evicted = started.pop(0 if leads else 2)
    ask_to_go(nodes, evicted)
    assert evicted.wait(timeout=90) == ExitCode.UNFINISHED
    until.touch()
    said = said_by(started)
    assert sum("this node leads the run now" in text for text in said) == leads
    ended = HarnessRun(nodes.run, 0, None)
    assert world_sizes(ended) == [3, 2]
    assert [event.step for event in ended.events_of_kind(StepDone)] == list(range(1, 41))
    assert ended.events_of_kind(WorkerFailure) == []
    assert ended.digest == lab.train_reference(nodes.changes, 3).digest


@pytest.mark.parametrize("event", ["saving a checkpoint", "this node leaves"])
def test_all_nodes_leave_when_all_are_asked_to_go(nodes: Nodes, event: str) -> None:
    """The other nodes are asked while the leader saves, or when it hands over."""
    nodes.changes = {"steps": 10_000}
    slow_from_step_one(nodes)
    leader, *members = (nodes.start(node) for node in range(3))
    ask_to_go(nodes, leader)
    wait_until(lambda: event in nodes.run.events.read_text())
    for member in members:
        member.send_signal(signal.SIGTERM)
    said_by([leader, *members], ExitCode.UNFINISHED)
    if event == "saving a checkpoint":  # else another node may begin to lead before it is asked to go
        assert world_sizes(HarnessRun(nodes.run, ExitCode.UNFINISHED, None)) == [3]


def test_all_nodes_leave_when_too_few_are_left_without_the_leading_one(nodes: Nodes) -> None:
    nodes.changes, nodes.num_nodes = {"steps": 10_000}, "2:3"
    slow_from_step_one(nodes)
    leader, member = (nodes.start(node, PHALANX_NUM_EXPECTED_NODES="2") for node in range(2))
    ask_to_go(nodes, leader)
    ended = nodes.end(leader, member)
    assert (ended.code, world_sizes(ended)) == (ExitCode.UNFINISHED, [2])
