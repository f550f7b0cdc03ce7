"""`phalanx chaos`: train without faults, train with injected faults, and compare."""

import shutil
import signal
from pathlib import Path
from typing import Annotated

import typer

from phalanx.errors import ExitCode, UsageError

FAILED_EXIT_CODE = 1
"""Exit code when the run did not end as it should: a bug in Phalanx, or in the recipe's own code."""


def chaos(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="Recipe (YAML).")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Overrides, such as steps=500.")
    ] = None,
    faults: Annotated[int, typer.Option(min=1, max=100_000, metavar="N", help="Number of faults to inject.")] = 10,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, metavar="S", help="Seed of the fault plan.")] = 0,
    kinds: Annotated[
        str | None, typer.Option(metavar="KIND,...", help="Kinds of faults.", show_default="all applicable")
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="New directory for both runs.", show_default="runs/<name>-chaos"),
    ] = None,
    nproc_per_node: Annotated[
        int | None,
        typer.Option("--nproc-per-node", min=1, max=100_000, metavar="N", help="Workers on each node."),
    ] = None,
    nodes: Annotated[
        int, typer.Option(min=1, max=1_000, metavar="N", help="Number of nodes, emulated by agents on this machine.")
    ] = 1,
    queue: Annotated[bool, typer.Option("--queue", help="Run as a job of a separate local queue.")] = False,
    baseline: Annotated[
        Path | None,
        typer.Option("--baseline", metavar="RUN", help="Finished run without faults, instead of training one."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the fault plan, without training.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print faults, costs and verdict as JSON.")] = False,
) -> int:
    """Train under injected faults, and check that the weights are bit-identical and nothing is left behind.

    Trains the recipe twice: without faults, and with a seeded plan of faults during steps, saves and restarts. Restarts
    the run when it was killed or exited with 75. Exit code 0: the digests are equal, and no process, shared memory,
    temporary file or queue entry is left; else 1. Ctrl-C stops and removes everything.

    Kinds: kill, crash, abort, fork-server, agent, preempt, interrupt, time-limit, corrupt-checkpoint, disk-full,
    storage-outage, freeze, hang; with --nodes also node-loss and partition; with --queue also job-runner and
    queue-daemon.
    """
    from phalanx.app.chaos import ChaosExperiment, find_baseline_run, make_run_shape
    from phalanx.cli import chaos_output
    from phalanx.jobs.chaos.fault_plan import draw_faults, parse_kinds
    from phalanx.recipe import load_recipe
    from phalanx.run.directory import check_run_path

    given = overrides or []
    if recipe.suffix == ".py":
        raise UsageError(f"{recipe}: chaos is for recipes; two runs of a script with phalanx.session may differ")
    if queue and nodes > 1:
        raise UsageError("--queue runs on this machine only; omit --nodes")
    loaded = load_recipe(recipe, given)
    loaded.check_required()
    if loaded.recipe.determinism == "auto":  # on a GPU `auto` may be `off`, and digests are compared here
        given = [*given, "determinism=fixed-world"]
        loaded = load_recipe(recipe, given)
    run_shape = make_run_shape(loaded, nproc_per_node, nodes, queue)
    fault_plan = draw_faults(seed, faults, parse_kinds(kinds, run_shape), run_shape)
    folder = run if run is not None else Path("runs") / f"{loaded.recipe.name}-chaos"
    if folder.exists():
        raise UsageError(f"{folder}: already exists; choose another --run, or remove it")
    check_run_path(folder)
    console = chaos_output.ChaosConsole(quiet=as_json, total=len(fault_plan))
    console.print_plan(fault_plan, run_shape, seed)
    if dry_run:
        if as_json:
            typer.echo(chaos_output.to_json(fault_plan, seed))
        return int(ExitCode.DONE)
    baseline_run = None if baseline is None else find_baseline_run(baseline, loaded, run_shape)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it cleans up like Ctrl-C
    folder.mkdir(parents=True)
    try:
        result = ChaosExperiment(recipe, given, run_shape, fault_plan, folder, console).run(baseline_run)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    summary = chaos_output.to_json(fault_plan, seed, result)
    (folder / "chaos.json").write_text(summary + "\n", encoding="utf-8")
    console.print_verdict(result)
    if as_json:
        typer.echo(summary)
    return int(ExitCode.DONE) if result.verdict.passed else FAILED_EXIT_CODE
