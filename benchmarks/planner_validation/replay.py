"""Predict the runs of a table of published runs, write the predictions next to them, and print how far off they are.

    python benchmarks/planner_validation/replay.py CSV --out CSV [--json]

Rows with 1 in a column `calibrate` are used to fit the few constants of their source and accelerator; all others are
predicted without a look at what was measured. docs/how-to/validate-predictions.md explains the columns.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # a script has its own folder on the path, not the package's
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from phalanx.errors import PhalanxError, UsageError
from phalanx.run.directory import check_output_path
from planner_validation import tables


def main(argv: Sequence[str] | None = None) -> int:
    """Replay the table that the command line names and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "table",
        type=Path,
        metavar="CSV",
        help="published runs; docs/how-to/validate-predictions.md explains the columns",
    )
    parser.add_argument("--out", type=Path, metavar="CSV", required=True, help="the table with the predictions")
    parser.add_argument("--json", action="store_true", help="print the errors by source as JSON")
    given = parser.parse_args(argv)
    try:
        replay(given.table, given.out, given.json)
    except PhalanxError as error:
        print(f"error: {error}", file=sys.stderr)
        return int(error.code)
    return 0


def replay(table: Path, out: Path, as_json: bool) -> None:
    """Predict the rows of `table`, write them to `out` with the predictions, and print the errors by source.

    Raises:
        UsageError: `table` does not exist, or `out` cannot be written.
        DataError: `table` is no table of published runs.
    """
    if not table.is_file():
        raise UsageError(f"{table}: there is no such file")
    if out.absolute() == table.absolute():
        raise UsageError(f"--out {out}: is the table itself; its predictions need a file of their own")
    check_output_path("--out", out, ["error_pct"])
    rows = tables.read_table(table)
    answers = tables.predict_table(rows, table, _make_progress(len(rows)))
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    tables.write_table(out, rows, answers)
    found = summarize_errors(rows, answers)
    if as_json:
        print(json.dumps(found, indent=2))
        return
    print(format_errors(found, len(rows)))
    print(f"wrote {out}")


def summarize_errors(rows: Sequence[dict[str, str]], predictions: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each source and accelerator: rows, how many were predicted, and their absolute errors in percent."""
    groups: dict[tuple[str, str], list[Any]] = {}
    for row, answer in zip(rows, predictions, strict=True):
        groups.setdefault((row.get("source", ""), row["gpu"]), []).append((row, answer))
    summaries = []
    for (source, gpu), rows_of_source in groups.items():
        error_percents = sorted(
            abs(answer["error_pct"])
            for row, answer in rows_of_source
            if answer["error_pct"] is not None and row.get("calibrate", "").strip() != "1"
        )
        summaries.append(
            {
                "source": source,
                "gpu": gpu,
                "rows": len(rows_of_source),
                "compared": len(error_percents),
                "median": statistics.median(error_percents) if error_percents else None,
                "p90": error_percents[min(len(error_percents) - 1, int(0.9 * len(error_percents)))]
                if error_percents
                else None,
            }
        )
    return summaries


def format_errors(summaries: Sequence[dict[str, Any]], rows: int) -> str:
    """The errors as a table."""
    lines = [f"{'source':<52} {'accelerator':<18} {'rows':>5} {'compared':>8} {'median':>8} {'p90':>8}"]
    for each in sorted(summaries, key=lambda one: (one["source"], one["gpu"])):
        error_text = "".join(f" {'' if each[name] is None else f'{each[name]:.1f} %':>8}" for name in ("median", "p90"))
        lines.append(
            f"{each['source'][:52]:<52} {each['gpu'][:18]:<18} {each['rows']:>5} {each['compared']:>8}{error_text}"
        )
    compared = sum(each["compared"] for each in summaries)
    return "\n".join([*lines, f"{rows} rows, {compared} compared with what was measured; errors of the step time"])


def _make_progress(rows: int) -> Callable[[int], None]:
    """Return a function that prints on a terminal how many rows are done."""

    def show(done: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{done} of {rows} rows\033[K", end="", file=sys.stderr, flush=True)

    return show


if __name__ == "__main__":
    sys.exit(main())
