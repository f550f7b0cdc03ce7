"""What waits for the process that forks workers: it has an end, and says that it goes on. Real processes, stopped by
SIGSTOP or in a loop that never ends; deadlines are short here."""

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from fork_server_calls import HELPERS, WITHOUT_TORCH
from made_messages import start_workers
from phalanx.app.calibrate import call_on_ranks
from phalanx.deadline import Deadline
from phalanx.errors import ExitCode
from phalanx.jobs.agent.fork_server_client import (
    RESUME_AFTER_CHECKS,
    ForkServerClient,
    ForkServerLostError,
    StopRequestedError,
    call_timeout,
)
from phalanx.jobs.agent.pausable_workers import PausableWorkers, WorkersFailedError
from phalanx.run import Run
from phalanx.run.message_socket import SendTimeoutError, make_socket_pair, send, set_send_timeout
from phalanx.run.process_messages import Command, SendSignal
from train_harness import wait_until

Make = Callable[..., ForkServerClient]
AGAIN = "start again with the same command"


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def make(said: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes one whose calls are those of `nursery_calls` and `bout_calls`."""
    monkeypatch.setattr("phalanx.jobs.agent.fork_server_client.POLL_INTERVAL_S", 0.05)
    monkeypatch.setattr("phalanx.jobs.agent.pausable_workers.POLL_INTERVAL_S", 0.05)
    monkeypatch.setattr("phalanx.app.calibrate.POLL_INTERVAL_S", 0.05)
    made: list[ForkServerClient] = []

    def start(path: Path | str = WITHOUT_TORCH, **patience: Any) -> ForkServerClient:
        monkeypatch.setenv("PYTHONPATH", str(path))
        made.append(ForkServerClient(**{"report": said.append, **patience}))
        return made[-1]

    yield start
    for process in made:
        process.__exit__()
        assert process.has_exited()


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)


def stopping_again(nursery: ForkServerClient, said: list[str]) -> Callable[[str], None]:
    """Stops it whenever it was continued."""

    def tell(text: str) -> None:
        said.append(text)
        stop(nursery.process.pid)

    return tell


def again_and_again(act: Callable[[], None]) -> None:
    """More often than what it sends fits a socket."""
    for _ in range(10_000):
        act()


def test_what_is_stopped_at_any_moment_is_continued_with_a_word(make: Make, said: list[str]) -> None:
    nursery = make(HELPERS)  # its store is torch's
    who = f"the process that loads torch and starts workers (process {nursery.process.pid})"
    stop(nursery.process.pid)
    nursery.wait_until_ready()
    assert said == [f"{who} was stopped (SIGSTOP): continued it"]
    stop(nursery.process.pid)
    assert nursery.call("fork_server_calls:double", 4) == 8
    assert said[1:] == said[:1]
    assert nursery.call("fork_server_calls:stop_oneself", 7) == 7
    assert said[2].endswith(
        "which the process that loads torch and starts workers has started, was stopped (SIGSTOP): continued it"
    )
    nursery.start_store("127.0.0.1")
    stop(nursery.store_pid)
    for _ in range(RESUME_AFTER_CHECKS):
        assert nursery.resume_if_stopped() is None
    wait_until(lambda: psutil.Process(nursery.store_pid).status() != psutil.STATUS_STOPPED)
    assert said[3].startswith(f"process {nursery.store_pid}, which the process that")
    assert len(said) == 4


@pytest.mark.parametrize("what", ["ready", "call"])
def test_one_that_stays_stopped_is_killed_and_reported_as_not_finished(make: Make, said: list[str], what: str) -> None:
    nursery = make()
    nursery.report = stopping_again(nursery, said)
    if what == "call":
        nursery.wait_until_ready()
    stop(nursery.process.pid)
    why = f"is stopped (SIGSTOP), and stays so when it is continued; {AGAIN}"
    with pytest.raises(ForkServerLostError, match=re.escape(why)) as lost:
        nursery.call("fork_server_calls:stay", "")
    assert lost.value.code is ExitCode.UNFINISHED
    assert nursery.has_exited()


def test_one_that_takes_nothing_is_killed_and_reported(make: Make) -> None:
    nursery = make()
    stop(nursery.process.pid)
    set_send_timeout(nursery.control, 0.05)
    with pytest.raises(ForkServerLostError, match=f"took no message for 10 s: it hangs; {AGAIN}"):
        again_and_again(lambda: nursery.send(SendSignal(signal=0)))
    assert nursery.has_exited()


def test_one_that_is_stopped_at_the_end_is_killed_at_once_with_all_below_it(
    make: Make, said: list[str], tmp_path: Path
) -> None:
    for name in ("worker", "child"):
        os.mkfifo(tmp_path / name)
    nursery = make()
    nursery.wait_until_ready()
    nursery.send(start_workers("fork_server_calls:wait_for_ever", str(tmp_path), tmp_path))
    pids = [int((tmp_path / name).read_text()) for name in ("worker", "child")]
    stop(nursery.process.pid)
    nursery.__exit__()
    assert nursery.has_exited()
    assert said == []
    wait_until(lambda: not any(map(psutil.pid_exists, pids)))


def test_one_that_still_loads_torch_is_not_waited_for_at_the_end(make: Make, said: list[str], tmp_path: Path) -> None:
    """Whoever refuses a recipe meanwhile leaves at once."""
    (tmp_path / "torch.py").write_text("import signal\nsignal.pause()\n")
    nursery = make(tmp_path)
    nursery.__exit__()
    assert nursery.has_exited()
    assert said == []


def test_torch_that_never_comes_to_its_end_is_reported_while_it_is_waited_for(
    make: Make, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("import signal\nsignal.pause()\n")
    monkeypatch.setattr(
        "phalanx.jobs.agent.fork_server_client.Deadline",
        lambda *given, **more: Deadline(*given, **{"report_interval_s": 0.2, **more}),
    )
    nursery = make(tmp_path, ready_timeout_s=0.5)
    with pytest.raises(ForkServerLostError, match=f"^waited 0 s for the process .* to be ready: it hangs; {AGAIN}$"):
        nursery.wait_until_ready()
    assert nursery.has_exited()
    assert said
    assert said[0].startswith("still waiting for the process that loads torch and starts workers to be ready after 0 s")


def test_a_wait_ends_at_once_when_this_process_is_asked_to_stop(make: Make, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import signal\nsignal.pause()\n")
    nursery = make(tmp_path)
    nursery.is_stop_requested = lambda: True
    with pytest.raises(StopRequestedError, match=r"^asked to stop while it waited for the process .* to be ready$"):
        nursery.wait_until_ready()
    assert nursery.has_exited()


def test_a_working_folder_that_is_gone_is_told_before_torch_is_loaded(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(FileNotFoundError):
        make()


def test_a_trial_that_hangs_is_killed_with_all_below_it_and_reported(make: Make, tmp_path: Path) -> None:
    others = psutil.Process().children(recursive=True)
    nursery = make(call_timeout_s=0.5)
    nursery.wait_until_ready()
    with pytest.raises(
        ForkServerLostError,
        match=rf"for a trial before the run \(fork_server_calls:stay\) to end: it hangs; {AGAIN}; if it is",
    ):
        nursery.call("fork_server_calls:stay", str(tmp_path))
    assert set(psutil.Process().children(recursive=True)) <= set(others)


def test_a_world_whose_process_that_forks_stays_stopped_has_failed(make: Make, said: list[str], tmp_path: Path) -> None:
    nursery, run = make(), Run(tmp_path)
    run.create()
    nursery.wait_until_ready()
    nursery.report = stopping_again(nursery, said)
    command = Command(function="pausable_worker_calls:steps", payload={"folder": str(tmp_path), "seconds": 0.01})
    world = PausableWorkers(nursery, run, 1, command)
    assert world.run_for(0.02)
    stop(nursery.process.pid)
    with pytest.raises(WorkersFailedError, match="is stopped"):
        world.close()
    assert nursery.has_exited()
    with pytest.raises(WorkersFailedError, match=r"was killed by SIGKILL|died, and they with it"):
        world.start()


def test_a_measurement_whose_process_that_forks_stays_stopped_ends(make: Make, said: list[str], tmp_path: Path) -> None:
    nursery = make()
    nursery.wait_until_ready()
    nursery.report = stopping_again(nursery, said)
    stop(nursery.process.pid)
    with pytest.raises(ForkServerLostError, match="is stopped"):
        call_on_ranks(nursery, tmp_path, "fork_server_calls:double", {"seconds": 60.0}, 1)
    assert nursery.has_exited()


def test_a_message_to_one_that_reads_nothing_does_not_wait_without_end() -> None:
    near, far = make_socket_pair()
    with near, far:
        set_send_timeout(near, 0.05)
        with pytest.raises(SendTimeoutError):
            again_and_again(lambda: send(near, SendSignal(signal=0)))


def test_a_trial_has_ten_minutes_or_as_long_as_the_recipe_says_of_silence() -> None:
    assert [call_timeout(silence) for silence in (6.0, 600.0, 7200.0)] == [600.0, 600.0, 7200.0]


def test_a_wait_says_that_it_goes_on_and_has_an_end() -> None:
    said, times = list[str](), iter(range(0, 1000, 4))
    wait = Deadline("the tide", 60.0, said.append, lambda: float(next(times)))
    looks = 1
    while not wait.check_expired():
        looks += 1
    assert looks == 15
    assert said == ["still waiting for the tide after 32 s, for 60 s at most"]


def test_time_in_which_this_process_was_held_still_does_not_count() -> None:
    times = iter([0.0, 1.0, 5000.0, 5001.0])
    wait = Deadline("the tide", 60.0, print, lambda: next(times))
    assert [wait.check_expired() for _ in range(3)] == [False, False, False]
