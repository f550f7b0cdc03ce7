"""Trains small runs for the tests of whole worlds: with our agent in this process, or by the command line.

All runs of a session share one fork server: a run costs about half a second. Faults are planned per run in a file
that the callback `faults:Faults` (see `faults.py`) reads, so that they strike at exactly the step they are meant for.
"""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import psutil
import pytest

from phalanx.app.prepare_run import RunRequest, prepare_run
from phalanx.app.supervise import supervise_run
from phalanx.cli import main
from phalanx.errors import ExitCode
from phalanx.jobs.agent.fork_server_client import ForkServerClient
from phalanx.recipe import Recipe
from phalanx.recipe.load import LoadedRecipe
from phalanx.recipe.yaml_loader import to_yaml
from phalanx.run import Event, Run, read_events, select_final_steps
from phalanx.run.event_types import EvaluationDone, RunEvent, StepDone, WorkerFailure, WorkerStarted
from phalanx.run.messages import drain, send
from phalanx.run.process_messages import SendSignal

Values = dict[str, Any]
E = TypeVar("E", bound=RunEvent)

FAULTS_CALLBACK = "faults:Faults"
BASE_RECIPE: Values = {
    "name": "lab",
    "model": {"args": {"layers": 1, "hidden_size": 32, "num_heads": 2}},
    "data": {"source": {"text": "few.txt"}, "seq_len": 32},
    "evaluation": {"every": 5, "holdout_fraction": 0.05, "max_samples": 6},
    "batch": {"global_size": 12, "micro_size": 1},
    "steps": 12,
    "optimizer": {"lr": 3e-3, "schedule": {"warmup_steps": 3}},
    "precision": "fp32",
    "compile": False,
    "checkpoint": {"every": 4, "in_memory_every": None},
    "fault_tolerance": {"max_restarts": 5, "last_call_s": 200.0},
    "callbacks": [FAULTS_CALLBACK],
    "num_threads": 1,
}
"""About 100 training samples: an epoch ends in step 9 of 12, so every run crosses the border of one. Whether a share of
the time suffices for hot copies depends on the machine, so there are none where a test doesn't ask for them."""


class AgentLost(Exception):
    """Thrown out of the agent, which leaves a run as an agent that died between two attempts would."""


@dataclass
class HarnessRun:
    """How a run ended here: its exit code, the message for the user, and what stands in its directory."""

    run: Run
    code: int
    message: str | None

    @property
    def events(self) -> list[Event]:
        return list(read_events(self.run.events))

    def events_of_kind(self, kind: type[E]) -> list[E]:
        """All events of a kind."""
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def result(self) -> Values:
        return self.run.read_json(self.run.result) or {}

    @property
    def digest(self) -> str:
        """The digest of a run that is done."""
        assert self.code == ExitCode.DONE, (
            self.code,
            self.message,
            [e for e in self.events if not isinstance(e, StepDone)],
        )
        digest = self.result["digest"]
        assert isinstance(digest, str)
        return digest

    @property
    def losses(self) -> list[float]:
        """Of each step, from the attempt that counts."""
        return [event.loss for event in select_final_steps(self.events)]

    @property
    def curves(self) -> list[float]:
        """Losses, gradient norms, and what evaluations found, of a run that is done."""
        assert self.code == ExitCode.DONE, self.message
        evaluations = self.events_of_kind(EvaluationDone)
        metrics = [value for event in evaluations for value in event.metrics.values() if value is not None]
        norms = [event.grad_norm for event in self.events_of_kind(StepDone)]
        return [*self.losses, *norms, *(event.loss or 0.0 for event in evaluations), *metrics]

    def relative_differences(self, other: "HarnessRun") -> list[float]:
        """How far the loss of each step is from that of another run, as a share of it; both are done."""
        for run in (self, other):
            assert run.code == ExitCode.DONE, run.message
        return [abs(ours - theirs) / abs(theirs) for ours, theirs in zip(self.losses, other.losses, strict=True)]


def plan_fault(
    step: int, do: str = "kill", *, ranks: Sequence[int] | None = None, attempt: int = 0, **more: Any
) -> Values:
    """A planned fault; see `faults.py`. `ranks` None means every worker."""
    return {"step": step, "do": do, "ranks": ranks, "attempt": attempt, **more}


def merge_recipes(base: Values, changes: Values) -> Values:
    """`base` with the keys of `changes`, mapping by mapping."""
    both = {key: changes.get(key, value) for key, value in base.items()} | changes
    return {
        key: merge_recipes(base[key], value) if isinstance(value, dict) and isinstance(base.get(key), dict) else value
        for key, value in both.items()
    }


def random_words(seed: int, count: int) -> str:
    """Text that a model can learn a little about."""
    rng = random.Random(seed)
    known = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 8))) for _ in range(200)]
    return " ".join(rng.choices(known, k=count))[: 5 * count]


class TrainHarness:
    """Where runs are trained. `folder` holds the recipes' files: texts, tasks and callbacks of the tests' own; `runs`
    what is trained."""

    def __init__(self, folder: Path, runs: Path):
        self.folder = folder / "recipes"
        self.cache = folder / "cache"
        self.runs = runs
        self.tag = f"phalanx-lab-{os.getpid()}-{random.getrandbits(64):x}"
        self._references: dict[str, HarnessRun] = {}
        self._count = 0

    def __enter__(self) -> Self:
        self.create_recipe_dir(self.folder)
        with self.environment():
            self.fork_server = ForkServerClient()
        for name in ("trials", "profile_trial", "timing_trial"):  # once for all runs
            self.fork_server.preload("importlib:import_module", f"phalanx.autoconfig.{name}")
        return self

    def __exit__(self, *_: object) -> None:
        self.fork_server.__exit__()

    def create_recipe_dir(self, folder: Path) -> Path:
        """Make a folder for recipes: a small text, and the modules that recipes here name."""
        (folder / "samples").mkdir(parents=True)
        (folder / "few.txt").write_text(random_words(1, 700))
        (folder / "many.txt").write_text(random_words(2, 3000))
        for name in ("faults.py", "user_tasks.py", "user_models.py", "model_zoo.py"):
            (folder / name).write_text(Path(__file__).with_name(name).read_text())
        return folder

    @contextlib.contextmanager
    def environment(self) -> Iterator[None]:
        """This process with the environment that runs have here."""
        with pytest.MonkeyPatch.context() as patch:
            for key, value in self.variables().items():
                patch.setenv(key, value)
            yield

    def variables(self) -> dict[str, str]:
        paths = filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH")))
        path = os.pathsep.join(dict.fromkeys(os.pathsep.join(paths).split(os.pathsep)))
        return {"PHALANX_CACHE_DIR": str(self.cache), "PHALANX_TEST_TAG": self.tag, "PYTHONPATH": path}

    def new_run(self) -> Run:
        """A run directory that does not exist yet."""
        self._count += 1
        return Run(self.runs / f"run-{self._count}")

    def train(
        self,
        changes: Values | None = None,
        nproc_per_node: int = 1,
        run: Run | None = None,
        *,
        faults: Sequence[Values] = (),
        show: Callable[[Event], None] = lambda event: None,
        force: bool = False,
        folder: Path | None = None,
    ) -> HarnessRun:
        """Train BASE with `changes` as `phalanx train` would, and return how it ended. PhalanxError as it raises."""
        run = run or self.new_run()
        write_faults(run, faults)
        recipe = Recipe.model_validate(merge_recipes(BASE_RECIPE, changes or {}))
        loaded = LoadedRecipe(recipe, None, folder or self.folder, {})
        begun = prepare_run(RunRequest(loaded, run, nproc_per_node, force=force), self.fork_server)
        with self.environment(), begun as ready:
            try:
                outcome = supervise_run(ready, self.fork_server, show, force)
            except BaseException:
                self.kill_workers()
                raise
        return HarnessRun(run, int(outcome.code), outcome.message)

    def train_until_agent_lost(self, changes: Values | None, nproc: int, run: Run, faults: Sequence[Values]) -> None:
        """Train until the first worker falls, and let the agent go down with it."""

        def show(event: Event) -> None:
            if isinstance(event, WorkerFailure):
                raise AgentLost

        with pytest.raises(AgentLost):
            self.train(changes, nproc, run, faults=faults, show=show)

    def train_reference(self, changes: Values | None = None, nproc: int = 1) -> HarnessRun:
        """The same run without any fault, trained once in a session."""
        key = json.dumps([changes, nproc], sort_keys=True)
        if key not in self._references:
            self._references[key] = self.train(changes, nproc)
        return self._references[key]

    def recipe_file(self, changes: Values | None = None, name: str = "recipe") -> Path:
        """BASE with `changes` as a file."""
        path = self.folder / f"{name}.yaml"
        path.write_text(to_yaml(merge_recipes(BASE_RECIPE, changes or {}), flow=False))
        return path

    @contextlib.contextmanager
    def start(
        self, *arguments: str | Path, module: str = "phalanx", variables: Mapping[str, str] | None = None
    ) -> "Iterator[subprocess.Popen[str]]":
        """The command line, `python -m phalanx ...`, as a process of its own, which does not outlive the block."""
        with subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
            env={**os.environ, **self.variables(), "COLUMNS": "200", **(variables or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    def command(self, *arguments: str | Path, module: str = "phalanx") -> "subprocess.CompletedProcess[str]":
        """The command line, run to its end."""
        with self.start(*arguments, module=module) as process:
            out, errors = process.communicate(timeout=100)
        return subprocess.CompletedProcess(process.args, process.returncode, out, errors)

    def call_command(
        self, capsys: pytest.CaptureFixture[str], *arguments: str | Path
    ) -> "subprocess.CompletedProcess[str]":
        """The command line in this process, with the fork server of the lab: it imports nothing again."""
        with self.environment(), pytest.MonkeyPatch.context() as patch:
            patch.setenv("COLUMNS", "200")
            patch.setattr("phalanx.app.train.ForkServerClient", lambda **_: contextlib.nullcontext(self.fork_server))
            code = main.main([*map(str, arguments)])
        return subprocess.CompletedProcess(arguments, code, *capsys.readouterr())

    def from_command_line(self, run: Run, code: int) -> HarnessRun:
        """A run that the command line trained."""
        return HarnessRun(run, code, None)

    def processes(self) -> set[int]:
        """Every process that descends from this lab, except its own fork server's."""
        own = psutil.Process(self.fork_server.process.pid)
        known = {own.pid, *(child.pid for child in own.children(recursive=True)), os.getpid()}
        found = set()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if process.environ().get("PHALANX_TEST_TAG") == self.tag and process.status() != psutil.STATUS_ZOMBIE:
                    found.add(process.pid)
        return found - known

    def kill_workers(self) -> None:
        """End the workers of a run whose agent failed here, so that the next run finds the fork server without them."""
        send(self.fork_server.control, SendSignal(signal=int(signal.SIGKILL)))
        below = psutil.Process(self.fork_server.process.pid)
        wait_until(lambda: len(below.children(recursive=True)) <= 1, what="only the store to be left")
        time.sleep(0.1)
        for sock in (self.fork_server.control, self.fork_server.events):
            list(drain(sock))


def list_live_workers(ended: HarnessRun) -> list[int]:
    """Workers of any attempt of a run that are still there."""
    found = []
    for event in ended.events_of_kind(WorkerStarted):
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(event.pid).status() != psutil.STATUS_ZOMBIE:
                found.append(event.pid)
    return found


def write_faults(run: Run, faults: Sequence[Values]) -> None:
    """Write the faults of a run beside its directory, where `faults.py` looks for them."""
    run.path.parent.mkdir(parents=True, exist_ok=True)
    faults_file(run).write_text(json.dumps(list(faults)))


def faults_file(run: Run) -> Path:
    return run.path.with_name(run.path.name + ".faults.json")


def read_digest(text: str) -> str:
    """The digest that `phalanx train` printed."""
    found = re.search(r"^digest +(\w+)$", text, re.MULTILINE)
    assert found, text
    return found[1]


def wait_until(condition: Callable[[], Any], seconds: float = 90.0, what: str = "") -> Any:
    """The condition's first true value; fails when it does not come."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"waited {seconds} s in vain{': ' + what if what else ''}"
        time.sleep(0.01)
    return value


def send_signal_at_step(step: int, number: signal.Signals = signal.SIGTERM) -> Callable[[Event], None]:
    """A `show` that sends this process, the agent, a signal when it hears of a step not before `step`."""
    sent: list[int] = []

    def show(event: Event) -> None:
        if isinstance(event, StepDone) and event.step >= step and not sent:
            sent.append(event.step)
            os.kill(os.getpid(), number)

    return show


def count_steps(run: Run) -> int:
    """The highest step in the events so far."""
    return max((event.step for event in read_events(run.events) if isinstance(event, StepDone)), default=0)
