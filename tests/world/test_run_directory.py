"""What stands in the directory of a run of whole worlds: events, result, and how a run goes on in it."""

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phalanx.app.prepare_run import RunRequest, prepare_run
from phalanx.errors import DataError, ExitCode, PhalanxError, RecipeError, UsageError
from phalanx.recipe import Recipe
from phalanx.recipe.load import LoadedRecipe
from phalanx.run import Event, Run
from phalanx.run.directory import RESULT_FORMAT
from phalanx.run.event_types import (
    AttemptStarted,
    CheckpointSaved,
    EvaluationDone,
    RunEnded,
    RunWarning,
    StepDone,
    WorkerStarted,
)
from train_harness import BASE_RECIPE, HarnessRun, TrainHarness, Values, plan_fault


def by_attempt(ended: HarnessRun) -> dict[int, list[int]]:
    """The steps of each attempt in the order of the events."""
    steps: dict[int, list[int]] = {}
    attempt = -1
    for event in ended.events:
        if isinstance(event, AttemptStarted):
            attempt = event.attempt
        elif isinstance(event, StepDone):
            steps.setdefault(attempt, []).append(event.step)
    return steps


@pytest.fixture(scope="module")
def stop(lab: TrainHarness) -> Callable[[int], Run]:
    """Copies of a run that was stopped after step 6, which is trained once for each number of workers."""
    stopped: dict[int, Run] = {}

    def copy(nproc: int) -> Run:
        if nproc not in stopped:
            stopped[nproc] = lab.train({}, nproc, faults=[plan_fault(6, "term")]).run
        return Run(Path(shutil.copytree(stopped[nproc].path, lab.new_run().path)))

    return copy


def test_every_step_stands_once_in_an_attempt_with_parts_that_sum_to_its_seconds(lab: TrainHarness) -> None:
    ended = lab.train({}, 2, faults=[plan_fault(7, ranks=[0])])
    steps = by_attempt(ended)
    assert steps[0] == list(range(1, steps[0][-1] + 1))
    assert steps[1] == list(range(ended.events_of_kind(AttemptStarted)[1].start_step + 1, 13))
    for event in ended.events_of_kind(StepDone):
        phases = vars(event.breakdown_s).values()
        assert all(seconds >= 0 for seconds in phases)
        assert math.isclose(sum(phases), event.duration_s, rel_tol=1e-6)
        assert event.units == 12 * 32
        assert event.loss > 0
        assert event.grad_norm > 0
        assert 0 < event.lr <= 3e-3


def test_the_steps_of_a_run_fill_the_time_between_its_events(lab: TrainHarness) -> None:
    """No time is lost between the steps: evaluation apart, their seconds add up to the clock."""
    ended = lab.train_reference({"evaluation": {"every": None}, "steps": 60}, 1)
    steps = ended.events_of_kind(StepDone)
    clock = steps[-1].time - steps[0].time
    assert math.isclose(sum(event.duration_s for event in steps[1:]), clock, rel_tol=0.02, abs_tol=0.005)


def test_events_of_a_run_tell_its_workers_starts_and_end(lab: TrainHarness) -> None:
    ended = lab.train_reference({}, 3)
    assert sorted(event.rank for event in ended.events_of_kind(WorkerStarted)) == [0, 1, 2]
    (start,) = ended.events_of_kind(AttemptStarted)
    assert (start.world_size, start.attempt, start.start_step, start.total_steps) == (3, 0, 0, 12)
    assert start.num_micro_batches == 12
    assert [event.step for event in ended.events_of_kind(EvaluationDone)] == [5, 10, 12]
    last = ended.events[-1]
    assert isinstance(last, RunEnded)
    assert (last.status, last.step) == ("done", 12)
    for event in ended.events_of_kind(CheckpointSaved):
        assert event.size_bytes > 100_000
        assert 0 <= event.stall_s <= event.duration_s
    assert (ended.run.path / ended.events_of_kind(CheckpointSaved)[-1].path / "MANIFEST.json").is_file()


def test_one_worker_with_several_micro_batches_estimates_the_gradient_noise(lab: TrainHarness) -> None:
    told = {event.step: event.noise_scale_samples for event in lab.train_reference({}, 1).events_of_kind(StepDone)}
    assert [step for step, noise in told.items() if noise is not None] == [8]
    assert told[8] is not None
    assert told[8] > 0


def test_a_batch_for_each_worker_is_settled_when_the_run_begins(lab: TrainHarness) -> None:
    """Three workers of 4 samples make steps of 12, with three times the rate; so it stays when one of them goes on."""
    optim = {"lr": 1e-3, "schedule": {"warmup_steps": 0, "decay": "constant"}, "lr_scaling": {"warmup_steps": 4}}
    changes = {"batch": {"global_size": 4, "scale_with_workers": True}, "optimizer": optim, "steps": 6}
    ended = lab.train(changes, 3)
    assert [event.units for event in ended.events_of_kind(StepDone)] == [12 * 32] * 6
    assert [event.lr for event in ended.events_of_kind(StepDone)] == pytest.approx(
        [1.5e-3, 2e-3, 2.5e-3, 3e-3, 3e-3, 3e-3]
    )
    again = lab.train(changes | {"steps": 8}, 1, run=ended.run)
    assert [(event.units, event.lr) for event in again.events_of_kind(StepDone)[-2:]] == [
        (12 * 32, pytest.approx(3e-3))
    ] * 2


def test_the_result_has_its_fields_and_the_digest_that_the_command_line_prints(
    lab: TrainHarness, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = lab.train_reference({}, 2)
    result = ended.result
    assert set(result) == {
        "format",
        "status",
        "steps",
        "final_loss",
        "num_units",
        "duration_s",
        "num_restarts",
        "digest",
    }
    assert (result["format"], result["status"], result["steps"]) == (RESULT_FORMAT, "done", 12)
    assert result["final_loss"] == ended.losses[-1]
    assert (result["num_units"], result["num_restarts"]) == (12 * 12 * 32, 0)
    assert 0 < result["duration_s"] < 60
    printed = lab.call_command(capsys, "checkpoint", "digest", ended.run.path)
    assert printed.stdout.strip() == ended.digest


def test_a_run_can_be_moved_and_goes_on_where_it_is_then(
    lab: TrainHarness, stop: Callable[[int], Run], tmp_path: Path
) -> None:
    stopped = stop(2)
    moved = Run(Path(shutil.move(stopped.path, tmp_path / "elsewhere")))
    ended = lab.train({}, 2, moved)
    assert ended.digest == lab.train_reference({}, 2).digest
    assert not stopped.path.exists()


class NoTrials:
    """Stands in for the fork server of a run that gets no further than its lock."""

    def call(self, function: str, payload: Any) -> Any:
        return ""

    def preload(self, function: str, payload: Any) -> None:
        pass


def test_a_run_is_not_trained_twice_at_a_time(lab: TrainHarness) -> None:
    """The lock is of a process that opens the run, so the second may be this one."""
    run, refused = lab.new_run(), []
    loaded = LoadedRecipe(Recipe.model_validate(BASE_RECIPE), None, lab.folder, {})

    def show(event: Event) -> None:
        if isinstance(event, AttemptStarted):
            with pytest.raises(UsageError) as caught, prepare_run(RunRequest(loaded, run, 1), NoTrials()):
                pass
            refused.append(str(caught.value))

    assert lab.train({}, 1, run, show=show).digest == lab.train_reference({}, 1).digest
    (reason,) = refused
    assert "another process is training this run" in reason


def test_a_finished_run_with_more_steps_goes_on_and_prints_the_jump_of_the_learning_rate(lab: TrainHarness) -> None:
    ended = lab.train({"steps": 8}, 2)
    lab.train({"steps": 12}, 2, ended.run)
    assert [event.start_step for event in ended.events_of_kind(AttemptStarted)] == [0, 8]
    assert [event.step for event in ended.events_of_kind(StepDone)] == list(range(1, 13))
    (note,) = ended.events_of_kind(RunWarning)
    assert "steps 8 -> 12" in note.text
    assert "the learning rate at step 8 jumps from 0.0003 to 0.00142" in note.text
    assert (ended.result["steps"], ended.result["status"]) == (12, "done")


def test_a_changed_recipe_is_refused_and_told_what_differs(lab: TrainHarness) -> None:
    changes: Values = {"model": {"args": {"hidden_size": 48}}, "precision": "bf16"}
    run = lab.train_reference({}, 1).run
    before = run.events.read_bytes(), run.resolved.read_bytes()
    with pytest.raises(RecipeError) as caught:
        lab.train(changes, 1, run)
    lines = [line.strip() for line in str(caught.value).splitlines()]
    assert lines[1:-1] == ["model.args.hidden_size: 32 -> 48", 'precision: "fp32" -> "bf16"']
    assert "--force" in lines[-1]
    assert (run.events.read_bytes(), run.resolved.read_bytes()) == before


def test_force_goes_on_under_the_changed_recipe_and_records_it(lab: TrainHarness, stop: Callable[[int], Run]) -> None:
    ended = lab.train({"optimizer": {"lr": 1e-3}}, 1, stop(1), force=True)
    assert ended.code == 0
    assert ended.events_of_kind(AttemptStarted)[-1].start_step == 6
    assert [event.text for event in ended.events_of_kind(RunWarning)] == ["forced: optimizer.lr: 0.003 -> 0.001"]
    assert ended.events_of_kind(StepDone)[-1].lr == pytest.approx(1e-4)
    assert ended.digest != lab.train_reference({}, 1).digest


def test_a_run_goes_on_when_the_weights_that_it_began_with_are_gone(lab: TrainHarness, tmp_path: Path) -> None:
    first = lab.train_reference({}, 1)
    shutil.copytree(first.run.path, tmp_path / "first")
    given: Values = {"init_from": str(tmp_path / "first"), "steps": 6}
    begun = lab.train(given, 1)
    shutil.rmtree(tmp_path / "first")
    assert lab.train({**given, "steps": 7}, 1, begun.run).events_of_kind(AttemptStarted)[-1].start_step == 6


def test_weights_that_do_not_fit_the_model_are_refused_before_anything_is_written(lab: TrainHarness) -> None:
    given: Values = {"init_from": str(lab.train_reference({}, 1).run.path), "model": {"args": {"hidden_size": 16}}}
    with pytest.raises(PhalanxError, match=r"embedding.weight has shape \[256, 32\], the model's has \[256, 16\]"):
        lab.train(given, 1)


def test_workers_that_begin_with_other_weights_than_the_first_are_refused(lab: TrainHarness) -> None:
    ended = lab.train({"model": {"build": "user_models:from_the_kernel"}}, 2)
    assert ended.code == ExitCode.RECIPE
    assert ended.message is not None
    assert "the initial state of worker 1 is not that of worker 0" in ended.message


def test_a_task_for_other_data_is_refused(lab: TrainHarness) -> None:
    with pytest.raises(RecipeError, match="task: classification is for images, and the data are tokens"):
        lab.train({"task": "classification"}, 1)


def test_other_data_are_refused_before_the_run_starts_again(lab: TrainHarness, tmp_path: Path) -> None:
    folder = lab.create_recipe_dir(tmp_path / "recipes")
    stopped = lab.train({}, 1, folder=folder, faults=[plan_fault(6, "term")])
    events = stopped.run.events.read_bytes()
    (folder / "few.txt").write_text("other words " * 400)
    with pytest.raises(DataError, match="was trained on other data"):
        lab.train({}, 1, stopped.run, folder=folder)
    assert stopped.run.events.read_bytes() == events


def test_a_run_is_done_with_closed_streams_among_files_called_like_modules(lab: TrainHarness, tmp_path: Path) -> None:
    """Closed streams as after `nohup phalanx train ... <&- >&- 2>&- &`; the files are in the working folder and the
    recipe's."""
    folder = lab.create_recipe_dir(tmp_path / "recipes")
    for name in ("random", "queue", "types", "copy", "platform", "logging", "json", "secrets", "numbers", "typing"):
        (folder / f"{name}.py").write_text("raise SystemExit('imported by mistake')\n")
    shutil.copy(lab.recipe_file({"callbacks": []}, "closed"), folder / "r.yaml")
    words = [sys.executable, "-P", "-m", "phalanx", "train", "r.yaml", "--run", "r"]
    line = ["/bin/sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *words]
    assert subprocess.run(line, cwd=folder, env={**os.environ, **lab.variables()}, check=False).returncode == 0
    assert '"status": "done"' in Run(folder / "r").result.read_text()


@pytest.mark.parametrize("damage", ["lost", "torn", "foreign"])
def test_a_run_goes_on_without_its_small_files_and_says_which_it_missed(
    lab: TrainHarness, stop: Callable[[int], Run], damage: str
) -> None:
    run = stop(2)
    small = [
        run.plan,
        run.cluster,
        run.environment,
        run.result,
        run.checkpoints / "best.json",
        run.path / "in_memory.json",
    ]
    for path in small:
        if damage == "lost":
            path.unlink(missing_ok=True)
        else:
            path.write_text(
                '{"steps": ' if damage == "torn" else '{"steps": "x", "step": [], "data_info": 1, "lines": [1]}'
            )
    ended = lab.train({}, 2, run)
    assert ended.digest == lab.train_reference({}, 2).digest
    told = [event.text for event in ended.events_of_kind(RunWarning)]
    assert any("plan.json: not valid JSON" in text for text in told) is (damage == "torn")
    assert run.read_json(run.plan)["data_info"]["kind"] == "tokens"  # type: ignore[index]


@pytest.mark.parametrize("names", [("resolved",), ("resolved", "recipe")], ids=["resolved", "both"])
def test_a_run_that_lost_its_recipes_goes_on_with_what_its_checkpoint_says(
    lab: TrainHarness, names: tuple[str, ...]
) -> None:
    changes: Values = {"num_threads": "auto", "batch": {"micro_size": "auto"}}
    run = lab.train(changes, 1, faults=[plan_fault(6, "term")]).run
    resolved = run.resolved.read_text()
    for name in names:
        (run.path / f"{name}.yaml").unlink()
    ended = lab.train(changes, 1, run)
    assert ended.digest == lab.train_reference(changes, 1).digest
    assert run.resolved.read_text() == resolved
    assert any(
        f"{names[0]}.yaml is missing; the run resumes with" in event.text for event in ended.events_of_kind(RunWarning)
    )


def test_a_run_that_lost_its_resolved_recipe_refuses_another_one(lab: TrainHarness, stop: Callable[[int], Run]) -> None:
    run = stop(1)
    run.resolved.unlink()
    with pytest.raises(RecipeError, match=r"optimizer.lr"):
        lab.train({"optimizer": {"lr": 0.5}}, 1, run)
    for path in run.checkpoints.glob("step-*/MANIFEST.json"):
        path.write_text("{}")
    with pytest.raises(DataError, match=r"resolved.yaml: is missing, and no checkpoint holds a readable recipe"):
        lab.train({}, 1, run)


def test_a_changed_digit_in_resolved_yaml_is_refused_by_its_key(lab: TrainHarness, stop: Callable[[int], Run]) -> None:
    run = stop(1)
    text = run.resolved.read_text()
    run.resolved.write_text(text.replace("global_size: 12", "global_size: 24"))
    ended = lab.train({}, 1, run)
    assert ended.code == ExitCode.RECIPE
    assert f"is not what {run.checkpoints}" in str(ended.message)
    assert ": batch.global_size: " in str(ended.message)
    run.resolved.write_text(text)
    assert lab.train({}, 1, run).digest == lab.train_reference({}, 1).digest
