"""A replica that is lost while a checkpoint is being written, under `determinism: elastic`: the others go on from
memory, end the checkpoint if the lost one had done its part and save anew if not, and no half-made one is left."""

import json
from pathlib import Path

import pytest
from test_nonfinite_steps import POISONED, folder, poison  # noqa: F401 - a fixture

from phalanx.run.event_types import (
    AttemptStarted,
    CheckpointFailed,
    CheckpointSaved,
    EvaluationDone,
    NonFiniteStep,
    RunEvent,
    StepDone,
    WorkerFailure,
    WorkerStarted,
)
from phalanx.train.checkpoint import (
    digest_checkpoint,
    format_checkpoint_name,
    list_checkpoints,
    parse_step,
    verify_checkpoint,
)
from train_harness import (
    FAULTS_CALLBACK,
    HarnessRun,
    TrainHarness,
    Values,
    list_live_workers,
    merge_recipes,
    plan_fault,
)

WHOLE: Values = {"determinism": "elastic", "steps": 18, "checkpoint": {"every": 9}, "evaluation": {"every": 20}}
"""Nothing else is due while one checkpoint is written, however slow this machine is."""
PAIRS: Values = {**WHOLE, "parallelism": {"replicate": 2, "shard": 2}}
UNWRITTEN: Values = {"callbacks": [FAULTS_CALLBACK, "kill_during_save:KillDuringSave"]}
worlds = pytest.mark.parametrize(
    ("changes", "nproc", "rank"),
    [(WHOLE, 2, 1), pytest.param(WHOLE, 3, 0, marks=pytest.mark.slow), (PAIRS, 4, 3)],
    ids=["last", "leader", "sharded"],
)


def train(
    lab: TrainHarness,
    changes: Values,
    nproc: int,
    faults: tuple[Values, ...] = (),
    folder: Path | None = None,  # noqa: F811
    **plan: object,
) -> HarnessRun:
    """Train with a worker that falls by this plan (`helpers/kill_during_save.py`)."""
    folder, run = folder or lab.folder, lab.new_run()
    (folder / "kill_during_save.py").write_text(
        (Path(__file__).parents[1] / "helpers" / "kill_during_save.py").read_text()
    )
    run.path.parent.mkdir(parents=True, exist_ok=True)
    run.path.with_name(run.path.name + ".unwritten.json").write_text(json.dumps(plan))
    return lab.train(merge_recipes(changes, UNWRITTEN), nproc, run, faults=faults, folder=folder)


def undisturbed(lab: TrainHarness, changes: Values) -> HarnessRun:
    """One replica alone."""
    size = changes.get("parallelism", {}).get("shard", 1)
    return lab.train_reference({**changes, "parallelism": {"shard": size}}, size)


def saved(ended: HarnessRun) -> list[int]:
    return [event.step for event in ended.events_of_kind(CheckpointSaved)]


def given_up(ended: HarnessRun) -> list[int]:
    return [event.step for event in ended.events_of_kind(CheckpointFailed)]


def steps_before(ended: HarnessRun, kind: type[RunEvent]) -> int:
    """The last step that was told before the first event of a kind."""
    first = next(number for number, event in enumerate(ended.events) if isinstance(event, kind))
    return max(event.step for event in ended.events[:first] if isinstance(event, StepDone))


def assert_the_others_went_on(lab: TrainHarness, ended: HarnessRun, changes: Values, nproc: int) -> None:
    """In the same processes, from where they were; and all that was saved is whole."""
    reference = undisturbed(lab, changes)
    assert ended.digest == reference.digest
    assert ended.losses == reference.losses
    assert [event.step for event in ended.events_of_kind(StepDone)] == list(range(1, 19))  # none was done again
    first, second, *_ = ended.events_of_kind(AttemptStarted)
    assert (first.world_size, second.world_size) == (nproc, nproc - changes.get("parallelism", {}).get("shard", 1))
    assert second.attempt == len(ended.events_of_kind(WorkerFailure)) == 1
    assert len([event for event in ended.events_of_kind(WorkerStarted) if not event.joins_late]) == nproc
    assert_whole(ended)


def assert_whole(ended: HarnessRun) -> None:
    """The last checkpoint is there, and there are no others than whole ones that were told."""
    checkpoints = list_checkpoints(ended.run.checkpoints)
    steps = [parse_step(path) for path in checkpoints if verify_checkpoint(path)]
    there = {path.name for path in ended.run.checkpoints.iterdir()}
    assert there == {"best.json", *map(format_checkpoint_name, steps)}
    assert set(steps) <= set(saved(ended))
    assert steps[0] == saved(ended)[-1] == ended.result["steps"]
    assert list_live_workers(ended) == []


@worlds
@pytest.mark.parametrize("moment", ["within", pytest.param("record", marks=pytest.mark.slow)])
def test_where_its_part_is_missing_the_others_save_anew_at_once(
    lab: TrainHarness, changes: Values, nproc: int, rank: int, moment: str
) -> None:
    ended = train(lab, changes, nproc, step=9, rank=rank, moment=moment)
    assert_the_others_went_on(lab, ended, changes, nproc)
    assert given_up(ended) == [9]
    assert "lost before it had written its part" in ended.events_of_kind(CheckpointFailed)[0].reason
    assert saved(ended) == [steps_before(ended, CheckpointFailed) + 1, 18]


@worlds
def test_where_it_had_done_its_part_the_others_end_the_checkpoint(
    lab: TrainHarness, changes: Values, nproc: int, rank: int
) -> None:
    mates = [2] if changes is PAIRS else []
    ended = train(lab, changes, nproc, step=9, rank=rank, moment="written", mates=mates)
    assert_the_others_went_on(lab, ended, changes, nproc)
    assert (saved(ended), given_up(ended)) == ([9, 18], [])
    both = [
        digest_checkpoint(each.run.checkpoints / format_checkpoint_name(9))
        for each in (ended, undisturbed(lab, changes))
    ]
    assert both[0] == both[1]


def test_a_leader_that_is_lost_before_the_checkpoint_has_its_name(lab: TrainHarness) -> None:
    ended = train(lab, WHOLE, 2, step=9, rank=0, moment="publish")
    assert_the_others_went_on(lab, ended, WHOLE, 2)
    assert given_up(ended) == [9]
    assert len(saved(ended)) == 2


def test_a_leader_that_is_lost_before_it_could_tell_of_the_checkpoint(lab: TrainHarness) -> None:
    ended = train(lab, WHOLE, 2, step=9, rank=0, moment="published")
    assert_the_others_went_on(lab, ended, WHOLE, 2)
    assert (saved(ended), given_up(ended)) == ([9, 18], [])


@pytest.mark.parametrize(("moment", "lost"), [("written", []), ("within", [9])])
def test_nobody_waits_for_what_is_still_being_written(lab: TrainHarness, moment: str, lost: list[int]) -> None:
    """Its thread may write only when three more steps are done."""
    ended = train(lab, WHOLE, 2, step=9, rank=1, moment=moment, hold=3)
    assert_the_others_went_on(lab, ended, WHOLE, 2)
    assert given_up(ended) == lost
    assert steps_before(ended, CheckpointFailed if lost else CheckpointSaved) >= 12


@worlds
def test_lost_in_the_last_save_of_the_run(lab: TrainHarness, changes: Values, nproc: int, rank: int) -> None:
    ended = train(lab, changes, nproc, step=18, rank=rank, moment="within")
    assert_the_others_went_on(lab, ended, changes, nproc)
    assert (saved(ended), given_up(ended)) == ([9, 18], [18])


@worlds
def test_lost_while_all_wait_to_save_what_is_the_best_so_far(
    lab: TrainHarness, changes: Values, nproc: int, rank: int
) -> None:
    """What was evaluated is not evaluated again: it would not be better than itself."""
    changes, mates = merge_recipes(changes, {"evaluation": {"every": 12}}), [2] if changes is PAIRS else []
    ended = train(lab, changes, nproc, step=9, rank=rank, moment="evaluated", hold="lost", mates=mates)
    assert_the_others_went_on(lab, ended, changes, nproc)
    assert (saved(ended), given_up(ended)) == ([9, 12, 18], [])
    first, second = ended.events_of_kind(EvaluationDone)
    assert (first.step, first.is_best, second.step) == (12, True, 18)


@pytest.mark.parametrize(("nproc", "rank"), [(2, 1), pytest.param(3, 0, marks=pytest.mark.slow)])
def test_lost_while_all_wait_to_go_back(lab: TrainHarness, folder: Path, nproc: int, rank: int) -> None:  # noqa: F811
    """To the checkpoint that is being written; those who are left do, where they met without it."""
    changes = merge_recipes(POISONED, {"steps": 18, "checkpoint": {"every": 9}, "evaluation": {"every": 20}})
    poison(lab, folder, [(10, 0), (11, 5), (12, 11)])
    ended = train(lab, changes, nproc, folder=folder, step=9, rank=rank, moment="guarded", hold="lost")
    assert ended.digest == lab.train(changes, 1, folder=folder).digest
    assert [event.step for event in ended.events_of_kind(StepDone)] == [*range(1, 13), *range(10, 19)]
    assert [event.action for event in ended.events_of_kind(NonFiniteStep)] == ["skip", "skip", "rollback"]
    assert len([event for event in ended.events_of_kind(WorkerStarted) if not event.joins_late]) == nproc
    assert (saved(ended), given_up(ended)) == ([9, 18], [])
    assert_whole(ended)


def test_the_last_is_lost_too_before_it_has_saved_anew(lab: TrainHarness) -> None:
    """There is only the checkpoint of before."""
    changes = {**WHOLE, "steps": 27, "evaluation": {"every": 28}}
    ended = train(lab, changes, 2, step=18, rank=1, moment="within", hold=9, faults=(plan_fault(22, ranks=[0]),))
    assert ended.digest == undisturbed(lab, changes).digest
    assert "SIGKILL" in ended.events_of_kind(WorkerFailure)[-1].message
    assert ended.events_of_kind(AttemptStarted)[-1].start_step == 9
    assert_whole(ended)


def test_the_last_is_lost_too_when_it_has_saved_anew(lab: TrainHarness) -> None:
    changes = {**WHOLE, "steps": 60, "checkpoint": {"every": 30}, "evaluation": {"every": 61}}
    last = plan_fault(31, ranks=[0], when="told", delay=0.25)
    ended = train(lab, changes, 2, step=30, rank=1, moment="within", faults=(last,))
    assert ended.digest == undisturbed(lab, changes).digest
    assert len(ended.events_of_kind(WorkerFailure)) == 2
    assert (
        ended.events_of_kind(AttemptStarted)[-1].start_step >= saved(ended)[0] > 30
    )  # later where another had taken its place
    assert_whole(ended)


@pytest.mark.slow
@pytest.mark.parametrize("keep", [1, 3])
def test_a_guard_goes_back_to_the_checkpoint_that_was_lost(lab: TrainHarness, folder: Path, keep: int) -> None:  # noqa: F811
    """The one that was saved in its place is of another step: to come by the lost one, all start again before it."""
    changes = merge_recipes(
        POISONED, {"steps": 24, "checkpoint": {"every": 8, "keep": keep}, "evaluation": {"every": 25}}
    )
    poison(lab, folder, [(20, 0), (21, 5), (22, 11)])
    reference = lab.train(changes, 1, folder=folder)
    ended = train(lab, changes, 2, folder=folder, step=16, rank=1, moment="within")
    assert ended.digest == reference.digest
    assert given_up(ended) == [16]
    assert [step for step in saved(ended) if step % 8 == 0] == [8, 16, 24]
    assert ended.events_of_kind(AttemptStarted)[-1].start_step == 8
    assert "of step 16, was lost together with a worker" in ended.events_of_kind(WorkerFailure)[-1].message
    assert_whole(ended)
