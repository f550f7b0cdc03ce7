"""A recipe's text with keys changed: values as asked for, all else as written."""

from pathlib import Path
from typing import Any

import pytest

from phalanx.recipe.overrides import rewrite_recipe
from phalanx.recipe.yaml_loader import parse_yaml, to_yaml

TEXT = """\
# mine
name: a  # short
batch:
  global_size: 8 # of all
  micro_size: auto # of one

# how fast
optimizer: {lr: 1.0e-3}
compile: auto
"""


def test_values_are_changed_and_comments_stay() -> None:
    text = rewrite_recipe(TEXT, ["optimizer.lr=2e-3"], {"batch.micro_size": 4}, {"batch.micro_size": "1.2 x"}, ["one"])
    changed = TEXT.replace("1.0e-3", "0.002").replace("micro_size: auto", "micro_size: 4   ")
    assert text == f"# one\n# batch.micro_size: 1.2 x\n{changed}"


def test_a_key_that_was_not_there_is_added_with_its_mapping() -> None:
    text = rewrite_recipe(TEXT, ["num_threads=2"], {"memory.activation_checkpointing": "none"}, {})
    assert text.startswith(TEXT)
    assert parse_yaml(text, "")[0]["memory"] == {"activation_checkpointing": "none"}


def test_null_stays_null() -> None:
    text = rewrite_recipe("local_sgd: null\nsteps: 3\n", ["steps=4"], {"checkpoint.every": None}, {})
    assert text == "local_sgd: null\nsteps: 4\ncheckpoint:\n  every: null\n"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null\n",
        "# only a comment\n",
        "{name: a, steps: 3}\n",
        "name: a\nparallelism:\n  replicate: 1\n# end\n",
        '"name": a\nbatch:\n\n  global_size: 8\n',
        "steps: # nothing yet\n",
        "data: {source: [{text: a}, {text: b}]} # both\n",
        "batch: &x {global_size: 8}\nmodel: {args: *x}\n",
        "determinism: off\noptimizer: {lr: 1e-3}\n",
    ],
)
def test_values_are_as_asked_for_however_the_text_is_written(text: str) -> None:
    changes: dict[str, Any] = {"batch.micro_size": 2, "parallelism": {"replicate": 2}, "precision": "bf16"}
    new = parse_yaml(rewrite_recipe(text, ["steps=7"], changes, {}), "")[0]
    assert (new["batch"]["micro_size"], new["precision"], new["steps"]) == (2, "bf16", 7)
    assert new["parallelism"] == {"replicate": 2}
    kept = {
        key: value for key, value in (parse_yaml(text, "")[0] or {}).items() if key in ("name", "data", "optimizer")
    }
    assert kept.items() <= new.items()


def test_the_example_keeps_every_comment() -> None:
    example = (Path(__file__).parents[3] / "examples" / "gpt-python.yaml").read_text()
    text = rewrite_recipe(example, [], {"precision": "bf16", "batch.micro_size": 8}, {})
    old, new = example.splitlines(), text.splitlines()
    assert len(old) == len(new)
    assert sum(a != b for a, b in zip(old, new, strict=True)) == 2
    assert [line.partition("#")[2] for line in old] == [line.partition("#")[2] for line in new]


@pytest.mark.parametrize("flow", [None, False, True])
def test_every_character_of_a_text_is_read_back(flow: bool | None) -> None:
    """U+0085, U+2028 and U+2029 are line breaks for YAML 1.1: a manifest turned them into spaces."""
    for number in (*range(0x100), 0x2028, 0x2029, 0xFEFF, 0xFFFE, 0x1F600):
        values = [f"a{chr(number)}b", f"a {chr(number)} b", chr(number)]
        assert parse_yaml(to_yaml({"args": values}, flow), "manifest")[0] == {"args": values}
