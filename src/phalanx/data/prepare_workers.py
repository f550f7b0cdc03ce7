"""Write the pieces of a plan with several processes, and what such a process does.

A process gets one piece after the other. The list of a piece's files may be too large for a message, and so may the
names of the files that were no UTF-8: both are files of the working directory (`prepare_plan.py`).
"""

import os
import signal
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

from phalanx.data.prepare_plan import PieceWriter, PrepareJob, PreparePiece, read_piece_file, write_piece_file
from phalanx.data.prepare_progress import ProgressReporter
from phalanx.deadline import POLL_INTERVAL_S, RESUME_AFTER_CHECKS, Deadline, find_stopped, resume_processes
from phalanx.errors import ExitCode, PhalanxError, UsageError
from phalanx.formatting import format_exit_status
from phalanx.run.call_process import CallProcess, report_progress, value_of
from phalanx.run.event_loop import EventLoop
from phalanx.run.fields import read_as
from phalanx.run.process_messages import CallProgress, CallReply

SILENCE_TIMEOUT_S = 600.0
"""Seconds in which at least one of the processes that prepare data must have said something."""


def write_with_workers(
    job: PrepareJob, pending: dict[int, PreparePiece], num_workers: int, reporter: ProgressReporter, lock: int
) -> None:
    """Write pieces with several processes. Each inherits the `lock`: if this process is killed, no other process begins
    before the last of them has ended."""
    numbers, num_left = iter(pending), len(pending)
    workers = [CallProcess(lock) for _ in range(min(num_workers, len(pending)))]

    def send_next(worker: CallProcess) -> None:
        if (number := next(numbers, None)) is not None:
            write_piece_file(Path(job.dataset_dir), number, pending[number])
            worker.send_call(f"{__name__}:write_piece", {"job": asdict(job), "number": number})

    def receive(worker: CallProcess) -> None:
        nonlocal num_left
        if (messages := worker.receive()) is None:
            raise _death_error(worker.process.wait())
        for message in messages:
            if isinstance(message, CallProgress):
                reporter.add_progress(message.num_bytes, message.count)
            elif isinstance(message, CallReply):
                value_of(message)
                num_left -= 1
                send_next(worker)

    try:
        with EventLoop() as loop:
            for worker in workers:
                loop.add_reader(worker.socket, partial(receive, worker))
                send_next(worker)
            silence = _Silence(workers, reporter)
            while num_left:
                if loop.run_once(POLL_INTERVAL_S):
                    silence = _Silence(workers, reporter)
                else:
                    silence.check()
    finally:
        for worker in workers:
            worker.kill()


def _death_error(status: int) -> Exception:
    """Return the error for a process that ended without a word."""
    if status >= 0:
        return RuntimeError(f"a worker that prepares data ended with status {status}")
    killed = " (possibly out of memory)" if -status == signal.SIGKILL else ""
    text = f"a process that prepares data was killed by {format_exit_status(status)}{killed}"
    return PhalanxError(f"{text}; run the same command again to continue from here", ExitCode.UNFINISHED)


class _Silence:
    """A time in which no worker says anything. Those that were stopped are continued; if it lasts too long, preparing
    ends."""

    def __init__(self, workers: Sequence[CallProcess], reporter: ProgressReporter):
        self._pids, self._reporter, self._num_stopped_checks = [each.process.pid for each in workers], reporter, 0
        self._deadline = Deadline("the processes that prepare data", SILENCE_TIMEOUT_S, reporter.report_note)

    def check(self) -> None:
        """Look at the workers. Call it every second."""
        stopped_processes = find_stopped(self._pids)
        self._num_stopped_checks = self._num_stopped_checks + 1 if stopped_processes else 0
        if self._num_stopped_checks == RESUME_AFTER_CHECKS:
            resume_processes(stopped_processes)
            self._reporter.report_note(
                f"process {stopped_processes[0].pid}, which prepares data, was stopped (SIGSTOP): continued it"
            )
            self._num_stopped_checks = 0
        if self._deadline.check_expired():
            raise PhalanxError(
                f"the processes that prepare data have reported nothing for {SILENCE_TIMEOUT_S:.0f} s: they hang, or "
                "the storage of the source or of the cache does; run the same command again to continue from here",
                ExitCode.UNFINISHED,
            )


def write_piece(payload: dict[str, Any]) -> None:
    """Write one piece: what the process does in a call."""
    job = read_as(PrepareJob, payload["job"])
    try:
        piece = read_piece_file(Path(job.dataset_dir), payload["number"])
        _open_writer(job).write_piece(payload["number"], piece, report_progress)
    except OSError as error:  # a full disk, as a rule; source files that cannot be read are a PhalanxError
        raise UsageError(f"{error.filename or 'the dataset'}: cannot be written: {error.strerror}") from error


@cache
def _open_writer(job: PrepareJob) -> PieceWriter:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process for each core
    return PieceWriter(job)
