"""What `grad_sync.algorithm: auto` decides, on made-up numbers and on those that were measured over limited links."""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace

import pytest

from phalanx.planner.scenario import INT8_WIRE_RATIO, TRANSPORT_BY_COMPRESSION
from phalanx.recipe.grad_sync_defaults import AUTO_COMPRESSIONS
from phalanx.train.grad_sync.registry import GRAD_SYNC_ALGORITHMS
from phalanx.train.grad_sync.selection import (
    BYTES_FRACTION_BY_ALGORITHM,
    SelectionState,
    StepTiming,
    compute_efficiencies,
    predict_lossy_gain,
    predict_step_s,
    resume_selection,
    select_best,
    update_selection,
)

ALL = AUTO_COMPRESSIONS
COMPUTING, BACKWARD = 0.372, 0.228
LINKS = {
    "100mbit": ({"all-reduce": 1.8469, "bf16": 1.0698, "int8": 0.6189}, "int8"),
    "1gbit": ({"all-reduce": 0.3990, "bf16": 0.4003, "int8": 0.4267}, "all-reduce"),
}
"""Seconds of a step (docs/benchmarks/grad-sync.md), and the fastest."""


def seen(seconds: float, computing: float = COMPUTING) -> StepTiming:
    return StepTiming(seconds, seconds - computing, BACKWARD)


def walked(
    steps: Mapping[str, float], candidates: tuple[str, ...] = ALL, choice: SelectionState | None = None
) -> list[SelectionState]:
    """The choices until one is settled, where steps take so long with each strategy."""
    found = [choice or resume_selection(SelectionState(), candidates, 4)]
    while not found[-1].is_final:
        after, why = update_selection(found[-1], candidates, seen(steps[found[-1].algorithm]))
        assert why
        found.append(after)
    return found


def names(choices: list[SelectionState]) -> list[str]:
    return [choice.algorithm for choice in choices]


@pytest.mark.parametrize("link", LINKS)
def test_on_measured_links_the_fastest_is_taken(link: str) -> None:
    steps, fastest = LINKS[link]
    chosen = walked(steps)[-1].algorithm
    assert chosen == fastest
    assert steps[chosen] <= 1.05 * min(steps.values())


def test_a_run_begins_with_the_most_accurate() -> None:
    assert resume_selection(SelectionState(), ALL, 4).algorithm == "all-reduce"


def test_what_hides_behind_backward_stays() -> None:
    assert names(walked({"all-reduce": 0.385})) == ["all-reduce", "all-reduce"]


def test_the_first_that_stays_within_the_limit_is_taken() -> None:
    assert names(walked({"all-reduce": 0.5, "bf16": 0.38})) == ["all-reduce", "bf16", "bf16"]


def test_one_that_is_slower_is_left_again() -> None:
    assert names(walked({"all-reduce": 0.5, "bf16": 0.6, "int8": 0.4})) == ["all-reduce", "bf16", "all-reduce"]


def test_among_equals_the_more_accurate_is_taken() -> None:
    assert walked({"all-reduce": 1.0, "bf16": 0.7, "int8": 0.69})[-1].algorithm == "bf16"


def test_what_is_not_allowed_is_not_tried() -> None:
    assert names(walked(LINKS["100mbit"][0], ALL[:2])) == ["all-reduce", "bf16", "bf16"]


def test_another_world_begins_anew() -> None:
    settled = walked(LINKS["100mbit"][0])[-1]
    assert resume_selection(settled, ALL, 4) == settled
    assert resume_selection(settled, ALL, 2) == SelectionState("all-reduce", 2)
    assert resume_selection(settled, ALL[:2], 4) == SelectionState("all-reduce", 4)


def test_a_share_that_stays_decides_nothing() -> None:
    settled = walked(LINKS["100mbit"][0])[-1]
    for seconds in (0.61, 0.64, 0.60, 0.65):
        settled, why = update_selection(settled, ALL, seen(seconds))
        assert not why
    assert settled.algorithm == "int8"


def test_a_single_look_at_another_share_decides_nothing() -> None:
    choice = walked({"all-reduce": 0.38})[-1]
    for seconds in (1.8, 0.38, 1.8, 0.38):
        choice, why = update_selection(choice, ALL, seen(seconds))
        assert not why
    assert choice.algorithm == "all-reduce"


def test_a_share_that_has_grown_for_long_goes_on_to_fewer_bytes() -> None:
    choice = walked({"all-reduce": 0.38})[-1]
    choice, why = update_selection(choice, ALL, seen(1.8))
    assert not why
    choice, why = update_selection(choice, ALL, seen(1.8))
    assert choice.algorithm == "bf16"
    assert "all-reduce" in why
    assert walked(LINKS["100mbit"][0], choice=choice)[-1].algorithm == "int8"


@pytest.mark.parametrize(("now", "then"), [(0.38, "all-reduce"), (2.0, "all-reduce")])
def test_where_nothing_has_fewer_bytes_or_less_would_do_all_are_tried_again(now: float, then: str) -> None:
    choice = walked(LINKS["100mbit"][0])[-1]
    for _ in range(2):
        choice, why = update_selection(choice, ALL, seen(now))
    assert why
    assert (choice.algorithm, choice.is_final, dict(choice.timings)) == (then, False, {})


def test_a_network_that_goes_up_and_down_is_tried_less_and_less_often() -> None:
    choice, looks = walked({"all-reduce": 0.38})[-1], []
    for _ in range(3):
        choice = walked(
            LINKS["100mbit"][0], choice=replace(choice, is_final=False, timings={}, algorithm="all-reduce")
        )[-1]
        count, why = 0, ""
        while not why:
            choice, why = update_selection(choice, ALL, seen(0.38))
            count += 1
        looks.append(count)
    assert looks == [2, 4, 8]


def test_it_says_what_was_foretold_and_what_came_of_it() -> None:
    choices = walked(LINKS["100mbit"][0])
    _, why = update_selection(choices[1], ALL, seen(1.0698))
    assert f"bf16 0.35 ({choices[1].predicted_efficiency:.2f} was predicted)" in why
    assert choices[2].predicted_efficiency == pytest.approx(COMPUTING / 0.6189, abs=0.1)


def test_two_strategies_foretell_the_third_by_a_line() -> None:
    both = {"all-reduce": seen(2.0), "bf16": seen(1.2)}
    assert predict_step_s("int8", both) == pytest.approx(1.2 - 1.6 * (0.5 - INT8_WIRE_RATIO))
    assert predict_step_s("int8", {"all-reduce": seen(0.6), "bf16": seen(0.4)}) == COMPUTING


def test_one_strategy_foretells_another_by_its_bytes() -> None:
    exposed = 1.8469 - COMPUTING
    expected = COMPUTING + (exposed + BACKWARD) / 2 - BACKWARD
    assert predict_step_s("bf16", {"all-reduce": seen(1.8469)}) == pytest.approx(expected)


def test_efficiency_is_the_step_without_exchange_over_the_step() -> None:
    found = compute_efficiencies({"all-reduce": seen(0.744), "bf16": seen(0.372)})
    assert found == {"all-reduce": 0.5, "bf16": 1.0}


def test_what_exact_no_would_gain_is_told_of_the_most_accurate_that_would_do() -> None:
    assert predict_lossy_gain(seen(0.38))[0] == "all-reduce"
    name, efficiency = predict_lossy_gain(seen(0.42))
    assert (name, efficiency) == ("bf16", 1.0)
    name, efficiency = predict_lossy_gain(seen(1.8469))
    assert name == "int8"
    assert 0.5 < efficiency < 0.9


def test_what_saves_waiting_and_hardly_time_is_not_taken() -> None:
    allreduce, bf16 = (
        StepTiming(0.669, 0.043, BACKWARD),
        StepTiming(0.655, 0.017, BACKWARD),
    )  # as it was seen once at 1 Gbit/s
    assert select_best(ALL, {"all-reduce": allreduce, "bf16": bf16}) == "all-reduce"
    assert select_best(ALL, {"all-reduce": allreduce, "bf16": replace(bf16, step_s=0.64)}) == "bf16"


def test_the_fastest_within_the_limit_is_not_preferred_to_the_most_accurate_there() -> None:
    assert select_best(ALL, {"bf16": seen(0.385), "int8": seen(0.373)}) == "bf16"


def test_it_survives_a_checkpoint() -> None:
    for choice in walked(LINKS["100mbit"][0]):
        assert SelectionState.from_meta(json.loads(json.dumps(asdict(choice)))) == choice
    assert SelectionState.from_meta({}) == SelectionState()


def test_bytes_are_those_of_the_planner() -> None:
    assert set(BYTES_FRACTION_BY_ALGORITHM) == set(AUTO_COMPRESSIONS) <= set(GRAD_SYNC_ALGORITHMS)
    assert {
        name: BYTES_FRACTION_BY_ALGORITHM[name]
        for name in TRANSPORT_BY_COMPRESSION
        if name in BYTES_FRACTION_BY_ALGORITHM
    } == {
        n: TRANSPORT_BY_COMPRESSION[n].wire_ratio for n in TRANSPORT_BY_COMPRESSION if n in BYTES_FRACTION_BY_ALGORITHM
    }
