"""The pure parts of what the verbs do: what a run's result is, what is left to do in it, and what changed."""

import errno
from pathlib import Path
from typing import Any

import pytest

import phalanx
from made_events import made
from phalanx.app import train
from phalanx.app.prepare_run import create_run, load_prices
from phalanx.app.resume import describe_finished, describe_resume, read_last_step
from phalanx.app.supervise import build_result
from phalanx.autoconfig.resolve import make_trial_recipe
from phalanx.errors import DataError, ExitCode, RecipeError, UsageError
from phalanx.jobs.agent.leader_agent import RunOutcome
from phalanx.recipe import Recipe, ResolvedRecipe, load_resolved_recipe
from phalanx.recipe.diff import incompatible_changes
from phalanx.recipe.load import dump_recipe
from phalanx.run import Event, EventLog, Run
from phalanx.run.directory import write_json
from phalanx.run.event_types import (
    AttemptStarted,
    CheckpointRejected,
    CheckpointSaved,
    RunEnded,
    RunWarning,
    StepDone,
    WorkerFailure,
    WorkerStarted,
)
from resolved_recipes import resolved_recipe

DAY = 86400.0


def recipe(**values: Any) -> Recipe:
    return Recipe.model_validate({"data": {"source": {"text": "texts/*.txt"}}, **values})


def resolved(**values: Any) -> ResolvedRecipe:
    """A recipe as if every `auto` in it had been resolved."""
    batch = {"global_size": 16, "micro_size": 8}
    base = {"batch": batch, "num_threads": 2, "precision": "bf16", "parallelism": {"replicate": 2}, "compile": False}
    return resolved_recipe(2, **{"data": {"source": {"text": "texts/*.txt"}}, **base, **values})


def record(run: Run, *events: Event) -> None:
    log = EventLog(run.events)
    for event in events:
        log.write(event)
    log.close()


def start(t: float, attempt: int = 0) -> Event:
    return made(AttemptStarted, time=t, attempt=attempt)


def worker(t: float, attempt: int = 0) -> Event:
    return made(WorkerStarted, time=t, attempt=attempt)


def step(t: float, number: int, **fields: Any) -> Event:
    return made(StepDone, time=t, step=number, **{"loss": 10.0 - number, "units": 100, **fields})


def ended(code: ExitCode, result: dict[str, Any] | None = None, message: str | None = None) -> RunOutcome:
    return RunOutcome(code, result, message)


def test_the_result_is_what_the_worker_reported_and_the_seconds_of_all_attempts(run: Run) -> None:
    record(run, worker(9.0), start(10.0), step(12.0, 1), step(15.0, 2), made(RunEnded, time=15.5))
    reported = {"format": 1, "status": "done", "steps": 2, "digest": "d" * 32}
    assert build_result(run, ended(ExitCode.DONE, reported)) == {**reported, "duration_s": 5.5}


def test_the_time_between_attempts_does_not_count(run: Run) -> None:
    record(run, worker(99.0), start(100.0), step(110.0, 1), made(RunEnded, time=111.0, status="interrupted"))
    record(run, made(RunWarning, time=DAY), worker(DAY + 1, 1))
    record(run, made(CheckpointRejected, time=DAY + 2))
    record(run, start(DAY + 3, 1), step(DAY + 8, 2), made(RunEnded, time=DAY + 10))
    assert build_result(run, ended(ExitCode.DONE, {"steps": 2}))["duration_s"] == 11.0 + 7.0


def test_the_time_of_an_attempt_that_died_counts_up_to_what_was_seen_of_it(run: Run) -> None:
    record(run, worker(99.0), start(100.0), step(110.0, 1))
    record(run, worker(DAY, 1), start(DAY + 1, 1), step(DAY + 3, 2), made(WorkerFailure, time=DAY + 4))
    assert build_result(run, ended(ExitCode.GAVE_UP))["duration_s"] == 10.0 + 3.0


def test_a_warning_within_an_attempt_costs_it_no_time(run: Run) -> None:
    record(run, worker(9.0), start(10.0), made(RunWarning, time=11.0), step(15.0, 1))
    assert build_result(run, ended(ExitCode.UNFINISHED))["duration_s"] == 5.0


@pytest.mark.parametrize(
    ("code", "status"),
    [(ExitCode.UNFINISHED, "interrupted"), (ExitCode.GAVE_UP, "failed"), (ExitCode.RECIPE, "failed")],
)
def test_without_a_report_the_events_tell_how_far_it_came(run: Run, code: ExitCode, status: str) -> None:
    record(run, worker(9.0), start(10.0), step(11.0, 1), step(12.0, 2))
    assert build_result(run, ended(code, message="why")) == {
        "format": 1,
        "status": status,
        "steps": 2,
        "final_loss": 8.0,
        "num_units": 200,
        "duration_s": 2.0,
        "num_restarts": 0,
        "digest": None,
        "message": "why",
    }


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([], (0, None, 0, 0)),
        ([start(10.0), step(11.0, 1), step(12.0, 2, loss=None, skip_reason="non-finite loss")], (2, 9.0, 100, 0)),
        (
            [start(10.0), *(step(10.0 + n, n) for n in (1, 2, 3)), start(20.0, 1), step(21.0, 2, loss=0.5)],
            (2, 0.5, 200, 1),
        ),
    ],
    ids=["no step", "a skipped step", "steps done again"],
)
def test_each_step_counts_once_and_a_skipped_one_not(
    run: Run, events: list[Event], expected: tuple[int, float | None, int, int]
) -> None:
    record(run, *events)
    result = build_result(run, ended(ExitCode.GAVE_UP))
    assert (result["steps"], result["final_loss"], result["num_units"], result["num_restarts"]) == expected


def test_the_last_step_is_the_one_done_last(run: Run) -> None:
    assert read_last_step(run) == 0
    record(run, start(1.0), step(2.0, 1), step(3.0, 2), start(4.0, 1), step(5.0, 1))
    assert read_last_step(run) == 1


def write_run(run: Run, given: Recipe, result: dict[str, Any] | None = None, **values: Any) -> None:
    run.recipe.write_text(dump_recipe(given))
    run.resolved.write_text(dump_recipe(resolved(steps=given.steps, **values)))
    if result is not None:
        write_json(run.result, result)


DONE = {"status": "done", "steps": 300}


def test_a_run_at_its_end_has_nothing_left_to_do(run: Run) -> None:
    write_run(run, recipe(), DONE)
    sentence = describe_finished(run, recipe())
    assert sentence == f"{run.path}: finished at step 300; set steps=600 to train longer"


@pytest.mark.parametrize(
    ("result", "wanted"),
    [
        (None, {}),
        ({"status": "interrupted", "steps": 300}, {}),
        ({"status": "failed", "steps": 300}, {}),
        (DONE, {"steps": 301}),
        (DONE, {"optimizer": {"lr": 0.5}}),
    ],
)
def test_otherwise_there_is_something_to_do_or_to_refuse(
    run: Run, result: dict[str, Any] | None, wanted: dict[str, Any]
) -> None:
    write_run(run, recipe(), result)
    assert describe_finished(run, recipe(**wanted)) is None


def test_training_a_finished_run_from_python_returns_its_result(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise AssertionError("no process is needed")

    monkeypatch.setattr(train, "ForkServerClient", refuse)
    write_run(run, recipe(), DONE)
    assert phalanx.train(recipe(), run=run.path) == DONE


@pytest.mark.parametrize("steps", [300, 600])
def test_a_run_that_lost_its_checkpoints_is_refused_also_when_it_was_done(run: Run, steps: int) -> None:
    write_run(run, recipe(), DONE)
    saved = made(CheckpointSaved, time=2.0, step=300, path="checkpoints/step-000000300")
    record(run, start(1.0), step(2.0, 300), saved)
    (run.checkpoints / "step-000000301.tmp-0").mkdir()
    with pytest.raises(DataError) as refusal:
        describe_finished(run, recipe(steps=steps))
    assert str(refusal.value) == (
        f"{run.checkpoints}: no checkpoint is left, and the run did 300 steps; restore the checkpoints, or use another "
        "--run to start from the beginning"
    )


def test_a_run_whose_checkpoints_are_damaged_or_were_never_saved_is_not_taken_for_one_that_lost_them(run: Run) -> None:
    write_run(run, recipe(), DONE)
    record(run, start(1.0), step(2.0, 300))
    assert describe_finished(run, recipe()) is not None
    record(run, made(CheckpointSaved, time=3.0, step=300, path="checkpoints/step-000000300"))
    (run.checkpoints / "step-000000300").mkdir()
    assert describe_finished(run, recipe()) is not None


def test_overrides_are_for_files() -> None:
    with pytest.raises(UsageError, match="overrides are for recipes in files"):
        phalanx.train(recipe(), ["steps=3"])


SHARDED = {"parallelism": {"shard": 2}, "determinism": "elastic"}
MORE_REPLICAS = {"parallelism": {"replicate": 4, "shard": 2}, "determinism": "elastic"}
LINEAR = {"lr": 1.0, "schedule": {"warmup_steps": 0, "decay": "linear", "min_lr_ratio": 0.0}}
DILOCO = {"determinism": "off", "local_sgd": {"method": "diloco"}}


@pytest.mark.parametrize(
    ("old", "new", "note"),
    [
        ({}, {"checkpoint": {"every": 7}}, None),
        (
            {"steps": 100, "optimizer": LINEAR},
            {"steps": 200, "optimizer": LINEAR},
            "the learning rate at step 100 jumps from 0 to 0.5",
        ),
        ({}, {"parallelism": {"replicate": 3}}, "the number of workers changed under determinism = fixed-world"),
        (
            {"parallelism": {"replicate": 4}},
            {"parallelism": {"shard": 2, "replicate": 2}},
            "the parallelism changed under determinism = fixed-world",
        ),
        ({"device": "cuda"}, {"device": "cpu"}, "device cuda -> cpu: the digest will differ by rounding"),
        (DILOCO, {**DILOCO, "parallelism": {"replicate": 3}}, "each resumes from the mean of all workers' weights"),
        (SHARDED, MORE_REPLICAS, None),
        (SHARDED, {**SHARDED, "parallelism": {"replicate": 2}}, "the parallelism of a replica changed"),
    ],
)
def test_what_changes_in_a_run_that_resumes_is_noted(
    old: dict[str, Any], new: dict[str, Any], note: str | None
) -> None:
    notes = describe_resume(resolved(**old), resolved(**new))
    assert len(notes) == (note is not None)
    assert note is None or note in notes[0]


def test_a_run_from_before_recipes_named_a_device_goes_on_with_any() -> None:
    old, new = resolved(), resolved(device="cpu")
    assert describe_resume(old, new) == []
    assert incompatible_changes(recipe(), old, recipe(device="cpu")) == []


def test_trials_do_not_depend_on_what_they_do_not_measure() -> None:
    one = make_trial_recipe(recipe())
    other = make_trial_recipe(recipe(name="other", steps=7, callbacks=["a:B"], checkpoint={"every": 3}))
    assert one == other
    assert make_trial_recipe(recipe(batch={"global_size": 32})) != one
    Recipe.model_validate(one)


def test_a_place_that_is_refused_by_the_file_system_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Run) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Run, "create", refuse)
    with pytest.raises(UsageError, match="cannot create a run here: Read-only file system"):
        create_run(Run(tmp_path / "run"))


def test_a_wrong_cluster_is_named_with_the_variable() -> None:
    assert load_prices({}) is None
    with pytest.raises(RecipeError, match=r"^PHALANX_CLUSTER: dgx-h1000: "):
        load_prices({"PHALANX_CLUSTER": "dgx-h1000"})


@pytest.mark.parametrize("text", ["", "name: mine\n", "num_threads: 2\nprecision: fp32\n"])
def test_a_resolved_recipe_that_was_cut_short_is_refused(tmp_path: Path, text: str) -> None:
    run = Run(tmp_path)
    run.resolved.write_text(text)
    with pytest.raises(RecipeError, match=r"resolved.yaml: is empty or cut short: it leaves \S+ open"):
        load_resolved_recipe(run.resolved)
