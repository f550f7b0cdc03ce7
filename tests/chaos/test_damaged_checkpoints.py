"""A bit flips in the newest checkpoint, in whichever file: it is found, told, and the one before is used."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from phalanx.errors import ExitCode
from phalanx.run import Run
from phalanx.run.event_types import AttemptStarted, CheckpointRejected, StepDone, WorkerFailure
from phalanx.train.checkpoint.format import list_checkpoints, parse_step
from train_harness import TrainHarness, Values, plan_fault

QUIET: Values = {"evaluation": {"every": 16}, "steps": 16, "checkpoint": {"every": 16}}
"""No checkpoints but those of a run that is asked to stop."""
STOPS = (3, 7, 11)
FILES = {1: ["rank-00000.safetensors"], 3: [f"rank-{rank:05d}.safetensors" for rank in range(3)]}
CASES = [(nproc, file) for nproc in FILES for file in [*FILES[nproc], "MANIFEST.json", "MANIFEST.xxh3"]]


def broken_run(lab: TrainHarness, nproc: int) -> Run:
    """A copy of a run with three checkpoints that died in step 15. It was stopped for them: a save in the background
    may be overtaken by steps as short as these."""
    original = Run(lab.runs / f"broken-{nproc}")
    if not original.path.exists():
        for attempt, step in enumerate(STOPS):
            lab.train(QUIET, nproc, original, faults=[plan_fault(step, "term", attempt=attempt)])
        lab.train_until_agent_lost(QUIET, nproc, original, [plan_fault(15, ranks=[0], attempt=len(STOPS))])
    copy = lab.new_run()
    shutil.copytree(original.path, copy.path)
    return copy


def newest(run: Run) -> Path:
    return list_checkpoints(run.checkpoints)[0]


def flip(file: Path, rng: random.Random) -> None:
    content = bytearray(file.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)


def truncate(file: Path, rng: random.Random) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: rng.randrange(len(content))])


def remove(file: Path, rng: random.Random) -> None:
    file.unlink()


@pytest.mark.parametrize(("nproc", "file"), CASES)
def test_a_flipped_bit_is_found_and_the_checkpoint_before_is_used(lab: TrainHarness, nproc: int, file: str) -> None:
    run = broken_run(lab, nproc)
    last, before, _ = list_checkpoints(run.checkpoints)
    flip(last / file, random.Random(f"{nproc} {file}"))
    ended = lab.train(QUIET, nproc, run)
    (rejected,) = ended.events_of_kind(CheckpointRejected)
    assert (rejected.path, rejected.file) == (f"checkpoints/{last.name}", file)
    assert "damaged" in rejected.reason or "malformed" in rejected.reason
    assert ended.events_of_kind(AttemptStarted)[-1].start_step == parse_step(before)
    assert ended.digest == lab.train_reference(QUIET, nproc).digest


@pytest.mark.parametrize("damage", [truncate, remove])
@pytest.mark.parametrize("file", ["rank-00002.safetensors", pytest.param("MANIFEST.json", marks=pytest.mark.slow)])
def test_a_torn_or_missing_file_is_found_too(
    lab: TrainHarness, file: str, damage: Callable[[Path, random.Random], None]
) -> None:
    run = broken_run(lab, 3)
    damage(newest(run) / file, random.Random(file))
    ended = lab.train(QUIET, 3, run)
    assert [event.file for event in ended.events_of_kind(CheckpointRejected)] == [file]
    assert ended.digest == lab.train_reference(QUIET, 3).digest


def test_two_damaged_checkpoints_in_a_row(lab: TrainHarness) -> None:
    run, rng = broken_run(lab, 1), random.Random(2)
    *damaged, good = list_checkpoints(run.checkpoints)
    for checkpoint in damaged:
        flip(checkpoint / "rank-00000.safetensors", rng)
    ended = lab.train(QUIET, 1, run)
    assert [Path(event.path).name for event in ended.events_of_kind(CheckpointRejected)] == [it.name for it in damaged]
    assert ended.events_of_kind(AttemptStarted)[-1].start_step == parse_step(good)
    assert ended.digest == lab.train_reference(QUIET, 1).digest


def test_a_bit_that_flips_between_two_attempts_is_found_by_the_restart(lab: TrainHarness) -> None:
    """Without anybody starting the run again: the agent's own restart finds it."""
    run, rng = broken_run(lab, 2), random.Random(3)

    def show(event: dict[str, object]) -> None:
        if isinstance(event, WorkerFailure):
            flip(newest(run) / "rank-00000.safetensors", rng)

    ended = lab.train(QUIET, 2, run, faults=[plan_fault(15, ranks=[1], attempt=len(STOPS) + 1)], show=show)
    assert [event.file for event in ended.events_of_kind(CheckpointRejected)] == ["rank-00000.safetensors"]
    assert ended.digest == lab.train_reference(QUIET, 2).digest


@pytest.mark.parametrize("nproc", [1, 3])
def test_a_run_whose_checkpoints_are_all_damaged_says_so_and_starts_nothing_over(lab: TrainHarness, nproc: int) -> None:
    run, rng = broken_run(lab, nproc), random.Random(4)
    for checkpoint in list_checkpoints(run.checkpoints):
        flip(checkpoint / "MANIFEST.json", rng)
    ended = lab.train(QUIET, nproc, run)
    assert ended.code == ExitCode.DATA
    assert ended.message is not None
    assert "no checkpoint here is good" in ended.message
    assert len(ended.events_of_kind(CheckpointRejected)) == 3
    assert len(list_checkpoints(run.checkpoints)) == 3
    assert not [
        event
        for event in ended.events_of_kind(StepDone)
        if event.time > ended.events_of_kind(CheckpointRejected)[0].time
    ]
