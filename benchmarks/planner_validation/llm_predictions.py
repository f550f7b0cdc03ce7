"""Replay of published runs of language models: a prediction beside each row of a table.

Each row's model is built from its shape and followed, divided as the row says over the hardware that it names, and its
step simulated. What software does is that of its stack (`planner/device_costs.py`). Rows with 1 in a column `calibrate`
may move the constants of their source and accelerator (`fit_constants.py`); no row has a constant of its own.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from phalanx.planner.device_costs import device_costs_for_stack
from phalanx.planner.memory import estimate_memory
from phalanx.planner.scenario import Scenario
from phalanx.planner.step_time import StepBreakdown, predict_step_time
from planner_validation.cells import CannotPredict, Row
from planner_validation.fit_constants import MeasuredRun, fit_stack_constants, scale_stack
from planner_validation.llm_rows import PublishedRun, parse_run
from planner_validation.llm_scenarios import scenario_of

SourceAndAccelerator = tuple[str, str]
"""Source and accelerator: one software stack on some hardware."""
Z_90_PERCENT = 1.645
DENSE_LOG_STD, MOE_LOG_STD, CALIBRATED_LOG_STD, LOG_STD_PER_DOUBLING = 0.13, 0.20, 0.10, 0.02
"""Standard deviations of log(measured / predicted): of dense models, of mixtures of experts and fp4, as a factor of
either once calibrated (0.10 / 0.13), and what each doubling of the devices beyond those of calibration adds. Set from
the errors in docs/benchmarks/planner.md."""
PREDICTION_COLUMNS = (
    "predicted_step_time_s",
    "predicted_speedup",
    "predicted_tokens_per_sec_per_gpu",
    "predicted_memory_gib",
    "predicted_low_s",
    "predicted_high_s",
    "error_pct",
    "why_not",
)
"""What replay adds to a table."""


def predict_rows(
    rows: Sequence[Row], report_progress: Callable[[int], None] = lambda done: None
) -> list[dict[str, Any]]:
    """A prediction for each row, in order, with the keys of COLUMNS, None where there is nothing to say.
    `report_progress` gets the number of rows that are done."""
    read: list[tuple[PublishedRun, Scenario] | str] = []
    for at, row in enumerate(rows):
        read.append(_parse_row(row))
        report_progress(at + 1)
    calibration_runs: dict[SourceAndAccelerator, list[tuple[PublishedRun, Scenario]]] = defaultdict(list)
    for row, found in zip(rows, read, strict=True):
        if _is_calibration_row(row) and not isinstance(found, str) and found[0].step_s is not None:
            calibration_runs[_source_and_accelerator(row)].append(found)
    fits = {key: _fit_constants(runs) for key, runs in calibration_runs.items()}
    largest = {key: max(run.devices for run, _ in runs) for key, runs in calibration_runs.items()}
    answers = []
    for row, found in zip(rows, read, strict=True):
        if isinstance(found, str):
            answers.append({**dict.fromkeys(PREDICTION_COLUMNS), "why_not": found})
            continue
        run, scenario = found
        key = _source_and_accelerator(row)
        try:
            answers.append(_predict_row(run, scale_stack(scenario, fits.get(key, {})), largest.get(key)))
        except ValueError as why:  # a schedule that cannot run as the row has it
            answers.append({**dict.fromkeys(PREDICTION_COLUMNS), "why_not": str(why)})
    return answers


def predict_step_seconds(scenario: Scenario) -> float:
    """Of a step."""
    return predict_breakdown(scenario).total


def predict_breakdown(scenario: Scenario) -> StepBreakdown:
    """Seconds of a step by cause, on hardware as its stack uses it."""
    return predict_step_time(
        scenario, device_costs_for_stack(scenario.cluster.node.accelerator, scenario.precision, scenario.stack)
    )


def _parse_row(row: Row) -> tuple[PublishedRun, Scenario] | str:
    """A row understood, or why it cannot be."""
    try:
        run = parse_run(row)
        scenario = scenario_of(run, row.get("source", ""))
        device_costs_for_stack(scenario.cluster.node.accelerator, scenario.precision, scenario.stack)
    except CannotPredict as why:
        return str(why)
    except KeyError as precision:
        return f"the {row['gpu']} has no arithmetic in {precision.args[0]}"
    return run, scenario


def _fit_constants(runs: Sequence[tuple[PublishedRun, Scenario]]) -> dict[str, float]:
    """What to multiply each constant by."""
    measured = [MeasuredRun(scenario, run.step_s) for run, scenario in runs if run.step_s is not None]
    return fit_stack_constants(measured, predict_step_seconds)


def _predict_row(run: PublishedRun, scenario: Scenario, calibrated_at: int | None) -> dict[str, Any]:
    parts = predict_breakdown(scenario)
    total = parts.total
    spread = MOE_LOG_STD if run.shape.num_experts or scenario.precision == "fp4" else DENSE_LOG_STD
    if calibrated_at is not None:
        spread *= CALIBRATED_LOG_STD / DENSE_LOG_STD
        spread += LOG_STD_PER_DOUBLING * max(0.0, math.log2(run.devices / calibrated_at))
    width = math.exp(Z_90_PERCENT * spread)
    computing = parts.gemm + parts.attention + parts.memory_bound
    return {
        "predicted_step_time_s": total,
        "predicted_speedup": run.devices * computing / total,
        "predicted_tokens_per_sec_per_gpu": run.global_batch * run.shape.seq_len / run.devices / total,
        "predicted_memory_gib": _predicted_memory_gib(scenario),
        "predicted_low_s": total / width,
        "predicted_high_s": total * width,
        "error_pct": None if run.step_s is None else 100.0 * (total / run.step_s - 1.0),
        "why_not": None,
    }


def _predicted_memory_gib(scenario: Scenario) -> float:
    return estimate_memory(scenario).allocated / 2**30


def _source_and_accelerator(row: Row) -> SourceAndAccelerator:
    return row.get("source", ""), row.get("gpu", "")


def _is_calibration_row(row: Row) -> bool:
    return row.get("calibrate", "").strip() in ("1", "1.0", "true", "True")
