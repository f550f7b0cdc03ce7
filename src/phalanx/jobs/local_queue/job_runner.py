"""The parent process of one attempt of a job: `python -m phalanx.jobs.local_queue.job_runner FOLDER ATTEMPT`.

It is no child of the daemon, so that the job continues when the daemon dies and another one starts. It starts the job's
command, forwards signals, warns before the time limit, ends the remaining processes of the job after the command, and
records the exit code. When it is killed, so is the command.
"""

import contextlib
import json
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from phalanx.compat import become_subreaper, die_with_parent
from phalanx.jobs.process_tree import kill_descendants
from phalanx.logging_config import configure_logging
from phalanx.run.boot_clock import seconds_since_boot
from phalanx.run.directory import write_json
from phalanx.run.fields import ExitStatus, read_as

logger = logging.getLogger("phalanx.jobs.local_queue.job_runner")  # its __name__ is __main__ under `python -m`

EXIT_GRACE_S = 30.0
"""Seconds after a last warning that a job has before it is killed; its `warning` where that is longer."""
OUTPUT_FILE = "output.log"


@dataclass(frozen=True, kw_only=True)
class AttemptSpec:
    """Input of an attempt, as in `attempt-N.json`. SIGTERM is sent `warning_s` before the time limit."""

    command: tuple[str, ...]
    working_dir: str
    environment: dict[str, str]
    time_limit_s: float | None
    warning_s: float

    def write(self, home: Path, attempt: int) -> None:
        """Write the file atomically."""
        write_json(home / f"attempt-{attempt}.json", asdict(self))


@dataclass(frozen=True, kw_only=True)
class AttemptEnd:
    """How an attempt ended, as in `ended-N.json`. Times are unix seconds of the wall clock, `duration_s` is of the
    boot clock; None if unknown."""

    exit_code: ExitStatus
    reason: str | None
    started_at: float | None = None
    ended_at: float | None = None
    duration_s: float | None = None


def main() -> None:
    """Run the attempt that `attempt-N.json` describes."""
    configure_logging()
    job_dir, attempt = Path(sys.argv[1]), int(sys.argv[2])
    spec: AttemptSpec = read_as(AttemptSpec, json.loads((job_dir / f"attempt-{attempt}.json").read_text()))
    become_subreaper()
    wake_socket, wake_writer = socket.socketpair()
    wake_writer.setblocking(False)
    signal.set_wakeup_fd(wake_writer.fileno(), warn_on_full_buffer=False)
    received: list[int] = []
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(each, lambda number, _: received.append(number))
    signal.signal(signal.SIGCHLD, lambda *_: None)
    started = AttemptStart()
    try:
        process = subprocess.Popen(
            spec.command,
            cwd=spec.working_dir,
            env={**spec.environment, **read_secrets(job_dir)},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
    except OSError as error:
        print(f"error: {error.filename or spec.command[0]}: {error.strerror}", flush=True)
        write_ending(job_dir, attempt, started, 127, f"could not be started: {error.strerror}")
        return
    limit, warning = spec.time_limit_s, spec.warning_s
    kill_deadline = None if limit is None else time.monotonic() + limit
    warn_at = None if kill_deadline is None else max(time.monotonic(), kill_deadline - warning)
    reason = None
    with selectors.DefaultSelector() as selector:
        selector.register(wake_socket, selectors.EVENT_READ)
        while process.poll() is None:
            wake_times = [moment for moment in (warn_at, kill_deadline) if moment is not None]
            patience = max(0.0, min(wake_times) - time.monotonic()) if wake_times else None
            if selector.select(patience):
                wake_socket.recv(4096)
            while received:
                number = received.pop(0)
                logger.info("passing signal %d on to process %d", number, process.pid)
                process.send_signal(number)
                if number == signal.SIGTERM:
                    patience = time.monotonic() + max(EXIT_GRACE_S, warning)
                    kill_deadline, reason = min(kill_deadline or patience, patience), "was asked to stop"
            now = time.monotonic()
            if warn_at is not None and now >= warn_at:
                warn_at, reason = None, "reached its time limit"
                logger.info("the time limit comes: sending SIGTERM to process %d", process.pid)
                process.send_signal(signal.SIGTERM)
            if kill_deadline is not None and now >= kill_deadline:
                kill_deadline = None
                logger.info("killing process %d", process.pid)
                process.kill()
    code = process.returncode
    kill_descendants()
    write_ending(job_dir, attempt, started, code, reason if code else None)


def read_secrets(job_dir: Path) -> dict[str, str]:
    """Values that only this process's user can read."""
    with contextlib.suppress(FileNotFoundError):
        found: dict[str, str] = json.loads((job_dir / "secrets.json").read_text())
        return found
    return {}


@dataclass(frozen=True)
class AttemptStart:
    """Start of an attempt: by the wall clock for users, and by the boot clock."""

    wall_time: float = field(default_factory=time.time)
    boot_time: float = field(default_factory=seconds_since_boot)


def write_ending(job_dir: Path, attempt: int, started: AttemptStart, exit_code: int, reason: str | None) -> None:
    """Write how the attempt ended, whole."""
    end = AttemptEnd(
        exit_code=exit_code,
        reason=reason,
        started_at=started.wall_time,
        ended_at=time.time(),
        duration_s=seconds_since_boot() - started.boot_time,
    )
    write_json(ending_path(job_dir, attempt), asdict(end))


def ending_path(job_dir: Path, attempt: int) -> Path:
    """Return the file that records the end of an attempt."""
    return job_dir / f"ended-{attempt}.json"


def read_ending(job_dir: Path, attempt: int) -> AttemptEnd | None:
    """Return how an attempt ended; None if it has not. A file of another Phalanx version counts as a killed attempt."""
    path = ending_path(job_dir, attempt)
    try:
        found: AttemptEnd = read_as(AttemptEnd, json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except ValueError:
        return AttemptEnd(exit_code=-int(signal.SIGKILL), reason=f"{path.name} does not say how it ended")
    return found


if __name__ == "__main__":
    main()
