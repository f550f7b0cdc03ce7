"""`phalanx profile`: trace a few steps of a recipe, and print where the time goes."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from phalanx.cli.options import JsonOption, OverridesArgument, RecipeArgument
from phalanx.formatting import format_plural
from phalanx.run import Run
from phalanx.run.directory import check_output_path
from phalanx.text_table import Column, format_table


def profile(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Steps to trace, after 3 warm-up steps.")] = 5,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Chrome trace to write (for Perfetto).")] = Path(
        "trace.json"
    ),
    as_json: JsonOption = False,
    top: Annotated[int, typer.Option(min=1, metavar="K", help="Number of operations to list.")] = 12,
) -> None:
    """Profile a few training steps on one worker; write only the trace."""
    from phalanx.app.prepare_run import RunRequest, check_start, prepare_run
    from phalanx.cli.data import show_progress
    from phalanx.jobs.agent.fork_server_client import ForkServerClient, call_timeout
    from phalanx.recipe import load_recipe

    check_output_path("--out", out, ['"traceEvents"', '"schemaVersion"'])
    loaded = load_recipe(recipe, overrides or [])
    check_start(loaded, 1)
    with (
        ForkServerClient(call_timeout_s=call_timeout(loaded.recipe.fault_tolerance.hang_timeout_s)) as fork_server,
        show_progress() as progress,
    ):
        unused_run = Run(Path(".phalanx-profile-writes-nothing"))
        request = RunRequest(loaded, unused_run, world_size=1)
        with prepare_run(request, fork_server, progress, write=False) as prepared:
            payload = {"recipe": prepared.recipe.model_dump(mode="json"), "folder": str(prepared.recipe_dir)}
            trace = fork_server.call(
                "phalanx.autoconfig.trials:profile_recipe_steps",
                {**payload, "steps": steps, "out": str(out.absolute())},
            )
    if as_json:
        typer.echo(json.dumps({**trace, "trace": str(out)}))
        return
    typer.echo(_format_trace(trace, top))
    typer.echo(f"\nwrote {out}")


def _format_trace(answer: dict[str, Any], top: int) -> str:
    from phalanx.observe.text_report import COMPONENT_LABELS

    seconds = answer["step_s"]
    breakdown_s = {COMPONENT_LABELS.get(name, name): value for name, value in answer["breakdown_s"].items()}
    steps = format_plural(answer["steps"], "step")
    lines = [f"{steps} of {seconds * 1e3:.2f} ms (the profiler adds a small overhead)", ""]
    lines += _format_shares("part of the step", breakdown_s, seconds)
    lines += ["", *_format_shares("kind of operation", answer["kinds_s"], sum(answer["kinds_s"].values()))]
    operations = [(name[:48], f"{own * 1e3:.3f}", str(calls)) for name, own, calls in answer["ops"][:top]]
    return "\n".join([*lines, "", *format_table(_columns("operation", "calls"), operations)])


def _format_shares(title: str, values: dict[str, float], whole: float) -> list[str]:
    ordered = sorted(values.items(), key=lambda item: -item[1])
    rows = ((name, f"{value * 1e3:.3f}", f"{value / whole if whole else 0:.1%}") for name, value in ordered)
    return format_table(_columns(title, "share"), rows)


def _columns(title: str, last: str) -> list[Column]:
    return [Column(title, min_width=48), Column("ms/step", is_number=True), Column(last, is_number=True)]
