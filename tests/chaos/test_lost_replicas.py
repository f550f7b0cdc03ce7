"""Replicas that are lost under `exact: replicas`: the others go on from memory, another takes the empty place, and the
run ends in the weights that one process alone would have had."""

import os
import random
import signal

import pytest
from test_lost_nodes import Nodes, nodes  # noqa: F401 - a fixture

from lab import Ended, Lab, Values, alive, fault, killing_the_youngest, wait_until
from phalanx.errors import ExitCode
from phalanx.observe.history import read_history
from phalanx.observe.ledger import ledger_of
from phalanx.run import Event

REPLICAS: Values = {"exchange": {"exact": "replicas"}}
LONG: Values = {**REPLICAS, "steps": 70, "checkpoint": {"every": 40}, "evaluate": {"every": 20}}
"""So many steps that another worker takes its place before the last."""


def steps_of(ended: Ended) -> list[int]:
    return [event["step"] for event in ended.kind("step")]


def worlds(ended: Ended) -> list[int]:
    """Workers after each meeting."""
    return [event["world"] for event in ended.kind("start")]


@pytest.mark.parametrize(
    ("nproc", "rank", "micro"), [pytest.param(2, 1, 1, marks=pytest.mark.slow), (2, 0, 1), (4, 3, 3)]
)
def test_the_others_go_on_from_memory_and_another_takes_its_place(lab: Lab, nproc: int, rank: int, micro: int) -> None:
    """Four micro-batches on three workers: one of them does two."""
    changes = {**LONG, "batch": {"micro": micro}}
    ended = lab.train(changes, nproc, faults=[fault(7, ranks=[rank])])
    reference = lab.reference(changes, 1)
    assert ended.digest == reference.digest
    assert ended.losses == reference.losses
    assert worlds(ended) == [nproc, nproc - 1, nproc]
    assert steps_of(ended) == list(range(1, LONG["steps"] + 1))  # none is missing, none was done again
    assert [event["step"] for event in ended.kind("eval")] == [event["step"] for event in reference.kind("eval")]
    assert ended.result["restarts"] == len(ended.kind("fault")) == 1
    assert alive(ended) == []


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 12))])
def test_killed_at_any_moment_of_a_step_ends_in_the_same_weights(lab: Lab, seed: int) -> None:
    rng = random.Random(seed)
    nproc = rng.choice([2, 3, 4])
    first = fault(rng.randint(1, 6), ranks=[rng.randrange(nproc)], when="within", delay=rng.uniform(0, 0.015))
    second = fault(rng.randint(8, 11), ranks=[rng.randrange(nproc)], when="within", delay=rng.uniform(0, 0.015))
    ended = lab.train(REPLICAS, nproc, faults=[first, second])
    assert ended.digest == lab.reference(REPLICAS, 1).digest
    assert ended.losses == lab.reference(REPLICAS, 1).losses
    assert alive(ended) == []


def test_killed_again_and_again(lab: Lab) -> None:
    """Whoever is youngest, as soon as it has worked."""
    ended = lab.train(LONG, 2, show=killing_the_youngest(2, 6))
    assert ended.digest == lab.reference(LONG, 1).digest
    assert len(ended.kind("fault")) >= 4


def test_two_at_once_start_again_from_the_last_checkpoint(lab: Lab) -> None:
    ended = lab.train(LONG, 3, faults=[fault(45, ranks=[0, 2])])
    assert ended.digest == lab.reference(LONG, 1).digest
    assert alive(ended) == []


def test_killed_when_it_is_about_to_take_its_place(lab: Lab) -> None:
    killed: list[int] = []

    def show(event: Event) -> None:
        if event["kind"] == "worker" and event.get("later") and not killed:
            killed.append(event["pid"])
            os.kill(event["pid"], signal.SIGKILL)

    ended = lab.train(LONG, 2, faults=[fault(7, ranks=[1])], show=show)
    assert ended.digest == lab.reference(LONG, 1).digest
    assert len(killed) == 1


def test_asked_to_stop_while_one_is_away_saves_and_goes_on_later(lab: Lab) -> None:
    run = lab.place()

    def show(event: Event) -> None:
        if event["kind"] == "start" and event["world"] == 1:
            signal.raise_signal(signal.SIGTERM)

    stopped = lab.train(LONG, 2, run, faults=[fault(7, ranks=[1])], show=show)
    assert stopped.code == ExitCode.UNFINISHED
    assert alive(stopped) == []
    assert lab.train(LONG, 2, run).digest == lab.reference(LONG, 1).digest


def test_what_it_cost_stands_in_the_ledger(lab: Lab) -> None:
    ended = lab.train(LONG, 2, faults=[fault(7, ranks=[1])])
    ledger = ledger_of(read_history(ended.run.events))
    (loss,) = ledger.losses
    assert loss.what == "rank 1: SIGKILL"
    assert loss.discarded == 0
    parts = ledger.productive + ledger.blocked + ledger.discarded + ledger.unavailable
    assert parts == pytest.approx(ledger.allocated)


@pytest.mark.slow
def test_a_lost_node_comes_back_while_the_others_train(lab: Lab, nodes: Nodes) -> None:  # noqa: F811
    nodes.changes = {**LONG, "steps": 1500, "checkpoint": {"every": 1000}, "evaluate": {"every": None}}
    leader, member = nodes.start(0), nodes.start(1)
    wait_until(lambda: nodes.run.events.exists() and '"step": 20,' in nodes.run.events.read_text(), 30, "step 20")
    member.send_signal(signal.SIGKILL)
    ended = nodes.end(leader, nodes.start(1))
    assert ended.digest == lab.reference(nodes.changes, 1).digest
    assert worlds(ended) == [2, 1, 2]
    assert steps_of(ended) == list(range(1, 1501))
