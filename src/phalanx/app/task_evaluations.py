"""Evaluate checkpoints on tasks of lm-eval while a run trains (`evaluation.tasks`): by a process next to the agent, so
that no step waits for it. What fails there is a warning."""

import contextlib
import json
import logging
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import xxhash

from phalanx.app.lm_eval import check_task_names, find_lm_eval
from phalanx.cluster import Machine
from phalanx.errors import DataError, UsageError
from phalanx.process_lifetime import die_with_parent, prefer_oom_kill
from phalanx.recipe.data_schema import EvaluationConfig
from phalanx.recipe.load import LoadedRecipe
from phalanx.run import Event, Run
from phalanx.run.cache import cache_root
from phalanx.run.directory import write_json
from phalanx.run.event_types import AttemptStarted, CheckpointSaved, RunWarning, TasksEvaluated
from phalanx.safe_files import open_for_append

logger = logging.getLogger(__name__)

MAX_WAIT_AT_END_S = 300.0
"""Seconds that a run which is done waits for the tasks of its last checkpoint."""
POLL_INTERVAL_S = 0.5
LOWEST_PRIORITY = 19
MAX_VALUE = 1e30
"""Beyond it a score counts as not finite, as in every event."""


class EvaluationProcess:
    """A `phalanx evaluate` with the lowest priority. It ends with this process, and its log is RUN/logs/tasks.log."""

    def __init__(self, run: Run, device: str, variables: Mapping[str, str], arguments: Sequence[str]):
        self._directory = find_scratch_dir(run)
        self._directory.mkdir(parents=True)
        self._scores, self._log = self._directory / "scores.json", run.logs / "tasks.log"
        environment = {**os.environ, **variables, "TMPDIR": str(self._directory)}
        environment.pop("PHALANX_TOKEN", None)  # tasks may run code
        if run.store_url is not None:  # the checkpoint is downloaded
            environment["PHALANX_CACHE_DIR"] = str(self._directory)
        with open(self._scores, "wb") as scores, open(open_for_append(self._log), "ab") as log:
            self._log_start = os.fstat(log.fileno()).st_size
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "phalanx", *arguments, "--json", "--device", device],
                stdin=subprocess.DEVNULL,
                stdout=scores,
                stderr=log,
                env=environment,
                process_group=0,  # Ctrl-C is for training. In a session of its own, priorities would not count.
                preexec_fn=partial(_prepare_child, os.getpid()),
            )

    def poll(self) -> int | None:
        """Return its exit code; None while it runs."""
        return self._process.poll()

    def read_scores(self) -> list[dict[str, Any]]:
        """Return what it printed. Raises ValueError for anything but JSON."""
        scores: list[dict[str, Any]] = json.loads(self._scores.read_text())
        return scores

    def read_reason(self) -> str:
        """Return the last lines of its log."""
        with open(self._log, "rb") as log:
            log.seek(self._log_start)
            lines = log.read().decode(errors="replace").replace("\r", "\n").split("\n")
        return "; ".join([line.strip() for line in lines if line.strip()][-2:])

    def close(self) -> None:
        """Kill what is left of it, and remove its files."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)


def find_scratch_dir(run: Run) -> Path:
    """The directory for what an evaluation of a run exports and downloads."""
    return cache_root() / "tasks" / xxhash.xxh3_64_hexdigest(os.fsencode(os.path.realpath(run.path)))


def _prepare_child(parent: int) -> None:
    die_with_parent(parent)
    prefer_oom_kill()
    os.nice(LOWEST_PRIORITY)


class TaskEvaluations:
    """Evaluates checkpoints of a run, one at a time: when one is due and no process runs, the newest. As a context it
    leaves no process and no files. `start`: starts the process of a command's arguments."""

    def __init__(
        self,
        run: Run,
        config: EvaluationConfig,
        recipe_dir: Path,
        start: Callable[[Sequence[str]], EvaluationProcess],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._run, self._config, self._start, self._clock = run, config, start, clock
        self._tasks = list_tasks(config, recipe_dir)
        self.newest_step = 0
        """Of the newest checkpoint that was saved in this process; 0: none."""
        self._due_step = 0  # of the checkpoint that was due last
        self._is_due = False
        self._step = 0  # of the checkpoint for which a process was started last
        self._process: EvaluationProcess | None = None
        self._started_at = 0.0

    def __enter__(self) -> Self:
        self._end_process()  # removes the files of an agent that was killed
        shutil.rmtree(find_scratch_dir(self._run), ignore_errors=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._end_process()

    def add_event(self, event: Event) -> None:
        """Learn from an event of the run whether a checkpoint is due."""
        if isinstance(event, AttemptStarted):
            self._due_step = event.start_step
        if self._tasks and isinstance(event, CheckpointSaved):
            self.newest_step = event.step
            every = self._config.tasks_every or 1
            if event.step // every != self._due_step // every:
                self._is_due = True
                self._due_step = event.step

    def poll(self, emit: Callable[[Event], None]) -> None:
        """Report a process that has ended, and start the next."""
        if self._process is not None and (code := self._process.poll()) is not None:
            emit(self._read_result(self._process, code))
            self._end_process()
        if self._process is None and self._is_due:
            self._is_due = False
            self._step = self.newest_step
            self._started_at = self._clock()
            try:
                write_json(self._run.evaluating, {"step": self._step})  # it is not removed meanwhile
                self._process = self._start(self._arguments(self._step))
            except (OSError, DataError, subprocess.SubprocessError) as error:
                emit(self._make_warning(self._step, str(error)))

    def finish(self, is_done: bool, wait: Callable[[float], bool], emit: Callable[[Event], None]) -> None:
        """End with the run. If it is done, its last checkpoint is evaluated, for MAX_WAIT_AT_END_S at most. `wait`
        sleeps for some seconds, and returns whether to stop at once. What is not evaluated is named."""
        if is_done:
            self._is_due = self.newest_step != self._step
            self.poll(emit)
            if self._process is not None:
                logger.warning("waiting at most %.0f s for the tasks of the last checkpoint", MAX_WAIT_AT_END_S)
            deadline = self._clock() + MAX_WAIT_AT_END_S
            while self._process is not None and self._clock() < deadline and not wait(POLL_INTERVAL_S):
                self.poll(emit)
        steps = [self._step] if self._process is not None else []
        steps += [self.newest_step] if self._is_due else []
        self._end_process()
        for step in steps:
            emit(self._make_warning(step, "the run has ended"))

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None
        with contextlib.suppress(OSError):
            self._run.evaluating.unlink(missing_ok=True)

    def _arguments(self, step: int) -> list[str]:
        """Return the arguments of `phalanx` that evaluate a checkpoint."""
        options = {"--step": step, "--tasks": ",".join(self._tasks), "--samples": self._config.max_samples}
        return ["evaluate", self._run.location, *(str(word) for option in options.items() for word in option)]

    def _read_result(self, process: EvaluationProcess, code: int) -> Event:
        """Return the scores of a process that has ended, or why there are none."""
        try:
            if code:
                return self._make_warning(self._step, process.read_reason() or f"the process ended with {code}")
            scores = process.read_scores()
            values = {f"{score['task']}/{score['metric']}": float(score["value"]) for score in scores}
            errors = {f"{score['task']}/{score['metric']}": score["standard_error"] for score in scores}
        except (OSError, ValueError, KeyError, TypeError) as error:
            return self._make_warning(self._step, f"no scores were printed: {error}")
        return TasksEvaluated(
            step=self._step,
            metrics={name: value if abs(value) < MAX_VALUE else None for name, value in values.items()},
            standard_errors={
                name: error for name, error in errors.items() if error is not None and math.isfinite(error)
            },
            duration_s=self._clock() - self._started_at,
        )

    def _make_warning(self, step: int, reason: str) -> RunWarning:
        command = shlex.join(["phalanx", *self._arguments(step)])
        return RunWarning(text=f"the tasks of step {step} were not evaluated: {reason}; run: {command}")


def list_tasks(config: EvaluationConfig, recipe_dir: Path) -> list[str]:
    """Return the tasks of a recipe; files are relative to its directory."""
    return [str(recipe_dir / task) if (recipe_dir / task).is_file() else task for task in config.tasks]


def check_tasks(loaded: LoadedRecipe) -> None:
    """Raise UsageError when a recipe has tasks and lm-eval is not installed here, or does not know one."""
    tasks = list_tasks(loaded.recipe.evaluation, loaded.recipe_dir)
    if not tasks:
        return
    try:
        command = find_lm_eval(None)
        names = [task for task in tasks if "*" not in task and not Path(task).is_file()]
        if names:  # lm-eval checks neither patterns nor files
            check_task_names(tuple(command), tuple(names))
    except UsageError as error:
        raise UsageError(f"{loaded.location_of('evaluation.tasks')}: {error}") from None


def choose_device(
    machine: Machine, num_workers: int, environment: Mapping[str, str] = os.environ
) -> tuple[str, dict[str, str]]:
    """Return the device for evaluations and the variable that shows only it: the first GPU of this machine that none of
    its `num_workers` workers uses, else the CPU."""
    names = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
    variable = next((name for name in names if environment.get(name)), names[-1])
    visible = environment.get(variable) or ",".join(map(str, range(machine.num_gpus)))
    unused = visible.split(",")[num_workers : machine.num_gpus]
    return ("cuda", {variable: unused[0]}) if unused else ("cpu", {variable: ""})
