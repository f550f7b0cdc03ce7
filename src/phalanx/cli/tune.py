"""`phalanx tune`: parse, search, print each trial as it ends, write the tuned recipe."""

import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.numbers import number

if TYPE_CHECKING:
    from phalanx.api import Ready
    from phalanx.tuning import Row, Tuned


def tune(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="Recipe (YAML).")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Overrides; they are written into the tuned recipe.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Tuned recipe to write.", show_default="NAME.tuned.yaml"),
    ] = None,
    seconds: Annotated[
        float,
        typer.Option(
            min=0.1,
            max=86_400,
            callback=number,
            metavar="S",
            help="Measuring time for each trial, in seconds.",
        ),
    ] = 5.0,
    nproc: Annotated[
        int | None,
        typer.Option(
            "--nproc-per-node",
            min=1,
            max=100_000,
            metavar="N",
            help="Workers.",
            show_default="chosen by trials on a CPU",
        ),
    ] = None,
    allow_precision: Annotated[
        bool, typer.Option("--allow-precision", help="Also try precisions other than the recipe's.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the trials as JSON.")] = False,
) -> None:
    """Measure what makes a recipe faster on this machine, and write the tuned recipe.

    Runs trials in order of predicted speedup and keeps what is faster. Never changes the batch size, learning rate,
    data or model, nor the precision unless it is `auto` or --allow-precision is given. Ctrl-C stops and writes nothing.
    """
    from datetime import date

    from phalanx.cli.data import preparing
    from phalanx.errors import UsageError
    from phalanx.recipe import load_recipe
    from phalanx.run.directory import check_output, write_whole
    from phalanx.tuning import Watcher, text_of
    from phalanx.tuning import tune as search

    out = out or recipe.with_name(f"{recipe.stem}.tuned.yaml")
    if out.absolute() == recipe.absolute():
        raise UsageError(f"--out {out}: this is the recipe; write the tuned recipe to another file")
    check_output("--out", out, ["# Tuned by `phalanx tune`"])
    loaded = load_recipe(recipe, overrides or [])
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it cleans up like Ctrl-C
    with preparing() as progress:
        screen = Screen(quiet=as_json)
        watcher = Watcher(progress, screen.begun, screen.trying, screen.tried)
        tuned = search(loaded, nproc=nproc, seconds=seconds, allow_precision=allow_precision, watcher=watcher)
    write_whole(out, text_of(loaded, overrides or [], tuned, date.today()))
    if as_json:
        typer.echo(json.dumps(_plain(tuned, out), indent=2))
    else:
        typer.echo("\n".join(_conclusion(tuned, recipe, out)))


class Screen:
    """The table, row by row; on a terminal also what is being tried."""

    def __init__(self, quiet: bool):
        self._quiet = quiet

    def begun(self, ready: "Ready", seconds: float) -> None:
        from phalanx.observe.units import duration

        if self._quiet:
            return
        recipe = ready.recipe
        workers = recipe.parallelism.world if not isinstance(recipe.parallelism, str) else 1
        print(
            f"{ready.cluster.get('device_name')}, {ready.cluster.get('physical_cores')} cores; {recipe.name} by itself:"
        )
        print(
            f"{recipe.precision}, compile={str(recipe.compile).lower()}, batch.micro_size={recipe.batch.micro_size}, "
            f"{workers} {'process' if workers == 1 else 'processes'} x {recipe.num_threads} "
            f"{'thread' if recipe.num_threads == 1 else 'threads'}: {duration(seconds)} a step\n"
        )
        print(f"{'TRIAL':<26} {'PREDICTED':>9}  {'MEASURED (QUARTILES)':<23} {'STEP TIME':>9}  RESULT", flush=True)

    def trying(self, label: str) -> None:
        if sys.stderr.isatty() and not self._quiet:
            print(f"\r{label} ...\033[K", end="", file=sys.stderr, flush=True)

    def tried(self, row: "Row") -> None:
        if sys.stderr.isatty() and not self._quiet:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
        if not self._quiet:
            print(row_text(row), flush=True)


def row_text(row: "Row") -> str:
    """One line of the table."""
    from phalanx.observe.units import duration
    from phalanx.tuning import gain

    predicted = "" if row.predicted is None else f"{row.predicted:.2f} x"
    result = ": ".join(part for part in ("kept" if row.kept and row.predicted else "", row.note) if part)
    if row.found is None:
        return f"{row.label:<26} {predicted:>9}  {'':<23} {'':>9}  {result}"
    found, step = gain(row.found), duration(row.found.after)
    return f"{row.label:<26} {predicted:>9}  {found:<23} {step:>9}  {result}".rstrip()


def _conclusion(tuned: "Tuned", recipe: Path, out: Path) -> list[str]:
    from phalanx.observe.units import duration
    from phalanx.streams import word_of
    from phalanx.tuning import gain

    lines = ["", *(f"not tried  {note}" for note in tuned.untried), ""]
    if tuned.total is None:
        lines.append(f"no trial is faster than `phalanx train {word_of(recipe)}`")
    else:
        lines.append(
            f"{duration(tuned.total.before)} -> {duration(tuned.total.after)} a step: {gain(tuned.total)} as fast"
        )
    workers = [] if tuned.workers == 1 else ["--nproc-per-node", str(tuned.workers)]
    return [*lines, f"wrote {out}; train it with: phalanx train {' '.join([word_of(out), *workers])}"]


def _plain(tuned: "Tuned", out: Path) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "default_step_seconds": tuned.default_seconds,
        "trials": [row.plain() for row in tuned.rows],
        "changes": tuned.changes,
        "total": None if tuned.total is None else asdict(tuned.total),
        "untried": tuned.untried,
        "workers": tuned.workers,
        "machine": tuned.machine,
        "recipe": str(out),
    }
