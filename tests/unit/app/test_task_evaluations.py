"""Which checkpoints are scored on `evaluation.tasks` while a run trains, by a process that a test ends."""

import json
import signal
import stat
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from made_events import made
from phalanx.app.lm_eval import check_task_names
from phalanx.app.task_evaluations import (
    MAX_WAIT_AT_END_S,
    EvaluationProcess,
    TaskEvaluations,
    check_tasks,
    choose_device,
)
from phalanx.cluster import Machine
from phalanx.cluster.discovery import Cpu
from phalanx.errors import UsageError
from phalanx.recipe import Recipe
from phalanx.recipe.data_schema import EvaluationConfig
from phalanx.recipe.load import LoadedRecipe
from phalanx.run import Event, Run
from phalanx.run.event_types import AttemptStarted, CheckpointSaved, RunWarning, TasksEvaluated

SCORE = {"task": "gsm8k", "metric": "exact_match (strict-match)", "value": 0.25, "standard_error": 0.01}


class FakeProcess:
    """A process that ends when a test sets `code`."""

    def __init__(self, arguments: Sequence[str]):
        self.arguments = list(arguments)
        self.code: int | None = None
        self.scores: Any = [SCORE]
        self.is_closed = False

    @property
    def step(self) -> int:
        return int(self.arguments[self.arguments.index("--step") + 1])

    def poll(self) -> int | None:
        return self.code

    def read_scores(self) -> Any:
        if self.scores is None:
            raise ValueError("nothing")
        return self.scores

    def read_reason(self) -> str:
        return "RuntimeError: no space; error: lm_eval ended"

    def close(self) -> None:
        self.is_closed = True


class Training:
    """A run that saves checkpoints, and its evaluations."""

    def __init__(self, run: Run, **config: Any):
        self.run, self.now = run, 0.0
        run.create()
        self.processes: list[FakeProcess] = []
        self.events: list[Event] = []
        config = {"tasks": ["gsm8k", "wikitext"], "max_samples": 8, **config}
        self.evaluations = TaskEvaluations(
            run, EvaluationConfig(**config), run.path.parent, self._start, clock=lambda: self.now
        )

    def _start(self, arguments: Sequence[str]) -> FakeProcess:
        self.processes.append(FakeProcess(arguments))
        return self.processes[-1]

    def save(self, *steps: int) -> None:
        """Save checkpoints, with a look at the process after each."""
        for step in steps:
            self.evaluations.add_event(made(CheckpointSaved, step=step))
            self.poll()

    def poll(self) -> None:
        self.now += 1
        self.evaluations.poll(self.events.append)

    def end_process(self, code: int = 0) -> None:
        """End the newest process."""
        self.processes[-1].code = code
        self.poll()

    def wait(self, seconds: float) -> bool:
        """Let time pass."""
        self.now += seconds
        return False

    @property
    def started_steps(self) -> list[int]:
        return [process.step for process in self.processes]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "a run")


def test_one_at_a_time_and_a_newer_checkpoint_replaces_one_that_waits(run: Run) -> None:
    training = Training(run)
    training.save(10, 20, 30)
    assert training.started_steps == [10]
    training.end_process()
    assert training.started_steps == [10, 30]
    assert training.processes[0].is_closed


@pytest.mark.parametrize(("every", "steps"), [(None, [10, 20, 30, 40]), (20, [20, 40]), (25, [30])])
def test_a_checkpoint_of_every_n_steps_is_due(run: Run, every: int | None, steps: list[int]) -> None:
    training = Training(run, tasks_every=every)
    for step in (10, 20, 30, 40):
        training.save(step)
        if training.processes:
            training.end_process()
    assert training.started_steps == steps


def test_a_resumed_run_counts_from_its_start(run: Run) -> None:
    training = Training(run, tasks_every=20)
    training.evaluations.add_event(made(AttemptStarted, start_step=30))
    training.save(35, 40)
    assert training.started_steps == [40]


def test_scores_become_an_event_and_what_is_not_finite_none(run: Run) -> None:
    training = Training(run)
    training.save(10)
    training.processes[0].scores = [SCORE, {**SCORE, "metric": "ppl", "value": 1e300, "standard_error": None}]
    training.end_process()
    (event,) = training.events
    assert isinstance(event, TasksEvaluated)
    assert event.step == 10
    assert event.metrics == {"gsm8k/exact_match (strict-match)": 0.25, "gsm8k/ppl": None}
    assert event.standard_errors == {"gsm8k/exact_match (strict-match)": 0.01}
    assert event.duration_s == 1


def test_a_failure_is_a_warning_with_its_reason_and_the_command(run: Run) -> None:
    training = Training(run)
    training.save(10)
    training.end_process(64)
    training.save(20)
    training.processes[-1].scores = None
    training.end_process()
    assert [type(event) for event in training.events] == [RunWarning] * 2
    first, second = (str(vars(event)["text"]) for event in training.events)
    assert first == (
        "the tasks of step 10 were not evaluated: RuntimeError: no space; error: lm_eval ended; run: "
        f"phalanx evaluate '{run.path}' --step 10 --tasks gsm8k,wikitext --samples 8"
    )
    assert "step 20 were not evaluated: no scores were printed" in second


def test_the_checkpoint_stays_while_it_is_evaluated(run: Run) -> None:
    training = Training(run)
    training.save(10)
    assert run.list_steps_in_evaluation() == [10]
    training.end_process()
    assert run.list_steps_in_evaluation() == []
    run.evaluating.write_text('{"step": 10}')  # an agent that was killed
    with training.evaluations:
        assert run.list_steps_in_evaluation() == []


def test_the_newest_checkpoint_takes_the_place_of_one_that_is_due_and_may_be_removed(run: Run) -> None:
    training = Training(run, tasks_every=20)
    training.save(20, 30, 40, 50)
    training.end_process()
    training.save(60)
    training.end_process()
    assert training.started_steps == [20, 50, 60]


def test_at_the_end_of_training_the_last_checkpoint_is_evaluated(run: Run) -> None:
    training = Training(run, tasks_every=100)
    training.save(10)

    def end_soon(seconds: float) -> bool:
        training.processes[-1].code = 0
        return False

    training.evaluations.finish(True, end_soon, training.events.append)
    assert training.started_steps == [10]
    assert [type(event) for event in training.events] == [TasksEvaluated]


def test_the_wait_at_the_end_is_bounded_and_what_is_left_is_named(run: Run) -> None:
    training = Training(run)
    training.save(10, 20)
    training.evaluations.finish(True, training.wait, training.events.append)
    assert MAX_WAIT_AT_END_S <= training.now < MAX_WAIT_AT_END_S + 5
    assert training.started_steps == [10]
    assert training.processes[0].is_closed
    texts = [str(vars(event)["text"]) for event in training.events]
    assert ["--step 10" in texts[0], "--step 20" in texts[1]] == [True, True]


@pytest.mark.parametrize("is_done", [False, True])
def test_a_run_that_is_asked_to_stop_does_not_wait(run: Run, is_done: bool) -> None:
    training = Training(run)
    training.save(10)
    training.evaluations.finish(is_done, lambda seconds: True, training.events.append)
    assert [type(event) for event in training.events] == [RunWarning]
    assert training.now == 1
    assert training.processes[0].is_closed
    assert not run.evaluating.exists()


def test_an_early_end_leaves_no_process(run: Run) -> None:
    training = Training(run)
    with training.evaluations:
        training.save(10)
    assert training.processes[0].is_closed


def test_a_run_without_tasks_starts_nothing(run: Run) -> None:
    training = Training(run, tasks=[])
    training.save(10)
    training.evaluations.finish(True, training.wait, training.events.append)
    assert (training.processes, training.events) == ([], [])


def test_a_process_that_cannot_be_started_is_a_warning(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(run)

    def refuse(_: Sequence[str]) -> FakeProcess:
        raise OSError("no memory")

    monkeypatch.setattr(training.evaluations, "_start", refuse)
    training.save(10)
    assert "not evaluated: no memory; run: phalanx evaluate" in str(vars(training.events[0])["text"])


COMMAND = """
import os, json, time
print(json.dumps([os.nice(0), os.environ["TMPDIR"], os.environ["CUDA_VISIBLE_DEVICES"], sys.argv[1:]]))
print("50%", "100%", sep=chr(13), file=sys.stderr)
print("the cause", "error: the end", sep=chr(10), file=sys.stderr)
if "fail" in sys.argv:
    sys.exit(3)
sys.stdout.flush()
time.sleep(600)
"""


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_process_has_a_low_priority_and_leaves_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.create()
    monkeypatch.setattr(sys, "executable", str(write_program(run.path / "python", COMMAND)))
    process = EvaluationProcess(run, "cuda", {"CUDA_VISIBLE_DEVICES": "2"}, ["evaluate", "RUN"])
    wait_until(lambda: bool(process._scores.read_text()))
    nice, temporary, visible, arguments = json.loads(process._scores.read_text())
    assert (nice, visible) == (19, "2")
    assert arguments == ["-P", "-m", "phalanx", "evaluate", "RUN", "--json", "--device", "cuda"]
    assert process.poll() is None
    process.close()
    assert process.poll() == -signal.SIGKILL
    assert not Path(temporary).exists()


def test_the_reason_of_a_failure_is_the_end_of_the_log(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.create()
    (run.logs / "tasks.log").write_text("of an earlier one\n")
    monkeypatch.setattr(sys, "executable", str(write_program(run.path / "python", COMMAND)))
    process = EvaluationProcess(run, "cpu", {"CUDA_VISIBLE_DEVICES": ""}, ["evaluate", "fail"])
    wait_until(lambda: process.poll() is not None)
    assert (process.poll(), process.read_reason()) == (3, "the cause; error: the end")
    process.close()


def machine(num_gpus: int) -> Machine:
    device = "cuda" if num_gpus else "cpu"
    return Machine("n0", device, "fake", max(1, num_gpus), 8, 8, 1 << 30, 1 << 30, Cpu("fake"))


def test_a_gpu_that_no_worker_uses_else_the_cpu() -> None:
    assert choose_device(machine(0), 2, {}) == ("cpu", {"CUDA_VISIBLE_DEVICES": ""})
    assert choose_device(machine(4), 4, {}) == ("cpu", {"CUDA_VISIBLE_DEVICES": ""})
    assert choose_device(machine(4), 2, {}) == ("cuda", {"CUDA_VISIBLE_DEVICES": "2"})
    masked = {"CUDA_VISIBLE_DEVICES": "4,GPU-5,6"}
    assert choose_device(machine(3), 1, masked) == ("cuda", {"CUDA_VISIBLE_DEVICES": "GPU-5"})
    masked = {"HIP_VISIBLE_DEVICES": "1,3"}
    assert choose_device(machine(2), 1, masked) == ("cuda", {"HIP_VISIBLE_DEVICES": "3"})


def write_program(path: Path, script: str) -> Path:
    path.write_text(f"#!{sys.executable}\nimport sys\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


VALIDATE = """
assert sys.argv[1:5] == ["-m", "lm_eval", "validate", "--tasks"]
if missing := [name for name in sys.argv[5].split(",") if name != "gsm8k"]:
    print("Tasks not found: " + ", ".join(missing))
    sys.exit(1)
"""


def load(folder: Path, *tasks: str) -> LoadedRecipe:
    values = {"model": {"build": "hf:model"}, "data": {"source": {"text": "a.txt"}}, "evaluation": {"tasks": tasks}}
    return LoadedRecipe(Recipe.model_validate(values), None, folder, {})


def test_tasks_are_checked_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = write_program(tmp_path / "python", VALIDATE)
    monkeypatch.setenv("PHALANX_LM_EVAL", str(python))
    (tmp_path / "mine.yaml").write_text("task: mine")
    check_tasks(load(tmp_path, "gsm8k", "mine.yaml"))
    check_tasks(load(tmp_path, "mmlu_*", "mine.yaml"))
    with pytest.raises(UsageError, match=r"evaluation.tasks: .*Tasks not found: gsm9k; list .* -m lm_eval ls tasks$"):
        check_tasks(load(tmp_path, "gsm8k", "gsm9k"))


def test_lm_eval_that_is_missing_is_an_error_with_the_command_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PHALANX_LM_EVAL", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    check_tasks(load(tmp_path))
    with pytest.raises(UsageError, match=r"evaluation.tasks: lm_eval: no such program.*pip install 'lm-eval"):
        check_tasks(load(tmp_path, "gsm8k"))
    python = write_program(tmp_path / "python", 'sys.exit("No module named lm_eval")')
    with pytest.raises(UsageError, match=r"No module named lm_eval; install it by: .*pip install 'lm-eval"):
        check_task_names((str(python), "-m", "lm_eval"), ("gsm8k",))
    older = write_program(tmp_path / "older", "sys.exit(2)")
    check_task_names((str(older), "-m", "lm_eval"), ("gsm8k",))
