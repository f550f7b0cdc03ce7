"""Replicas that are lost under `determinism: elastic`: the others go on from memory, another takes the empty place, and
the run ends in the weights that one process alone would have had."""

import json
import os
import random
import signal
from pathlib import Path

import pytest
from test_lost_nodes import Nodes, nodes  # noqa: F401 - a fixture

from phalanx.errors import ExitCode
from phalanx.observe.goodput import compute_device_time
from phalanx.observe.history import read_history
from phalanx.run import Event
from phalanx.run.event_types import (
    AttemptStarted,
    CheckpointSaved,
    EvaluationDone,
    StepDone,
    WorkerFailure,
    WorkerStarted,
)
from train_harness import (
    FAULTS_CALLBACK,
    HarnessRun,
    TrainHarness,
    Values,
    kill_youngest_worker,
    list_live_workers,
    plan_fault,
    wait_until,
    write_faults,
)

REPLICAS: Values = {"determinism": "elastic"}
LONG: Values = {**REPLICAS, "steps": 70, "checkpoint": {"every": 40}, "evaluation": {"every": 20}}
"""So many steps that another worker takes its place before the last."""
NOT_YET = {"step": 9, "rank": None, "moment": "", "hold": "lost", "world": 2}
"""A checkpoint that is not written before only one worker is left (`helpers/kill_during_save.py`)."""
READY = 0.8
"""Seconds from a worker's start until it waits for its place."""


def steps_of(ended: HarnessRun) -> list[int]:
    return [event.step for event in ended.events_of_kind(StepDone)]


def assert_nothing_was_lost(lab: TrainHarness, ended: HarnessRun, changes: Values) -> None:
    reference = lab.train_reference(changes, 1)
    assert ended.digest == reference.digest
    assert ended.losses == reference.losses
    assert steps_of(ended) == list(range(1, changes["steps"] + 1))  # none is missing, none was done again
    assert [event.step for event in ended.events_of_kind(EvaluationDone)] == [
        event.step for event in reference.events_of_kind(EvaluationDone)
    ]
    assert list_live_workers(ended) == []


def worlds(ended: HarnessRun) -> list[int]:
    """Workers after each meeting."""
    return [event.world_size for event in ended.events_of_kind(AttemptStarted)]


@pytest.mark.parametrize(
    ("nproc", "rank", "micro"), [pytest.param(2, 1, 1, marks=pytest.mark.slow), (2, 0, 1), (4, 3, 3)]
)
def test_the_others_go_on_from_memory_and_another_takes_its_place(
    lab: TrainHarness, nproc: int, rank: int, micro: int
) -> None:
    """Four micro-batches on three workers: one of them does two."""
    changes = {**LONG, "batch": {"micro_size": micro}}
    ended = lab.train(changes, nproc, faults=[plan_fault(7, ranks=[rank])])
    assert_nothing_was_lost(lab, ended, changes)
    assert worlds(ended) == [nproc, nproc - 1, nproc]
    assert ended.result["num_restarts"] == len(ended.events_of_kind(WorkerFailure)) == 1


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 12))])
def test_killed_at_any_moment_of_a_step_ends_in_the_same_weights(lab: TrainHarness, seed: int) -> None:
    rng = random.Random(seed)
    nproc = rng.choice([2, 3, 4])
    first = plan_fault(rng.randint(1, 6), ranks=[rng.randrange(nproc)], when="within", delay=rng.uniform(0, 0.015))
    second = plan_fault(rng.randint(8, 11), ranks=[rng.randrange(nproc)], when="within", delay=rng.uniform(0, 0.015))
    ended = lab.train(REPLICAS, nproc, faults=[first, second])
    assert ended.digest == lab.train_reference(REPLICAS, 1).digest
    assert ended.losses == lab.train_reference(REPLICAS, 1).losses
    assert list_live_workers(ended) == []


def test_a_router_counts_no_token_of_a_step_that_was_given_up(lab: TrainHarness) -> None:
    """Its counts are in no checkpoint, and decide the next step's gradients."""
    changes = {**REPLICAS, "model": {"build": "phalanx.models:moe", "args": {"num_experts": 4}}}
    second = plan_fault(8, ranks=[0], when="within", delay=0.02)
    ended = lab.train(changes, 2, faults=[plan_fault(4, ranks=[1], when="within", delay=0.02), second])
    assert ended.digest == lab.train_reference(changes, 1).digest
    assert list_live_workers(ended) == []


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 40))])
def test_killed_at_the_end_of_the_run(lab: TrainHarness, seed: int) -> None:
    """After the last step, while all evaluate, save or leave."""
    rng = random.Random(seed)
    nproc = rng.choice([2, 3, 4])
    last = plan_fault(12, ranks=[rng.randrange(nproc)], when="within", delay=rng.uniform(0, 0.08))
    ended = lab.train(REPLICAS, nproc, faults=[last])
    assert ended.digest == lab.train_reference(REPLICAS, 1).digest
    assert ended.losses == lab.train_reference(REPLICAS, 1).losses
    assert list_live_workers(ended) == []


@pytest.mark.parametrize("hot", [None, 3])
def test_killed_again_and_again(lab: TrainHarness, hot: int | None) -> None:
    """Whoever is youngest, as soon as it has worked; with hot copies, one of which may be under way."""
    ended = lab.train({**LONG, "checkpoint": {"every": 40, "in_memory_every": hot}}, 2, show=kill_youngest_worker(2, 6))
    assert ended.digest == lab.train_reference(LONG, 1).digest
    assert len(ended.events_of_kind(WorkerFailure)) >= 4


@pytest.mark.parametrize("ranks", [[0, 2], pytest.param([1, 2], marks=pytest.mark.slow)])
def test_two_at_once(lab: TrainHarness, ranks: list[int]) -> None:
    ended = lab.train(LONG, 3, faults=[plan_fault(7, ranks=ranks)])
    assert_nothing_was_lost(lab, ended, LONG)
    assert worlds(ended)[:2] == [3, 1]
    assert max(worlds(ended)[2:]) == 3


def test_all_at_once_start_again_from_the_last_checkpoint(lab: TrainHarness) -> None:
    ended = lab.train(LONG, 3, faults=[plan_fault(45, ranks=[0, 1, 2])])
    assert ended.digest == lab.train_reference(LONG, 1).digest
    assert [event.start_step for event in ended.events_of_kind(AttemptStarted)] == [0, 40]
    assert list_live_workers(ended) == []


@pytest.mark.slow
def test_another_is_lost_while_a_new_one_waits_for_the_end_of_a_checkpoint(lab: TrainHarness, tmp_path: Path) -> None:
    """The new one, which may come in only then, is ended and started again."""
    folder = lab.create_recipe_dir(tmp_path / "recipes")
    (folder / "kill_during_save.py").write_text(
        (Path(__file__).parents[1] / "helpers" / "kill_during_save.py").read_text()
    )
    run = lab.new_run()
    run.path.with_name(run.path.name + ".unwritten.json").write_text(json.dumps(NOT_YET))
    victims: list[int] = []
    begun: list[float] = []

    def show(event: Event) -> None:
        if isinstance(event, WorkerStarted) and event.joins_late:
            begun.append(event.time)
        elif isinstance(event, WorkerStarted) and event.rank == 1:
            victims.append(event.pid)
        if isinstance(event, StepDone) and begun and event.time > begun[0] + READY and victims:
            os.kill(victims.pop(), signal.SIGKILL)

    changes = {**REPLICAS, "steps": 70, "checkpoint": {"every": 9}, "evaluation": {"every": 71}}
    slow = plan_fault(9, "slow", delay=0.06)
    both = {**changes, "callbacks": [FAULTS_CALLBACK, "kill_during_save:KillDuringSave"]}
    ended = lab.train(both, 3, run, faults=[plan_fault(10, ranks=[2]), slow], show=show, folder=folder)
    assert_nothing_was_lost(lab, ended, changes)
    assert worlds(ended)[:3] == [3, 2, 1]
    assert [event.rank for event in ended.events_of_kind(WorkerStarted) if event.joins_late].count(2) == 2
    assert (
        min(event.time for event in ended.events_of_kind(CheckpointSaved)) > ended.events_of_kind(WorkerFailure)[1].time
    )


def test_killed_when_it_is_about_to_take_its_place(lab: TrainHarness) -> None:
    killed: list[int] = []

    def show(event: Event) -> None:
        if isinstance(event, WorkerStarted) and event.joins_late and not killed:
            killed.append(event.pid)
            os.kill(event.pid, signal.SIGKILL)

    ended = lab.train(LONG, 2, faults=[plan_fault(7, ranks=[1])], show=show)
    assert ended.digest == lab.train_reference(LONG, 1).digest
    assert len(killed) == 1


def test_asked_to_stop_while_one_is_away_saves_and_goes_on_later(lab: TrainHarness) -> None:
    run = lab.new_run()

    def show(event: Event) -> None:
        if isinstance(event, AttemptStarted) and event.world_size == 1:
            signal.raise_signal(signal.SIGTERM)

    stopped = lab.train(LONG, 2, run, faults=[plan_fault(7, ranks=[1])], show=show)
    assert stopped.code == ExitCode.UNFINISHED
    assert list_live_workers(stopped) == []
    assert lab.train(LONG, 2, run).digest == lab.train_reference(LONG, 1).digest


def test_what_it_cost_stands_in_the_ledger(lab: TrainHarness) -> None:
    ended = lab.train(LONG, 2, faults=[plan_fault(7, ranks=[1])])
    ledger = compute_device_time(read_history(ended.run.events))
    (loss,) = ledger.failure_costs
    assert loss.description == "rank 1: SIGKILL"
    assert loss.wasted_s == 0
    parts = ledger.productive_s + ledger.blocked_s + ledger.wasted_s + ledger.unavailable_s
    assert parts == pytest.approx(ledger.allocated_s)


@pytest.mark.slow
def test_a_lost_node_comes_back_while_the_others_train(lab: TrainHarness, nodes: Nodes, tmp_path: Path) -> None:  # noqa: F811
    nodes.changes = {**LONG, "steps": 300, "checkpoint": {"every": 1000}, "evaluation": {"every": None}}
    back = tmp_path / "back"
    write_faults(nodes.run, [plan_fault(21, "slow", delay=0.1, until=str(back))])  # else it may end before that
    leader, member = nodes.start(0), nodes.start(1)
    wait_until(lambda: nodes.run.events.exists() and '"step": 20,' in nodes.run.events.read_text(), 120, "step 20")
    member.send_signal(signal.SIGKILL)
    returned = nodes.start(1)
    wait_until(lambda: '"scaled_up": true' in nodes.run.events.read_text(), 120, "the node to come back")
    back.touch()
    ended = nodes.end(leader, returned)
    assert ended.digest == lab.train_reference(nodes.changes, 1).digest
    assert worlds(ended) == [2, 1, 2]
    assert steps_of(ended) == list(range(1, 301))
