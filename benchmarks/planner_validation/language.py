"""Replay of published runs of language models: a prediction beside each row of a table.

Each row's model is built from its shape and followed, divided as the row says over the hardware that it names, and its
step simulated. What software does is that of its stack (`plan/stacks.py`). Rows with 1 in a column `calibrate` may
move the constants of their source and accelerator (`calibrate.py`); no row has a constant of its own.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from phalanx.plan.footprint import footprint
from phalanx.plan.setup import Setup
from phalanx.plan.stacks import rates_of
from phalanx.plan.step import Parts, step
from planner_validation.calibrate import Measurement, calibrated, scaled
from planner_validation.cells import CannotPredict, Row
from planner_validation.rows import Run, understand
from planner_validation.setups import setup_of

Key = tuple[str, str]
"""Source and accelerator: one software stack on some hardware."""
NINETY = 1.645
SURE, MIXED, CALIBRATED, DISTANCE = 0.13, 0.20, 0.10, 0.02
"""Standard deviations of log(measured / predicted): of dense models, of mixtures of experts and fp4, as a factor of
either once calibrated (0.10 / 0.13), and what each doubling of the devices beyond those of calibration adds. Set from
the errors in docs/benchmarks/planner.md."""
COLUMNS = (
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


def predict_rows(rows: Sequence[Row], tell: Callable[[int], None] = lambda done: None) -> list[dict[str, Any]]:
    """A prediction for each row, in order, with the keys of COLUMNS, None where there is nothing to say. `tell` gets
    the number of rows that are done."""
    read: list[tuple[Run, Setup] | str] = []
    for at, row in enumerate(rows):
        read.append(_read(row))
        tell(at + 1)
    marked: dict[Key, list[tuple[Run, Setup]]] = defaultdict(list)
    for row, found in zip(rows, read, strict=True):
        if _is_marked(row) and not isinstance(found, str) and found[0].measured is not None:
            marked[_key(row)].append(found)
    fits = {key: _fit(runs) for key, runs in marked.items()}
    largest = {key: max(run.devices for run, _ in runs) for key, runs in marked.items()}
    answers = []
    for row, found in zip(rows, read, strict=True):
        if isinstance(found, str):
            answers.append({**dict.fromkeys(COLUMNS), "why_not": found})
            continue
        run, setup = found
        key = _key(row)
        try:
            answers.append(_answer(run, scaled(setup, fits.get(key, {})), largest.get(key)))
        except ValueError as why:  # a schedule that cannot run as the row has it
            answers.append({**dict.fromkeys(COLUMNS), "why_not": str(why)})
    return answers


def seconds(setup: Setup) -> float:
    """Of a step."""
    return parts_of(setup).total


def parts_of(setup: Setup) -> Parts:
    """Seconds of a step by cause, on hardware as its stack uses it."""
    return step(setup, rates_of(setup.cluster.node.accelerator, setup.precision, setup.stack))


def _read(row: Row) -> tuple[Run, Setup] | str:
    """A row understood, or why it cannot be."""
    try:
        run = understand(row)
        setup = setup_of(run, row.get("source", ""))
        rates_of(setup.cluster.node.accelerator, setup.precision, setup.stack)
    except CannotPredict as why:
        return str(why)
    except KeyError as precision:
        return f"the {row['gpu']} has no arithmetic in {precision.args[0]}"
    return run, setup


def _fit(runs: Sequence[tuple[Run, Setup]]) -> dict[str, float]:
    """What to multiply each constant by."""
    measured = [Measurement(setup, run.measured) for run, setup in runs if run.measured is not None]
    return calibrated(measured, seconds)


def _answer(run: Run, setup: Setup, calibrated_at: int | None) -> dict[str, Any]:
    parts = parts_of(setup)
    total = parts.total
    spread = MIXED if run.shape.experts or setup.precision == "fp4" else SURE
    if calibrated_at is not None:
        spread *= CALIBRATED / SURE
        spread += DISTANCE * max(0.0, math.log2(run.devices / calibrated_at))
    width = math.exp(NINETY * spread)
    computing = parts.products + parts.attention + parts.memory
    return {
        "predicted_step_time_s": total,
        "predicted_speedup": run.devices * computing / total,
        "predicted_tokens_per_sec_per_gpu": run.batch * run.shape.sequence / run.devices / total,
        "predicted_memory_gib": _memory(setup),
        "predicted_low_s": total / width,
        "predicted_high_s": total * width,
        "error_pct": None if run.measured is None else 100.0 * (total / run.measured - 1.0),
        "why_not": None,
    }


def _memory(setup: Setup) -> float:
    return footprint(setup).allocated / 2**30


def _key(row: Row) -> Key:
    return row.get("source", ""), row.get("gpu", "")


def _is_marked(row: Row) -> bool:
    return row.get("calibrate", "").strip() in ("1", "1.0", "true", "True")
