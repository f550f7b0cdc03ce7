"""The fork server: trials and workers in forked processes, all of one fork server that this file starts once."""

import os
import platform
import select
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fork_server_calls import HELPERS, WITHOUT_TORCH
from made_messages import start_workers
from phalanx.errors import ExitCode, PhalanxError, SubprocessError
from phalanx.jobs.agent.fork_server_client import ForkServerClient, ForkServerLostError, add_huge_pages
from phalanx.jobs.agent.forked_child import GPU_FAILED_STATUS, STORAGE_FAILED_STATUS
from phalanx.run.messages import drain, receive, send
from phalanx.run.process_messages import RunCall, SendSignal, StoreDied, WorkerCrashed, WorkerExited, WorkersStarted
from train_harness import wait_until


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServerClient]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(HELPERS))
        process = ForkServerClient()
    with process:
        process.wait_until_ready()
        yield process


def test_no_thread_runs_where_workers_are_forked(fork_server: ForkServerClient) -> None:
    fork_server.call("fork_server_calls:double", 1)  # numpy's BLAS ends its threads before every fork
    assert psutil.Process(fork_server.process.pid).num_threads() == 1


THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(
    not THP.exists() or "[never]" in THP.read_text() or platform.libc_ver() < ("glibc", "2.35"),
    reason="this kernel, or this C library, has no huge pages to ask for",
)
def test_large_tensors_are_in_huge_pages(fork_server: ForkServerClient) -> None:
    assert fork_server.call("fork_server_calls:huge_bytes", 64 << 20) >= 32 << 20


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", "glibc.malloc.hugetlb=1"),
        ("glibc.malloc.check=3", "glibc.malloc.check=3:glibc.malloc.hugetlb=1"),
        ("glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=0"),
    ],
)
def test_what_the_user_says_of_memory_is_kept(given: str, expected: str) -> None:
    assert add_huge_pages(given) == expected


def test_each_call_is_a_process_of_its_own(fork_server: ForkServerClient) -> None:
    assert fork_server.call("fork_server_calls:remember", "a") == ["a"]
    assert fork_server.call("fork_server_calls:remember", "b") == ["b"]


def test_what_was_preloaded_is_there_in_every_call(fork_server: ForkServerClient) -> None:
    fork_server.preload("fork_server_calls:keep", "b")
    assert fork_server.call("fork_server_calls:kept", None) == ["b"]
    assert fork_server.call("fork_server_calls:kept", None) == ["b"]


def test_a_users_error_comes_back_with_its_text_and_code(fork_server: ForkServerClient) -> None:
    with pytest.raises(PhalanxError, match=r"^the shard is torn$") as caught:
        fork_server.call("fork_server_calls:refuse", "the shard is torn")
    assert caught.value.code is ExitCode.DATA


def test_any_other_error_comes_back_with_its_traceback(fork_server: ForkServerClient) -> None:
    with pytest.raises(SubprocessError, match=r"^LookupError: not here$") as caught:
        fork_server.call("fork_server_calls:fail", "not here")
    assert caught.value.traceback is not None
    assert "fork_server_calls.py" in caught.value.traceback


@pytest.mark.parametrize(
    ("function", "payload", "message", "killed"),
    [
        ("no_such_function", None, "no_such_function", False),
        ("leave", 0, "SystemExit: 0", False),
        ("leave", 3, "SystemExit: 3", False),
        ("vanish", 0, "the trial process ended with exit code 0", False),
        ("kill_oneself", int(signal.SIGKILL), "the trial process ended with SIGKILL", True),
        ("kill_oneself", int(signal.SIGALRM), "ended with SIGALRM", False),  # not SIGHUP, which nohup holds back
    ],
)
def test_a_trial_that_cannot_answer_comes_back_as_an_error(
    fork_server: ForkServerClient, function: str, payload: object, message: str, killed: bool
) -> None:
    with pytest.raises(SubprocessError, match=message) as caught:
        fork_server.call(f"fork_server_calls:{function}", payload)
    assert (caught.value.killed, caught.value.code) == (killed, ExitCode.UNFINISHED if killed else ExitCode.GAVE_UP)


def test_a_call_gets_no_answer_that_was_meant_for_another(fork_server: ForkServerClient) -> None:
    call = RunCall(function="fork_server_calls:double", payload=1, call_id=0)
    send(fork_server.control, call)  # a call that was interrupted; its answer was not read
    assert fork_server.call("fork_server_calls:double", 4) == 8


def store_of(fork_server: ForkServerClient) -> psutil.Process:
    """The process below it that listens."""
    return next(child for child in psutil.Process(fork_server.process.pid).children() if child.net_connections())


def test_a_store_that_has_died_is_followed_by_another_and_told(fork_server: ForkServerClient) -> None:
    port = fork_server.start_store("127.0.0.1")
    assert fork_server.start_store("127.0.0.1") == port
    store_of(fork_server).kill()
    wait_until(lambda: fork_server.start_store("127.0.0.1") != port)  # as soon as the kernel is done with it
    store_of(fork_server).kill()
    assert receive(fork_server.control) == [StoreDied(attempt=0)]


@pytest.mark.parametrize("what", ["call", "store", "preload"])
def test_a_fork_server_that_is_killed_is_told_as_not_finished(what: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", WITHOUT_TORCH)
        process = ForkServerClient()
    with process:
        if what != "call":
            process.process.kill()
        with pytest.raises(ForkServerLostError, match="was killed by SIGKILL") as caught:
            {
                "call": lambda: process.call("fork_server_calls:kill_fork_server", None),
                "store": lambda: process.start_store("127.0.0.1"),
                "preload": lambda: process.preload("fork_server_calls:keep", 1),
            }[what]()
        assert caught.value.code is ExitCode.UNFINISHED


def test_a_fork_server_that_cannot_load_torch_is_told_as_an_unfit_node(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: not found')")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        process = ForkServerClient()
    with process, pytest.raises(ForkServerLostError, match="died with exit code 1; its message stands above") as caught:
        process.wait_until_ready()
    assert caught.value.code is ExitCode.UNFIT_NODE


def start(fork_server: ForkServerClient, function: str, folder: Path, world: int, **environment: str) -> None:
    asked = start_workers(
        f"fork_server_calls:{function}", str(folder), folder, world, attempt=6, environment=environment
    )
    send(fork_server.control, asked)


def exits(fork_server: ForkServerClient, count: int) -> dict[int, int]:
    """Ranks and statuses of so many workers, once they are gone."""
    found: dict[int, int] = {}
    while len(found) < count:
        for message in receive(fork_server.control) or ():
            if isinstance(message, WorkersStarted):
                continue
            assert isinstance(message, WorkerExited)
            found[message.rank] = message.exit_status
    return found


def test_workers_get_their_place_a_log_each_and_are_reported_with_their_status(
    fork_server: ForkServerClient, tmp_path: Path
) -> None:
    start(fork_server, "write_rank_variables", tmp_path, 2, EXTRA="more")
    assert exits(fork_server, 2) == {0: 10, 1: 11}
    assert [(tmp_path / str(rank)).read_text() for rank in (0, 1)] == ["0 0 2 2 6 more", "1 1 2 2 6 more"]
    logs = [(tmp_path / f"attempt-6-rank-{rank}.log").read_text() for rank in (0, 1)]
    assert logs == ["worker 0 speaks\n", "worker 1 speaks\n"]


def test_a_worker_that_raises_reports_type_message_and_line(fork_server: ForkServerClient, tmp_path: Path) -> None:
    list(drain(fork_server.events))
    start(fork_server, "fail_at_length", tmp_path, 1)
    assert exits(fork_server, 1) == {0: 1}
    (crash,) = drain(fork_server.events)
    text = "RuntimeError: CUDA error: it went wrong Consider this. Compile with that. ("
    assert isinstance(crash, WorkerCrashed)
    assert (crash.rank, crash.message[: len(text)]) == (0, text)
    assert "fork_server_calls.py:" in crash.message


@pytest.mark.parametrize("log", ["/dev/full", "nowhere/log"])
def test_a_log_that_takes_nothing_does_not_end_a_worker(
    fork_server: ForkServerClient, tmp_path: Path, log: str
) -> None:
    (tmp_path / "attempt-6-rank-0.log").symlink_to(log)
    start(fork_server, "speak", tmp_path, 1)
    assert exits(fork_server, 1) == {0: 0}
    assert (tmp_path / "done").exists()


def test_a_worker_whose_storage_fails_has_a_status_of_its_own(fork_server: ForkServerClient, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    start(fork_server, "gone", tmp_path / "empty", 1)
    assert exits(fork_server, 1) == {0: 1}  # that a file is missing is no failure
    (tmp_path / "lost").symlink_to(tmp_path / "lost")
    start(fork_server, "read", tmp_path / "lost", 1)  # its log cannot be opened either
    assert exits(fork_server, 1) == {0: STORAGE_FAILED_STATUS}


def test_a_worker_whose_gpu_fails_has_a_status_of_its_own(fork_server: ForkServerClient, tmp_path: Path) -> None:
    start(fork_server, "lose_gpu", tmp_path, 1)
    assert exits(fork_server, 1) == {0: GPU_FAILED_STATUS}


def test_a_trial_whose_gpu_fails_finds_the_machine_unfit(fork_server: ForkServerClient) -> None:
    with pytest.raises(
        PhalanxError, match=r"a GPU of this machine failed: RuntimeError: CUDA error: uncorr.* ECC"
    ) as caught:
        fork_server.call("fork_server_calls:lose_gpu", "")
    assert caught.value.code == ExitCode.UNFIT_NODE


def term_is_pending(process: psutil.Process) -> bool:
    """Whether SIGTERM has been sent and is held back."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    (pending,) = (int(line.split()[1], 16) for line in lines if line.startswith("ShdPnd"))
    return bool(pending & 1 << signal.SIGTERM - 1)


def test_a_signal_that_comes_too_early_waits_for_the_workers_handler(
    fork_server: ForkServerClient, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    # A FIFO, since descriptors of ours are not the fork server's: the worker reads from it once we open it.
    start(fork_server, "wait_for_term_at", tmp_path, 1, GATE=str(gate))
    send(fork_server.control, SendSignal(signal=int(signal.SIGTERM)))
    wait_until(lambda: any(map(term_is_pending, psutil.Process(fork_server.process.pid).children())))
    with open(gate, "w") as opened:
        opened.write("x")
    assert exits(fork_server, 1) == {0: 75}


def test_workers_and_their_children_die_with_the_fork_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", WITHOUT_TORCH)
    for name in ("worker", "child"):
        os.mkfifo(tmp_path / name)
    message = start_workers("fork_server_calls:wait_for_ever", str(tmp_path), tmp_path)
    with ForkServerClient() as fork_server:
        fork_server.wait_until_ready()
        send(fork_server.control, message)
        pids = [int((tmp_path / name).read_text()) for name in ("worker", "child")]
        handles = [os.pidfd_open(pid) for pid in pids]
        assert all(psutil.pid_exists(pid) for pid in pids)
        inside = fork_server.process.pid
    for handle in handles:
        ready, _, _ = select.select([handle], [], [], 10)
        assert ready, "a process outlived the fork server"
        os.close(handle)
    assert not psutil.pid_exists(inside)
