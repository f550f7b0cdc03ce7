"""Tables of published runs: read one, see which kind it is, and write it again with predictions beside what it says."""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from phalanx.errors import DataError
from phalanx.run.directory import write_atomic

LANGUAGE_COLUMNS = ("model", "layers", "hidden", "vocab", "seq_len", "global_batch_seqs", "gpu", "n_gpus")
CONVNET_COLUMNS = ("model", "gpu", "n_gpus", "interconnect", "comm_scheme", "global_batch")
"""Columns that a table of either kind must have; others may be absent or empty."""
SIGNIFICANT_DIGITS = 6

Row = Mapping[str, str]


def read_table(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file. DataError: it is no such file, or a line is not as long as the head."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is no text ({error.reason} at byte {error.start}); expected a CSV file") from None
    lines = csv.DictReader(io.StringIO(text, newline=""))
    rows = []
    for row in lines:
        if None in row or any(value is None for value in row.values()):
            long = "more" if None in row else "fewer"
            raise DataError(
                f"{path}:{lines.line_num}: has {long} cells than the head; expected {len(lines.fieldnames or ())}"
            )
        rows.append(row)
    if not rows:
        raise DataError(f"{path}: has no rows; expected a head and a line for each run")
    return rows


def detect_kind(rows: Sequence[Row], path: Path) -> str:
    """`language` or `convolution`, by the columns. DataError names those that are missing."""
    columns = set(rows[0])
    missing = {name: [each for each in needed if each not in columns] for name, needed in COLUMNS_BY_KIND.items()}
    for name, absent in missing.items():
        if not absent:
            return name
    nearest = min(missing, key=lambda name: len(missing[name]))
    raise DataError(
        f"{path}: columns are missing: {', '.join(missing[nearest])}; a table of {KIND_LABELS[nearest]} needs "
        f"{', '.join(COLUMNS_BY_KIND[nearest])}"
    )


COLUMNS_BY_KIND = {"language": LANGUAGE_COLUMNS, "convolution": CONVNET_COLUMNS}
KIND_LABELS = {"language": "language models", "convolution": "convolutional networks"}


def predict_table(
    rows: Sequence[Row], path: Path, report_progress: Callable[[int], None] = lambda done: None
) -> list[dict[str, Any]]:
    """What replay adds to each row. DataError: the table says too little."""
    if detect_kind(rows, path) == "language":
        from planner_validation.llm_predictions import predict_rows

        return predict_rows(rows, report_progress)
    from planner_validation import convnet_predictions
    from planner_validation.llm_predictions import PREDICTION_COLUMNS

    answers = convnet_predictions.predict_rows(rows)
    return [{**dict.fromkeys(PREDICTION_COLUMNS), **answer} for answer in answers]


def write_table(path: Path, rows: Sequence[Row], answers: Sequence[Mapping[str, Any]]) -> None:
    """The table with its predictions, whole or not at all."""
    names = [*rows[0], *(name for name in answers[0] if name not in rows[0])]
    out = io.StringIO(newline="")
    lines = csv.DictWriter(out, names, lineterminator="\n")
    lines.writeheader()
    for row, answer in zip(rows, answers, strict=True):
        lines.writerow({**row, **{name: _format_cell(value) for name, value in answer.items()}})
    write_atomic(path, out.getvalue())


def _format_cell(value: Any) -> Any:
    return f"{value:.{SIGNIFICANT_DIGITS}g}" if isinstance(value, float) else "" if value is None else value
