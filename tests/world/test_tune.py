"""Tuning with real worlds of workers: what is measured, what fails, what is written, and what Ctrl-C leaves."""

import signal
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import pytest

from phalanx.app.tune import TuneCallbacks, TuneResult, render_recipe, tune
from phalanx.autoconfig.tuning_candidates import TUNABLE_KEYS, TuningCandidate, TuningFacts
from phalanx.errors import ExitCode
from phalanx.recipe import Recipe, load_recipe
from phalanx.recipe.diff import diff_recipes
from train_harness import TrainHarness

TRIED = {
    "shares": TuningCandidate(
        {"parallelism": {"replicate": 2}, "batch.micro_size": 6, "num_threads": 1}, 1.5, "two workers"
    ),
    "refused": TuningCandidate({"batch.micro_size": 5}, 1.4, "does not divide the batch"),
    "fails": TuningCandidate({"parallelism": {"tensor": 3}}, 1.3, "two heads cannot be cut in three"),
}


@pytest.fixture(scope="module")
def recipe(lab: TrainHarness) -> Path:
    return lab.recipe_file({"callbacks": [], "batch": {"micro_size": "auto"}}, "tuned-by-a-test")


@pytest.fixture(scope="module")
def tuned(lab: TrainHarness, recipe: Path) -> Iterator[tuple[TuneResult, list[str]]]:
    told: list[str] = []

    def propose(best: Recipe, facts: TuningFacts) -> list[TuningCandidate]:
        return list(TRIED.values())

    watcher = TuneCallbacks(on_trial_end=lambda row: told.append(row.label))
    with lab.environment():
        yield tune(load_recipe(recipe), seconds=0.1, callbacks=watcher, propose=propose), told


def test_each_candidate_is_tried_once_and_told(tuned: tuple[TuneResult, list[str]]) -> None:
    found, told = tuned
    assert told == [candidate.label for candidate in TRIED.values()] == [row.label for row in found.trials]


def test_a_world_of_two_is_measured_against_one(tuned: tuple[TuneResult, list[str]]) -> None:
    row = tuned[0].trials[0]
    assert row.measured is not None
    assert 0 < row.measured.speedup_q1 <= row.measured.speedup_q3
    assert row.is_kept == ("parallelism" in tuned[0].changes)


def test_a_candidate_that_cannot_run_is_a_row_that_says_why(tuned: tuple[TuneResult, list[str]]) -> None:
    _, refused, fails = tuned[0].trials
    assert (refused.measured, refused.is_kept, fails.measured, fails.is_kept) == (None, False, None, False)
    assert "batch.micro_size: 5 x" in refused.note
    assert "3 ranks cannot share the model's 2 attention heads" in fails.note


def test_the_tuned_recipe_differs_only_where_it_may(tuned: tuple[TuneResult, list[str]], recipe: Path) -> None:
    found, given = tuned[0], load_recipe(recipe)
    out = recipe.with_name("out.yaml")
    out.write_text(render_recipe(given, ["steps=7"], found, date(2026, 11, 21)))
    new = load_recipe(out).recipe
    keys = [difference.key for difference in diff_recipes(given.recipe, new)]
    assert "steps" in keys
    assert all(key == "steps" or any(key.startswith(allowed) for allowed in TUNABLE_KEYS) for key in keys)


def test_nothing_is_left_behind(tuned: tuple[TuneResult, list[str]], lab: TrainHarness) -> None:
    assert not lab.processes()
    assert not list(Path().glob(".phalanx*"))


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_interrupted_it_leaves_no_process_and_no_file(
    lab: TrainHarness, recipe: Path, tmp_path: Path, number: signal.Signals
) -> None:
    out = tmp_path / "out.yaml"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path))
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(lab.cache / "inductor"))  # which torch makes for itself
        with lab.start("tune", recipe, "--out", out, "--seconds", "20") as process:
            assert process.stdout is not None
            while not process.stdout.readline().startswith("TRIAL"):
                assert process.poll() is None
            process.send_signal(number)
            _, errors = process.communicate(timeout=60)
    assert process.returncode == ExitCode.UNFINISHED
    assert errors.splitlines()[-1] == "error: interrupted"
    assert list(tmp_path.iterdir()) == []
    assert not lab.processes()
