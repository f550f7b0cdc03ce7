"""Several agents, one for each node, here all on one machine: one of them, its machine or its network is lost, and the
run ends in the same bits."""

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.errors import ExitCode
from phalanx.recipe import load_recipe
from phalanx.run.event_types import HangDetected, RunWarning, WorkerFailure
from run_nodes import Nodes, make_nodes
from train_harness import (
    HarnessRun,
    TrainHarness,
    count_steps,
    list_live_workers,
    plan_fault,
    wait_until,
    write_faults,
)


@pytest.fixture
def nodes(lab: TrainHarness, tmp_path: Path) -> Iterator[Nodes]:
    nodes = make_nodes(lab, tmp_path)
    with nodes.stack:
        yield nodes


def fine(lab: TrainHarness, ended: HarnessRun) -> None:
    """It ended as if nothing had happened, and left nothing behind."""
    assert ended.code == ExitCode.DONE, ended.message
    assert ended.digest == lab.train_reference({}, 2).digest
    wait_until(lambda: list_live_workers(ended) == [] and lab.processes() == set(), 5, "everything to end")


def faults_of(ended: HarnessRun) -> list[str]:
    return [event.what for event in ended.events_of_kind(WorkerFailure)]


def test_two_nodes_end_in_the_same_bits_as_one_machine(lab: TrainHarness, nodes: Nodes) -> None:
    ended = nodes.end(nodes.start(0), nodes.start(1))
    fine(lab, ended)
    assert faults_of(ended) == []
    assert load_recipe(nodes.run.resolved).recipe.grad_sync.bucket_mib == 1  # 25 on one


def test_a_hang_on_one_of_three_nodes_is_told_within_ten_seconds_and_ended(lab: TrainHarness, nodes: Nodes) -> None:
    nodes.count, nodes.changes = 3, {"fault_tolerance": {"hang_timeout_s": 6.0}}
    write_faults(nodes.run, [plan_fault(6, "block", ranks=[2])])
    ended = nodes.end(nodes.start(0), nodes.start(1), nodes.start(2))
    assert ended.digest == lab.train_reference({}, 3).digest
    (hang,) = ended.events_of_kind(HangDetected)
    assert (hang.rank, hang.silence_s < 10.0) == (2, True)
    assert faults_of(ended) == ["hang"]


@pytest.mark.parametrize(
    ("rank", "codes"), [pytest.param(0, [77, 75], marks=pytest.mark.slow), (1, [75, 77])], ids=["leading", "other"]
)
def test_a_node_whose_gpu_fails_in_every_attempt_leaves_alone_as_unfit(
    nodes: Nodes, rank: int, codes: list[int]
) -> None:
    nodes.changes = {"fault_tolerance": {"max_restarts": 2}}
    write_faults(nodes.run, [plan_fault(1, "lose-gpu", ranks=[rank], attempt=None)])
    started = [nodes.start(0), nodes.start(1)]
    said = [process.communicate(timeout=150)[1] for process in started]
    assert [process.returncode for process in started] == codes, said
    why = f"error: {'node 1' if rank else 'worker 0'}"
    (line,) = [line for line in said[0].splitlines() if line.startswith(why)]
    assert "its GPU failed: RuntimeError: CUDA error: uncorrectable ECC error" in line
    assert line.endswith("no progress in 2 attempts: train on another machine, or reset the GPU")


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_worker_of_either_node_is_replaced(lab: TrainHarness, nodes: Nodes, rank: int) -> None:
    write_faults(nodes.run, [plan_fault(7, ranks=[rank])])
    ended = nodes.end(nodes.start(0), nodes.start(1))
    fine(lab, ended)
    assert [(event.rank, event.what) for event in ended.events_of_kind(WorkerFailure)] == [(rank, "SIGKILL")]


@pytest.mark.slow
def test_an_agent_that_is_killed_and_started_again_rejoins(lab: TrainHarness, nodes: Nodes) -> None:
    write_faults(nodes.run, [plan_fault(7, "kill-agent", ranks=[1])])
    leader, member = nodes.start(0), nodes.start(1)
    member.wait(timeout=40)
    assert member.returncode == -signal.SIGKILL
    ended = nodes.end(leader, nodes.start(1))
    fine(lab, ended)
    assert faults_of(ended) == ["node lost"]


@pytest.mark.slow
def test_a_leader_that_is_killed_and_started_again_finds_its_nodes(lab: TrainHarness, nodes: Nodes) -> None:
    write_faults(nodes.run, [plan_fault(7, "kill-agent", ranks=[0])])
    leader, member = nodes.start(0), nodes.start(1)
    leader.wait(timeout=40)
    assert leader.returncode == -signal.SIGKILL
    ended = nodes.end(nodes.start(0), member)
    fine(lab, ended)


@pytest.mark.slow
def test_a_node_that_is_cut_off_and_comes_back_rejoins(lab: TrainHarness, nodes: Nodes) -> None:
    """An agent that is held still gives no sign, as behind a network that drops everything."""
    write_faults(nodes.run, [plan_fault(1, "slow", delay=0.3, ranks=[0])])
    leader, member = nodes.start(0), nodes.start(1)
    wait_until(lambda: count_steps(nodes.run) >= 3)
    os.kill(member.pid, signal.SIGSTOP)
    wait_until(lambda: '"failure"' in nodes.run.events.read_text(), 30, "the node to be given up")
    os.kill(member.pid, signal.SIGCONT)
    ended = nodes.end(leader, member)
    fine(lab, ended)
    assert faults_of(ended) == ["node lost"]


@pytest.mark.slow
def test_a_signal_to_any_node_stops_the_run_after_a_save(lab: TrainHarness, nodes: Nodes) -> None:
    write_faults(nodes.run, [plan_fault(1, "slow", delay=0.1)])
    leader, member = nodes.start(0), nodes.start(1)
    wait_until(lambda: count_steps(nodes.run) >= 3)
    os.kill(member.pid, signal.SIGTERM)
    stopped = nodes.end(leader, member)
    assert stopped.code == ExitCode.UNFINISHED, stopped.message
    assert stopped.result["digest"] is not None
    write_faults(nodes.run, [])
    fine(lab, nodes.end(nodes.start(0), nodes.start(1)))


def test_a_node_that_leaves_as_unfit_is_named_at_once_and_waited_for_with_words(
    lab: TrainHarness, nodes: Nodes, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: not found')")
    leader = nodes.start(0)
    unfit = nodes.start(1, PYTHONPATH=str(tmp_path))
    assert unfit.wait(timeout=40) == ExitCode.UNFIT_NODE
    events = nodes.run.events
    wait_until(lambda: events.exists() and "then this ends with 75" in events.read_text(), 30, "the leader's word")
    os.kill(leader.pid, signal.SIGTERM)
    ended = nodes.end(leader)
    said = [event.text for event in ended.events_of_kind(RunWarning)]
    assert said[0].startswith("waiting for node 1 until ")
    assert said[1].startswith(f"node 1 ({socket.gethostname()}) left with exit code 77: the process that loads torch")
    assert (ended.code, said[1] in ended.message) == (ExitCode.UNFINISHED, True)


def test_a_recipe_that_is_wrong_ends_all_nodes_with_its_code(lab: TrainHarness, nodes: Nodes) -> None:
    nodes.changes = {"steps": -1}
    leader = nodes.start(0)
    ended = nodes.end(leader, nodes.start(1), seconds=30)
    assert ended.code == ExitCode.RECIPE
