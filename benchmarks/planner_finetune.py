"""Accuracy of the predicted memory of fine-tuning: published runs, by source and method, written to docs/benchmarks.

    python benchmarks/planner_finetune.py [--validation ../shared/validation/finetune.csv] [--page FILE] [--rows TEXT]

Rows that leave open what memory depends on are counted by reason. `--rows` prints every row of the sources with TEXT in
their name. It takes a second.
"""

import argparse
import csv
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path

from phalanx.errors import UsageError
from phalanx.formatting import BYTES_PER_GIB
from phalanx.planner.finetune_memory import estimate_finetune_memory
from planner_validation.cells import CannotPredict, Row
from planner_validation.finetune_rows import FineTuningRow, forget_own_source, parse_finetune_row, parse_finetune_run
from planner_validation.llm_rows import parse_notes

BEGIN, END = "<!-- made by benchmarks/planner_finetune.py -->", "<!-- end of planner_finetune.py -->"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--validation", type=Path, default=Path("../shared/validation/finetune.csv"))
    parser.add_argument("--page", type=Path, default=Path("docs/benchmarks/planner.md"))
    parser.add_argument("--rows", metavar="TEXT")
    given = parser.parse_args()
    if not given.validation.is_file():
        raise UsageError(f"--validation {given.validation}: there is no such file")
    rows = list(csv.DictReader(given.validation.open()))
    if given.rows is not None:
        print_rows([row for row in rows if given.rows in row["source"]])
        return
    text = "\n".join([f"Made by `python benchmarks/planner_finetune.py` on {date.today()}.", "", *format_page(rows)])
    head, _, rest = given.page.read_text().partition(BEGIN)
    given.page.write_text(f"{head}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")
    print(text)


def print_rows(rows: Sequence[Row]) -> None:
    """Print predicted and measured memory of each row, or why there is no prediction."""
    for row in rows:
        name = (
            f"{row['model']} {row['method']} {row['micro_batch']} x {row['seq_len']} {row['gpus']} {row['note'][:60]}"
        )
        try:
            parsed = parse_finetune_row(row)
        except CannotPredict as error:
            print(f"{'':21} {name}: {error}")
            continue
        predicted = getattr(estimate_finetune_memory(parsed.run), parsed.counter) / BYTES_PER_GIB
        error_percent = 100 * (predicted / parsed.peak_gib - 1)
        print(f"{predicted:7.2f} {parsed.peak_gib:7.2f} {error_percent:+5.1f} {name}")


def format_page(rows: Sequence[Row]) -> list[str]:
    """Tables of errors by source and method, of limits that a source states, and of rows without a prediction."""
    errors, reasons = defaultdict[tuple[str, str], list[tuple[float, float]]](list), Counter[tuple[str, str]]()
    for row in rows:
        try:
            parsed = parse_finetune_row(row)
        except CannotPredict as error:
            if row["peak_memory_gib"]:
                reasons[row["source"], str(error)] += 1
            continue
        forgetful = replace(parsed, run=forget_own_source(row, parsed.run))
        errors[row["source"], row["method"]].append((relative_error(parsed), relative_error(forgetful)))
        if smi_gib := parse_notes(row).get("nvidia_smi_gib"):
            shown, shown_forgetful = (
                replace(it, peak_gib=float(smi_gib), counter="total") for it in (parsed, forgetful)
            )
            errors[row["source"], f"{row['method']}, nvidia-smi"].append(
                (relative_error(shown), relative_error(shown_forgetful))
            )
    lines = ["| source | method | rows | median | p90 | bias | own source left out: median | p90 |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for (source, method), pairs in sorted(errors.items()):
        values, values_forgetful = zip(*pairs, strict=True)
        cells = [*format_errors(values), f"{100 * statistics.median(values):+.1f}", *format_errors(values_forgetful)]
        lines.append(f"| {source} | {method} | {len(pairs)} | {' | '.join(cells)} |")
    lines += ["", "| not predicted | why | rows |", "|---|---|---|"]
    lines += [f"| {source} | {why} | {count} |" for (source, why), count in sorted(reasons.items())]
    return [*lines, "", *format_limits(rows)]


def relative_error(parsed: FineTuningRow) -> float:
    """Predicted over measured memory, less 1."""
    predicted = float(getattr(estimate_finetune_memory(parsed.run), parsed.counter))
    return predicted / BYTES_PER_GIB / parsed.peak_gib - 1


def format_errors(values: Sequence[float]) -> list[str]:
    """Median and p90 of absolute errors, in percent."""
    absolute = sorted(abs(value) for value in values)
    return [f"{100 * value:.1f}" for value in (statistics.median(absolute), absolute[round(0.9 * (len(values) - 1))])]


def format_limits(rows: Sequence[Row]) -> list[str]:
    """Lines about rows that state a limit: predicted memory at the longest sequence that fits, as a share of the
    budget; and runs out of memory."""
    shares, out_of_memory = defaultdict[str, list[float]](list), Counter[bool]()
    for row in rows:
        notes = parse_notes(row)
        if "budget_gib" not in notes and notes.get("outcome") != "OOM":
            continue
        try:
            total = estimate_finetune_memory(parse_finetune_run(row)).total / BYTES_PER_GIB
        except CannotPredict:
            continue
        if notes.get("outcome") == "OOM":
            size = next((int(part[:-2]) for part in row["gpu"].split("-") if part[:-2].isdigit()), None)
            if size is not None:
                out_of_memory[total > size * 1e9 / BYTES_PER_GIB] += 1
        else:
            shares[row["source"]].append(total / float(notes["budget_gib"]))
    lines = ["| longest sequence that fits | rows | predicted, as a share of the budget: median | lowest | highest |"]
    lines += ["|---|---|---|---|---|"]
    for source, values in sorted(shares.items()):
        cells = (statistics.median(values), min(values), max(values))
        lines.append(f"| {source} | {len(values)} | {' | '.join(f'{value:.2f}' for value in cells)} |")
    return [*lines, "", f"Runs out of memory: {out_of_memory[True]} predicted, {out_of_memory[False]} not."]


if __name__ == "__main__":
    main()
