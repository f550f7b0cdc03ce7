"""A little of the soak, with fixed seeds; and that it sees what it is there to see."""

import json
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from grammar import ROUNDED, draw_finetuning_recipe, draw_matrix_recipe, draw_recipe, method_of
from soak import TESTS, Counts, Round, create_recipe_dir, reproduce_command, run_round

from phalanx.recipe import Recipe

SAME = 38006
"""Of a round with a worker that aborts, Ctrl-C, and starts on one and on two workers."""


@pytest.fixture(scope="module")
def soak(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the recipes' data and modules in `recipes`."""
    folder = tmp_path_factory.mktemp("soak")
    create_recipe_dir(folder / "recipes")
    return folder


def round_of(soak: Path, seed: int, *callbacks: str) -> Round:
    return run_round(seed, soak / f"round-{seed}", soak / "recipes", soak / "cache", callbacks)


def test_a_seed_draws_the_same_recipe_again_and_all_are_recipes() -> None:
    for draw in (draw_finetuning_recipe, draw_matrix_recipe, draw_recipe):
        first, second = ([draw(random.Random(seed)) for seed in range(300)] for _ in range(2))
        assert first == second
        for each in first:
            Recipe.model_validate(each.recipe)
    assert {method_of(each.recipe) for each in first} > {"auto", *ROUNDED}
    assert {len(each.others) for each in first} == {1, 2, 3}
    assert {(each.nodes, each.queue) for each in first} == {(1, False), (2, False), (1, True)}


def test_a_run_that_is_struck_and_started_again_ends_in_the_digest_of_the_undisturbed_one(soak: Path) -> None:
    found = round_of(soak, SAME)
    assert (found.outcome, found.reasons) == ("equal", [])
    assert found.faults == ["abort", "interrupt"]
    assert found.starts > 1
    assert not (soak / f"round-{SAME}").exists()


def test_a_state_that_restarts_do_not_bring_back_is_a_failure_with_its_seed(soak: Path) -> None:
    found = round_of(soak, SAME, "soak_models:Drift")
    assert found.outcome == "failed"
    assert found.reasons[0].startswith("the digest is ")
    assert (soak / f"round-{SAME}" / "disturbed" / "result.json").is_file()
    counts = Counts(SAME)
    counts.take(found)
    assert f"failed: {reproduce_command(SAME)}" in str(counts)
    assert reproduce_command(SAME).endswith(f"soak.py --seed {SAME} --rounds 1")
    assert counts.values()["failures"][0]["reasons"] == found.reasons


def test_ctrl_c_ends_it_with_its_counts(tmp_path: Path) -> None:
    command = [sys.executable, str(TESTS / "soak" / "soak.py"), "--seed", str(SAME), "--out", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(TESTS / "helpers")}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        while not (tmp_path / f"round-{SAME}" / "calm").exists():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert re.search(r"^0 rounds in [\d.]+ h: 0 digests equal, 0 failed, 0 recipes refused$", said, re.MULTILINE)
    assert json.loads((tmp_path / "soak.json").read_text())["rounds"] == 0
