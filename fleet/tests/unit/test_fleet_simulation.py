"""A fleet file simulated: same seed same figures, power from states, failures by their factors, and clear errors."""

import json
from pathlib import Path

import numpy as np
import pytest

from phalanx.cli.main import main
from phalanx.errors import DataError, ExitCode, RecipeError, UsageError
from phalanx_fleet.power_tree import NodePower
from phalanx_fleet.simulate.cluster_simulation import ClusterSimulation
from phalanx_fleet.simulate.job_state import SchedulingPolicy, SimulatedJob
from phalanx_fleet.simulate.node_pool import NodePool
from phalanx_fleet.simulate.power_model import measure_power, slow_down
from phalanx_fleet.simulate.random_events import (
    SECONDS_PER_YEAR,
    NodeHistory,
    find_rates,
    read_job_trace,
    sample_failures,
    sample_level_failures,
)
from phalanx_fleet.simulate.variants import simulate_variants
from phalanx_fleet.simulation_settings import FailureEntry

FLEET = """
sites: {s: {budget: 40 kW}}
feeds: {f: {site: s}}
rows: {w: {feed: f}}
racks: {"r[1-2]": {row: w, node_type: h100, nodes: 2}}
node_types: {h100: {node: dgx-h100}}
simulate:
  days: 20
  seeds: 2
  jobs: {a: {count: 1, devices: {16: 1}, median_h: 1000}, b: {per_day: 20, devices: {1: 1, 8: 1}, sigma: 1}}
  failures: {gpu: {per_1000_node_days: 60, repair_h: 5}}
"""
POWER = NodePower(8, 700, 75, 4600, 2300)


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    path = tmp_path / "fleet.yaml"
    path.write_text(FLEET)
    return path


def test_shares_add_up_and_failures_are_counted_by_cause(fleet):
    for result in simulate_variants(fleet, [], None, 2)[0].results:
        assert sum(result.shares.values()) == pytest.approx(1, abs=1e-12)
        assert result.stops_by_cause["gpu"] > 0


def test_a_variant_sees_the_same_jobs_and_other_settings(fleet):
    base, variant = simulate_variants(fleet, ["site.pue=2.4 site.carbon_g_per_kwh=1"], None, 1)
    assert variant.results[0].num_jobs == base.results[0].num_jobs
    assert variant.results[0].site.site_energy_kwh == pytest.approx(2 * base.results[0].site.site_energy_kwh)


def test_added_racks_exceed_a_budget(fleet):
    base, more = simulate_variants(fleet, ["racks.r3='{row: w, node_type: h100, nodes: 2}'"], None, 1)
    assert more.num_nodes == 6
    assert [(each.level.label, each.committed_w) for each in base.exceeded] == [("site s", 40_800)]
    assert [each.committed_w for each in more.exceeded] == [61_200]


def test_energy_is_idle_power_plus_that_of_jobs():
    job = SimulatedJob(3600, 8, 3600, activity=1.0)
    outcome = ClusterSimulation(NodePool(2, 8), [job], SchedulingPolicy(), until_s=4 * 3600).run()
    history = measure_power(outcome, POWER, 2)
    assert history.hourly_w.tolist() == pytest.approx([5800, 2900 + 10_200, 5800, 5800])
    assert history.energy_j == pytest.approx(3600 * history.hourly_w.sum(), rel=1e-12)
    assert history.peak_w == pytest.approx(13_100)


def test_a_cap_slows_only_what_draws_more():
    assert slow_down(POWER, 0.5, 0.8) == 1.0
    assert 0.7 < slow_down(POWER, 1.0, 0.8) < 1.0


def test_failures_follow_batch_and_age():
    entry = FailureEntry(
        per_1000_device_years=100,
        batch_factors={"old": 4},
        age_factors={1.0: 2},
        repair_share=0,
    )
    nodes = [NodeHistory(batch, 0) for batch in ("old", None) for _ in range(1000)]
    failures = sample_failures({"gpu": entry}, nodes, 8, 2 * SECONDS_PER_YEAR, np.random.default_rng(0))
    counts = np.bincount([failure.nodes[0] // 1000 for failure in failures], minlength=2)
    young = sum(failure.time_s < SECONDS_PER_YEAR for failure in failures)
    assert counts / (1000 * 0.8 * 3) == pytest.approx([4, 1], rel=0.1)
    assert young / len(failures) == pytest.approx(1 / 3, rel=0.1)


def test_a_feed_fails_for_nodes_of_all_kinds_at_once(tmp_path):
    path = tmp_path / "fleet.yaml"
    path.write_text("""
sites: {s: {}}
feeds: {f: {site: s}}
rows: {w: {feed: f}}
racks: {r1: {row: w, node_type: h100, nodes: 2}, r2: {row: w, node_type: h200, nodes: 1}}
node_types: {h100: {node: dgx-h100}, h200: {node: dgx-h200}}
simulate:
  days: 365
  jobs: {a: {count: 1, devices: {16: 1}, median_h: 1e5}, b: {node_type: h200, count: 1, devices: {8: 1}, median_h: 1e5}}
  failures: {feed: {level: feed, per_1000_level_years: 20000, repair_h: 1}}
""")
    result = simulate_variants(path, [], None, 1)[0].results[0]
    assert result.stops_by_cause["feed"] > 10
    assert result.stops_by_cause["feed"] % 2 == 0  # a job of each kind of node, each time


def test_racks_fail_at_their_rate_and_jobs_save_for_it():
    entry = FailureEntry(level="rack", per_1000_level_years=10_000)
    nodes = [NodeHistory(levels=(f"rack {index // 4}", "row w")) for index in range(400)]
    levels = {name for node in nodes for name in node.levels}
    failures = sample_level_failures({"pdu": entry}, levels, SECONDS_PER_YEAR, np.random.default_rng(0))
    assert len(failures) == pytest.approx(1000, rel=0.1)
    assert len({failure.level for failure in failures}) == 100
    rates = find_rates({"pdu": entry}, nodes, 8)
    assert [rates.of_job(n) * SECONDS_PER_YEAR for n in (1, 4, 400)] == pytest.approx([10, 10, 1000])


def test_a_replay_ends_with_its_last_job(fleet, tmp_path):
    (tmp_path / "jobs.csv").write_text("submit_s,gpus,duration_s,user\n100,32,50,x\n0,32,60,y\n")
    result = simulate_variants(fleet, [], tmp_path / "jobs.csv", 1)[0].results[0]
    assert (result.num_done, result.wait_mean_s) == (2, pytest.approx(130))  # the second waits for a start of 300 s


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no column submit_s"),
        ("submit_s,gpus,duration_s\n0,1.5,3\n", "gpus: expected a whole number above 0, found 1.5"),
        ("submit_s,gpus,duration_s\n0,1,-3\n", "jobs.csv:2: duration_s: expected a number of 0 or more, found '-3'"),
        ("submit_s,gpus,duration_s\n", "no jobs"),
    ],
)
def test_a_wrong_trace_is_refused_with_its_line(tmp_path, text, message):
    (tmp_path / "jobs.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        read_job_trace(tmp_path / "jobs.csv")


@pytest.mark.parametrize(
    ("what", "error", "message"),
    [
        ("site.pue=0.5", RecipeError, "expected a number from 1 to 10"),
        ("spare=1", RecipeError, "unknown key"),
        ("spares", UsageError, "expected KEY=VALUE"),
        ("jobs.a.devices.64=1 spares=0.5", UsageError, "can never run"),
        ("jobs.a.node_type=b200", UsageError, "no nodes of kind b200"),
        ("'batches.old={racks: q1}'", UsageError, "no such rack"),
        ("failures.gpu.level=rack", RecipeError, "per_1000_node_days is not for level: rack; expected per_1000_level"),
        ("failures.gpu.per_1000_level_years=1", RecipeError, "expected level: rack, row or feed"),
        ("failures.gpu.per_1000_node_days=-1", RecipeError, "per_1000_node_days"),
    ],
)
def test_wrong_settings_are_refused(fleet, what, error, message):
    with pytest.raises(error, match=message):
        simulate_variants(fleet, [what], None, 1)


def test_the_command_prints_variants_next_to_each_other(fleet, capsys):
    assert main(["simulate", str(fleet), "--what", "spares=0.25", "--seeds", "2"]) == ExitCode.DONE
    out = capsys.readouterr().out
    assert "as in the file" in out
    assert "spares=0.25" in out
    assert main(["simulate", str(fleet), "--json", "--seeds", "1"]) == ExitCode.DONE
    assert len(json.loads(capsys.readouterr().out)[0]["seeds"]) == 1
