"""The nodes file: what it has, and what is refused with its line."""

from pathlib import Path

import pytest

from phalanx.errors import RecipeError
from phalanx_fleet.nodes_file import NodesFileEntry, load_nodes_file


def test_nodes_are_read_in_their_order(tmp_path: Path) -> None:
    path = tmp_path / "nodes.yaml"
    path.write_text("nodes:\n  - {name: n2}\n  - name: n1\n    prometheus: http://n1:9400/metrics\n")
    assert load_nodes_file(path).nodes == [
        NodesFileEntry(name="n2"),
        NodesFileEntry(name="n1", prometheus="http://n1:9400/metrics"),
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("nodes:\n  - name: n1\n    promtheus: x\n", r":3: nodes\.0\.promtheus: unknown key.*prometheus"),
        ("nodes:\n  - prometheus: x\n", r":2: nodes\.0\.name: .*missing|nodes\.0\.name"),
        ("nodes: [{name: n1}, {name: n2},\n  {name: n1}]\n", r":2: nodes\.2\.name: n1 appears twice"),
        ("- n1\n", "expected `nodes:` with a list"),
        ("nodes: {n1: x}\n", ":1: nodes: "),
    ],
)
def test_what_is_wrong_is_said_with_its_line(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "nodes.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=problem):
        load_nodes_file(path)


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"nowhere\.yaml"):
        load_nodes_file(tmp_path / "nowhere.yaml")
