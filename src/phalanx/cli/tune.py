"""`phalanx tune`: measure what makes a recipe faster, and write the tuned recipe."""

import json
import signal
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.options import OverridesArgument, RecipeArgument, name_output
from phalanx.errors import UsageError
from phalanx.formatting import format_duration, format_plural
from phalanx.std_streams import word_of
from phalanx.text_table import Column, format_table

if TYPE_CHECKING:
    from phalanx.app.prepare_run import PreparedRun
    from phalanx.app.tune import TuneResult, TuneTrial

TRIAL_COLUMNS = (
    Column("TRIAL", min_width=25),
    Column("PREDICTED", is_number=True),
    Column("MEASURED (QUARTILES)", min_width=22),
    Column("STEP TIME", is_number=True),
    Column("RESULT"),
)
"""Rows are printed as trials end, hence the widths."""


def tune(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Tuned recipe to write.", show_default="NAME.tuned.yaml")
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0.1, metavar="S", help="Measuring time for each trial, in seconds.")
    ] = 5.0,
    nproc_per_node: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Workers.", show_default="chosen by trials on a CPU")
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

    from phalanx.app.tune import TuneCallbacks, render_recipe
    from phalanx.app.tune import tune as search
    from phalanx.cli.data import show_progress
    from phalanx.recipe import load_recipe
    from phalanx.run.directory import check_output_path, write_output

    out = out or name_output(recipe, "tuned")
    if out.absolute() == Path(recipe).absolute():
        raise UsageError(f"--out {out}: this is the recipe; write the tuned recipe to another file")
    check_output_path("--out", out, ["# Tuned by `phalanx tune`"])
    loaded = load_recipe(recipe, overrides or [])
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it cleans up like Ctrl-C
    with show_progress() as progress:
        console = TuneConsole(quiet=as_json)
        callbacks = TuneCallbacks(progress, console.print_baseline, console.print_trial)
        result = search(
            loaded, nproc_per_node=nproc_per_node, seconds=seconds, allow_precision=allow_precision, callbacks=callbacks
        )
    write_output(out, render_recipe(loaded, overrides or [], result, date.today()))
    if as_json:
        typer.echo(json.dumps(_result_to_json(result, out), indent=2))
    else:
        typer.echo("\n".join(_format_conclusion(result, recipe, out)))


class TuneConsole:
    """Prints the table row by row."""

    def __init__(self, quiet: bool):
        self._quiet = quiet

    def print_baseline(self, prepared: "PreparedRun", seconds: float) -> None:
        if self._quiet:
            return
        recipe = prepared.recipe
        num_workers = recipe.parallelism.world
        print(
            f"{prepared.cluster.get('device_name')}, {prepared.cluster.get('physical_cores')} cores; {recipe.name} "
            "with the defaults:"
        )
        print(
            f"{recipe.precision}, compile={str(recipe.compile).lower()}, batch.micro_size={recipe.batch.micro_size}, "
            f"{num_workers} {'process' if num_workers == 1 else 'processes'} x "
            f"{format_plural(recipe.num_threads, 'thread')}: {format_duration(seconds)} a step\n"
        )
        print(*format_table(TRIAL_COLUMNS, []), flush=True)

    def print_trial(self, trial: "TuneTrial") -> None:
        if not self._quiet:
            print(format_trial(trial), flush=True)


def format_trial(trial: "TuneTrial") -> str:
    """Format a row of the table."""
    from phalanx.app.tune import format_gain

    predicted = "" if trial.predicted is None else f"{trial.predicted:.2f} x"
    result = ": ".join(part for part in ("kept" if trial.is_kept and trial.predicted else "", trial.note) if part)
    measured = trial.measured
    times = ("", "") if measured is None else (format_gain(measured), format_duration(measured.candidate_s))
    return "\n".join(format_table(TRIAL_COLUMNS, [(trial.label, predicted, *times, result)], show_header=False))


def _format_conclusion(result: "TuneResult", recipe: str, out: Path) -> list[str]:
    from phalanx.app.tune import format_gain

    lines = [""]
    if result.total is None:
        lines.append(f"no trial is faster than `phalanx train {word_of(recipe)}`")
    else:
        before, after = map(format_duration, (result.total.baseline_s, result.total.candidate_s))
        lines.append(f"{before} -> {after} a step: {format_gain(result.total)} as fast")
    nproc_option = [] if result.num_workers == 1 else ["--nproc-per-node", str(result.num_workers)]
    return [*lines, f"wrote {out}; train it with: phalanx train {' '.join([word_of(out), *nproc_option])}"]


def _result_to_json(result: "TuneResult", out: Path) -> dict[str, Any]:
    return {
        "default_step_s": result.default_seconds,
        "trials": [row.to_json() for row in result.trials],
        "changes": result.changes,
        "total": None if result.total is None else asdict(result.total),
        "num_workers": result.num_workers,
        "machine": result.machine,
        "recipe": str(out),
    }
