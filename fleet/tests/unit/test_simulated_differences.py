"""Differences over equal seeds with their interval."""

import math
from pathlib import Path

import numpy as np
import pytest

from phalanx_fleet.simulate.figures import (
    compare_paired,
    describe_differences,
    find_student_quantile,
    list_differences,
)
from phalanx_fleet.simulate.random_events import read_job_trace
from phalanx_fleet.simulate.variants import simulate_variants

FLEET = """
sites: {s: {}}
feeds: {f: {site: s}}
rows: {w: {feed: f}}
racks: {r1: {row: w, node_type: h100, nodes: 4}}
node_types: {h100: {node: dgx-h100}}
simulate:
  days: 30
  jobs: {a: {count: 1, devices: {32: 1}, median_h: 1e4}}
  failures: {gpu: {per_1000_node_days: 200, repair_share: 0}}
"""


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    path = tmp_path / "fleet.yaml"
    path.write_text(FLEET)
    return path


def test_the_interval_is_that_of_student_over_paired_seeds():
    difference = compare_paired([1, 2, 3, math.nan], [2, 4, 4, 9])
    assert (difference.mean, difference.num_seeds) == (pytest.approx(4 / 3), 3)
    assert difference.high - difference.mean == pytest.approx(
        4.303 * np.std([1, 2, 1], ddof=1) / math.sqrt(3), rel=1e-3
    )


@pytest.mark.parametrize(
    ("confidence", "freedom", "quantile"), [(0.95, 1, 12.706), (0.95, 4, 2.776), (0.95, 100, 1.984), (0.999, 4, 8.610)]
)
def test_students_quantile_is_that_of_tables(confidence, freedom, quantile):
    assert find_student_quantile(confidence, freedom) == pytest.approx(quantile, rel=1e-3)


def test_of_a_table_of_equal_variants_at_most_1_in_20_calls_a_figure_different():
    source = np.random.default_rng(1)
    wrong = 0
    for _ in range(200):
        draws = source.normal(size=(35, 2, 5))
        wrong += any(not compare_paired(*pair.tolist(), num_compared=35).is_noise for pair in draws)
    assert wrong <= 0.05 * 200


def test_paired_seeds_show_a_difference_that_is_less_than_the_spread_of_seeds():
    base = np.random.default_rng(0).normal(100, 20, 5)
    assert not compare_paired(base.tolist(), (base + np.array([1.0, 1.1, 0.9, 1.0, 1.05])).tolist()).is_noise


@pytest.mark.parametrize(("seeds", "is_noise"), [([1, -1, 2, -2], True), ([1, 1.1, 0.9, 1], False), ([5], True)])
def test_noise_is_an_interval_with_zero_or_a_single_seed(seeds, is_noise):
    assert compare_paired([0.0] * len(seeds), seeds).is_noise is is_noise


def test_rounding_is_no_difference():
    assert compare_paired([0.1 + 0.2, 0.3], [0.3, 0.1 + 0.2]).high == 0


def test_half_the_failures_differ_by_more_than_noise_and_another_price_in_nothing_else(fleet):
    variants = simulate_variants(fleet, ["failures.gpu.per_1000_node_days=50", "site.price_per_kwh=1"], None, seeds=10)
    found = {each.row.title: each.differences for each in list_differences(variants)}
    assert found["ETTR"][0].low > 0
    assert {title for title, (_, price) in found.items() if price.mean} == {"cost of energy"}
    table = describe_differences(variants)
    assert table is not None
    assert next(row for row in table.rows if row[0] == "ETTR")[2] == "0"


@pytest.mark.parametrize("seeds", [1, 2])
def test_the_same_variant_differs_in_nothing(fleet, seeds):
    table = describe_differences(simulate_variants(fleet, ["simulate.days=30"], None, seeds))
    assert table is not None
    assert table.rows == []
    assert table.notes[-1] == "simulate.days=30: no figure differs from the file."


JOBS_OF_ALL_NODES = [(32, 100_000.0), (32, 90_000.0), (32, 80_000.0), (1, 10.0)]


def test_jobs_of_one_second_are_replayed_in_the_order_of_the_file(fleet, tmp_path):
    fleet.write_text(FLEET.replace("per_1000_node_days: 200", "per_1000_node_days: 0"))

    def find_mean(submissions):
        path = tmp_path / "jobs.csv"
        rows = [f"{at},{gpus},{s}" for at, (gpus, s) in zip(submissions, JOBS_OF_ALL_NODES, strict=True)]
        path.write_text("\n".join(["submit_s,gpus,duration_s", *rows]) + "\n")
        assert [row[1:] for row in read_job_trace(path)] == JOBS_OF_ALL_NODES
        (variant,) = simulate_variants(fleet, [], path, seeds=1)
        return variant.results[0].completion_mean_s

    assert find_mean([0, 0, 0, 0]) == pytest.approx(find_mean([0, 1, 2, 3]), rel=1e-3)
