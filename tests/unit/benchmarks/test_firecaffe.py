"""benchmarks/firecaffe.py with made-up points: speed-ups, the paper's formula, replay's curves, and the pictures."""

from pathlib import Path
from typing import Any

import pytest

import firecaffe
from phalanx.recipe import check_recipe, load_recipe
from phalanx.train.lr_schedule import peak_learning_rate

ROOT = Path(__file__).parents[3]
ROWS = [
    {"name": "none", "seconds": 1.5},
    {"name": "binomial-tree-whole", "seconds": 3.0},
    {"name": "ring", "seconds": 9.0},
]
CASE = {"workload": "nin-8", "told": "NiN & <friends>", "bytes": 25e6, "link": "800mbit", "nodes": 4, "rows": ROWS}
SERVER = [{"name": "none", "seconds": 1.5}, {"name": "parameter-server-whole", "seconds": 6.0}]
RESULTS: dict[str, Any] = {"cases": [CASE, {**CASE, "nodes": 8, "rows": SERVER}]}


def test_a_measured_speed_up_is_over_a_node_that_exchanges_nothing() -> None:
    (found,) = firecaffe.measured_from(RESULTS)
    assert [(point.way, point.nodes, point.speedup) for point in found.points] == [
        ("binomial-tree", 4, 2.0),
        ("parameter-server", 8, 2.0),
    ]


def test_the_formulas_are_those_of_the_planner() -> None:
    """25 MB over 100 MB/s take 0.25 s: 4 nodes wait 4 x 0.25 s for a tree (up and down, two levels), 8 for one that
    serves the 7 others both ways 14 x 0.25 s, beside 1.5 s of computing; a ring hides behind backward."""
    (found,) = firecaffe.measured_from(RESULTS)
    assert firecaffe.formula(found, "binomial-tree", [1, 4]) == [(1, 1.0), (4, pytest.approx(4 * 1.5 / 2.5))]
    assert firecaffe.formula(found, "parameter-server", [8]) == [(8, pytest.approx(8 * 1.5 / 5.0))]
    assert firecaffe.formula(found, "all-reduce", [8]) == [(8, 8)]


@pytest.mark.parametrize(("name", "rate"), [("nin", 0.04), ("googlenet", 0.08)])
def test_the_recipes_have_the_papers_rate_at_its_batch(name: str, rate: float) -> None:
    loaded = load_recipe(ROOT / "examples" / "firecaffe" / f"{name}.yaml", ["batch.global_size=1024"])
    check_recipe(loaded.recipe, loaded.recipe_dir, 1, loaded.location_of)
    assert peak_learning_rate(loaded.recipe) == pytest.approx(rate)
