"""Tuning with real worlds of workers: what is measured, what fails, what is written, and what Ctrl-C leaves."""

import signal
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import pytest

from lab import Lab
from phalanx.errors import ExitCode
from phalanx.plan.tuning import CHANGEABLE, Candidate, Facts
from phalanx.recipe import Recipe, differences, load_recipe
from phalanx.tuning import Tuned, Watcher, text_of, tune

TRIED = {
    "shares": Candidate({"parallelism": {"replicate": 2}, "batch.micro_size": 6, "num_threads": 1}, 1.5, "two workers"),
    "refused": Candidate({"batch.micro_size": 5}, 1.4, "does not divide the batch"),
    "fails": Candidate({"parallelism": {"tensor": 3}}, 1.3, "two heads cannot be cut in three"),
}


@pytest.fixture(scope="module")
def recipe(lab: Lab) -> Path:
    return lab.recipe_file({"callbacks": [], "batch": {"micro_size": "auto"}}, "tuned-by-a-test")


@pytest.fixture(scope="module")
def tuned(lab: Lab, recipe: Path) -> Iterator[tuple[Tuned, list[str]]]:
    told: list[str] = []

    def propose(best: Recipe, facts: Facts) -> list[Candidate]:
        return list(TRIED.values())

    watcher = Watcher(tried=lambda row: told.append(row.label))
    with lab.environment():
        yield tune(load_recipe(recipe), seconds=0.1, watcher=watcher, propose=propose), told


def test_each_candidate_is_tried_once_and_told(tuned: tuple[Tuned, list[str]]) -> None:
    found, told = tuned
    assert told == [candidate.label for candidate in TRIED.values()] == [row.label for row in found.rows]


def test_a_world_of_two_is_measured_against_one(tuned: tuple[Tuned, list[str]]) -> None:
    row = tuned[0].rows[0]
    assert row.found is not None
    assert 0 < row.found.low <= row.found.high
    assert row.kept == ("parallelism" in tuned[0].changes)


def test_a_candidate_that_cannot_run_is_a_row_that_says_why(tuned: tuple[Tuned, list[str]]) -> None:
    _, refused, fails = tuned[0].rows
    assert (refused.found, refused.kept, fails.found, fails.kept) == (None, False, None, False)
    assert "batch.micro_size: 5 x" in refused.note
    assert "3 ranks cannot share the model's 2 attention heads" in fails.note


def test_the_tuned_recipe_differs_only_where_it_may(tuned: tuple[Tuned, list[str]], recipe: Path) -> None:
    found, given = tuned[0], load_recipe(recipe)
    out = recipe.with_name("out.yaml")
    out.write_text(text_of(given, ["steps=7"], found, date(2026, 11, 21)))
    new = load_recipe(out).recipe
    keys = [difference.key for difference in differences(given.recipe, new)]
    assert "steps" in keys
    assert all(key == "steps" or any(key.startswith(allowed) for allowed in CHANGEABLE) for key in keys)


def test_nothing_is_left_behind(tuned: tuple[Tuned, list[str]], lab: Lab) -> None:
    assert not lab.processes()
    assert not list(Path().glob(".phalanx*"))


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_interrupted_it_leaves_no_process_and_no_file(
    lab: Lab, recipe: Path, tmp_path: Path, number: signal.Signals
) -> None:
    out = tmp_path / "out.yaml"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path))
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(lab.cache / "inductor"))  # which torch makes for itself
        with lab.start("tune", recipe, "--out", out, "--seconds", "20") as process:
            assert process.stdout is not None
            while not process.stdout.readline().startswith("tried"):
                assert process.poll() is None
            process.send_signal(number)
            _, errors = process.communicate(timeout=60)
    assert process.returncode == ExitCode.UNFINISHED
    assert errors.strip() == "error: interrupted"
    assert list(tmp_path.iterdir()) == []
    assert not lab.processes()
