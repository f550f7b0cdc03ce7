"""A recipe's text with keys changed: values as asked for, all else as written."""

from pathlib import Path
from typing import Any

import pytest

from phalanx.recipe import load_recipe
from phalanx.recipe.yaml_edit import rewrite_recipe
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


def test_a_key_on_its_own_line_keeps_its_comment_and_gets_a_remark_above() -> None:
    text = rewrite_recipe(TEXT, [], {"batch.micro_size": 4}, {"batch.micro_size": "1.2 x"})
    assert "  # 1.2 x\n  micro_size: 4 # of one\n" in text
    assert text.replace("  # 1.2 x\n  micro_size: 4", "  micro_size: auto") == TEXT


def test_a_key_that_was_not_there_is_added_with_its_mapping() -> None:
    text = rewrite_recipe(
        TEXT, [], {"memory.activation_checkpointing": "none", "num_threads": 2}, {"num_threads": "two"}
    )
    assert text.startswith(TEXT)
    assert text.endswith("memory: {activation_checkpointing: none}\n# two\nnum_threads: 2\n")


def test_a_key_within_braces_has_its_top_key_written_anew() -> None:
    text = rewrite_recipe(TEXT, ["optimizer.lr=2e-3"], {}, {})
    assert text == TEXT.replace("1.0e-3", "0.002")


def test_the_head_stands_on_top() -> None:
    assert rewrite_recipe(TEXT, [], {}, {}, ["one", "two"]) == f"# one\n# two\n{TEXT}"


def test_comments_within_braces_stay() -> None:
    text = "optimizer: {lr: 1e-3, # rate\n  # both\n  betas: [0.9, 0.95]}  # end\nseed: 1\n"
    new = rewrite_recipe(
        text, ["optimizer.lr=2e-3", "optimizer.max_grad_norm=1"], {"seed": 2}, {"optimizer.lr": "1.2 x"}
    )
    assert new == f"# 1.2 x\n{text}".replace("1e-3", "0.002").replace("]}", "], max_grad_norm: 1}").replace(
        "seed: 1", "seed: 2"
    )


def test_a_list_on_lines_of_its_own_is_replaced_and_what_follows_stays() -> None:
    text = "callbacks: # mine\n- a:b # first\n- c:d\n\n# how fast\ncompile: auto\n"
    assert rewrite_recipe(text, ["callbacks=[]"], {}, {}) == "callbacks: [] # mine\n\n# how fast\ncompile: auto\n"


def test_a_new_key_joins_the_keys_of_its_mapping() -> None:
    text = "batch:\n    global_size: 8 # of all\n\n# how fast\ncompile: auto\n"
    new = rewrite_recipe(text, [], {"batch.micro_size": 4}, {"batch.micro_size": "1.2 x"})
    assert new == text.replace("# of all\n", "# of all\n    # 1.2 x\n    micro_size: 4\n")


def test_keys_join_a_mapping_in_braces() -> None:
    assert (
        rewrite_recipe("a: {}\nb: {c: 1}\n", ["a.x=1", "a.z=2", "b.d=w"], {}, {})
        == "a: {x: 1, z: 2}\nb: {c: 1, d: w}\n"
    )


def test_a_value_comes_where_there_was_none() -> None:
    assert rewrite_recipe("steps: # nothing yet\n# end\n", ["steps=5"], {}, {}) == "steps: 5 # nothing yet\n# end\n"


def test_a_text_in_a_block_is_replaced() -> None:
    assert rewrite_recipe("name: |\n  a\n  b\n\n# end\nseed: 1\n", ["name=c"], {}, {}) == "name: c\n\n# end\nseed: 1\n"


def test_an_element_of_a_list_is_changed_with_the_list() -> None:
    text = "data: {source: [{text: a}, {text: b}]} # both\n"
    assert rewrite_recipe(text, ["data.source.1.weight=2"], {}, {}) == text.replace("b}", "b, weight: 2}")


@pytest.mark.parametrize("text", ["a: &x {b: 1}\nc: *x\n", "a: &x {b: 1}\nc: {d: *x}\n", "? a\n? c\n", "null\n"])
def test_a_text_that_cannot_be_changed_in_place_is_written_again(text: str) -> None:
    old = parse_yaml(text, "")[0] or {}
    new = rewrite_recipe(text, ["c={b: 2}"], {}, {"c": "why"}, ["head"])
    assert new.startswith("# head\n")
    assert "why" in new
    assert parse_yaml(new, "")[0] == {**old, "c": {"b": 2}}


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
    path.write_text(rewrite_recipe(text, ["steps=7"], changes, dict.fromkeys(changes, "why"), ["head"]))
    recipe = load_recipe(path).recipe
    assert (recipe.batch.micro_size, recipe.compile, recipe.precision, recipe.steps) == (2, True, "bf16", 7)
    assert recipe.parallelism.world == 2 if not isinstance(recipe.parallelism, str) else False
    assert path.read_text().count("# why") + path.read_text().count(": why") == len(changes)


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
