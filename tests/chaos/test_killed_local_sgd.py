"""Workers that train apart for rounds of steps: killed or asked to stop at any step, the run ends with the very weights
that it would have had; in a world of another size it goes on from their mean."""

from typing import Any

import pytest

from phalanx.errors import ExitCode
from phalanx.run.event_types import (
    AttemptStarted,
    CheckpointSaved,
    EvaluationDone,
    InMemoryRestored,
    NonFiniteStep,
    RunWarning,
)
from phalanx.train.checkpoint.format import list_checkpoints, parse_step, read_manifest
from phalanx.train.checkpoint.load import load_tensors
from train_harness import HarnessRun, TrainHarness, Values, plan_fault

SMALL = {"args": {"layers": 2, "hidden_size": 32, "num_heads": 2}}


SLOW = plan_fault(1, "slow", delay=0.03, attempt=None)
"""Steps so slow that a checkpoint is written before the next but one is done."""


def changes_of(method: str, workers: int = 2, every: int = 3, **local_sgd: Any) -> Values:
    """Two buckets; with 12 steps, four rounds."""
    values = {"method": method, "sync_every": every, "warmup_steps": 0, **local_sgd}
    sync = {"determinism": "off", "grad_sync": {"bucket_mib": 0.02}, "local_sgd": values}
    return {"model": SMALL, "parallelism": {"replicate": workers}, **sync}


RUNS: list[Any] = [
    pytest.param("average", {}, 2, None, marks=pytest.mark.slow),
    ("diloco", {"sync_dtype": "int8"}, 2, None),
    pytest.param("diloco", {}, 3, 2, marks=pytest.mark.slow),
    pytest.param("average", {"sync_dtype": "bf16"}, 2, 3, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("method", "local_sgd", "workers", "hot"), RUNS, ids=str)
def test_a_killed_run_ends_with_the_same_bits(
    lab: TrainHarness, method: str, local_sgd: Values, workers: int, hot: int | None
) -> None:
    changes = changes_of(method, workers, **local_sgd)
    where = {"checkpoint": {"every": None if hot else 2, "in_memory_every": hot}}
    ended = lab.train({**changes, **where}, workers, faults=[SLOW, plan_fault(8, ranks=[workers - 1])])
    first, second = (event.start_step for event in ended.events_of_kind(AttemptStarted))
    assert first == 0
    assert second in (3, 6)  # the end of a round; the one before where the disk was slow
    assert bool(ended.events_of_kind(InMemoryRestored)) == (hot is not None)
    reference = lab.train_reference(changes, workers)
    assert ended.digest == reference.digest
    assert ended.losses == reference.losses


STREAMED: list[Any] = [
    (2, {"sync_dtype": "int8"}, None),
    pytest.param(3, {}, None, marks=pytest.mark.slow),
    pytest.param(2, {"sync_dtype": "int8"}, 2, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("workers", "local_sgd", "hot"), STREAMED, ids=str)
def test_a_run_that_is_killed_while_a_fragment_is_under_way_ends_with_the_same_bits(
    lab: TrainHarness, workers: int, local_sgd: Values, hot: int | None
) -> None:
    """One fragment leaves after steps 2, 6 and 10, the other after 4, 8 and 12; each lands a step later."""
    changes = {
        **changes_of("diloco", workers, every=4, num_fragments=2, sync_delay=1, **local_sgd),
        "evaluation": {"every": 6},
    }
    where = {"checkpoint": {"every": None if hot else 2, "in_memory_every": hot}}
    ended = lab.train({**changes, **where}, workers, faults=[SLOW, plan_fault(8, ranks=[workers - 1])])
    first, second = (event.start_step for event in ended.events_of_kind(AttemptStarted))
    assert first == 0
    assert second in (4, 6)
    assert bool(ended.events_of_kind(InMemoryRestored)) == (hot is not None)
    reference = lab.train_reference(changes, workers)
    assert ended.digest == reference.digest
    assert ended.losses == reference.losses
    assert [event.step for event in ended.events_of_kind(EvaluationDone)] == [
        event.step for event in reference.events_of_kind(EvaluationDone)
    ]
    assert [event.loss for event in ended.events_of_kind(EvaluationDone)] == [
        event.loss for event in reference.events_of_kind(EvaluationDone)
    ]


def test_a_checkpoint_has_what_was_under_way(lab: TrainHarness) -> None:
    changes, run = changes_of("diloco", every=4, num_fragments=2, sync_delay=1), lab.new_run()
    lab.train({**changes, "checkpoint": {"every": 6, "keep": 3}, "evaluation": {"every": 6}}, 2, run, faults=[SLOW])
    flying = {
        parse_step(path): {name for name in read_manifest(path).tensors if name.startswith("local_sgd/in_flight/")}
        for path in list_checkpoints(run.checkpoints)
    }
    assert flying[6]
    assert not flying[12]


@pytest.mark.parametrize("method", ["diloco", pytest.param("average", marks=pytest.mark.slow)])
def test_a_run_that_is_stopped_in_the_middle_of_a_round_goes_on_with_it(lab: TrainHarness, method: str) -> None:
    changes, run = changes_of(method, every=5), lab.new_run()
    stopped = lab.train(changes, 2, run, faults=[plan_fault(6, "term", ranks=[1])])
    assert stopped.code == ExitCode.UNFINISHED
    assert saved(stopped) % 5
    ended = lab.train(changes, 2, run)
    assert ended.digest == lab.train_reference(changes, 2).digest
    assert ended.losses == lab.train_reference(changes, 2).losses


def saved(ended: HarnessRun) -> int:
    """The step of the newest checkpoint."""
    return max(parse_step(path) for path in list_checkpoints(ended.run.checkpoints))


@pytest.mark.parametrize("workers", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "streams", [{}, pytest.param({"num_fragments": 2, "sync_delay": 1}, marks=pytest.mark.slow)], ids=str
)
def test_another_number_of_workers_goes_on_from_the_mean(lab: TrainHarness, streams: Values, workers: int) -> None:
    """Those who were two were stopped in the middle of a round."""
    run = lab.new_run()
    stopped = lab.train(changes_of("diloco", 2, every=5, **streams), 2, run, faults=[plan_fault(6, "term", ranks=[1])])
    assert saved(stopped) % 5
    ended = lab.train(changes_of("diloco", workers, every=5, **streams), workers, run)
    assert [event.world_size for event in ended.events_of_kind(AttemptStarted)] == [2, workers]
    assert len(ended.digest) == 32
    assert ended.losses[-1] < ended.losses[0]


def test_what_falls_due_within_a_round_is_done_at_its_end(lab: TrainHarness) -> None:
    """Every 5 and every 4 steps, in rounds of 3."""
    ended = lab.train_reference(changes_of("average"), 2)
    assert [event.step for event in ended.events_of_kind(EvaluationDone)] == [6, 12]
    skipped = [
        event for event in ended.events_of_kind(RunWarning) if event.text.startswith("step 9: not saved")
    ]  # a slow disk
    assert [event.step for event in ended.events_of_kind(CheckpointSaved)] == [6, *([] if skipped else [9]), 12]


def test_a_checkpoint_has_a_row_for_each_worker_of_what_is_its_own(lab: TrainHarness) -> None:
    ended = lab.train_reference(changes_of("diloco"), 2)
    path = max(list_checkpoints(ended.run.checkpoints), key=parse_step)
    tensors, parameters = load_tensors(path), [n for n in read_manifest(path).tensors if "/" not in n]
    assert not [
        name for name in tensors if name.startswith("optimizer/") or name == f"local_sgd/worker/{parameters[0]}"
    ]
    for name in parameters:
        rows = tensors[f"local_sgd/worker/optimizer/{name}/exp_avg"]
        assert rows.shape == (2, *tensors[name].shape)
        assert not rows[0].equal(rows[1])
        assert tensors[f"local_sgd/outer_momentum/{name}"].shape == tensors[name].shape
        assert tensors[f"local_sgd/worker/optimizer/{name}/step"].tolist() == [12.0, 12.0]


def test_a_gradient_that_is_not_finite_on_one_worker_is_skipped_by_all(lab: TrainHarness) -> None:
    ended = lab.train_reference({**changes_of("average"), "task": "user_tasks:OverflowOnLastRankTask"}, 2)
    (guard,) = ended.events_of_kind(NonFiniteStep)
    assert (guard.step, guard.reason, guard.action) == (1, "non-finite gradient", "skip")
    tensors = load_tensors(max(list_checkpoints(ended.run.checkpoints), key=parse_step))
    steps = {name: rows.tolist() for name, rows in tensors.items() if name.endswith("/step")}
    assert steps
    assert set(map(tuple, steps.values())) == {(11.0, 11.0)}


@pytest.mark.slow
def test_workers_lower_the_loss_scale_of_fp16_together(lab: TrainHarness) -> None:
    changes = {**changes_of("average"), "precision": "fp16", "task": "user_tasks:OverflowingTask"}
    ended = lab.train(changes, 2, faults=[plan_fault(8, ranks=[1])])
    assert ended.events_of_kind(NonFiniteStep)
    assert ended.digest == lab.train_reference(changes, 2).digest
