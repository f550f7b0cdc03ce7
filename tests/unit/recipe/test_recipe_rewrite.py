"""A recipe's text with keys changed: values as asked for, all else as written."""

from pathlib import Path
from typing import Any

import pytest

from phalanx.recipe import load_recipe
from phalanx.recipe.rewrite import rewritten

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


def test_a_key_on_its_own_line_keeps_its_comment_and_gets_a_remark_above() -> None:
    text = rewritten(TEXT, [], {"batch.micro_size": 4}, {"batch.micro_size": "1.2 x"})
    assert "  # 1.2 x\n  micro_size: 4 # of one\n" in text
    assert text.replace("  # 1.2 x\n  micro_size: 4", "  micro_size: auto") == TEXT


def test_a_key_that_was_not_there_is_added_with_its_mapping() -> None:
    text = rewritten(TEXT, [], {"memory.activation_checkpointing": "none", "num_threads": 2}, {"num_threads": "two"})
    assert text.startswith(TEXT)
    assert text.endswith("memory: {activation_checkpointing: none}\n# two\nnum_threads: 2\n")


def test_a_key_within_braces_has_its_top_key_written_anew() -> None:
    text = rewritten(TEXT, ["optimizer.lr=2e-3"], {}, {})
    assert text == TEXT.replace("1.0e-3", "0.002")


def test_the_head_stands_on_top() -> None:
    assert rewritten(TEXT, [], {}, {}, ["one", "two"]) == f"# one\n# two\n{TEXT}"


@pytest.mark.parametrize(
    "text",
    [
        TEXT,
        "",
        "{name: a, steps: 3}\n",
        "name: a\nparallelism:\n  replicate: 1\n# end\n",
        '"name": a\nbatch:\n\n  global_size: 8\n',
    ],
)
def test_values_are_as_asked_for_however_the_text_is_written(text: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "batch.micro_size": 2,
        "parallelism": {"replicate": 2},
        "compile": True,
        "precision": "bf16",
    }
    path = tmp_path / "new.yaml"
    path.write_text(rewritten(text, ["steps=7"], changes, dict.fromkeys(changes, "why"), ["head"]))
    recipe = load_recipe(path).recipe
    assert (recipe.batch.micro_size, recipe.compile, recipe.precision, recipe.steps) == (2, True, "bf16", 7)
    assert recipe.parallelism.world == 2 if not isinstance(recipe.parallelism, str) else False
    assert path.read_text().count("# why") + path.read_text().count(": why") == len(changes)


def test_the_example_keeps_every_comment() -> None:
    example = (Path(__file__).parents[3] / "examples" / "gpt-python.yaml").read_text()
    text = rewritten(example, [], {"precision": "bf16", "batch.micro_size": 8}, {})
    old, new = example.splitlines(), text.splitlines()
    assert len(old) == len(new)
    assert sum(a != b for a, b in zip(old, new, strict=True)) == 2
    assert [line.partition("#")[2] for line in old] == [line.partition("#")[2] for line in new]
