"""Jobs of the local queue that a guard pauses for a load target."""

import errno
import sqlite3
from pathlib import Path

import pytest

from phalanx.errors import UsageError
from phalanx.jobs.backends.local import LocalBackend
from phalanx.jobs.spec import Job
from phalanx_fleet.power.guard_loop import BackendJobControl
from phalanx_fleet.power.job_shedder import PausableState


@pytest.fixture
def engine(tmp_path: Path) -> LocalBackend:
    return LocalBackend(tmp_path / "queue", ensure_daemon=lambda *_: None)


@pytest.fixture
def job(engine: LocalBackend, tmp_path: Path) -> str:
    return engine.submit(engine.render(Job("a", ("true",), tmp_path)))


def test_the_guard_resumes_only_what_it_has_paused(engine: LocalBackend, job: str) -> None:
    control, handle = BackendJobControl("for power, by a guard"), f"local:{job}"
    control._open = lambda name, thread: engine  # type: ignore[assignment, method-assign]
    control.check_handle(handle)
    engine.pause(job, "by hand")
    control.pause(handle)
    control.resume(handle)
    assert control.read_state(handle) is PausableState.HELD
    engine.resume(job)
    control.pause(handle)
    assert control.read_state(handle) is PausableState.PAUSED
    control.resume(handle)
    assert control.read_state(handle) is PausableState.WAITING


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), sqlite3.OperationalError("full")])
def test_a_full_disk_ends_no_guard(
    engine: LocalBackend, job: str, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    control, handle = BackendJobControl("for power, by a guard"), f"local:{job}"
    control._open = lambda name, thread: engine  # type: ignore[assignment, method-assign]

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("phalanx.jobs.backends.local.write_pause", fail)
    with pytest.raises(UsageError, match=f"{handle}: .*full|No space left"):
        control.pause(handle)
    monkeypatch.undo()
    control.pause(handle)
    monkeypatch.setattr("phalanx.jobs.backends.local.remove_pause", fail)
    with pytest.raises(UsageError, match=f"{handle}: .*full|No space left"):
        control.resume(handle)
