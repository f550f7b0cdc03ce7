"""What a run may use, before it starts and while it trains."""

import json
from pathlib import Path

import pytest

from make_run import Maker
from phalanx.app.budget import BudgetGuard, check_budget, check_planned_budget, load_prices, stop_at_budget
from phalanx.cluster.spec import Prices
from phalanx.errors import ExitCode, RecipeError
from phalanx.jobs.agent.leader_agent import RunOutcome
from phalanx.recipe import load_recipe
from phalanx.recipe.schema import BudgetConfig
from phalanx.run import Run
from phalanx.run.event_types import AttemptStarted
from phalanx.run.telemetry_minutes import NodeEnergy, NodeMinute, Rollups
from settable_clock import SettableClock

PRICES = Prices(kwh=0.5, pue=2.0)


def trained_run(path: Path, num_steps: int = 10) -> Run:
    """Two workers, a second a step."""
    maker = Maker(path, total=20, world=2)
    maker.event(AttemptStarted, world_size=2, attempt=0, start_step=0, total_steps=20, device="cpu")
    maker.steps(1, num_steps)
    return Run(path)


def write_energy(run: Run, kwh: float) -> None:
    run.telemetry.mkdir(exist_ok=True)
    minute = NodeMinute(60.0, 60.0, 60, "n1", Rollups(), {}, False, NodeEnergy(cpu_j=3.6e6 * kwh))
    (run.telemetry / "n1.jsonl").write_bytes(minute.to_line())


def make_guard(run: Run, clock: SettableClock | None = None, **limits: float) -> BudgetGuard:
    return BudgetGuard(run, BudgetConfig(**limits), 2, PRICES, clock=clock or SettableClock())


def test_a_run_is_warned_at_80_percent_once_and_stopped_at_100(tmp_path: Path) -> None:
    clock, warnings = SettableClock(), list[str]()
    guard = make_guard(Run(tmp_path), clock, device_hours=2.0)
    for hour in (0.5, 0.8, 0.85):
        clock.now = 3600 * hour
        assert guard.find_stop_reason(warnings.append) is None
    assert warnings == ["budget.device_hours: 1.60 of 2.00 is used; the run saves and stops at 100%"]
    clock.now = 3600.0
    assert guard.find_stop_reason(warnings.append) == "budget.device_hours: 2.00 of 2.00 is used"


def test_energy_counts_with_the_pue_and_money_by_its_price(tmp_path: Path) -> None:
    write_energy(Run(tmp_path), 3.0)
    used = make_guard(Run(tmp_path), kwh=9.0).measure_usage()
    assert (used.kwh, used.cost) == (6.0, 3.0)


def test_earlier_attempts_and_the_start_count(tmp_path: Path) -> None:
    run = trained_run(tmp_path / "run")
    before = make_guard(run, kwh=9.0).measure_usage().device_hours
    assert before is not None
    assert before > 0
    guard = BudgetGuard(run, BudgetConfig(kwh=9.0), 2, None, startup_s=1800.0, clock=SettableClock())
    assert guard.measure_usage().device_hours == pytest.approx(before + 1.0)


def test_a_run_whose_budget_is_used_up_does_not_start(tmp_path: Path) -> None:
    run = trained_run(tmp_path / "run")
    write_energy(run, 3.0)
    make_guard(run, kwh=6.1).check_start(10, 1.0)
    with pytest.raises(RecipeError, match=r"budget.kwh: 6.00 of 5.00 is used; raise it to resume"):
        make_guard(run, kwh=5.0).check_start(20, 1.0)


def test_what_remains_is_predicted_from_a_step_and_from_the_energy_so_far(tmp_path: Path) -> None:
    run = trained_run(tmp_path / "run")
    write_energy(run, 3.0)
    with pytest.raises(RecipeError, match=r"budget.kwh: predicted 12.0 of 11.0; raise it, or train fewer steps"):
        make_guard(run, kwh=11.0).check_start(20, 1.0)
    with pytest.raises(RecipeError, match=r"budget.device_hours: predicted 20.* of 10.0"):
        make_guard(run, device_hours=10.0).check_start(20, 3600.0)
    make_guard(run, device_hours=10.0).check_start(20, None)


def test_a_run_that_its_budget_stopped_does_not_start_again(tmp_path: Path) -> None:
    guard = make_guard(Run(tmp_path), device_hours=1e-9)
    guard.stop_reason = "budget.device_hours: 2 of 1 is used"
    unfinished = RunOutcome(ExitCode.UNFINISHED, None, None)
    stopped = stop_at_budget(unfinished, guard)
    assert (stopped.code, stopped.message) == (
        ExitCode.RECIPE,
        "budget.device_hours: 2 of 1 is used: saved and stopped; raise it to resume",
    )
    done = RunOutcome(ExitCode.DONE, None, None)
    assert stop_at_budget(done, guard) == done
    assert stop_at_budget(unfinished, None) == unfinished


RECIPE = """\
model: {args: {layers: 2, hidden_size: 128, num_heads: 2}}
data: {source: {text: corpus.txt}, seq_len: 64}
parallelism: {replicate: 8}
batch: {global_size: 64}
steps: 100000
"""


def test_money_needs_prices(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(RECIPE)
    loaded = load_recipe(tmp_path / "r.yaml", ["budget.cost=3"])
    with pytest.raises(RecipeError, match=r"budget.cost: needs prices: set PHALANX_CLUSTER"):
        check_budget(loaded, Prices())
    check_budget(loaded, PRICES)


def test_a_job_that_is_planned_to_exceed_its_budget_is_not_submitted(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(RECIPE)
    (tmp_path / "corpus.txt").write_text("words and words " * 1000)
    cluster = {"node": "dgx-h100", "nodes": 4, "prices": {"kwh": 0.3}}
    (tmp_path / "c.yaml").write_text(json.dumps(cluster))
    environment = {"PHALANX_CLUSTER": str(tmp_path / "c.yaml")}
    loaded = load_recipe(tmp_path / "r.yaml", ["budget.kwh=1e6", "budget.cost=1e-6"])
    with pytest.raises(RecipeError, match=r"budget.cost: predicted .* of 1.00e-6"):
        check_planned_budget(loaded, 8, environment)


def test_a_job_whose_data_are_elsewhere_is_submitted_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "r.yaml").write_text(RECIPE)
    loaded = load_recipe(tmp_path / "r.yaml", ["data.source={prepared: nowhere}", "budget.kwh=1e-6"])
    check_planned_budget(loaded, 8, {"PHALANX_CLUSTER": "dgx-h100:1"})
    assert "the budget is not checked before the job starts: " in caplog.text


@pytest.mark.parametrize("text", ["dgx-h1000", "nowhere.yaml"])
def test_a_wrong_cluster_is_named_with_the_variable(text: str) -> None:
    assert load_prices({}) is None
    with pytest.raises(RecipeError, match=f"^PHALANX_CLUSTER: {text}: "):
        load_prices({"PHALANX_CLUSTER": text})
