"""What caps did to a run: speed and energy at each cap, time lost and energy saved by the sweep, swing and ramp."""

import json
from pathlib import Path

import pytest

from made_events import made
from phalanx.observe.energy_text import describe_power
from phalanx.observe.history import RunHistory, build_history
from phalanx.observe.run_power import summarize_power
from phalanx.run import Run
from phalanx.run.event_types import StepDone, StepPhases
from phalanx.run.telemetry_minutes import NodeMinute, Rollups, ValueRollup

HOUR = 1_795_860_000.0
CAPPED = range(5, 10)
"""Minutes with a cap of 500 instead of 700 W, and 8 instead of 10 steps."""


def device(cap_w: float, power_w: float, least_w: float = 100.0) -> Rollups:
    power = ValueRollup(least_w, power_w, power_w + 50.0, 60)
    return Rollups({"power_mean_w": power, "power_cap_w": ValueRollup(cap_w, cap_w, cap_w, 60)})


def write_run(folder: Path, has_sweep: bool = True, num_minutes: int = 10) -> tuple[Run, RunHistory]:
    run = Run(folder / "run")
    run.telemetry.mkdir(parents=True)
    events = []
    with open(run.telemetry / "n1.jsonl", "wb") as file:
        for number in range(num_minutes):
            begin, is_capped = HOUR + 60 * number, number in CAPPED
            each = device(500.0, 480.0) if is_capped else device(700.0, 650.0)
            file.write(NodeMinute(begin, 60.0, 60, "n1", Rollups(), {"0": each, "1": each}).to_line())
            for step in range(8 if is_capped else 10):
                time = begin + 1 + 5 * step
                events.append(
                    made(
                        StepDone, time=time, step=len(events) + 1, units=100.0, duration_s=5.0, breakdown_s=StepPhases()
                    )
                )
    if has_sweep:
        caps = [{"node_type": "h", "cap_w": cap, "rate": rate, "draw_w": draw} for cap, rate, draw in
                ((700.0, 10.0, 640.0), (600.0, 8.5, 590.0), (400.0, 7.5, 399.0))]  # fmt: skip
        (run.path / "power_sweep.json").write_text(json.dumps({"kind": "power_sweep", "caps": caps}))
    return run, build_history(events)


def test_speed_and_energy_per_token_are_measured_at_each_cap(tmp_path: Path) -> None:
    power = summarize_power(*write_run(tmp_path))
    assert power is not None
    full, capped = power.phases
    assert (full.cap_w, full.duration_s, full.units_per_s) == (700.0, 300.0, pytest.approx(1000 / 60))
    assert (capped.cap_w, capped.draw_w, capped.units_per_s) == (500.0, 480.0, pytest.approx(800 / 60))
    assert full.energy_j_per_unit == pytest.approx(2 * 650 * 60 / 1000)
    assert capped.energy_j_per_unit == pytest.approx(2 * 480 * 60 / 800)


def test_a_sweep_says_the_time_lost_and_the_energy_saved(tmp_path: Path) -> None:
    power = summarize_power(*write_run(tmp_path))
    assert power is not None
    assert power.lost_s == pytest.approx(5 * 60 * 0.2)  # .8 of the speed at 500 W, between 400 and 600
    same_work_j = 60 * 2 * 640 * (5 * 1.0 + 5 * 0.8)
    assert power.saved_j == pytest.approx(same_work_j - 60 * 2 * (5 * 650 + 5 * 480))


def test_without_a_sweep_the_cost_is_unknown(tmp_path: Path) -> None:
    power = summarize_power(*write_run(tmp_path, has_sweep=False))
    assert power is not None
    assert (power.lost_s, power.saved_j) == (None, None)
    assert dict(describe_power(power, "tokens"))["cost of caps"].startswith("unknown without a sweep")


@pytest.mark.parametrize("text", ["{", "[]", '{"caps": [1]}', '{"caps": [{"node_type": "h"}]}', '{"caps": []}'])
def test_a_damaged_sweep_is_none(tmp_path: Path, text: str) -> None:
    run, history = write_run(tmp_path)
    (run.path / "power_sweep.json").write_text(text)
    power = summarize_power(run, history)
    assert power is not None
    assert power.lost_s is None


def test_swing_is_within_a_minute_and_ramp_from_one_to_the_next(tmp_path: Path) -> None:
    run, history = write_run(tmp_path)
    with open(run.telemetry / "n1.jsonl", "ab") as file:
        busy = device(700.0, 650.0)
        file.write(NodeMinute(HOUR + 600, 60.0, 60, "n1", Rollups(), {"0": busy, "1": busy}).to_line())
    power = summarize_power(run, history)
    assert power is not None
    assert power.swing_w == pytest.approx(2 * (700 - 100))
    assert power.ramp_w_per_s == pytest.approx(2 * (650 - 480) / 60)
    assert "means of minutes" in dict(describe_power(power, "tokens"))["power swing"]


def test_a_minute_with_a_change_of_caps_counts_for_none(tmp_path: Path) -> None:
    run, history = write_run(tmp_path, num_minutes=2)
    values = device(700.0, 600.0).values | {"power_cap_w": ValueRollup(500.0, 600.0, 700.0, 60)}
    (run.telemetry / "n1.jsonl").write_bytes(
        NodeMinute(HOUR, 60.0, 60, "n1", Rollups(), {"0": Rollups(values)}).to_line()
    )
    power = summarize_power(run, history)
    assert power is not None
    assert power.phases == ()


def test_a_run_on_cpus_has_no_power_of_accelerators(tmp_path: Path) -> None:
    run, history = write_run(tmp_path, num_minutes=1)
    line = NodeMinute(HOUR, 60.0, 60, "n1", Rollups({"cpu_power_w": ValueRollup(1.0, 2.0, 3.0, 60)}), {}).to_line()
    (run.telemetry / "n1.jsonl").write_bytes(line)
    assert summarize_power(run, history) is None
