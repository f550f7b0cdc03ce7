"""No room while saving: training goes on, the old checkpoint stays whole, and what could not be kept is told."""

import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from checkpoints import kept
from phalanx.errors import ExitCode
from phalanx.run import Run
from phalanx.run.event_types import AttemptStarted, CheckpointFailed, CheckpointSaved, StepDone
from phalanx.train.checkpoint.format import list_checkpoints, parse_step
from phalanx.train.checkpoint.load import verify_checkpoint
from train_harness import HarnessRun, TrainHarness, Values, plan_fault

QUIET: Values = {"evaluation": {"every": 12}, "steps": 16}
"""Checkpoints at steps 4, 8 and 12, none for being the best."""
SLOW = plan_fault(1, "slow", delay=0.03)
"""Steps so slow that a save is done before the next is due."""


def failed(ended: HarnessRun) -> list[int]:
    return [event.step for event in ended.events_of_kind(CheckpointFailed)]


@pytest.mark.parametrize(
    ("nproc", "ranks"), [(1, None), (2, [1]), (2, [0]), pytest.param(3, None, marks=pytest.mark.slow)]
)
def test_a_disk_that_is_full_for_a_while_costs_only_the_checkpoints_of_that_while(
    lab: TrainHarness, nproc: int, ranks: list[int] | None
) -> None:
    faults = [SLOW, plan_fault(8, "limit-files", ranks=ranks), plan_fault(12, "free-files", ranks=ranks)]
    ended = lab.train(QUIET, nproc, faults=faults)
    assert failed(ended) == [8]
    assert ended.digest == lab.train_reference(QUIET, nproc).digest
    assert kept(ended.run) == [16, 12, 4]


@pytest.mark.parametrize(("nproc", "ranks"), [(1, None), pytest.param(2, [1], marks=pytest.mark.slow), (2, [0])])
def test_a_disk_that_stays_full_leaves_the_old_checkpoint_and_the_run_can_be_finished_later(
    lab: TrainHarness, nproc: int, ranks: list[int] | None
) -> None:
    ended = lab.train(QUIET, nproc, faults=[SLOW, plan_fault(8, "limit-files", ranks=ranks)])
    assert ended.code == ExitCode.UNFINISHED
    assert ended.message is not None
    assert "step 16: the last checkpoint could not be written" in ended.message
    assert "the last good checkpoint is of step 4" in ended.message
    assert failed(ended) == [8, 12, 16]
    assert "File too large" in ended.events_of_kind(CheckpointFailed)[0].reason or ranks == [1]
    assert max(event.step for event in ended.events_of_kind(StepDone)) == 16
    assert kept(ended.run) == [4]
    assert ended.result["status"] == "interrupted"
    again = lab.train(QUIET, nproc, ended.run)
    assert again.digest == lab.train_reference(QUIET, nproc).digest
    assert again.events_of_kind(AttemptStarted)[-1].start_step == 4


@pytest.fixture
def small_disk(lab: TrainHarness) -> Iterator[Path]:
    """A small file system of its own."""
    place = lab.runs / "small-disk"
    place.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a file system")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place: Path) -> None:
    """Leave not a byte free."""
    with open(place / "ballast", "ab", buffering=0) as file:
        for size in (4096, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue


def test_a_really_full_file_system_under_the_whole_run(lab: TrainHarness, small_disk: Path) -> None:
    """Events, logs and checkpoints, all on the disk that fills up."""
    run = Run(small_disk / "run")
    filled = threading.Event()

    def show(event: dict[str, Any]) -> None:
        if isinstance(event, CheckpointSaved) and not filled.is_set():
            filled.set()
            fill(small_disk)

    ended = lab.train(QUIET, 2, run, faults=[SLOW], show=show)
    assert filled.is_set()
    assert ended.code == ExitCode.UNFINISHED, ended.message
    assert ended.message is not None
    assert "could not be written" in ended.message
    assert 4 in [parse_step(path) for path in list_checkpoints(run.checkpoints)]
    verify_checkpoint(list_checkpoints(run.checkpoints)[-1])
    (small_disk / "ballast").unlink()
    again = lab.train(QUIET, 2, run)
    assert again.digest == lab.train_reference(QUIET, 2).digest


def test_events_that_found_no_room_are_written_when_there_is_room_again(lab: TrainHarness, small_disk: Path) -> None:
    def show(event: dict[str, Any]) -> None:
        if isinstance(event, CheckpointSaved) and event.step == 4:
            fill(small_disk)
        if isinstance(event, CheckpointFailed):
            (small_disk / "ballast").unlink()

    ended = lab.train(QUIET, 2, Run(small_disk / "run"), faults=[SLOW], show=show)
    assert failed(ended) == [8]
    assert ended.digest == lab.train_reference(QUIET, 2).digest
    assert [event.step for event in ended.events_of_kind(StepDone)] == list(range(1, 17))
