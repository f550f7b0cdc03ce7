"""Faults wait for what the run tells, strike only its own processes, and undo what they held."""

import json
import os
import subprocess
import time
import uuid
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from made_events import made
from phalanx.jobs.chaos.fault_plan import Fault, FaultPhase, FaultTrigger
from phalanx.jobs.chaos.faults import (
    DISK_FULL_MAX_FILE_BYTES,
    FaultContext,
    InjectedFault,
    inject,
    inject_disk_full,
    inject_faults,
    inject_freeze,
    inject_storage_outage,
    run_while_paused,
    wait_for_trigger,
)
from phalanx.jobs.chaos.launcher import CHAOS_TAG_VARIABLE, RunMonitor, TypicalDurations, measure_durations
from phalanx.run import Run
from phalanx.run.event_types import (
    AttemptStarted,
    CheckpointFailed,
    CheckpointSaved,
    RunEvent,
    StepDone,
    WorkerFailure,
    WorkerStarted,
)
from phalanx.run.fields import to_fields

NOW = FaultTrigger(FaultPhase.STEP, 0.0)


class Told:
    """A run that tells what a test says, with real processes as its workers."""

    def __init__(self, run: Run):
        self.run, self.story, self.mark = run, RunMonitor(run), str(uuid.uuid4())
        self.now, self.struck = 0.0, list[InjectedFault]()
        self.processes: list[subprocess.Popen[bytes]] = []
        usual = TypicalDurations(step_s=1.0, save_s=2.0, restart_s=4.0)
        self.scene = FaultContext(self.story, usual, self.mark, self.struck.append, clock=lambda: self.now)

    def tell(self, kind: type[RunEvent], **fields: Any) -> None:
        with open(self.run.events, "a") as file:
            print(json.dumps(to_fields(made(kind, time=1.0, **fields))), file=file)  # type: ignore[arg-type]
        self.story.read_new()

    def worker(self, attempt: int, rank: int = 0, **environment: str) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(["sleep", "60"], env=environment or {CHAOS_TAG_VARIABLE: self.mark})
        self.processes.append(process)
        until = time.monotonic() + 5.0
        while not psutil.Process(process.pid).environ():  # which takes a moment to be seen
            assert time.monotonic() < until
        self.tell(WorkerStarted, pid=process.pid, rank=rank, attempt=attempt)
        return process

    def comes(self, waiting: Iterator[float]) -> bool:
        """Whether it is over at this time, with nothing new told."""
        return next(waiting, None) is None


@pytest.fixture
def told(tmp_path: Path) -> Iterator[Told]:
    run = Run(tmp_path / "run")
    run.create()
    told = Told(run)
    yield told
    for process in told.processes:
        process.kill()
        process.wait()


def becomes(process: psutil.Process, stopped: bool) -> None:
    """A signal takes a moment; fails when nothing has come of it after five seconds."""
    until = time.monotonic() + 5.0
    while (process.status() == psutil.STATUS_STOPPED) is not stopped:
        assert time.monotonic() < until


def a_fault(kind: str, moment: FaultTrigger = NOW, rank: int = 0, luck: float = 0.5) -> Fault:
    return Fault(1, kind, rank, moment, luck)


def test_what_an_attempt_did_does_not_count_for_the_next(told: Told) -> None:
    told.worker(0)
    told.tell(AttemptStarted)
    told.tell(StepDone, step=9)
    told.tell(CheckpointSaved, step=8)
    told.worker(1)
    story = told.story
    assert (story.attempt, story.is_training, story.last_step, story.saved_step, len(story.worker_pids)) == (
        1,
        False,
        None,
        8,
        1,
    )


def test_what_is_usual_is_the_median_of_a_run() -> None:
    worker, start = made(WorkerStarted, time=1.0), made(AttemptStarted, time=1.5)
    steps = [made(StepDone, duration_s=seconds) for seconds in (0.1, 0.2, 9.0)]
    assert measure_durations([worker, worker, start, *steps]) == TypicalDurations(0.2, 0.0, 0.5)


def test_a_step_is_waited_for_and_a_share_of_the_next(told: Told) -> None:
    told.worker(0)
    waiting = wait_for_trigger(FaultTrigger(FaultPhase.STEP, 0.5, min_step=3), told.scene)
    told.tell(StepDone, step=2)
    assert not told.comes(waiting)
    told.tell(StepDone, step=3)
    told.now = 100.0
    assert not told.comes(waiting)
    told.now = 100.4
    assert not told.comes(waiting)
    told.now = 100.5
    assert told.comes(waiting)


def test_a_fresh_moment_waits_for_a_checkpoint_newer_than_those_before(told: Told) -> None:
    told.worker(0)
    told.scene.saved_step = 20
    waiting = wait_for_trigger(FaultTrigger(FaultPhase.STEP, 0.0, min_step=1, after_new_checkpoint=True), told.scene)
    told.tell(StepDone, step=30)
    told.tell(CheckpointSaved, step=20)
    assert not told.comes(waiting)
    told.tell(CheckpointSaved, step=30)
    assert told.comes(waiting)


def test_a_save_is_waited_for_until_its_directory_is_there(told: Told) -> None:
    told.worker(0)
    told.tell(AttemptStarted)
    told.tell(StepDone, step=5)
    stale, ours = (told.run.checkpoints / f"step-000000005.tmp-{tag}" for tag in ("deleted", "0"))
    stale.mkdir()
    waiting = wait_for_trigger(FaultTrigger(FaultPhase.SAVE, 0.5, min_step=1), told.scene)
    assert not told.comes(waiting)
    ours.mkdir()
    assert not told.comes(waiting)
    told.now = 1.0
    assert told.comes(waiting)


def test_the_next_fault_waits_until_the_attempt_that_was_struck_is_followed_by_another(told: Told) -> None:
    first = told.worker(0)
    faults = [
        a_fault("kill", FaultTrigger(FaultPhase.RESTART, 0.25)),
        a_fault("kill", FaultTrigger(FaultPhase.RESTART, 0.25)),
    ]
    playing = inject_faults(faults, told.scene)
    next(playing)
    told.now = 1.0
    next(playing)
    assert first.wait() == -9
    told.now = 50.0
    assert next(playing, None) is not None
    second = told.worker(1)
    next(playing)
    assert second.poll() is None
    told.now = 51.0
    next(playing)
    assert second.wait() == -9
    assert [one.attempt for one in told.struck] == [0, 1]
    assert [one.phase for one in told.struck] == [FaultPhase.RESTART, FaultPhase.RESTART]


def test_a_process_without_the_mark_is_let_be(told: Told) -> None:
    stranger = told.worker(0, OTHER="1")
    with pytest.raises(psutil.NoSuchProcess):
        next(inject(a_fault("kill"), told.scene), None)
    assert stranger.poll() is None
    assert told.struck == []


def test_a_pause_ends_by_itself_and_when_it_is_broken_off(told: Told) -> None:
    worker = psutil.Process(told.worker(0).pid)
    for broken in (False, True):
        pausing = inject_freeze(a_fault("freeze"), told.scene)
        next(pausing)
        becomes(worker, stopped=True)
        if broken:
            pausing.close()
        else:
            told.now += 1.0
            assert told.comes(pausing)
        becomes(worker, stopped=False)


def test_files_of_a_worker_may_grow_again_after_a_save_has_failed(told: Told) -> None:
    worker = psutil.Process(told.worker(0).pid)
    before = worker.rlimit(psutil.RLIMIT_FSIZE)
    filling = inject_disk_full(a_fault("disk-full"), told.scene)
    assert not told.comes(filling)
    assert worker.rlimit(psutil.RLIMIT_FSIZE)[0] == DISK_FULL_MAX_FILE_BYTES
    told.tell(CheckpointFailed)
    assert told.comes(filling)
    assert worker.rlimit(psutil.RLIMIT_FSIZE) == before


def test_damage_is_one_bit_of_the_newest_of_two_checkpoints_and_no_worker_goes_on(told: Told) -> None:
    victim, other = told.worker(0, rank=1), told.worker(0, rank=0)
    for step in (10, 20):
        folder = told.run.checkpoints / f"step-{step:09d}"
        playing = inject(a_fault("corrupt-checkpoint", rank=1), told.scene)
        if step == 20:
            assert next(playing, None) is not None  # one is not enough
        folder.mkdir()
        (folder / "a").write_bytes(bytes(1000))
    next(playing, None)
    assert victim.wait() == -9
    becomes(psutil.Process(other.pid), stopped=True)
    assert (told.run.checkpoints / "step-000000010" / "a").read_bytes() == bytes(1000)
    assert sum((folder / "a").read_bytes()) in [1 << bit for bit in range(8)]


def struck_by_storage(told: Told) -> Generator[float, None, None]:
    """Storage that has failed, of a run with a checkpoint."""
    (told.run.checkpoints / "step-000000010").mkdir()
    failing = inject_storage_outage(a_fault("storage-outage"), told.scene)
    while not told.struck:
        next(failing)
    return failing


@pytest.mark.parametrize("kind", [CheckpointFailed, WorkerFailure])
def test_checkpoints_can_be_reached_again_when_something_has_failed_of_it(told: Told, kind: str) -> None:
    told.worker(0)
    failing = struck_by_storage(told)
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        os.listdir(told.run.checkpoints)
    assert not told.comes(failing)
    told.tell(kind)
    for _ in failing:
        pass
    assert os.listdir(told.run.checkpoints) == ["step-000000010"]
    assert not told.run.checkpoints.is_symlink()


def test_checkpoints_can_be_reached_again_when_all_agents_are_gone(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    process = told.worker(0)
    agent = psutil.Process(process.pid)
    monkeypatch.setattr(FaultContext, "find_agent", lambda self, rank: agent)
    failing = struck_by_storage(told)
    assert not told.comes(failing)
    process.kill()
    for _ in failing:
        pass
    assert os.listdir(told.run.checkpoints) == ["step-000000010"]


def test_checkpoints_are_brought_back_when_the_run_is_ended_meanwhile(told: Told) -> None:
    told.worker(0)
    struck_by_storage(told).close()
    assert os.listdir(told.run.checkpoints) == ["step-000000010"]


def test_all_processes_of_a_run_stand_still_while_something_is_done_and_go_on_after_it(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = psutil.Process(told.worker(0).pid)
    monkeypatch.setattr(FaultContext, "find_agent", lambda self, rank: agent)
    seen: list[str] = []
    for _ in run_while_paused(told.scene, lambda: seen.append(agent.status())):
        pass
    assert seen == [psutil.STATUS_STOPPED]
    becomes(agent, stopped=False)
