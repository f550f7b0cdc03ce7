"""`phalanx replay`: predict the runs of a table, write that beside what it says, print how far off it is."""

import json as json_
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer


def replay(
    table: Annotated[Path, typer.Argument(metavar="CSV", help="Published runs; docs/replay.md tells the columns.")],
    out: Annotated[Path, typer.Option("--out", metavar="CSV", help="The table with the predictions.")],
    json: Annotated[bool, typer.Option("--json", help="Print the errors by source as JSON.")] = False,
) -> None:
    """Predict published runs, to see how far predictions can be trusted.

    Rows with 1 in a column `calibrate` are used to fit the few constants of their source and accelerator; all others
    are predicted without a look at what was measured.
    """
    from phalanx.errors import UsageError
    from phalanx.plan.replay import table as tables
    from phalanx.run.directory import check_output

    if not table.is_file():
        raise UsageError(f"{table}: there is no such file")
    if out.absolute() == table.absolute():
        raise UsageError(f"--out {out}: is the table itself; its predictions need a file of their own")
    check_output("--out", out, ["error_pct"])
    rows = tables.read(table)
    answers = tables.predicted(rows, table, _progress(len(rows)))
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    tables.write(out, rows, answers)
    found = errors(rows, answers)
    if json:
        typer.echo(json_.dumps(found, indent=2))
        return
    typer.echo(page(found, len(rows)))
    typer.echo(f"wrote {out}")


def errors(rows: Sequence[dict[str, str]], answers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each source and accelerator: rows, how many were predicted, and their absolute errors in percent."""
    import statistics

    groups: dict[tuple[str, str], list[Any]] = {}
    for row, answer in zip(rows, answers, strict=True):
        groups.setdefault((row.get("source", ""), row["gpu"]), []).append((row, answer))
    found = []
    for (source, gpu), members in groups.items():
        wrong = sorted(
            abs(answer["error_pct"])
            for row, answer in members
            if answer["error_pct"] is not None and row.get("calibrate", "").strip() != "1"
        )
        found.append(
            {
                "source": source,
                "gpu": gpu,
                "rows": len(members),
                "compared": len(wrong),
                "median": statistics.median(wrong) if wrong else None,
                "p90": wrong[min(len(wrong) - 1, int(0.9 * len(wrong)))] if wrong else None,
            }
        )
    return found


def page(found: Sequence[dict[str, Any]], rows: int) -> str:
    """The errors as a table."""
    lines = [f"{'source':<52} {'accelerator':<18} {'rows':>5} {'compared':>8} {'median':>8} {'p90':>8}"]
    for each in sorted(found, key=lambda one: (one["source"], one["gpu"])):
        wrong = "".join(f" {'' if each[name] is None else f'{each[name]:.1f} %':>8}" for name in ("median", "p90"))
        lines.append(f"{each['source'][:52]:<52} {each['gpu'][:18]:<18} {each['rows']:>5} {each['compared']:>8}{wrong}")
    compared = sum(each["compared"] for each in found)
    return "\n".join([*lines, f"{rows} rows, {compared} compared with what was measured; errors of the step time"])


def _progress(rows: int) -> Any:
    """Tells on a terminal how far it is."""

    def tell(done: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{done} of {rows} rows\033[K", end="", file=sys.stderr, flush=True)

    return tell
