"""Jobs of a simulated fleet that are recipes: hours and saves from the planner, and errors with the key."""

from pathlib import Path

import pytest

from phalanx.app.plan import plan
from phalanx.errors import RecipeError
from phalanx.planner.storage_costs import CHECKPOINT_BYTES_PER_PARAMETER
from phalanx_fleet.simulate.variants import simulate_variants

FLEET = """
sites: {s: {}}
feeds: {f: {site: s}}
rows: {w: {feed: f}}
racks: {r1: {row: w, node_type: h100, nodes: 2}}
node_types: {h100: {node: dgx-h100}}
simulate:
  days: 1
  jobs: {a: {count: 1, recipe: run.yaml, devices: {8: 1}, checkpoint: {mode: sync, write_gbps: 0.001}}}
  failures: {gpu: {per_1000_node_days: 1000, repair_share: 0}}
"""
RECIPE = """
model:
  build: "phalanx.models:transformer"
  args: {layers: 2, hidden_size: %d, num_heads: 4, vocab_size: 256}
data: {source: {text: "*.txt"}, tokenizer: bytes, seq_len: 128}
batch: {global_size: 64}
steps: %d
"""


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    (tmp_path / "run.yaml").write_text(RECIPE % (64, 100_000))
    (tmp_path / "fleet.yaml").write_text(FLEET)
    return tmp_path / "fleet.yaml"


def test_hours_and_saves_are_those_of_the_plan(fleet):
    variant = simulate_variants(fleet, [], None, 1)[0]
    run_plan = plan(fleet.parent / "run.yaml", "dgx-h100", 8)
    entry = variant.settings.jobs["a"]
    assert entry.hours[8] == pytest.approx(100_000 * run_plan.best.step_s / 3600)
    assert entry.checkpoint.save_s == pytest.approx(run_plan.parameters * CHECKPOINT_BYTES_PER_PARAMETER / 1e6)
    assert variant.results[0].num_done == 1
    assert "run.yaml on 8 of dgx-h100: predicted" in variant.recipe_notes[0]


def test_a_recipe_that_does_not_fit_the_nodes_is_refused_with_its_key(fleet):
    (fleet.parent / "run.yaml").write_text(RECIPE % (1 << 17, 10))
    with pytest.raises(RecipeError, match=r"simulate\.jobs\.a\.recipe: .*run\.yaml on 8 of dgx-h100: nothing fits"):
        simulate_variants(fleet, [], None, 1)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("jobs.a.recipe=none.yaml", "there is no such file"),
        ("jobs.a.median_h=3", "median_h is not for jobs with `recipe`"),
        ("jobs.a.recipe=null", "write_gbps is only for jobs with `recipe`"),
        ("'jobs.b={hours: {4: 1}}'", "hours: none for 8 accelerators"),
        ("jobs.a.devices.12=1", "on 12 of dgx-h100"),
    ],
)
def test_wrong_jobs_of_recipes_are_refused(fleet, what, message):
    with pytest.raises(RecipeError, match=message):
        simulate_variants(fleet, [what], None, 1)
