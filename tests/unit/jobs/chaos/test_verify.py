"""What is left of a run is found, whatever it is; a run is started again as its exit code says, and judged."""

import contextlib
import json
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from phalanx.jobs.backends.local import LocalBackend
from phalanx.jobs.chaos.faults import FaultContext
from phalanx.jobs.chaos.launcher import (
    CHAOS_TAG_VARIABLE,
    MAX_STARTS_WITHOUT_ATTEMPT,
    LocalLauncher,
    QueueLauncher,
    RunMonitor,
    TypicalDurations,
    find_tagged_processes,
    make_environment,
)
from phalanx.jobs.chaos.verify import (
    ChaosOutcome,
    find_leftovers,
    list_shared_memory,
    run_with_faults,
    verify_run,
)
from phalanx.jobs.spec import Job
from phalanx.run import Run

USUAL = TypicalDurations(0.01, 0.01, 0.1)


@pytest.fixture
def mark() -> str:
    return str(uuid.uuid4())


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    (tmp_path / "scratch" / "tmp").mkdir(parents=True)
    return tmp_path / "scratch"


@contextlib.contextmanager
def sleeper(mark: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that carries the mark, as can be seen."""
    with subprocess.Popen(["sleep", "60"], env={CHAOS_TAG_VARIABLE: mark}) as process:
        until = time.monotonic() + 5.0
        while not find_tagged_processes(mark):
            assert time.monotonic() < until
        yield process
        process.kill()


def left(run: Run, mark: str, scratch: Path, before: frozenset[str] | None = None) -> list[str]:
    return find_leftovers(run, mark, scratch, before or list_shared_memory(), grace_s=0.0)


def test_a_run_that_left_nothing_is_told_so(run: Run, mark: str, scratch: Path) -> None:
    (run.checkpoints / "step-000000010").mkdir()
    assert left(run, mark, scratch) == []


def test_a_process_that_carries_the_mark_is_found_until_it_is_gone(run: Run, mark: str, scratch: Path) -> None:
    with sleeper(mark) as process:
        (found,) = left(run, mark, scratch)
    assert found == f"process {process.pid} still runs: sleep 60"
    assert left(run, mark, scratch) == []


def test_processes_have_some_time_to_end(run: Run, mark: str, scratch: Path) -> None:
    with sleeper(mark) as process:

        def sleep(seconds: float) -> None:
            process.kill()
            process.wait()

        assert find_leftovers(run, mark, scratch, list_shared_memory(), grace_s=60.0, sleep=sleep) == []
        assert process.returncode == -9


def test_shared_memory_that_nobody_has_open_is_found_unless_it_was_there_before(
    run: Run, mark: str, scratch: Path
) -> None:
    path = Path("/dev/shm") / f"torch_{mark}"
    before = list_shared_memory()
    try:
        with path.open("wb") as file, subprocess.Popen(["sleep", "60"], stdout=file) as holder:
            assert left(run, mark, scratch, before) == []
            holder.kill()
        assert left(run, mark, scratch, before) == [f"shared memory: {path}"]
        assert left(run, mark, scratch, list_shared_memory()) == []
    finally:
        path.unlink()


@pytest.mark.parametrize("name", ["step-000000010.tmp-3", "step-000000010.old", ".best.json.17.tmp"])
def test_what_is_half_made_in_the_run_directory_is_found(run: Run, mark: str, scratch: Path, name: str) -> None:
    (run.checkpoints / name).mkdir()
    (run.checkpoints / name / "rank-00000.safetensors").touch()
    assert left(run, mark, scratch) == [f"temporary file: {run.checkpoints / name}"]


def test_files_among_the_temporary_ones_of_the_system_are_found(run: Run, mark: str, scratch: Path) -> None:
    environment = make_environment(mark, scratch, {"PATH": "/bin", "RANK": "3", "PHALANX_NODE_RANK": "1"})
    assert {"RANK", "PHALANX_NODE_RANK"}.isdisjoint(environment)
    code = "import tempfile; print(tempfile.mkstemp()[1])"
    made = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert left(run, mark, scratch) == [f"temporary file: {made.stdout.strip()}"]


def test_entries_of_a_queue_and_secrets_are_found(tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LETTER", "x")
    engine = LocalBackend(tmp_path / "state" / "queue", ensure_daemon=lambda *_: None)
    engine.submit(engine.render(Job("one", ("true",), tmp_path, secrets=("LETTER",))))
    queued = QueueLauncher([], {CHAOS_TAG_VARIABLE: mark}, tmp_path / "state", tmp_path / "log")
    entry, secret = queued.list_leftovers()
    assert entry == "job 1 is queued"
    assert secret.endswith("jobs/1/secrets.json")
    engine.cancel("1")
    assert queued.list_leftovers() == []


def verdict(run: Run, ended: ChaosOutcome, *, digest: str = "a", stored: str = "a", **more: Any) -> Sequence[str]:
    run.result.write_text(json.dumps({"digest": digest, "message": "no luck"}))
    given: dict[str, Any] = {"num_planned": 2, "num_injected": 2, "leftovers": (), **more}
    return verify_run(run, "a", ended, digest_of=lambda run: stored, **given)


def test_a_run_that_ended_in_the_same_digest_and_left_nothing_passes(run: Run) -> None:
    assert verdict(run, ChaosOutcome(0, 3)) == ()


@pytest.mark.parametrize(
    ("ended", "more", "said"),
    [
        (ChaosOutcome(0, 1), {"digest": "b"}, "the digest is b, and a without faults"),
        (ChaosOutcome(0, 1), {"stored": "b"}, "the digest of the last checkpoint is b, and a without faults"),
        (ChaosOutcome(0, 1), {"num_injected": 1}, "only 1 of 2 faults struck before the run was over"),
        (ChaosOutcome(0, 1), {"leftovers": ["process 7"]}, "left behind: process 7"),
        (ChaosOutcome(93, 1), {}, "the run ended with exit code 93: no luck"),
        (ChaosOutcome(None, 1, "silence"), {}, "the run hangs: silence"),
    ],
)
def test_whatever_is_wrong_makes_it_fail(run: Run, ended: ChaosOutcome, more: dict[str, Any], said: str) -> None:
    (reason,) = verdict(run, ended, **more)
    assert reason.startswith(said)


@pytest.fixture
def commands(run: Run, mark: str, scratch: Path) -> Iterator[LocalLauncher]:
    commands = LocalLauncher([], make_environment(mark, scratch), scratch / "output", RunMonitor(run))
    yield commands
    commands.kill()
    assert find_tagged_processes(mark) == []


def scene_of(commands: LocalLauncher) -> FaultContext:
    return FaultContext(commands.monitor, USUAL, "", lambda struck: None)


def test_a_command_that_was_killed_or_is_not_finished_is_started_again(commands: LocalLauncher, tmp_path: Path) -> None:
    count = tmp_path / "count"
    commands.command = ("sh", "-c", f"echo >> {count}; case $(wc -l < {count}) in 1) exit 75;; 2) kill -9 $$;; esac")
    again: list[int] = []
    ended = run_with_faults(commands, scene_of(commands), (), on_restart=again.append)
    assert ended == ChaosOutcome(0, 3)
    assert again == [2, 3]


@pytest.mark.parametrize(
    ("code", "starts"), [*((code, 1) for code in (1, 64, 65, 77, 78, 93)), (75, MAX_STARTS_WITHOUT_ATTEMPT)]
)
def test_any_other_code_or_too_many_starts_without_an_attempt_end_it(
    commands: LocalLauncher, code: int, starts: int
) -> None:
    commands.command = ("sh", "-c", f"exit {code}")
    assert run_with_faults(commands, scene_of(commands), ()) == ChaosOutcome(code, starts)


def test_a_run_of_which_nothing_is_heard_is_ended(commands: LocalLauncher) -> None:
    commands.command = ("sleep", "600")
    times = iter(range(0, 10_000, 100))
    ended = run_with_faults(commands, scene_of(commands), (), clock=lambda: float(next(times)))
    assert ended.exit_code is None
    assert ended.hang == "nothing was heard of it for 300 s"


def test_an_interruption_ends_the_run(commands: LocalLauncher) -> None:
    commands.command = ("sleep", "600")

    def sleep(seconds: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_with_faults(commands, scene_of(commands), (), sleep=sleep)
    assert not any(
        process.is_running() for process in find_tagged_processes(commands._environments[0][CHAOS_TAG_VARIABLE])
    )
    assert not psutil.pid_exists(commands._processes[0].pid)


def test_what_tempfile_tries_a_folder_with_is_not_taken_for_left_behind(run: Run, mark: str, scratch: Path) -> None:
    (scratch / "tmp" / "nxymom9a").write_bytes(b"blat")
    (scratch / "tmp" / "nxymom9b").write_bytes(b"data of a run")
    assert left(run, mark, scratch) == [f"temporary file: {scratch / 'tmp' / 'nxymom9b'}"]
