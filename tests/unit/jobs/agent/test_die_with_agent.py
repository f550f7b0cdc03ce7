"""Nothing outlives a fork server: not its workers, not their children."""

import os
import select
from pathlib import Path

import psutil
import pytest

from fork_server_calls import WITHOUT_TORCH
from made_messages import start_workers
from phalanx.jobs.agent.fork_server_client import ForkServerClient
from phalanx.run.messages import send


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
