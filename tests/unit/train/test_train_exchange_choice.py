"""What `grad_sync.algorithm: auto` decides, on made-up numbers and on those that were measured over limited links."""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace

import pytest

from phalanx.plan.setup import INT8, WIRES
from phalanx.recipe.exchanges import BY_ACCURACY
from phalanx.train.exchange.choice import (
    BYTES,
    Choice,
    Seen,
    begun,
    best,
    decided,
    efficiencies,
    foretold,
    gain_of_no,
)
from phalanx.train.exchange.ways import WAYS

ALL = BY_ACCURACY
COMPUTING, BACKWARD = 0.372, 0.228
LINKS = {
    "100mbit": ({"all-reduce": 1.8469, "bf16": 1.0698, "int8": 0.6189}, "int8"),
    "1gbit": ({"all-reduce": 0.3990, "bf16": 0.4003, "int8": 0.4267}, "all-reduce"),
}
"""Seconds of a step (docs/benchmarks/grad-sync.md), and the fastest."""


def seen(seconds: float, computing: float = COMPUTING) -> Seen:
    return Seen(seconds, seconds - computing, BACKWARD)


def walked(steps: Mapping[str, float], candidates: tuple[str, ...] = ALL, choice: Choice | None = None) -> list[Choice]:
    """The choices until one is settled, where steps take so long with each strategy."""
    found = [choice or begun(Choice(), candidates, 4)]
    while not found[-1].settled:
        after, why = decided(found[-1], candidates, seen(steps[found[-1].strategy]))
        assert why
        found.append(after)
    return found


def names(choices: list[Choice]) -> list[str]:
    return [choice.strategy for choice in choices]


@pytest.mark.parametrize("link", LINKS)
def test_on_measured_links_the_fastest_is_taken(link: str) -> None:
    steps, fastest = LINKS[link]
    chosen = walked(steps)[-1].strategy
    assert chosen == fastest
    assert steps[chosen] <= 1.05 * min(steps.values())


def test_a_run_begins_with_the_most_accurate() -> None:
    assert begun(Choice(), ALL, 4).strategy == "all-reduce"


def test_what_hides_behind_backward_stays() -> None:
    assert names(walked({"all-reduce": 0.385})) == ["all-reduce", "all-reduce"]


def test_the_first_that_stays_within_the_limit_is_taken() -> None:
    assert names(walked({"all-reduce": 0.5, "bf16": 0.38})) == ["all-reduce", "bf16", "bf16"]


def test_one_that_is_slower_is_left_again() -> None:
    assert names(walked({"all-reduce": 0.5, "bf16": 0.6, "int8": 0.4})) == ["all-reduce", "bf16", "all-reduce"]


def test_among_equals_the_more_accurate_is_taken() -> None:
    assert walked({"all-reduce": 1.0, "bf16": 0.7, "int8": 0.69})[-1].strategy == "bf16"


def test_what_is_not_allowed_is_not_tried() -> None:
    assert names(walked(LINKS["100mbit"][0], ALL[:2])) == ["all-reduce", "bf16", "bf16"]


def test_another_world_begins_anew() -> None:
    settled = walked(LINKS["100mbit"][0])[-1]
    assert begun(settled, ALL, 4) == settled
    assert begun(settled, ALL, 2) == Choice("all-reduce", 2)
    assert begun(settled, ALL[:2], 4) == Choice("all-reduce", 4)


def test_a_share_that_stays_decides_nothing() -> None:
    settled = walked(LINKS["100mbit"][0])[-1]
    for seconds in (0.61, 0.64, 0.60, 0.65):
        settled, why = decided(settled, ALL, seen(seconds))
        assert not why
    assert settled.strategy == "int8"


def test_a_single_look_at_another_share_decides_nothing() -> None:
    choice = walked({"all-reduce": 0.38})[-1]
    for seconds in (1.8, 0.38, 1.8, 0.38):
        choice, why = decided(choice, ALL, seen(seconds))
        assert not why
    assert choice.strategy == "all-reduce"


def test_a_share_that_has_grown_for_long_goes_on_to_fewer_bytes() -> None:
    choice = walked({"all-reduce": 0.38})[-1]
    choice, why = decided(choice, ALL, seen(1.8))
    assert not why
    choice, why = decided(choice, ALL, seen(1.8))
    assert choice.strategy == "bf16"
    assert "all-reduce" in why
    assert walked(LINKS["100mbit"][0], choice=choice)[-1].strategy == "int8"


@pytest.mark.parametrize(("now", "then"), [(0.38, "all-reduce"), (2.0, "all-reduce")])
def test_where_nothing_has_fewer_bytes_or_less_would_do_all_are_tried_again(now: float, then: str) -> None:
    choice = walked(LINKS["100mbit"][0])[-1]
    for _ in range(2):
        choice, why = decided(choice, ALL, seen(now))
    assert why
    assert (choice.strategy, choice.settled, dict(choice.seen)) == (then, False, {})


def test_a_network_that_goes_up_and_down_is_tried_less_and_less_often() -> None:
    choice, looks = walked({"all-reduce": 0.38})[-1], []
    for _ in range(3):
        choice = walked(LINKS["100mbit"][0], choice=replace(choice, settled=False, seen={}, strategy="all-reduce"))[-1]
        count, why = 0, ""
        while not why:
            choice, why = decided(choice, ALL, seen(0.38))
            count += 1
        looks.append(count)
    assert looks == [2, 4, 8]


def test_it_says_what_was_foretold_and_what_came_of_it() -> None:
    choices = walked(LINKS["100mbit"][0])
    _, why = decided(choices[1], ALL, seen(1.0698))
    assert f"bf16 0.35 ({choices[1].foretold:.2f} was predicted)" in why
    assert choices[2].foretold == pytest.approx(COMPUTING / 0.6189, abs=0.1)


def test_two_strategies_foretell_the_third_by_a_line() -> None:
    both = {"all-reduce": seen(2.0), "bf16": seen(1.2)}
    assert foretold("int8", both) == pytest.approx(1.2 - 1.6 * (0.5 - INT8))
    assert foretold("int8", {"all-reduce": seen(0.6), "bf16": seen(0.4)}) == COMPUTING


def test_one_strategy_foretells_another_by_its_bytes() -> None:
    exposed = 1.8469 - COMPUTING
    expected = COMPUTING + (exposed + BACKWARD) / 2 - BACKWARD
    assert foretold("bf16", {"all-reduce": seen(1.8469)}) == pytest.approx(expected)


def test_efficiency_is_the_step_without_exchange_over_the_step() -> None:
    found = efficiencies({"all-reduce": seen(0.744), "bf16": seen(0.372)})
    assert found == {"all-reduce": 0.5, "bf16": 1.0}


def test_what_exact_no_would_gain_is_told_of_the_most_accurate_that_would_do() -> None:
    assert gain_of_no(seen(0.38))[0] == "all-reduce"
    name, efficiency = gain_of_no(seen(0.42))
    assert (name, efficiency) == ("bf16", 1.0)
    name, efficiency = gain_of_no(seen(1.8469))
    assert name == "int8"
    assert 0.5 < efficiency < 0.9


def test_what_saves_waiting_and_hardly_time_is_not_taken() -> None:
    allreduce, bf16 = Seen(0.669, 0.043, BACKWARD), Seen(0.655, 0.017, BACKWARD)  # as it was seen once at 1 Gbit/s
    assert best(ALL, {"all-reduce": allreduce, "bf16": bf16}) == "all-reduce"
    assert best(ALL, {"all-reduce": allreduce, "bf16": replace(bf16, seconds=0.64)}) == "bf16"


def test_the_fastest_within_the_limit_is_not_preferred_to_the_most_accurate_there() -> None:
    assert best(ALL, {"bf16": seen(0.385), "int8": seen(0.373)}) == "bf16"


def test_it_survives_a_checkpoint() -> None:
    for choice in walked(LINKS["100mbit"][0]):
        assert Choice.from_meta(json.loads(json.dumps(asdict(choice)))) == choice
    assert Choice.from_meta({}) == Choice()


def test_bytes_are_those_of_the_planner() -> None:
    assert set(BYTES) == set(BY_ACCURACY) <= set(WAYS)
    assert {name: BYTES[name] for name in WIRES if name in BYTES} == {n: WIRES[n].share for n in WIRES if n in BYTES}
