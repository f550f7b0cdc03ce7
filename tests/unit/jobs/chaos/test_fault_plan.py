"""Which fault strikes whom and when: reproducible, fair to the run, and saves and restarts are among the moments."""

from dataclasses import replace
from itertools import groupby, pairwise

import pytest

from phalanx.errors import UsageError
from phalanx.jobs.chaos.fault_plan import (
    FAULT_KINDS,
    Fault,
    FaultPhase,
    RunShape,
    draw_faults,
    list_possible_kinds,
    parse_kinds,
)

COURSE = RunShape(steps=1000, checkpoint_every=20, keep=3, max_restarts=3, world_size=2)
SEEDS = range(40)


def rounds(faults: tuple[Fault, ...]) -> list[list[Fault]]:
    """The faults between two new checkpoints."""
    numbers, number = [], 0
    for fault in faults:
        number += fault.trigger.after_new_checkpoint
        numbers.append(number)
    return [[fault for fault, _ in group] for _, group in groupby(zip(faults, numbers, strict=True), lambda it: it[1])]


def test_a_seed_gives_the_same_list_again_and_another_seed_another() -> None:
    kinds = list_possible_kinds(COURSE)
    assert draw_faults(3, 20, kinds, COURSE) == draw_faults(3, 20, kinds, COURSE)
    assert draw_faults(3, 20, kinds, COURSE) != draw_faults(4, 20, kinds, COURSE)


@pytest.mark.parametrize("attempts", [1, 2, 3, 5])
def test_no_round_is_longer_than_the_run_may_go_on_without_progress(attempts: int) -> None:
    course = replace(COURSE, max_restarts=attempts)
    for seed in SEEDS:
        first, *others = rounds(draw_faults(seed, 30, list_possible_kinds(course), course))
        assert len(first) <= attempts - (not first[0].trigger.after_new_checkpoint)
        assert all(len(each) <= attempts for each in others)
        assert all(each[0].trigger.after_new_checkpoint for each in others)


def test_more_faults_than_the_run_saves_for_are_refused() -> None:
    course = replace(COURSE, steps=100)  # saves at 20, 40, 60 and 80: rounds of up to 2
    assert len(draw_faults(0, 4, ("kill",), course)) == 4
    with pytest.raises(UsageError, match=r"12 faults are too many: .* they need \d+ checkpoints; .* saves 4 times"):
        draw_faults(0, 12, ("kill",), course)


def test_a_run_that_is_given_up_at_once_is_struck_only_after_progress() -> None:
    course = replace(COURSE, max_restarts=1)
    assert all(fault.trigger.after_new_checkpoint for fault in draw_faults(1, 10, ("kill",), course))
    with pytest.raises(UsageError, match="need 1 checkpoints"):
        draw_faults(1, 1, ("kill",), replace(course, checkpoint_every=None))


@pytest.mark.parametrize("count", [4, 10, 60])
def test_steps_saves_and_restarts_are_among_the_moments(count: int) -> None:
    for seed in SEEDS:
        phases = {fault.trigger.phase for fault in draw_faults(seed, count, ("kill", "agent"), COURSE)}
        assert phases == set(FaultPhase)


def test_a_restart_is_struck_only_behind_a_fault_that_causes_one() -> None:
    for seed in SEEDS:
        faults = draw_faults(seed, 30, list_possible_kinds(COURSE), COURSE)
        for before, fault in pairwise(faults):
            assert fault.trigger.phase is not FaultPhase.RESTART or FAULT_KINDS[before.kind].ends_attempt
        assert faults[0].trigger.phase is not FaultPhase.RESTART


def test_every_kind_comes_where_there_is_room_for_each() -> None:
    kinds = list_possible_kinds(COURSE)
    for seed in SEEDS:
        assert {fault.kind for fault in draw_faults(seed, 2 * len(kinds), kinds, COURSE)} == set(kinds)


def test_damage_waits_for_a_checkpoint_newer_than_what_was_damaged_before() -> None:
    for seed in SEEDS:
        for kinds in (list_possible_kinds(COURSE), ("corrupt-checkpoint",), ("corrupt-checkpoint", "kill")):
            damage = [fault for fault in draw_faults(seed, 20, kinds, COURSE) if fault.kind == "corrupt-checkpoint"]
            assert damage
            assert all(fault.trigger.after_new_checkpoint for fault in damage)


def test_moments_go_up_through_the_run_and_leave_time_at_its_end() -> None:
    for seed in SEEDS:
        steps = [
            fault.trigger.min_step
            for fault in draw_faults(seed, 30, ("kill",), COURSE)
            if fault.trigger.min_step is not None
        ]
        assert steps == sorted(steps)
        assert steps[0] >= 1
        assert steps[-1] <= 800


def test_only_a_node_that_does_not_lead_is_lost() -> None:
    course = replace(COURSE, world_size=6, num_nodes=3)
    ranks = {fault.rank for seed in SEEDS for fault in draw_faults(seed, 10, ("node-loss", "partition"), course)}
    assert ranks == {2, 3, 4, 5}
    assert {fault.rank for seed in SEEDS for fault in draw_faults(seed, 10, ("kill",), course)} == set(range(6))


@pytest.mark.parametrize(
    ("text", "course", "said"),
    [
        ("kill,burn", COURSE, "there is no kind 'burn'; there are kill, crash"),
        ("", COURSE, "there is no kind ''"),
        ("hang", replace(COURSE, world_size=1), "hang needs another worker"),
        ("node-loss", COURSE, "node-loss needs several nodes: --nodes 2"),
        ("job-runner", COURSE, "job-runner needs a run in the queue: --queue"),
        (
            "corrupt-checkpoint",
            replace(COURSE, keep=1),
            "corrupt-checkpoint needs an older checkpoint: checkpoint.keep=2",
        ),
        ("corrupt-checkpoint", replace(COURSE, checkpoint_every=600), "in 1000 steps the run saves 1 times"),
    ],
)
def test_a_kind_that_does_not_exist_or_cannot_strike_is_told(text: str, course: RunShape, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_kinds(text, course)
    assert said in str(caught.value)


def test_without_a_word_only_what_can_strike_and_takes_seconds_comes() -> None:
    assert set(FAULT_KINDS) - set(parse_kinds(None, COURSE)) == {
        "interrupt",
        "node-loss",
        "partition",
        "job-runner",
        "queue-daemon",
    }
    assert parse_kinds(" kill, agent,kill", COURSE) == ("kill", "agent")
