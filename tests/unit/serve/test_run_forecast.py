"""Time left and cost of a run, so far and at its end."""

from pathlib import Path

import pytest

from make_run import Maker, healthy
from phalanx.cluster.spec import Prices
from phalanx.observe.history import read_history
from phalanx.observe.summary import RunSummary, build_summary
from phalanx.run import Run
from phalanx.run.telemetry_minutes import NodeEnergy, NodeMinute, Rollups
from phalanx.serve.run_forecast import forecast_run, render_forecast


def summarize(path: Path) -> RunSummary:
    run = Run(path)
    return build_summary(run, read_history(run.events))


@pytest.fixture
def half(tmp_path: Path) -> Path:
    maker = Maker(tmp_path / "run", total=20)
    maker.start()
    maker.steps(1, 10)
    (maker.path / "telemetry").mkdir()
    minute = NodeMinute(60.0, 60.0, 60, "n1", Rollups(), {}, False, NodeEnergy(cpu_j=3.6e6, measured_s=60.0))
    (maker.path / "telemetry" / "n1.jsonl").write_bytes(minute.to_line())
    return maker.path


def test_the_second_half_takes_as_long_and_costs_as_much_as_the_first(half: Path) -> None:
    summary = summarize(half)
    found = forecast_run(summary, Prices(device_hour=7200.0))
    assert found.seconds_left == pytest.approx(summary.durations.wall_s)
    assert found.cost == pytest.approx(2 * summary.device_time.allocated_s)
    assert found.cost_at_end == pytest.approx(2 * found.cost)
    assert found.device_hours_at_end == pytest.approx(summary.device_time.allocated_s / 1800)


def test_energy_costs_where_devices_have_no_price(half: Path) -> None:
    found = forecast_run(summarize(half), Prices(kwh=0.5, pue=1.2))
    assert (found.cost, found.cost_at_end) == (pytest.approx(0.6), pytest.approx(1.2))
    assert "0.600 USD; 1.20 USD at the last step" in render_forecast(found, Prices())


def test_a_run_that_is_over_has_what_it_used_and_no_forecast(tmp_path: Path) -> None:
    found = forecast_run(summarize(healthy(tmp_path / "run")), Prices())
    assert (found.seconds_left, found.device_hours_at_end, found.cost) == (None, None, None)
    assert "time left" not in render_forecast(found, Prices())


def test_a_run_without_a_step_has_no_section(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert render_forecast(forecast_run(summarize(tmp_path / "run"), Prices()), Prices()) == ""
