"""Which fault strikes whom and when: reproducible, fair to the run, and saves and restarts are among the moments."""

from dataclasses import replace
from itertools import groupby, pairwise

import pytest

from phalanx.errors import UsageError
from phalanx.jobs.chaos.plan import KINDS, Course, Fault, Moment, Phase, draw, kinds_of, possible

COURSE = Course(steps=1000, every=20, keep=3, attempts=3, world=2)
SEEDS = range(40)


def rounds(faults: tuple[Fault, ...]) -> list[list[Fault]]:
    """The faults between two new checkpoints."""
    numbers, number = [], 0
    for fault in faults:
        number += fault.moment.fresh
        numbers.append(number)
    return [[fault for fault, _ in group] for _, group in groupby(zip(faults, numbers, strict=True), lambda it: it[1])]


def test_a_seed_gives_the_same_list_again_and_another_seed_another() -> None:
    kinds = possible(COURSE)
    assert draw(3, 20, kinds, COURSE) == draw(3, 20, kinds, COURSE)
    assert draw(3, 20, kinds, COURSE) != draw(4, 20, kinds, COURSE)


@pytest.mark.parametrize("attempts", [1, 2, 3, 5])
def test_no_round_is_longer_than_the_run_may_go_on_without_progress(attempts: int) -> None:
    course = replace(COURSE, attempts=attempts)
    for seed in SEEDS:
        first, *others = rounds(draw(seed, 30, possible(course), course))
        assert len(first) <= attempts - (not first[0].moment.fresh)
        assert all(len(each) <= attempts for each in others)
        assert all(each[0].moment.fresh for each in others)


def test_as_many_faults_as_fit_are_drawn_and_no_more() -> None:
    course = replace(COURSE, steps=100)  # saves at 20, 40, 60 and 80: rounds of 2, 3, 3 and 3
    for seed in SEEDS:
        assert len(draw(seed, 11, ("kill",), course)) == 11
    with pytest.raises(UsageError, match=r"12 faults are too many: .* saves 4 times .* lets it go on after 11 faults"):
        draw(0, 12, ("kill",), course)


def test_a_run_that_is_given_up_at_once_is_struck_only_after_progress() -> None:
    course = replace(COURSE, attempts=1)
    assert all(fault.moment.fresh for fault in draw(1, 10, ("kill",), course))
    with pytest.raises(UsageError, match="lets it go on after 0 faults"):
        draw(1, 1, ("kill",), replace(course, every=None))


@pytest.mark.parametrize("count", [4, 10, 100])
def test_steps_saves_and_restarts_are_among_the_moments(count: int) -> None:
    for seed in SEEDS:
        phases = {fault.moment.phase for fault in draw(seed, count, ("kill", "agent"), COURSE)}
        assert phases == set(Phase)


def test_a_restart_is_struck_only_behind_a_fault_that_causes_one() -> None:
    for seed in SEEDS:
        faults = draw(seed, 30, possible(COURSE), COURSE)
        for before, fault in pairwise(faults):
            assert fault.moment.phase is not Phase.RESTART or KINDS[before.kind].ends
        assert faults[0].moment.phase is not Phase.RESTART


def test_every_kind_comes_where_there_is_room_for_each() -> None:
    kinds = possible(COURSE)
    for seed in SEEDS:
        assert {fault.kind for fault in draw(seed, 2 * len(kinds), kinds, COURSE)} == set(kinds)


def test_damage_waits_for_a_checkpoint_newer_than_what_was_damaged_before() -> None:
    for seed in SEEDS:
        for kinds in (possible(COURSE), ("corrupt-checkpoint",), ("corrupt-checkpoint", "kill")):
            damage = [fault for fault in draw(seed, 20, kinds, COURSE) if fault.kind == "corrupt-checkpoint"]
            assert damage
            assert all(fault.moment.fresh for fault in damage)


def test_moments_go_up_through_the_run_and_leave_time_at_its_end() -> None:
    for seed in SEEDS:
        steps = [fault.moment.step for fault in draw(seed, 30, ("kill",), COURSE) if fault.moment.step is not None]
        assert steps == sorted(steps)
        assert steps[0] >= 1
        assert steps[-1] <= 800


def test_only_a_node_that_does_not_lead_is_lost() -> None:
    course = replace(COURSE, world=6, nodes=3)
    ranks = {fault.rank for seed in SEEDS for fault in draw(seed, 10, ("node-loss", "partition"), course)}
    assert ranks == {2, 3, 4, 5}
    assert {fault.rank for seed in SEEDS for fault in draw(seed, 10, ("kill",), course)} == set(range(6))


@pytest.mark.parametrize(
    ("text", "course", "said"),
    [
        ("kill,burn", COURSE, "there is no kind 'burn'; there are kill, crash"),
        ("", COURSE, "there is no kind ''"),
        ("hang", replace(COURSE, world=1), "hang needs another worker"),
        ("node-loss", COURSE, "node-loss needs several nodes: --nodes 2"),
        ("job-runner", COURSE, "job-runner needs a run in the queue: --queue"),
        (
            "corrupt-checkpoint",
            replace(COURSE, keep=1),
            "corrupt-checkpoint needs an older checkpoint: checkpoint.keep=2",
        ),
        ("corrupt-checkpoint", replace(COURSE, every=600), "in 1000 steps the run saves 1 times"),
    ],
)
def test_a_kind_that_does_not_exist_or_cannot_strike_is_told(text: str, course: Course, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        kinds_of(text, course)
    assert said in str(caught.value)


def test_without_a_word_only_what_can_strike_and_takes_seconds_comes() -> None:
    assert set(KINDS) - set(kinds_of(None, COURSE)) == {
        "interrupt",
        "node-loss",
        "partition",
        "job-runner",
        "queue-daemon",
    }
    assert kinds_of(" kill, agent,kill", COURSE) == ("kill", "agent")


@pytest.mark.parametrize(
    ("moment", "words"),
    [
        (Moment(Phase.STEP, 0.375, 12), "38% of a step after step 12"),
        (Moment(Phase.SAVE, 0.5, 40, fresh=True), "50% into a save after step 40 and a new checkpoint"),
        (Moment(Phase.RESTART, 0.07), "7% into the restart"),
    ],
)
def test_a_moment_is_told_in_what_the_run_does(moment: Moment, words: str) -> None:
    assert str(moment) == words
