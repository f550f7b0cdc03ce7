"""`phalanx chaos`: train without faults, train with injected faults, and compare; and what that prints."""

import json
import shutil
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from phalanx.app.chaos import ChaosExperiment, ChaosResult, find_baseline_run, make_run_shape
from phalanx.cli.options import JsonOption, NprocOption, OverridesArgument, RecipeArgument
from phalanx.errors import ExitCode, UsageError
from phalanx.formatting import format_duration, format_plural
from phalanx.jobs.chaos.fault_plan import FAULT_KINDS, Fault, FaultPhase, RunShape, draw_faults, parse_kinds
from phalanx.jobs.chaos.faults import InjectedFault
from phalanx.recipe import load_recipe
from phalanx.run import Run
from phalanx.run.boot_clock import unix_now
from phalanx.run.directory import check_run_path
from phalanx.storage.url import is_url
from phalanx.text_table import Column, format_table

FAILED_EXIT_CODE = 1
"""Exit code when the run did not end as it should: a bug in Phalanx, or in the recipe's own code."""


def chaos(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    faults: Annotated[int, typer.Option(min=1, metavar="N", help="Number of faults to inject.")] = 10,
    seed: Annotated[int, typer.Option(min=0, metavar="S", help="Seed of the fault plan.")] = 0,
    kinds: Annotated[
        str | None, typer.Option(metavar="KIND,...", help="Kinds of faults.", show_default="all applicable")
    ] = None,
    run: Annotated[
        str | None, typer.Option(metavar="DIR", help="New directory for both runs.", show_default="runs/<name>-chaos")
    ] = None,
    nproc_per_node: NprocOption = None,
    nodes: Annotated[
        int, typer.Option(min=1, metavar="N", help="Number of nodes, emulated by agents on this machine.")
    ] = 1,
    queue: Annotated[bool, typer.Option("--queue", help="Run as a job of a separate local queue.")] = False,
    baseline: Annotated[
        str | None, typer.Option(metavar="RUN", help="Finished run or its URL, instead of training one.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the fault plan, without training.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Train under injected faults, and check that the weights are bit-identical and nothing is left behind.

    Trains the recipe twice: without faults, and with a seeded plan of faults during steps, saves and restarts. Restarts
    the run when it was killed or exited with 75. Exit code 0: the digests are equal, and no process, shared memory,
    temporary file or queue entry is left; else 1. Ctrl-C stops and removes everything.

    Kinds: kill, crash, abort, fork-server, agent, preempt, interrupt, time-limit, corrupt-checkpoint, disk-full,
    storage-outage, freeze, hang; with --nodes also node-loss and partition; with --queue also job-runner and
    queue-daemon.
    """
    given = overrides or []
    if recipe.endswith(".py"):
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
    if is_url(run):
        raise UsageError(f"--run {run}: the faults are injected on this machine; expected a directory")
    folder = Path("runs") / f"{loaded.recipe.name}-chaos" if run is None else Path(run)
    if folder.exists():
        raise UsageError(f"{folder}: already exists; choose another --run, or remove it")
    check_run_path(folder)
    console = ChaosConsole(quiet=as_json, total=len(fault_plan))
    console.print_plan(fault_plan, run_shape, seed)
    if dry_run:
        if as_json:
            typer.echo(to_json(fault_plan, seed))
        return int(ExitCode.DONE)
    baseline_run = None if baseline is None else find_baseline_run(baseline, loaded, run_shape)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it cleans up like Ctrl-C
    folder.mkdir(parents=True)
    try:
        callbacks = console.on_baseline, console.on_fault, console.on_restart
        result = ChaosExperiment(recipe, given, run_shape, fault_plan, folder, *callbacks).run(baseline_run)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    summary = to_json(fault_plan, seed, result)
    (folder / "chaos.json").write_text(summary + "\n", encoding="utf-8")
    console.print_verdict(result)
    if as_json:
        typer.echo(summary)
    return int(ExitCode.DONE) if result.passed else FAILED_EXIT_CODE


def describe_target(fault: Fault) -> str:
    """Name the target of a fault."""
    if FAULT_KINDS[fault.kind].needs_nodes:
        return f"node of {fault.rank}"
    if fault.kind in ("agent", "preempt", "time-limit"):
        return "agent"
    if fault.kind == "storage-outage":
        return "run"
    if fault.kind in ("job-runner", "queue-daemon"):
        return "queue"
    return f"worker {fault.rank}"


def describe_phase(one: InjectedFault) -> str:
    """Describe when in the run a fault was injected."""
    if one.phase is FaultPhase.RESTART:
        return f"starting attempt {one.attempt}"
    behind = f"step {one.step}" if one.step is not None else "its start"
    saving = ", saving" if one.phase is FaultPhase.SAVE else ""
    return f"attempt {one.attempt}, {behind}{saving}"


class ChaosConsole:
    """Prints progress; nothing if `quiet`."""

    def __init__(self, quiet: bool, total: int):
        self._quiet, self._num_faults = quiet, total

    def print_plan(self, fault_plan: Sequence[Fault], run_shape: RunShape, seed: int) -> None:
        """Print the fault plan."""
        nodes = " in a queue" if run_shape.uses_queue else ""  # which is on one node
        if run_shape.num_nodes > 1:
            nodes = f" on {run_shape.num_nodes} nodes"
        every = "at the end only" if run_shape.checkpoint_every is None else f"every {run_shape.checkpoint_every}"
        workers = f"{format_plural(run_shape.world_size, 'worker')}{nodes}, {run_shape.steps} steps"
        self._print(f"{format_plural(len(fault_plan), 'fault')}, seed {seed}; {workers}, a checkpoint {every}")
        columns = [Column(is_number=True, min_width=4), Column(), Column(), Column()]
        rows = [(str(fault.number), fault.kind, describe_target(fault), str(fault.trigger)) for fault in fault_plan]
        for line in format_table(columns, rows):
            self._print(line)

    def on_baseline(self, run: Run) -> None:
        """Print the baseline run."""
        result = run.read_json(run.result) or {}
        duration = format_duration(result.get("duration_s"))
        self._print(f"baseline     {run.location}: digest {result.get('digest')}, {duration}")

    def on_fault(self, one: InjectedFault) -> None:
        """Print an injected fault."""
        what = f"{one.description} ({describe_phase(one)})"
        self._print_with_time(f"fault {one.fault.number} of {self._num_faults}: {what}", one.t)

    def on_restart(self, num_starts: int) -> None:
        """Print that the run is started again."""
        self._print_with_time(f"the run did not finish; restarting it (start {num_starts})", unix_now())

    def print_verdict(self, chaos_result: ChaosResult) -> None:
        """Print the verdict."""
        result = chaos_result.run.read_json(chaos_result.run.result) or {}
        duration = format_duration(chaos_result.duration_s)
        self._print(f"\nfaulted      {chaos_result.run.path}: digest {result.get('digest')}, {duration}")
        for reason in chaos_result.reasons:
            self._print(f"wrong        {reason}")
        if chaos_result.passed:
            self._print("PASS         equal digests, nothing left behind")
        else:
            reasons = format_plural(len(chaos_result.reasons), "reason")
            self._print(f"FAIL         {reasons}; see {chaos_result.run.path.parent}")

    def _print_with_time(self, text: str, t: float) -> None:
        self._print(f"{time.strftime('%H:%M:%S', time.localtime(t))}  {text}")

    def _print(self, text: str) -> None:
        if not self._quiet:
            print(text.rstrip(), flush=True)


def to_json(fault_plan: Sequence[Fault], seed: int, result: ChaosResult | None = None) -> str:
    """Render the fault plan as JSON; with a result also what was injected, and the verdict."""
    injected = () if result is None else result.injected
    injected_by_number = {one.fault.number: _fault_to_json(one) for one in injected}
    value: dict[str, Any] = {"format": 1, "seed": seed}
    value["faults"] = [{**asdict(fault), "injected": injected_by_number.get(fault.number)} for fault in fault_plan]
    if result is not None:
        value |= {"digest": result.digest, "num_starts": result.num_starts, "duration_s": result.duration_s}
        value |= {"passed": result.passed, "reasons": list(result.reasons)}
    return json.dumps(value, indent=2)


def _fault_to_json(one: InjectedFault) -> dict[str, Any]:
    return {"time": one.t, "attempt": one.attempt, "step": one.step, "phase": one.phase, "description": one.description}
