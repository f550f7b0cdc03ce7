"""Numbers as people read them."""

import math

import pytest

from phalanx import formatting


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "not measured"),
        (math.nan, "not measured"),
        (0, "0 s"),
        (0.000083, "83 us"),
        (0.0412, "41.2 ms"),
        (0.99999, "1.0 s"),
        (7.3, "7.3 s"),
        (59.9, "1 min 00 s"),
        (161, "2 min 41 s"),
        (11_100, "3 h 05 min"),
        (187_200, "2 d 4 h"),
    ],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert formatting.format_duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "not measured"), (0, "0"), (16, "16"), (999.7, "1.00 k"), (41_234, "41.2 k"), (3_247_360, "3.25 M")],
)
def test_counts(value: float | None, text: str) -> None:
    assert formatting.format_count(value) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.0, "0%"), (0.004, "0.4%"), (0.0996, "10%"), (0.31, "31%"), (1.0, "100%"), (None, "not measured")],
)
def test_shares(share: float | None, text: str) -> None:
    assert formatting.format_percent(share) == text


def test_losses_say_when_they_are_not_numbers() -> None:
    assert formatting.format_loss(1.65432) == "1.654"
    assert formatting.format_loss(math.nan) == "not a number"
    assert formatting.format_loss(math.inf) == "infinite"
    assert formatting.format_loss(1e300) == "1.000e300"


def test_sizes_rates_and_plurals() -> None:
    assert formatting.format_bytes(39_012_352) == "39.0 MB"
    assert formatting.format_rate(41_234, "tokens") == "41.2 k tokens/s"
    assert formatting.format_flops(1.24e12) == "1.24 TFLOP/s"
    assert formatting.format_plural(1, "restart") == "1 restart"
    assert formatting.format_plural(2, "restart") == "2 restarts"


def test_exit_statuses_are_described() -> None:
    assert formatting.format_exit_status(-9) == "SIGKILL"
    assert formatting.format_exit_status(-40) == "signal 40"
    assert formatting.format_exit_status(3) == "exit code 3"


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["runs/a", "runs/b/"], ["a", "b"]),
        (["x/run", "y/run"], ["x/run", "y/run"]),
        (["/x/1/run", "/y/1/run", "/y/2/run", "/y/b"], ["x/1/run", "y/1/run", "2/run", "b"]),
        (["runs/a", "runs/a"], ["a", "a"]),
        ([], []),
    ],
    ids=["last part", "two parts", "each its own length", "equal", "none"],
)
def test_a_short_name_is_the_shortest_tail_that_no_other_path_has(paths: list[str], names: list[str]) -> None:
    assert formatting.shorten_paths(paths) == names
