"""The parent process of one attempt of a job: `python -m phalanx.jobs.local_queue.job_runner FOLDER ATTEMPT`.

It is no child of the daemon, so that the job continues when the daemon dies and another one starts. It starts the job's
command, forwards signals, warns before the time limit, ends the remaining processes of the job after the command, and
records the exit code. When it is killed, so is the command.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from phalanx.jobs.signal_queue import SignalQueue, kill_descendants
from phalanx.logging_config import configure_logging
from phalanx.process_lifetime import become_subreaper, die_with_parent
from phalanx.run.boot_clock import seconds_since_boot
from phalanx.run.directory import write_json
from phalanx.run.event_loop import EventLoop
from phalanx.run.fields import ExitStatus, read_as

logger = logging.getLogger("phalanx.jobs.local_queue.job_runner")  # its __name__ is __main__ under `python -m`

EXIT_GRACE_S = 30.0
"""Seconds after a last warning that a job has before it is killed; its `warning` where that is longer."""
FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
OUTPUT_FILE = "output.log"


@dataclass(frozen=True, kw_only=True)
class AttemptSpec:
    """Input of an attempt, as in `attempt-N.json`. SIGTERM is sent `warning_s` before the time limit."""

    command: tuple[str, ...]
    working_dir: str
    environment: dict[str, str]
    time_limit_s: float | None
    warning_s: float


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
    started_at, boot_time = time.time(), seconds_since_boot()
    with SignalQueue(FORWARDED_SIGNALS, wake_on_child_exit=True) as signals:
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
            write_ending(job_dir, attempt, started_at, boot_time, 127, f"could not be started: {error.strerror}")
            return
        job = JobProcess(process, spec, signals)
        job.wait()
        kill_descendants()
        reason = job.reason if process.returncode else None
        write_ending(job_dir, attempt, started_at, boot_time, process.returncode, reason)


class JobProcess:
    """The process of a job's command. `reason`: why it was asked to end, once it was."""

    def __init__(self, process: "subprocess.Popen[bytes]", spec: AttemptSpec, signals: SignalQueue):
        self._process = process
        self._spec = spec
        self._signals = signals
        self._kill_deadline: float | None = None
        self.reason: str | None = None

    def wait(self) -> None:
        """Forward signals until the process ends; warn it before the time limit, and kill it afterwards."""
        with EventLoop() as loop:
            loop.add_reader(self._signals.wake_socket, self._signals.clear_wake)
            if self._spec.time_limit_s is not None:
                self._kill_deadline = time.monotonic() + self._spec.time_limit_s
                loop.set_timer(self._warn, self._kill_deadline - self._spec.warning_s)
                loop.set_timer(self._kill, self._kill_deadline)
            while self._process.poll() is None:
                loop.run_once()
                self._forward_signals(loop)

    def _forward_signals(self, loop: EventLoop) -> None:
        while self._signals.received:
            number = self._signals.received.pop(0)
            logger.info("passing signal %d on to process %d", number, self._process.pid)
            self._process.send_signal(number)
            if number == signal.SIGTERM:
                grace_deadline = time.monotonic() + max(EXIT_GRACE_S, self._spec.warning_s)
                self._kill_deadline = min(self._kill_deadline or grace_deadline, grace_deadline)
                self.reason = "was asked to stop"
                loop.set_timer(self._kill, self._kill_deadline)

    def _warn(self) -> None:
        self.reason = "reached its time limit"
        logger.info("the time limit comes: sending SIGTERM to process %d", self._process.pid)
        self._process.send_signal(signal.SIGTERM)

    def _kill(self) -> None:
        self._kill_deadline = None
        logger.info("killing process %d", self._process.pid)
        self._process.kill()


def read_secrets(job_dir: Path) -> dict[str, str]:
    """Values that only this process's user can read."""
    file = job_dir / "secrets.json"
    return json.loads(file.read_text()) if file.exists() else {}


def write_ending(
    job_dir: Path, attempt: int, started_at: float, boot_time: float, exit_code: int, reason: str | None
) -> None:
    """Write how the attempt ended. `boot_time`: its start by the boot clock."""
    end = AttemptEnd(
        exit_code=exit_code,
        reason=reason,
        started_at=started_at,
        ended_at=time.time(),
        duration_s=seconds_since_boot() - boot_time,
    )
    write_json(ending_path(job_dir, attempt), asdict(end))


def ending_path(job_dir: Path, attempt: int) -> Path:
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
