"""What waits for the process that forks workers: it has an end, and says that it goes on. Real processes, stopped by
SIGSTOP or in a loop that never ends; deadlines are short here."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from fork_server_calls import WITHOUT_TORCH
from made_messages import start_workers
from phalanx.deadline import Deadline
from phalanx.jobs.agent.fork_server_client import (
    ForkServerClient,
    ForkServerLostError,
    StopRequestedError,
)
from phalanx.run.messages import SendTimeoutError, make_socket_pair, send, set_send_timeout
from phalanx.run.process_messages import SendSignal
from train_harness import wait_until

Make = Callable[..., ForkServerClient]
AGAIN = "start again with the same command"


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def make(said: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes one that finds the functions of `fork_server_calls`."""
    monkeypatch.setattr("phalanx.jobs.agent.fork_server_client.POLL_INTERVAL_S", 0.05)
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


def again_and_again(act: Callable[[], None]) -> None:
    """More often than what it sends fits a socket."""
    for _ in range(10_000):
        act()


def test_one_that_takes_nothing_is_killed_and_reported(make: Make) -> None:
    fork_server = make()
    stop(fork_server.process.pid)
    set_send_timeout(fork_server.control, 0.05)
    with pytest.raises(ForkServerLostError, match=f"took no message for 10 s: it hangs; {AGAIN}"):
        again_and_again(lambda: fork_server.send(SendSignal(signal=0)))
    assert fork_server.has_exited()


def test_one_that_hangs_at_the_end_is_killed_with_all_below_it(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phalanx.jobs.agent.fork_server_client.EXIT_TIMEOUT_S", 0.5)
    for name in ("worker", "child"):
        os.mkfifo(tmp_path / name)
    fork_server = make()
    fork_server.wait_until_ready()
    fork_server.send(start_workers("fork_server_calls:wait_for_ever", str(tmp_path), tmp_path))
    pids = [int((tmp_path / name).read_text()) for name in ("worker", "child")]
    stop(fork_server.process.pid)
    fork_server.__exit__()
    assert fork_server.has_exited()
    wait_until(lambda: not any(map(psutil.pid_exists, pids)))


def test_one_that_still_loads_torch_is_not_waited_for_at_the_end(make: Make, said: list[str], tmp_path: Path) -> None:
    """Whoever refuses a recipe meanwhile leaves at once."""
    (tmp_path / "torch.py").write_text("import signal\nsignal.pause()\n")
    fork_server = make(tmp_path)
    fork_server.__exit__()
    assert fork_server.has_exited()
    assert said == []


def test_torch_that_never_comes_to_its_end_is_reported_while_it_is_waited_for(
    make: Make, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("import signal\nsignal.pause()\n")
    monkeypatch.setattr(
        "phalanx.jobs.agent.fork_server_client.Deadline",
        lambda *given, **more: Deadline(*given, **{"report_interval_s": 0.2, **more}),
    )
    fork_server = make(tmp_path, ready_timeout_s=0.5)
    with pytest.raises(ForkServerLostError, match=f"^waited 0 s for the process .* to be ready: it hangs; {AGAIN}$"):
        fork_server.wait_until_ready()
    assert fork_server.has_exited()
    assert said
    assert said[0].startswith("still waiting for the process that loads torch and starts workers to be ready after 0 s")


def test_a_wait_ends_at_once_when_this_process_is_asked_to_stop(make: Make, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import signal\nsignal.pause()\n")
    fork_server = make(tmp_path)
    fork_server.is_stop_requested = lambda: True
    with pytest.raises(StopRequestedError, match=r"^asked to stop while it waited for the process .* to be ready$"):
        fork_server.wait_until_ready()
    assert fork_server.has_exited()


def test_a_trial_that_hangs_is_killed_with_all_below_it_and_reported(make: Make, tmp_path: Path) -> None:
    others = psutil.Process().children(recursive=True)
    fork_server = make(call_timeout_s=0.5)
    fork_server.wait_until_ready()
    with pytest.raises(
        ForkServerLostError,
        match=rf"for a trial before the run \(fork_server_calls:stay\) to end: it hangs; {AGAIN}; if it is",
    ):
        fork_server.call("fork_server_calls:stay", str(tmp_path))
    assert set(psutil.Process().children(recursive=True)) <= set(others)


def test_a_message_to_one_that_reads_nothing_does_not_wait_without_end() -> None:
    near, far = make_socket_pair()
    with near, far:
        set_send_timeout(near, 0.05)
        with pytest.raises(SendTimeoutError):
            again_and_again(lambda: send(near, SendSignal(signal=0)))


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
