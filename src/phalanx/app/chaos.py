"""Train a recipe without and with injected faults, and compare."""

import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.app.nodes import count_workers
from phalanx.app.prepare_run import check_start
from phalanx.app.resume import describe_finished
from phalanx.errors import ExitCode, PhalanxError, UsageError
from phalanx.jobs.chaos import launcher as chaos_launcher
from phalanx.jobs.chaos import verify
from phalanx.jobs.chaos.fault_plan import Fault, RunShape
from phalanx.jobs.chaos.faults import FaultContext, InjectedFault
from phalanx.jobs.chaos.launcher import RunMonitor, TypicalDurations, measure_durations
from phalanx.recipe import load_resolved_recipe
from phalanx.recipe.load import LoadedRecipe
from phalanx.run import Run, read_events
from phalanx.run.node_env import NodeEnv
from phalanx.std_streams import word_of

PINNED_FILES = ("recipe.yaml", "resolved.yaml", "plan.json", "cluster.json")
"""Files of the baseline run with which the other run starts, so that every `auto` has the same value."""


@dataclass(frozen=True)
class ChaosResult:
    """A run with injected faults. `digest`: of the baseline; `num_starts`: of the command."""

    run: Run
    digest: str
    injected: Sequence[InjectedFault]
    num_starts: int
    duration_s: float
    reasons: tuple[str, ...]
    """A sentence for each problem."""

    @property
    def passed(self) -> bool:
        """Whether nothing went wrong."""
        return not self.reasons


def make_run_shape(loaded: LoadedRecipe, nproc_per_node: int | None, num_nodes: int, uses_queue: bool) -> RunShape:
    """Describe the run, as far as the fault plan depends on it. All its nodes are this machine."""
    recipe = loaded.recipe
    _, world_size = check_start(loaded, count_workers(loaded, nproc_per_node, NodeEnv(num_nodes=num_nodes)))
    checkpoint = recipe.checkpoint
    max_restarts = recipe.fault_tolerance.max_restarts
    return RunShape(recipe.steps, checkpoint.every, checkpoint.keep, max_restarts, world_size, num_nodes, uses_queue)


def find_baseline_run(path: str, loaded: LoadedRecipe, run_shape: RunShape) -> Run:
    """Open the baseline run. Raises UsageError when it is not finished, or had another recipe or world size."""
    run = Run.open_existing(path)
    if (
        describe_finished(run, loaded.recipe) is None
        or (run.read_json(run.result) or {})["steps"] != loaded.recipe.steps
    ):
        raise UsageError(f"--baseline {path}: not a finished run of this recipe; see `phalanx report {word_of(path)}`")
    if load_resolved_recipe(run.resolved).parallelism.world != run_shape.world_size:
        raise UsageError(
            f"--baseline {path}: its world size is not {run_shape.world_size}, on which the digest depends"
        )
    return run


@dataclass(frozen=True)
class ChaosExperiment:
    """A recipe that is trained without and with faults, in a directory for both runs. `on_baseline` is called with the
    finished baseline, `on_fault` with each fault that is injected, `on_restart` with the number of each further start
    of the command."""

    recipe: str
    overrides: Sequence[str]
    run_shape: RunShape
    fault_plan: Sequence[Fault]
    folder: Path
    on_baseline: Callable[[Run], None]
    on_fault: Callable[[InjectedFault], None]
    on_restart: Callable[[int], None]

    def run(self, baseline_run: Run | None) -> ChaosResult:
        """Train the baseline if there is none yet, then with faults. No process is left running at the end."""
        tag = str(uuid.uuid4())
        # with a short path because it may contain sockets
        with tempfile.TemporaryDirectory(prefix="phalanx-chaos-", ignore_cleanup_errors=True) as directory:
            scratch = Path(directory)
            environment = chaos_launcher.make_environment(tag, scratch)
            try:
                if baseline_run is None:
                    baseline_run = Run(self.folder / "baseline")
                    arguments = self._arguments(baseline_run, self.run_shape.world_size)
                    train_baseline(baseline_run, arguments, environment, self.folder / "baseline.log", tag)
                typical = measure_durations(read_events(baseline_run.events))
                self.on_baseline(baseline_run)
                return self._run_with_faults(baseline_run, typical, tag, scratch, environment)
            finally:
                chaos_launcher.kill_tagged_processes(tag)

    def _run_with_faults(
        self, baseline_run: Run, typical: TypicalDurations, tag: str, scratch: Path, environment: dict[str, str]
    ) -> ChaosResult:
        """Train with faults, and verify the run. Processes that it left are listed before they are killed."""
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
            train = ["train", *arguments]
            num_nodes = self.run_shape.num_nodes
            launcher = chaos_launcher.LocalLauncher(train, environment, log, monitor, num_nodes)
        injected: list[InjectedFault] = []
        leftovers: list[str] = []

        def on_injected(one: InjectedFault) -> None:
            injected.append(one)
            self.on_fault(one)

        def on_finish() -> None:
            leftovers.extend(verify.find_leftovers(run, tag, scratch, shared_memory, launcher.list_leftovers))

        shared_memory, started_at = verify.list_shared_memory(), time.monotonic()
        context = FaultContext(monitor, typical, tag, on_injected, launcher.find_daemons)
        outcome = verify.run_with_faults(launcher, context, self.fault_plan, self.on_restart, on_finish)
        duration_s = time.monotonic() - started_at
        digest = (baseline_run.read_json(baseline_run.result) or {})["digest"]
        reasons = verify.verify_run(
            run, digest, outcome, len(self.fault_plan), len(injected), leftovers, read_newest_digest
        )
        return ChaosResult(run, digest, injected, outcome.num_starts, duration_s, reasons)

    def _arguments(self, run: Run, workers_per_node: int) -> list[str]:
        return [self.recipe, *self.overrides, "--run", str(run.path), "--nproc-per-node", str(workers_per_node)]


def train_baseline(run: Run, arguments: Sequence[str], environment: dict[str, str], log: Path, tag: str) -> None:
    """Train without faults. Raises PhalanxError with the exit code and the last line of a run that fails."""
    monitor = RunMonitor(run)
    context = FaultContext(monitor, TypicalDurations(0.0, 0.0, 0.0), tag, lambda injected: None)
    launcher = chaos_launcher.LocalLauncher(["train", *arguments], environment, log, monitor)
    outcome = verify.run_with_faults(launcher, context, ())
    digest = (run.read_json(run.result) or {}).get("digest")
    if outcome.exit_code == ExitCode.DONE and digest is not None:
        return
    output = log.read_text(errors="replace").strip().splitlines()
    lines = [line for line in output if line.startswith("error: ")] or output or ["no output"]
    code = {int(code): code for code in ExitCode if code is not ExitCode.DONE}.get(outcome.exit_code or 0)
    why = outcome.hang or lines[-1].removeprefix("error: ")
    raise PhalanxError(f"the run fails without faults: {why}", code or ExitCode.GAVE_UP)


def read_newest_digest(run: Run) -> str:
    """Return the digest of the newest checkpoint on disk."""
    from phalanx.train.checkpoint.digest import digest_checkpoint
    from phalanx.train.checkpoint.format import CorruptCheckpointError, list_checkpoints

    found = list_checkpoints(run.checkpoints)
    if not found:
        return "none: there is no checkpoint"
    try:
        return digest_checkpoint(found[0])
    except CorruptCheckpointError as error:
        return f"none: {error}"
