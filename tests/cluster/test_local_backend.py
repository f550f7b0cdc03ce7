"""The local queue, for real: every promise of an engine, and what only a queue of one's own can do."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from backend_contract import BackendContract
from phalanx.cli import main
from phalanx.cluster import discover_machine
from phalanx.errors import UsageError
from phalanx.jobs.backends import base
from phalanx.jobs.backends.local import DAEMON_START_INTERVAL_S, LocalBackend
from phalanx.jobs.local_queue.daemon import JOB_TAG_VARIABLE
from phalanx.jobs.spec import Job, JobState
from phalanx.run.lock import acquire_lock
from train_harness import wait_until


def processes(queue: Path) -> list[psutil.Process]:
    """Everything that belongs to a queue: its supervisors, and processes of its jobs."""
    found = []
    for process in psutil.process_iter():
        try:
            ours = str(queue) in process.cmdline() or str(process.environ().get(JOB_TAG_VARIABLE, "")).startswith(
                f"{queue}:"
            )
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


@pytest.fixture(scope="module")
def queue(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    queue = tmp_path_factory.mktemp("queue")
    yield queue
    wait_until(lambda: processes(queue) == [], 15, "the supervisor to leave with the last job")


@pytest.fixture
def engine(queue: Path) -> Iterator[LocalBackend]:
    engine = LocalBackend(queue)
    yield engine
    engine.database.close()


def supervisors(queue: Path) -> list[psutil.Process]:
    """Without what one of them has forked, which is called as it is until it is another program."""
    found = []
    for each in processes(queue):
        with contextlib.suppress(psutil.NoSuchProcess):
            words = each.cmdline()
            if "phalanx.jobs.local_queue.daemon" in words and words[0] != "/bin/sh":  # which starts one
                found.append(each)
    known = {each.pid for each in found}
    alone = []
    for each in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            if each.ppid() not in known:
                alone.append(each)
    return alone


def nobody_supervises(queue: Path) -> bool:
    """Whether the lock is free: who was killed may hold it for a while after it is called nothing any more."""
    lock = os.open(queue / "supervisor.lock", os.O_RDWR)
    try:
        return acquire_lock(lock, 0)
    finally:
        os.close(lock)


def supervisor(queue: Path) -> psutil.Process:
    return supervisors(queue)[0]


class TestContract(BackendContract):
    """Every promise of an engine."""


SLEEPER = "import time; print('up', flush=True); time.sleep(300)"


def python(folder: Path, code: str, name: str = "job", cores: int = 1) -> Job:
    return Job(name, (sys.executable, "-c", code), folder, cpus_per_node=cores)


def test_a_job_goes_on_when_its_supervisor_is_killed_and_the_next_one_finds_it(
    engine: LocalBackend, queue: Path, tmp_path: Path
) -> None:
    code = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)\nprint('done', os.getpid())"
    ident = engine.submit(engine.render(python(tmp_path, code)))
    wait_until(lambda: engine.poll(ident).state is JobState.RUNNING)
    wait_until(lambda: engine.database.get_job(int(ident)).runner is not None)  # type: ignore[union-attr]
    supervisor(queue).kill()
    (tmp_path / "go").touch()
    second = engine.submit(engine.render(python(tmp_path, "print('second')", name="second")))
    for each in (ident, second):
        wait_until(lambda each=each: engine.poll(each).state.is_final)
        assert (engine.poll(each).state, engine.poll(each).num_attempts) == (JobState.DONE, 1)


LOOKS = {
    "status": ("status", "{id}"),
    "ls": ("ls",),
    "logs": ("logs", "{id}"),
    "signal": ("signal", "{id}", "WINCH"),
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_command_starts_one_supervisor_where_none_lives_and_jobs_go_on(
    engine: LocalBackend, queue: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, look: str
) -> None:
    code = "import os, sys, time\nif os.path.exists('begun'): sys.exit(0)\nopen('begun', 'x')\n"
    code += "while not os.path.exists('go'): time.sleep(0.01)\nsys.exit(75)"
    ident = engine.submit(engine.render(python(tmp_path, code)))
    wait_until(lambda: (tmp_path / "begun").exists())
    wait_until(lambda: engine.database.get_job(int(ident)).runner is not None)  # type: ignore[union-attr]
    for each in supervisors(queue):
        each.kill()
    wait_until(lambda: supervisors(queue) == [] and nobody_supervises(queue))
    monkeypatch.setattr(base, "open_backend", lambda name: LocalBackend(queue))
    for _ in range(3):
        assert main.main(["jobs", *(word.format(id=ident) for word in LOOKS[look])]) == 0
    (tmp_path / "go").touch()
    seen = []
    while not engine.database.get_job(int(ident)).state.is_final:  # type: ignore[union-attr]
        seen.append(len(supervisors(queue)))
        assert len(seen) < 300
        time.sleep(0.02)
    assert max(seen) == 1
    assert (engine.poll(ident).state, engine.poll(ident).num_attempts) == (JobState.DONE, 2)


def test_a_supervisor_that_cannot_live_is_started_only_now_and_then(tmp_path: Path) -> None:
    now, asked = 100.0, []

    def ensure(folder: Path, idle: bool) -> bool:
        asked.append(idle)
        return True

    engine = LocalBackend(tmp_path / "queue", ensure_daemon=ensure, clock=lambda: now)
    engine.restart_dead_daemon()
    assert asked == []  # nobody needs one
    engine.submit(engine.render(python(tmp_path, "pass")))
    engine.restart_dead_daemon()
    engine.restart_dead_daemon()
    assert asked == [True, False]
    now += DAEMON_START_INTERVAL_S
    engine.restart_dead_daemon()
    assert asked == [True, False, False]
    engine.database.close()


@pytest.mark.parametrize("victim", ["the process above it", "the job itself"])
def test_a_job_that_is_killed_starts_again_and_leaves_nothing_behind(
    engine: LocalBackend, queue: Path, tmp_path: Path, victim: str
) -> None:
    child = "import subprocess, sys, time, os; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'])"
    code = f"{child}\nif os.path.exists('again'): sys.exit(0)\nopen('again', 'x')\n{SLEEPER}"
    ident = engine.submit(engine.render(python(tmp_path, code)))
    wait_until(lambda: list(engine.read_logs(ident)) == ["up"])
    wait_until(lambda: engine.database.get_job(int(ident)).runner is not None)  # type: ignore[union-attr]
    row = engine.database.get_job(int(ident))
    assert row is not None
    assert row.runner is not None
    above = psutil.Process(row.runner)
    (above if victim == "the process above it" else above.children()[0]).kill()
    wait_until(lambda: engine.poll(ident).state.is_final)
    assert (engine.poll(ident).state, engine.poll(ident).num_attempts) == (JobState.DONE, 2)
    wait_until(lambda: [each for each in processes(queue) if "time.sleep(300)" in str(each.cmdline())] == [], 5)


def test_a_time_limit_first_asks_and_then_kills(engine: LocalBackend, tmp_path: Path) -> None:
    code = "import signal, time; signal.signal(15, lambda *_: print('asked', flush=True)); print('up', flush=True)"
    job = Job(
        "slow",
        (sys.executable, "-c", f"{code}\nwhile True: time.sleep(1)"),
        tmp_path,
        cpus_per_node=1,
        time_limit_s=3,
        warning_s=1.5,
    )
    ident = engine.submit(engine.render(job))
    wait_until(lambda: "asked" in list(engine.read_logs(ident)))
    wait_until(lambda: engine.poll(ident).num_attempts > 1)  # killed, and started again
    engine.cancel(ident)
    wait_until(lambda: engine.poll(ident).state.is_final)


def test_jobs_that_do_not_fit_beside_each_other_wait_their_turn(engine: LocalBackend, tmp_path: Path) -> None:
    cores = discover_machine().physical_cores
    code = "import os; d = os.open('one', os.O_CREAT | os.O_EXCL); import time; time.sleep(0.3); os.unlink('one')"
    idents = [engine.submit(engine.render(python(tmp_path, code, f"job-{index}", cores))) for index in range(3)]
    for ident in idents:
        wait_until(lambda ident=ident: engine.poll(ident).state.is_final)
        assert engine.poll(ident).state is JobState.DONE
    starts = [engine.poll(ident).started_at or 0.0 for ident in idents]
    assert starts == sorted(starts)


def test_a_waiting_job_is_cancelled_without_ever_running(engine: LocalBackend, tmp_path: Path) -> None:
    cores = discover_machine().physical_cores
    first = engine.submit(engine.render(python(tmp_path, SLEEPER, "first", cores)))
    second = engine.submit(engine.render(python(tmp_path, "open('ran', 'x')", "second", cores)))
    wait_until(lambda: engine.poll(first).state is JobState.RUNNING)
    engine.cancel(second)
    assert (engine.poll(second).state, engine.poll(second).num_attempts) == (JobState.CANCELLED, 0)
    engine.cancel(first)
    wait_until(lambda: engine.poll(first).state.is_final)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("change", ["num_nodes", "gpus_per_node", "cpus_per_node"])
def test_a_job_that_never_fits_is_refused(engine: LocalBackend, tmp_path: Path, change: str) -> None:
    job = Job("big", ("true",), tmp_path, **{change: 999})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="999"):
        engine.render(job)


def test_secrets_lie_where_only_their_user_can_read_them_and_go_with_the_job(
    engine: LocalBackend, tmp_path: Path
) -> None:
    os.environ["OPEN_SESAME"] = "hush"
    try:
        job = Job("hidden", (sys.executable, "-c", SLEEPER), tmp_path, cpus_per_node=1, secrets=("OPEN_SESAME",))
        ident = engine.submit(engine.render(job))
    finally:
        del os.environ["OPEN_SESAME"]
    home = engine.database.job_dir(int(ident))
    file = home / "secrets.json"
    assert json.loads(file.read_text()) == {"OPEN_SESAME": "hush"}
    assert (file.stat().st_mode & 0o777, home.stat().st_mode & 0o777) == (0o600, 0o700)
    wait_until(lambda: "up" in list(engine.read_logs(ident)))
    assert not any("hush" in str(each.info["cmdline"]) for each in psutil.process_iter(["cmdline"]))
    engine.cancel(ident)
    wait_until(lambda: engine.poll(ident).state.is_final)
    wait_until(lambda: not file.exists(), 5)


def test_a_secret_that_is_not_there_is_told_before_anything_is_queued(engine: LocalBackend, tmp_path: Path) -> None:
    before = len(engine.list_jobs())
    with pytest.raises(UsageError, match="NOT_THERE"):
        engine.submit(engine.render(Job("job", ("true",), tmp_path, secrets=("NOT_THERE",))))
    assert len(engine.list_jobs()) == before


def test_a_file_that_is_no_queue_is_told(tmp_path: Path) -> None:
    (tmp_path / "queue.db").write_text("something else entirely, and long enough to be read as a header")
    with pytest.raises(UsageError, match="not a queue of Phalanx"):
        LocalBackend(tmp_path).list_jobs()
