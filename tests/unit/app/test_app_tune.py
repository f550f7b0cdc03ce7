"""What `phalanx tune` decides and writes, over made-up measurements. The real search is in tests/world/test_tune.py."""

from datetime import date
from pathlib import Path
from typing import Any

import pytest

from phalanx.app.tune import (
    TuneResult,
    TuneTrial,
    allowed_precisions,
    decide,
    render_recipe,
    without_end,
)
from phalanx.autoconfig.tuning_candidates import MeasuredSpeedup
from phalanx.cluster import Machine
from phalanx.cluster.discovery import Cpu
from phalanx.recipe import Recipe, load_recipe
from resolved_recipes import resolved_recipe

GAIN = MeasuredSpeedup(baseline_s=0.4, candidate_s=0.3, speedup=0.4 / 0.3, speedup_q1=1.3, speedup_q3=1.4)
ROWS = [
    TuneTrial("compile=true", {"compile": True}, 1.25, "", GAIN, True),
    TuneTrial("batch.micro_size=8", {"batch.micro_size": 8}, 1.03, "", None, False, "failed: out of memory"),
]


def machine(device: str) -> Machine:
    return Machine("here", device, "a machine", 1, 2, 2, 10**10, 10**10, Cpu("a CPU"))


def make(rows: list[TuneTrial], **changes: Any) -> TuneResult:
    recipe = Recipe.model_validate({"parallelism": {"replicate": 2}})
    total = GAIN if changes else None
    return TuneResult(recipe, recipe, 0.4, rows, changes, total, machine="a machine")


def test_a_gain_is_kept_and_noise_is_not() -> None:
    assert decide(GAIN, 0.5, Recipe()) == (True, "")
    assert decide(MeasuredSpeedup(0.4, 0.39, 1.01, 0.99, 1.03), 0.5, Recipe()) == (False, "within noise")
    assert decide(MeasuredSpeedup(0.4, 0.8, 0.5, 0.4, 0.6), 0.5, Recipe()) == (False, "slower")


def test_a_longer_start_must_pay_within_the_run() -> None:
    assert decide(GAIN, 20.0, Recipe(steps=300)) == (True, "starts 20 s later, which 200 steps pay back")
    kept, note = decide(GAIN, 20.0, Recipe(steps=100))
    assert not kept
    assert note == "starts 20 s later, which 200 steps pay back; this run has 100"


@pytest.mark.parametrize(
    ("precision", "allowed", "device", "found"),
    [
        ("auto", False, "cuda", ("fp32", "bf16")),
        ("bf16", False, "cuda", ()),
        ("fp32", True, "cpu", ("fp32", "bf16")),
    ],
)
def test_precision_is_tried_only_where_it_may_change(
    precision: Any, allowed: bool, device: str, found: tuple[str, ...]
) -> None:
    assert allowed_precisions(Recipe(precision=precision), machine(device), allowed) == found


def test_all_precisions_of_a_gpu_are_tried_when_allowed() -> None:
    assert {"fp16", "fp8"} < set(allowed_precisions(Recipe(), machine("cuda"), True))


def test_the_written_recipe_has_the_winners_with_their_gains(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine # a comment\ncompile: auto\n")
    text = render_recipe(load_recipe(path), ["steps=9"], make(ROWS, compile=True), date(2026, 11, 21))
    assert text == (
        "# Tuned by `phalanx tune` from mine.yaml on 2026-11-21, for a machine:\n"
        "# a step takes 300 ms instead of 400 ms, 1.33 x (1.30 to 1.40).\n"
        "# Train it with --nproc-per-node 2.\n"
        "# compile: tuned: compile=true: 1.33 x (1.30 to 1.40)\n"
        "name: mine # a comment\n"
        "compile: true\n"
        "steps: 9\n"
    )


def test_a_recipe_that_nothing_made_faster_is_written_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\n")
    text = render_recipe(load_recipe(path), [], make([]), date(2026, 11, 21))
    assert "no trial is faster than the defaults" in text
    assert text.endswith("name: mine\n")


def test_trials_never_end_save_or_call_back() -> None:
    recipe = without_end(resolved_recipe(callbacks=["mine:Callback"]))
    assert recipe.steps >= 10**9
    assert (recipe.callbacks, recipe.evaluation.every, recipe.checkpoint.every) == ([], None, None)
