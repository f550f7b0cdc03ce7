"""When a run that trains will be done, and what it has cost and will have cost by then."""

from dataclasses import dataclass

from phalanx import formatting
from phalanx.cluster.spec import Prices
from phalanx.observe.html_report.report import render_table
from phalanx.observe.run_cost import compute_cost
from phalanx.observe.summary import RUN_OUTCOMES, RunSummary


@dataclass(frozen=True)
class RunForecast:
    """What is known of a run at a time; None for what is not. Money is in the currency of the prices."""

    seconds_left: float | None
    device_hours: float | None
    device_hours_at_end: float | None
    cost: float | None
    cost_at_end: float | None


def forecast_run(summary: RunSummary, prices: Prices) -> RunForecast:
    """Forecast from the wall time of a step so far: saves, evaluations and failures continue at the same rate."""
    device_s, steps, planned = summary.device_time.allocated_s, summary.last_step, summary.planned_steps
    is_over = summary.status in RUN_OUTCOMES
    left = None
    if not is_over and steps and planned and summary.durations.wall_s:
        left = max(0, planned - steps) * summary.durations.wall_s / steps
    growth = planned / steps if left is not None and planned else None
    energy = summary.energy
    cost = compute_cost(device_s, None if energy is None else energy.energy_j, prices)
    return RunForecast(
        seconds_left=left,
        device_hours=device_s / 3600 if device_s else None,
        device_hours_at_end=device_s / 3600 * growth if device_s and growth else None,
        cost=cost,
        cost_at_end=cost * growth if cost is not None and growth else None,
    )


def render_forecast(forecast: RunForecast, prices: Prices) -> str:
    """The section of the page; empty where nothing is known."""

    def join(now: float | None, end: float | None, unit: str) -> str:
        text = f"{formatting.format_significant(now or 0.0)} {unit}"
        return text if end is None else f"{text}; {formatting.format_significant(end)} {unit} at the last step"

    rows = []
    if forecast.seconds_left is not None:
        rows.append(("time left", f"{formatting.format_duration(forecast.seconds_left)} at the pace so far"))
    if forecast.device_hours is not None:
        rows.append(("device-hours", join(forecast.device_hours, forecast.device_hours_at_end, "h")))
    if forecast.cost is not None:
        rows.append(("cost", join(forecast.cost, forecast.cost_at_end, prices.currency)))
    return f"<h2>Forecast and cost</h2>{render_table(rows)}" if rows else ""
