"""`phalanx plan`: predict a run on a cluster, and choose its parallelism."""

import gc
import json as json_
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer


def plan(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="Recipe (YAML).")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Overrides; they are written into the planned recipe."),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="Cluster: `dgx-h100:128` (nodes), `h100:64` (devices), or a file of a cluster or fleet.",
            show_default="PHALANX_CLUSTER, else this machine",
        ),
    ] = None,
    num_gpus: Annotated[
        int | None,
        typer.Option(
            "--num-gpus", min=1, max=10**8, metavar="N", help="Devices to plan for, of all nodes.", show_default="all"
        ),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Run with a power sweep, which says what the cap of a fleet file costs.",
            show_default="runs/NAME, where it has a sweep",
        ),
    ] = None,
    top: Annotated[int, typer.Option(min=1, max=10**9, metavar="K", help="Number of candidates to show.")] = 5,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Recipe to write.", show_default="NAME.planned.yaml"),
    ] = None,
    in_place: Annotated[bool, typer.Option("--in-place", help="Write the choice into RECIPE.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Break down step time and memory.")] = False,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the timeline of a step as a Chrome trace.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Predict memory, step time, energy and cost of a run on a cluster, and choose its parallelism.

    Without a cluster it plans for this machine, as measured by `phalanx calibrate`. A fleet file also gives the power
    cap that its budgets leave, and PUE, price and carbon of its site. Nothing is trained, and no data are read.
    """
    with disable_gc():
        from phalanx.app.plan import PlanOutputs, plan_recipe_file
        from phalanx.cli.plan_output import format_explanation, format_plan, to_json
        from phalanx.errors import UsageError

        if in_place and out is not None:
            raise UsageError(f"--in-place, --out {out}: give one of the two")
        out = recipe if in_place else out or recipe.with_name(f"{recipe.stem}.planned.yaml")
        outputs = PlanOutputs(out, trace, in_place)
        result = plan_recipe_file(recipe, overrides or [], cluster, num_gpus, outputs, run)
    if as_json:
        typer.echo(json_.dumps(to_json(result, top, out), indent=2))
        return
    typer.echo("\n".join(format_plan(result, top)))
    if explain:
        typer.echo("\n".join(format_explanation(result)))
    typer.echo(f"\nwrote {out}" + (f" and {trace}" if trace is not None else ""))


@contextmanager
def disable_gc() -> Iterator[None]:
    """Disable garbage collection while modules are imported: nearly all objects that imports create stay."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
