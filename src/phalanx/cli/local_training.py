"""Training on this machine by `phalanx train`, and what it prints: the run, its events, and how it ended."""

import contextlib
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Self, TextIO

from phalanx.app.prepare_run import PreparedRun
from phalanx.app.supervise import train_script
from phalanx.app.train import TrainObserver, train_run
from phalanx.app.train_arguments import TrainArguments
from phalanx.cli.data import show_progress
from phalanx.errors import ExitCode
from phalanx.formatting import format_count, format_duration, format_plural
from phalanx.jobs.agent.fork_server_client import ForkServerClient
from phalanx.jobs.agent.leader_agent import RunOutcome
from phalanx.observe.progress import DeferredDisplay, LogProgressDisplay, make_display, read_run_facts
from phalanx.recipe.load import dump_recipe
from phalanx.run import Event, Run
from phalanx.run.node_env import NodeEnv
from phalanx.std_streams import escape_control_chars, word_of

if TYPE_CHECKING:
    from phalanx.data import PrepareProgress


class TrainPrinter(TrainObserver):
    """Prints what happens to a run. Close it as a context."""

    def __init__(self, out: TextIO, dry_run: bool = False):
        self._out, self._dry_run = out, dry_run
        self._display: LogProgressDisplay | None = None
        self.started_run: Run | None = None
        """The run that this process prepared, with the events that it shows."""

    def show_finished(self, text: str) -> None:
        print(text, file=self._out)

    def open_progress(self) -> contextlib.AbstractContextManager["Callable[[PrepareProgress], None]"]:
        return show_progress()

    def show_prepared(self, prepared: PreparedRun) -> None:
        """Print what will be trained, and under --dry-run its recipe."""
        print(escape_control_chars(format_introduction(prepared)), file=self._out)
        if self._dry_run:
            print(dump_recipe(prepared.recipe), end="")
        else:
            self.started_run = prepared.run
            self._display = make_display(self._out, prepared.recipe.steps, read_run_facts(prepared.run))

    def show_event(self, event: Event) -> None:
        assert self._display is not None
        self._display.show_event(event)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._display is not None:
            self._display.close()


def train_locally(
    arguments: TrainArguments,
    dry_run: bool,
    out: TextIO,
    node_env: NodeEnv,
    fork_server: ForkServerClient | None = None,
) -> int:
    """Start a run under our own agent and follow it; return its exit code. With several nodes this is the leading one,
    and `nproc_per_node` workers are started on each. `fork_server`: one that was started before, for this run or on a
    node that takes over."""
    loaded = arguments.load_recipe()
    run = arguments.find_run(loaded.recipe.name)
    with TrainPrinter(out, dry_run) as printer:
        outcome = train_run(
            loaded,
            run,
            printer,
            nproc_per_node=arguments.nproc_per_node,
            force=arguments.force,
            dry_run=dry_run,
            node_env=node_env,
            fork_server=fork_server,
        )
    return int(ExitCode.DONE) if outcome is None else print_outcome(outcome, run, arguments, out)


def train_script_locally(arguments: TrainArguments, out: TextIO, fork_server: ForkServerClient | None = None) -> int:
    """Run a script that calls `phalanx.session` under our own agent and follow it; return its exit code."""
    run = arguments.find_run(Path(arguments.path).stem)
    with DeferredDisplay(run, out) as display:
        outcome = train_script(arguments, run, display.show_event, fork_server)
    return print_outcome(outcome, run, arguments, out)


def train_as_worker(arguments: TrainArguments, out: TextIO) -> int:
    """Run one worker of a world that torchrun, srun or mpirun started; return its exit code. Rank 0 prints."""
    from phalanx.app import train_worker

    with TrainPrinter(out) as printer:
        code = train_worker.train_as_worker(arguments, printer)
    if code is None:
        return int(ExitCode.DONE)
    if printer.started_run is not None and code is ExitCode.UNFINISHED:
        print("not finished; resume with the same command", file=out)
    elif printer.started_run is not None:
        print(escape_control_chars(format_conclusion(printer.started_run, code, arguments)), file=out)
    return train_worker.end_at_once(int(code))


def print_outcome(outcome: RunOutcome, run: Run, arguments: TrainArguments, out: TextIO) -> int:
    """Print how a run ended; return its exit code."""
    if outcome.message:
        print(f"error: {escape_control_chars(outcome.message)}", file=out)
    print(escape_control_chars(format_conclusion(run, outcome.code, arguments)), file=out)
    return int(outcome.code)


def format_introduction(prepared: PreparedRun) -> str:
    """What will be trained and what was chosen for it, in a few lines."""
    plan = prepared.plan
    cluster = prepared.cluster
    recipe = prepared.recipe
    rates = cluster.get("measured_matmul_tflops") or {}
    rates_text = ", ".join(f"{name} {rate:.2f}" for name, rate in rates.items())
    num_workers = recipe.parallelism.world
    lines = [
        f"run      {prepared.run.location}",
        f"model    {recipe.model.build}, {format_count(plan.get('trainable_parameters', 0))} parameters",
        *([f"packing  {plan['packing']}"] if plan.get("packing") else []),
        *([f"adapter  {plan['adapters']}"] if plan.get("adapters") else []),
        f"machine  {cluster.get('device_name')}, {cluster.get('physical_cores')} cores; "
        f"measured matmul TFLOP/s: {rates_text}",
        f"workers  {num_workers} x {format_plural(recipe.num_threads, 'thread')}",
    ]
    if data_summary := plan.get("data_summary"):
        lines.append(f"data     {data_summary}")
    for choice in plan.get("auto_choices", []):
        if choice["reason"] != "given" and choice["key"] != "num_threads":
            value = choice["value"]
            shown = str(value).lower() if isinstance(value, bool) else value
            lines.append(f"auto     {choice['key']} = {shown}: {choice['reason']}")
    if delayed := [name for name in recipe.trackers if name != "tensorboard"]:
        every = recipe.checkpoint.every
        when = "at the end only (checkpoint.every: null)" if every is None else "when a checkpoint saves them"
        lines.append(f"trackers charts of {', '.join(delayed)} get steps {when}")
    if predicted := plan.get("predicted_step_s"):
        step, run = map(format_duration, (predicted, predicted * recipe.steps))
        lines.append(f"predicted {step}/step, {run} for {recipe.steps} steps")
    return "\n".join(lines)


def format_conclusion(run: Run, code: ExitCode, arguments: TrainArguments) -> str:
    """Say how a run ended, and what to type next."""
    result = run.read_json_or_empty(run.result)
    path_words = [] if arguments.is_kept_recipe else [word_of(arguments.path)]
    resume_command = " ".join(["phalanx train", *path_words, shlex.join(arguments.format_options(run))])
    if code is ExitCode.DONE:
        return f"digest   {result.get('digest')}\nreport   phalanx report {word_of(run.location)}"
    if code is ExitCode.UNFINISHED:
        # Only a state that was saved has a digest: a second Ctrl-C or a full disk leaves the checkpoint before.
        saved_text = f"saved at step {result.get('steps')}" if result.get("digest") else "the last steps were not saved"
        return f"{saved_text}; resume with: {resume_command}"
    return f"details  {run.logs}"
