"""Small files of a run directory, flipped, cut, retyped and nested by a seeded hand: whatever reads them answers, or
says in a sentence what is wrong. Never a traceback, a hang, or memory without end."""

import json
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from make_run import troubled
from mutations import SEED, hand, mutated
from phalanx.cli import main
from phalanx.errors import PhalanxError
from phalanx.recipe.yaml_loader import parse_yaml
from phalanx.train.checkpoint.durable import DurableDirectory
from phalanx.train.checkpoint.save import CheckpointSaver
from phalanx.train.checkpoint.shard_file import TensorShard

SMALL = (
    *(
        "resolved.yaml",
        "plan.json",
        "cluster.json",
        "environment.json",
        "result.json",
        "events.jsonl",
        "in_memory.json",
    ),
    *("checkpoints/best.json", "checkpoints/step-000000002/MANIFEST.json", "checkpoints/step-000000002/MANIFEST.xxh3"),
)
VERBS = (["report"], ["compare"], ["checkpoint", "ls"], ["checkpoint", "verify"])
TRIED = 40
"""Mutations of each file by each verb's turn."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a checkpoint, and every small file that a run may have."""
    import torch

    path: Path = troubled(tmp_path_factory.mktemp("fuzz") / "run")
    saver = CheckpointSaver(DurableDirectory(path / "checkpoints", 0, 1))
    saver.start(2, [TensorShard.full_tensor("weight", torch.arange(12.0).reshape(3, 4))], {"step": 2, "samples": 2})
    saver.poll_when_idle()
    saver.commit()
    (path / "checkpoints" / "best.json").write_text(json.dumps({"step": 2, "loss": 0.5}))
    (path / "in_memory.json").write_text(json.dumps({"last_saved_step": 2, "epochs": [["abc", None]]}))
    for name in ("plan.json", "cluster.json", "environment.json", "result.json"):
        if not (path / name).exists():
            (path / name).write_text(json.dumps({"status": "done", "steps": 2, "seconds": 1.0, "digest": "0" * 32}))
    return path


@pytest.mark.parametrize("name", SMALL)
def test_a_damaged_small_file_is_read_or_refused_in_a_sentence(
    whole: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    content = (whole / name).read_bytes()
    rng = hand(name)
    for turn in range(TRIED):
        bad = mutated(content, rng)
        (run / name).write_bytes(bad)
        verb = VERBS[turn % len(VERBS)]
        code = main.main([*verb, str(run)])
        said = capsys.readouterr()
        assert code in (0, 64, 65, 78), (turn, bad, said.err)
        assert "Traceback" not in said.err + said.out
        assert "\x1b" not in said.err + said.out, (turn, bad)
        assert (code == 0) or said.err.startswith("error: "), (turn, bad)


@settings(max_examples=150, deadline=2000, derandomize=SEED == 0, suppress_health_check=[HealthCheck.too_slow])
@given(st.text(alphabet=st.sampled_from("{}[]:,-&*!|>?#'\" \n\tab1.$e~"), max_size=200))
def test_any_text_is_a_recipes_yaml_or_refused_in_a_sentence(text: str) -> None:
    try:
        parse_yaml(text, "recipe.yaml")
        said = "recipe.yaml"
    except PhalanxError as error:
        said = str(error)
    assert said.startswith("recipe.yaml")


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [x, x]\n" + "".join(f"{b}: &{b} [{'*' + a + ', '}{f'*{a}, ' * 8}]\n" for a, b in pairwise("abcdefghi")),
        "\n".join(f"k{number}: 1" for number in range(60_000)),
        "[" * 5000,
        "a: " * 5000,
        "${" * 20_000,
    ],
    ids=["aliases", "keys", "brackets", "mappings", "variables"],
)
@pytest.mark.timeout(20)
def test_a_text_that_says_endlessly_much_ends_soon(tmp_path: Path, text: str) -> None:
    (tmp_path / "recipe.yaml").write_text(text)
    assert main.main(["recipe", "check", str(tmp_path / "recipe.yaml")]) in (64, 78)
