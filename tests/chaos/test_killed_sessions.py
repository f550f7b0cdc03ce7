"""Training loops of the user's own that are killed, hang, are stopped, run out of memory or leave: no step is lost."""

import signal
from pathlib import Path

import pytest

from phalanx.errors import ExitCode
from phalanx.jobs.agent.heartbeat_checks import MIN_SILENCE_S
from phalanx.run.event_types import AttemptStarted, HangDetected, WorkerFailure
from session_runs import (
    SLOW,
    STEPS,
    read_logs,
    run_session,
    run_session_once,
    train_plain_loop,
    write_session_scripts,
)
from train_harness import TrainHarness, plan_fault, send_signal_at_step


@pytest.fixture(scope="module")
def scripts(lab: TrainHarness) -> Path:
    return write_session_scripts(lab)


@pytest.mark.parametrize(
    ("nproc", "ranks", "overrides"),
    [
        (1, None, []),
        (2, [1], []),
        pytest.param(2, None, ["batch.micro_size=2"], marks=pytest.mark.slow),
        pytest.param(2, [0], ["parallelism.shard=2"], marks=pytest.mark.slow),
        pytest.param(2, [1], ["parallelism.tensor=2"], marks=pytest.mark.slow),
        pytest.param(
            2,
            [1],
            ["local_sgd.method=diloco", "determinism=off", "local_sgd.sync_every=2", "local_sgd.warmup_steps=0"],
            marks=pytest.mark.slow,
            id="diloco",
        ),
    ],
)
def test_killed_at_any_step_it_ends_in_the_same_bits(
    lab: TrainHarness, scripts: Path, nproc: int, ranks: list[int] | None, overrides: list[str]
) -> None:
    arguments = ["dropout", *overrides]
    kills = [plan_fault(3, ranks=ranks), plan_fault(7, ranks=ranks, attempt=1), plan_fault(10, ranks=ranks, attempt=2)]
    ended = run_session(lab, arguments, nproc, faults=[SLOW, *kills])
    assert ended.digest == run_session_once(lab, *arguments, nproc=nproc).digest
    starts = [event.start_step for event in ended.events_of_kind(AttemptStarted)]
    assert len(starts) == 4
    assert starts[-1] in (4, 8)  # the last checkpoint, or the one before where the disk was slow


@pytest.mark.slow
def test_a_loop_that_hangs_is_told_with_its_stack_and_started_again(lab: TrainHarness, scripts: Path) -> None:
    arguments = ["batch.micro_size=1"]
    ended = run_session(lab, ["stuck", *arguments, "fault_tolerance.hang_timeout_s=7.5"], 2)
    assert ended.digest == run_session_once(lab, "right", *arguments, nproc=2).digest
    (hang,) = ended.events_of_kind(HangDetected)
    assert (hang.rank, hang.is_stopped) == (1, False)
    assert hang.silence_s < 2 * MIN_SILENCE_S
    assert "in work_between_steps" in hang.stack
    assert "session_script.py" in hang.stack
    (told,) = ended.events_of_kind(WorkerFailure)
    assert (told.rank, told.what) == (1, "hang")


@pytest.mark.slow
def test_a_loop_that_says_that_it_is_alive_is_let_be(lab: TrainHarness, scripts: Path) -> None:
    ended = run_session(lab, ["thinks", "batch.micro_size=1", "fault_tolerance.hang_timeout_s=6"], 2)
    assert ended.digest == run_session_once(lab, "right", "batch.micro_size=1", nproc=2).digest
    assert ended.events_of_kind(HangDetected) == ended.events_of_kind(WorkerFailure) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_stopped_it_saves_and_goes_on_to_the_same_bits(
    lab: TrainHarness, scripts: Path, number: signal.Signals
) -> None:
    stopped = run_session(lab, ["dropout"], 2, faults=[SLOW], show=send_signal_at_step(3, number))
    assert (stopped.code, stopped.message) == (ExitCode.UNFINISHED, None)
    assert 3 <= stopped.result["steps"] < STEPS
    assert stopped.result["status"] == "interrupted"
    assert run_session(lab, ["dropout"], 2, stopped.run).digest == run_session_once(lab, "dropout", nproc=2).digest


def test_a_loop_that_runs_out_of_memory_goes_on_with_smaller_micro_batches(lab: TrainHarness, scripts: Path) -> None:
    ended = run_session(lab, ["hungry"])
    assert ended.code == ExitCode.DONE, (ended.message, read_logs(ended))
    assert ended.losses == pytest.approx(train_plain_loop(), rel=1e-5)
    given = run_session(lab, ["hungry", "batch.micro_size=12"])
    assert given.code == ExitCode.RECIPE
    assert "out of memory with micro-batches of 12; use batch.micro_size=6" in str(given.message)


@pytest.mark.parametrize("name", ["language", pytest.param("vision", marks=pytest.mark.slow)])
def test_an_example_learns_and_survives(lab: TrainHarness, scripts: Path, name: str) -> None:
    whole = run_session_once(lab, nproc=2, script=name)
    killed = run_session(lab, [], 2, script=name, faults=[plan_fault(6, ranks=[1]), plan_fault(9, attempt=1)])
    assert killed.digest == whole.digest
    assert sum(whole.losses[-3:]) < 0.9 * sum(whole.losses[:3])


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("exits", "sys.exit() was called before the run was done ("),
        ("vanishes", "with exit code 0, before the run was done"),
    ],
)
def test_a_loop_whose_worker_leaves_with_0_is_given_up_and_the_worker_named(
    lab: TrainHarness, scripts: Path, how: str, told: str
) -> None:
    ended = run_session(lab, [how, "fault_tolerance.max_restarts=1"], 2)
    assert ended.code == ExitCode.GAVE_UP
    assert told in str(ended.message)
    assert (ended.result["status"], ended.result["digest"]) == ("failed", None)
