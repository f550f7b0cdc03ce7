"""Locks, and file systems that have none."""

import errno
import fcntl
import os
import subprocess
import sys
import threading
from typing import Any

import pytest

from phalanx.errors import UsageError
from phalanx.run import Run
from phalanx.run.lock import is_wanted, lock_run
from train_harness import wait_until


@pytest.fixture(params=[errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL])
def no_locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", refuse)


def test_a_lock_of_the_file_system_needs_no_word(run: Run) -> None:
    with lock_run(run) as note:
        assert note is None


LOCK = """
import sys
from pathlib import Path
from phalanx.run import Run
from phalanx.run.lock import lock_run
with lock_run(Run(Path(sys.argv[1]))):
    pass
"""


def test_a_run_that_is_locked_is_refused_to_another_process(run: Run) -> None:
    command = [sys.executable, "-c", LOCK, str(run.path)]
    with lock_run(run):
        refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "another process is training this run" in refused.stderr
    assert subprocess.run(command, check=False).returncode == 0


@pytest.mark.usefixtures("no_locks")
def test_without_locks_a_run_is_kept_from_others_of_this_machine(run: Run) -> None:
    with lock_run(run) as note:
        assert note is not None
        assert f"{run.path}: the file system has no locks" in note
        with pytest.raises(UsageError, match="another process is training this run"), lock_run(run):
            pass
    with lock_run(run) as note:
        assert note is not None


def test_a_lock_on_storage_that_fails_is_no_missing_lock(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(OSError, match="Input/output error"), lock_run(run):
        pass


def test_a_run_that_another_process_has_is_waited_for_with_words(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phalanx.run.lock.LOCK_RETRY_INTERVAL_S", 0.05)
    with lock_run(run), pytest.raises(UsageError, match="another process is training this run"), lock_run(run, 0.2):
        pass
    assert capsys.readouterr().err.startswith(f"waiting for {run.path}, which another process is training until ")


def test_who_has_a_run_sees_that_another_process_waits_for_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.run.lock.LOCK_RETRY_INTERVAL_S", 0.01)
    seen, over = list[bool](), threading.Event()

    def wait() -> None:
        with lock_run(run, 60.0):
            seen.append(is_wanted(run))
        over.set()

    with lock_run(run):
        assert not is_wanted(run)
        threading.Thread(target=wait).start()
        wait_until(lambda: is_wanted(run))
    assert over.wait(10)
    assert seen == [False]
    with lock_run(run), pytest.raises(UsageError, match="another process"), lock_run(run, 0.05):
        pass
    assert not is_wanted(run)
