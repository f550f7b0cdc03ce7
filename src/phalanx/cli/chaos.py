"""`phalanx chaos`: parse, train undisturbed, train under faults, show each as it strikes, leave with the verdict."""

import shutil
import signal
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.errors import ExitCode, PhalanxError, UsageError
from phalanx.std_streams import word_of

if TYPE_CHECKING:
    from phalanx.cli.chaos_output import ChaosConsole, ChaosResult
    from phalanx.jobs.chaos.fault_plan import Fault, RunShape
    from phalanx.jobs.chaos.faults import InjectedFault
    from phalanx.jobs.chaos.run_monitor import TypicalDurations
    from phalanx.recipe.load import LoadedRecipe
    from phalanx.run import Event, Run

from phalanx.app.chaos import PINNED_FILES, check_long_enough, read_newest_digest

FAILED_EXIT_CODE = 1
"""Exit code when the run did not end as it should: a mistake in Phalanx, or in the recipe's own code."""


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
    from phalanx.cli import chaos_output
    from phalanx.jobs.chaos.fault_plan import draw_faults, parse_kinds
    from phalanx.recipe import load_recipe
    from phalanx.run.directory import check_run_path

    given = overrides or []
    if recipe.suffix == ".py":
        raise UsageError(
            f"{recipe}: chaos is for recipes; a script with a loop of its own cannot be compared with itself"
        )
    if queue and nodes > 1:
        raise UsageError("--queue has this machine only; leave out --nodes")
    loaded = load_recipe(recipe, given)
    loaded.check_required()
    if loaded.recipe.determinism == "auto":  # on a GPU it may promise no bits, and digests are compared here
        given = [*given, "determinism=fixed-world"]
        loaded = load_recipe(recipe, given)
    run_shape = make_run_shape(loaded, nproc_per_node, nodes, queue)
    fault_plan = draw_faults(seed, faults, parse_kinds(kinds, run_shape), run_shape)
    folder = run if run is not None else Path("runs") / f"{loaded.recipe.name}-chaos"
    if folder.exists():
        raise UsageError(f"{folder}: exists already; choose another --run, or remove it")
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


def make_run_shape(loaded: "LoadedRecipe", nproc_per_node: int | None, num_nodes: int, uses_queue: bool) -> "RunShape":
    """What the run will be, as far as the list of faults depends on it."""
    from phalanx.app.train import find_machine
    from phalanx.cli.train_local import count_workers
    from phalanx.cluster.discovery import check_workers
    from phalanx.jobs.chaos.fault_plan import RunShape
    from phalanx.recipe import check_recipe, num_workers_for

    recipe = loaded.recipe
    world_size = count_workers(loaded, nproc_per_node, num_nodes)
    machine = find_machine(loaded)
    world_size = world_size or num_workers_for(recipe, machine.num_gpus or 1)
    check_workers(machine, world_size)
    check_recipe(recipe, loaded.recipe_dir, world_size, loaded.location_of)
    checkpoint = recipe.checkpoint
    if isinstance(checkpoint.every, str):
        raise UsageError(
            f"checkpoint.every={checkpoint.every}: the list of faults goes by the saves, so their number must be "
            "known; give it here, such as checkpoint.every='20 steps'"
        )
    return RunShape(
        recipe.steps,
        checkpoint.every,
        checkpoint.keep,
        recipe.fault_tolerance.max_restarts,
        world_size,
        num_nodes,
        uses_queue,
    )


def find_baseline_run(path: Path, loaded: "LoadedRecipe", run_shape: "RunShape") -> "Run":
    """The run to compare with. UsageError when it is not done, or was another recipe, or had other workers."""
    from phalanx.app.train import describe_finished
    from phalanx.recipe import load_resolved_recipe
    from phalanx.run import Run

    run = Run.open_existing(path)
    if (
        describe_finished(run, loaded.recipe) is None
        or (run.read_json(run.result) or {})["steps"] != loaded.recipe.steps
    ):
        raise UsageError(
            f"--baseline {path}: this is no run of this recipe that is done; see `phalanx report {word_of(path)}`"
        )
    parallelism = load_resolved_recipe(run.resolved).parallelism
    if parallelism.world != run_shape.world_size:
        raise UsageError(f"--baseline {path}: its workers were not {run_shape.world_size}, and the digest goes by that")
    return run


@dataclass(frozen=True)
class ChaosExperiment:
    """A recipe that is trained undisturbed and under faults, in a folder for both."""

    recipe: Path
    overrides: Sequence[str]
    run_shape: "RunShape"
    fault_plan: "Sequence[Fault]"
    folder: Path
    console: "ChaosConsole"

    def run(self, baseline_run: "Run | None") -> "ChaosResult":
        """Both runs, the first only where there is none yet; nothing of them runs on when this is over. UsageError
        when the undisturbed one shows that there is no time for so many faults."""
        from phalanx.jobs.chaos import launcher, verify
        from phalanx.jobs.chaos.run_monitor import measure_durations
        from phalanx.run import Run, read_events

        tag = str(uuid.uuid4())
        with verify.create_scratch_dir() as scratch:
            environment = launcher.make_environment(tag, scratch)
            try:
                if baseline_run is None:
                    baseline_run = Run(self.folder / "baseline")
                    train_baseline(
                        baseline_run,
                        self._arguments(baseline_run, self.run_shape.world_size),
                        environment,
                        self.folder / "baseline.log",
                        tag,
                    )
                typical = measure_durations(read_events(baseline_run.events))
                check_long_enough(self.fault_plan, self.run_shape, typical.step_s)
                self.console.print_baseline(baseline_run, typical)
                return self._run_with_faults(baseline_run, typical, tag, scratch, environment)
            finally:
                launcher.kill_tagged_processes(tag)

    def _run_with_faults(
        self, baseline_run: "Run", typical: "TypicalDurations", tag: str, scratch: Path, environment: dict[str, str]
    ) -> "ChaosResult":
        """The run under faults, and what is wrong with it. What it leaves is looked at before that is ended."""
        from phalanx.cli.chaos_output import ChaosResult
        from phalanx.jobs.chaos import launcher as chaos_launcher
        from phalanx.jobs.chaos import verify
        from phalanx.jobs.chaos.faults import FaultContext
        from phalanx.jobs.chaos.run_monitor import RunMonitor
        from phalanx.run import Run

        run = Run(self.folder / "faulted")
        run.create()
        for name in PINNED_FILES:
            if (baseline_run.path / name).is_file():
                shutil.copyfile(baseline_run.path / name, run.path / name)
        monitor, log = RunMonitor(run), self.folder / "faulted.log"
        arguments = self._arguments(run, self.run_shape.workers_per_node)
        launcher: chaos_launcher.Launcher
        if self.run_shape.uses_queue:
            launcher = chaos_launcher.QueueLauncher(arguments, environment, scratch / "state", log)
        else:
            launcher = chaos_launcher.LocalLauncher(
                ["train", *arguments], environment, log, monitor, self.run_shape.num_nodes
            )
        injected: list[InjectedFault] = []
        events: list[Event] = []
        leftovers: list[str] = []

        def on_injected(one: "InjectedFault") -> None:
            injected.append(one)
            self.console.print_fault(one)

        def on_finish() -> None:
            leftovers.extend(verify.find_leftovers(run, tag, scratch, baseline, launcher.list_leftovers))

        baseline, started_at = verify.record_baseline(), time.monotonic()
        outcome = verify.run_with_faults(
            launcher,
            FaultContext(monitor, typical, tag, on_injected, launcher.find_daemons),
            self.fault_plan,
            verify.ChaosCallbacks(events.append, self.console.print_restart, on_finish),
        )
        seconds = time.monotonic() - started_at
        digest = (baseline_run.read_json(baseline_run.result) or {})["digest"]
        verdict = verify.verify_run(
            run, digest, outcome, len(self.fault_plan), len(injected), leftovers, read_newest_digest
        )
        return ChaosResult(run, digest, injected, events, outcome.num_starts, seconds, verdict)

    def _arguments(self, run: "Run", workers_per_node: int) -> list[str]:
        return [str(self.recipe), *self.overrides, "--run", str(run.path), "--nproc-per-node", str(workers_per_node)]


def train_baseline(run: "Run", arguments: Sequence[str], environment: dict[str, str], log: Path, tag: str) -> None:
    """Train undisturbed. PhalanxError with the exit code of a run that fails by itself, and its last line."""
    from phalanx.jobs.chaos.faults import FaultContext
    from phalanx.jobs.chaos.launcher import LocalLauncher
    from phalanx.jobs.chaos.run_monitor import RunMonitor, TypicalDurations
    from phalanx.jobs.chaos.verify import run_with_faults

    monitor = RunMonitor(run)
    context = FaultContext(monitor, TypicalDurations(0.0, 0.0, 0.0), tag, lambda injected: None)
    launcher = LocalLauncher(["train", *arguments], environment, log, monitor)
    outcome = run_with_faults(launcher, context, ())
    digest = (run.read_json(run.result) or {}).get("digest")
    if outcome.exit_code == ExitCode.DONE and digest is not None:
        return
    output = log.read_text(errors="replace").strip().splitlines()
    lines = [line for line in output if line.startswith("error: ")] or output or ["it said nothing"]
    error = PhalanxError(f"without any fault the run does not end: {outcome.hang or lines[-1].removeprefix('error: ')}")
    known = {int(code) for code in ExitCode} - {0}
    error.code = ExitCode(outcome.exit_code) if outcome.exit_code in known else ExitCode.GAVE_UP
    raise error
