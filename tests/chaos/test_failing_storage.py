"""Storage that fails (EIO) while saving, logging or reading: a run outlasts it, or ends with a line that says so."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from checkpoints import kept
from phalanx.errors import ExitCode
from phalanx.jobs.agent import leader_agent
from phalanx.recipe import load_recipe
from phalanx.recipe.data_schema import DataSource
from phalanx.run import Event
from phalanx.run.event_types import (
    AttemptStarted,
    CheckpointFailed,
    CheckpointRejected,
    RunWarning,
    StepDone,
    WorkerFailure,
)
from phalanx.train.checkpoint.format import list_checkpoints, parse_step
from train_harness import TrainHarness, Values, plan_fault

QUIET: Values = {"evaluation": {"every": 12}, "steps": 16}
"""Checkpoints at steps 4, 8 and 12, none for being the best."""
SLOW = plan_fault(1, "slow", delay=0.03, attempt=None)
"""Steps so slow that a save is done before the next is due."""


@pytest.mark.parametrize("ranks", [None, [0], [1]])
def test_a_save_that_fails_is_told_and_the_next_one_is_made(lab: TrainHarness, ranks: list[int] | None) -> None:
    faults = [
        {**SLOW, "delay": 0.1},
        plan_fault(7, "fail-storage", ranks=ranks),
        plan_fault(11, "mend-storage", ranks=ranks),
    ]
    ended = lab.train(QUIET, 2, faults=faults)
    assert ended.digest == lab.train_reference(QUIET, 2).digest
    assert [event.step for event in ended.events_of_kind(CheckpointFailed)] == [8]
    if ranks != [1]:
        assert "Input/output error" in ended.events_of_kind(CheckpointFailed)[0].reason
    assert ended.result["num_restarts"] == 0
    assert kept(ended.run) == [16, 12, 4]


def test_storage_that_fails_in_the_middle_of_a_save_leaves_nothing_half_made(lab: TrainHarness) -> None:
    faults = [SLOW, plan_fault(8, "fail-storage", when="saving"), plan_fault(11, "mend-storage")]
    ended = lab.train(QUIET, 2, faults=faults)
    assert ended.digest == lab.train_reference(QUIET, 2).digest
    longer = lab.train({**QUIET, "steps": 17}, 2, ended.run)  # what storage refused to remove, the next start removes
    assert kept(longer.run)[:3] == [17, 16, 12]


def test_storage_that_fails_to_the_end_leaves_the_old_checkpoint_and_the_run_can_be_finished_later(
    lab: TrainHarness,
) -> None:
    ended = lab.train(QUIET, 2, faults=[SLOW, plan_fault(7, "fail-storage")])
    assert ended.code == ExitCode.UNFINISHED
    assert ended.message is not None
    assert "step 16: the last checkpoint could not be written" in ended.message
    assert not [path for path in ended.run.logs.iterdir() if "Traceback" in path.read_text()]
    assert [parse_step(path) for path in list_checkpoints(ended.run.checkpoints)] == [4]
    again = lab.train(QUIET, 2, ended.run)
    assert again.digest == lab.train_reference(QUIET, 2).digest
    assert kept(again.run)[0] == 16


def test_a_failed_read_is_told_and_followed_by_another_attempt(lab: TrainHarness) -> None:
    ended = lab.train(QUIET, 2, faults=[SLOW, plan_fault(7, "fail-read", ranks=[1])])
    assert ended.digest == lab.train_reference(QUIET, 2).digest
    (told,) = ended.events_of_kind(WorkerFailure)
    assert (told.rank, told.cause) == (1, "storage_failed")
    assert told.message == f"worker 1 ended because storage failed: {ended.run.path}: Input/output error"


def away(folder: Path) -> None:
    """Put a link to itself in the place of a folder, which nobody can follow: what autofs says of a lost mount."""
    os.rename(folder, folder.with_name("aside"))
    folder.symlink_to(folder)


def back(folder: Path) -> None:
    """Undo it."""
    folder.unlink()
    os.rename(folder.with_name("aside"), folder)


def on(**acts: Callable[[], None]) -> Callable[[Event], None]:
    """A `show` that does something once when it hears of a kind of event."""

    def show(event: Event) -> None:
        act = acts.pop(event.kind, None)
        if act is not None:
            act()

    return show


def test_checkpoints_that_cannot_be_read_are_waited_for_and_not_taken_for_bad_or_missing(lab: TrainHarness) -> None:
    run = lab.new_run()
    waits: list[str] = []

    def show(event: Event) -> None:
        if isinstance(event, WorkerFailure) and event.what == "SIGKILL":
            away(run.checkpoints)
        if isinstance(event, RunWarning) and event.text.startswith("waiting for storage"):
            waits.append(event.text)
            back(run.checkpoints)

    ended = lab.train(QUIET, 2, run, faults=[SLOW, plan_fault(10, ranks=[1])], show=show)
    assert ended.digest == lab.train_reference(QUIET, 2).digest
    assert [event.what for event in ended.events_of_kind(WorkerFailure)] == ["SIGKILL", "storage failed"]
    assert len(waits) == 1
    assert ended.events_of_kind(CheckpointRejected) == []
    assert ended.events_of_kind(AttemptStarted)[-1].start_step in (4, 8)


def test_storage_that_does_not_come_back_ends_the_run_with_what_is_wrong(
    lab: TrainHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader_agent, "MAX_OUTAGE_S", 0.0)
    run = lab.new_run()
    ended = lab.train(QUIET, 2, run, faults=[SLOW, plan_fault(6)], show=on(failure=lambda: away(run.checkpoints)))
    assert ended.code == ExitCode.UNFINISHED
    assert str(ended.message).endswith("; storage has failed for 0 s; start it again when storage works")
    assert "ended because storage failed: " in str(ended.message)
    assert ended.result["status"] == "interrupted"
    back(run.checkpoints)
    assert lab.train(QUIET, 2, run).digest == lab.train_reference(QUIET, 2).digest


def descriptor(path: Path) -> int:
    """Of a file that this process has open."""
    return next(
        int(name) for name in os.listdir("/proc/self/fd") if os.path.realpath(f"/proc/self/fd/{name}") == str(path)
    )


def test_events_that_storage_does_not_take_are_written_when_it_does(lab: TrainHarness) -> None:
    """A write to the unmapped beginning of this process's memory is answered by EIO."""
    run = lab.new_run()

    def break_events() -> None:
        memory = os.open("/proc/self/mem", os.O_WRONLY)
        os.dup2(memory, descriptor(run.events.resolve()))
        os.close(memory)

    ended = lab.train(QUIET, 2, run, faults=[SLOW], show=on(checkpoint_saved=break_events))
    assert ended.digest == lab.train_reference(QUIET, 2).digest
    assert [event.step for event in ended.events_of_kind(StepDone)] == list(range(1, 17))


def test_mapped_data_that_storage_cannot_give_are_read_by_another_attempt(lab: TrainHarness) -> None:
    """Beyond the end of a file that has become shorter, as where a read fails, a worker gets SIGBUS."""
    run, longer = lab.new_run(), {**QUIET, "steps": 60, "data": {"source": {"text": "many.txt"}}}
    whole = lab.train_reference(longer).digest
    found: dict[Path, bytes] = {}

    def cut() -> None:
        (source,) = cast(list[DataSource], load_recipe(run.resolved).recipe.data.source)
        for path in Path(str(source.prepared)).glob("*.bin"):
            found[path] = path.read_bytes()
            os.truncate(path, 0)

    def mend() -> None:
        for path, content in found.items():
            path.write_bytes(content)

    ended = lab.train(longer, 1, run, faults=[SLOW], show=on(step=cut, failure=mend))
    assert found
    assert ended.digest == whole
    (told,) = ended.events_of_kind(WorkerFailure)
    assert told.what == "SIGBUS"
    assert "a file that is mapped into memory could not be read" in told.message
