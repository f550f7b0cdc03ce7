"""Run with injected faults and verify the result: the digest of a run without faults, and no leftovers."""

import contextlib
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.cluster.health.checks.host import find_abandoned_shm
from phalanx.cluster.health.finding import CheckContext
from phalanx.errors import ExitCode
from phalanx.jobs.chaos.fault_plan import Fault
from phalanx.jobs.chaos.faults import POLL_INTERVAL_S, FaultContext, inject_faults
from phalanx.jobs.chaos.launcher import Launcher, find_tagged_processes, read_command_line
from phalanx.run import Run

EXIT_GRACE_S, LEFTOVER_POLL_INTERVAL_S = 10.0, 0.05
"""Seconds for the processes of a finished run to end (the queue's daemon waits 2 s for jobs), and between looks."""
MIN_HANG_TIMEOUT_S, HANG_TIMEOUT_STEPS = 300.0, 20.0
"""A run hangs after this many seconds, or usual step times, without an event, whichever is longer."""
TEMPORARY_NAME_PARTS = (".tmp", ".old")
"""Parts of the names of incomplete or obsolete files in a run directory."""


@dataclass(frozen=True)
class ChaosOutcome:
    """How a run ended: its exit code, or None and a reason if it had to be killed."""

    exit_code: int | None
    num_starts: int
    hang: str | None = None


def run_with_faults(
    launcher: Launcher,
    context: FaultContext,
    faults: Sequence[Fault],
    on_restart: Callable[[int], None] = lambda num_starts: None,
    on_finish: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> ChaosOutcome:
    """Start the run, inject the faults, and restart the run until it is over. The run has always ended when this
    function returns or raises. `on_restart` gets the number of each start after the first; `on_finish` is called when
    the run ends without intervention, before its remaining processes are ended."""
    monitor, injection = context.monitor, inject_faults(faults, context)
    hang_timeout_s = max(MIN_HANG_TIMEOUT_S, HANG_TIMEOUT_STEPS * context.typical.step_s)
    num_starts, last_event_at = 1, clock()
    try:
        launcher.start()
        while True:
            pause = next(injection, POLL_INTERVAL_S)
            events = monitor.read_new()
            code = launcher.restart_if_needed()
            if launcher.num_starts > num_starts:
                num_starts = launcher.num_starts
                on_restart(num_starts)
            if code is not None:
                on_finish()
                return ChaosOutcome(code, launcher.num_starts)
            if events:
                last_event_at = clock()
            elif clock() - last_event_at > hang_timeout_s:
                return ChaosOutcome(None, launcher.num_starts, f"nothing was heard of it for {hang_timeout_s:.0f} s")
            sleep(pause)
    finally:
        injection.close()
        launcher.kill()


def list_shared_memory() -> frozenset[str]:
    """Return the names in /dev/shm."""
    folder = Path("/dev/shm")
    return frozenset(os.listdir(folder)) if folder.is_dir() else frozenset()


def find_leftovers(
    run: Run,
    tag: str,
    scratch: Path,
    shared_memory_before: frozenset[str],
    queue: Callable[[], Sequence[str]] = tuple,
    grace_s: float = EXIT_GRACE_S,
    sleep: Callable[[float], None] = time.sleep,
) -> list[str]:
    """Return a sentence for each leftover of a finished run: processes, unused shared memory, temporary files in its
    directory and in that of the system, entries of a queue."""
    deadline, empty_looks = time.monotonic() + grace_s, 0
    while True:
        found = find_tagged_processes(tag)
        empty_looks = 0 if found else empty_looks + 1
        # Look twice: a process that is just being started has no environment for a moment.
        if empty_looks > 1 or time.monotonic() >= deadline:
            break
        sleep(LEFTOVER_POLL_INTERVAL_S)
    leftovers = [f"process {each.pid} still runs: {' '.join(read_command_line(each))[:100]}" for each in found]
    check_context = CheckContext(run_dir=run.path)
    shared_memory = sorted(set(find_abandoned_shm(check_context)) - shared_memory_before)
    leftovers += [f"shared memory: /dev/shm/{name}" for name in shared_memory]
    leftovers += [f"temporary file: {path}" for path in find_temporary_files(run)]
    leftovers += [f"temporary file: {path}" for path in sorted((scratch / "tmp").iterdir()) if not _is_probe(path)]
    return leftovers + [f"queue: {entry}" for entry in queue()]


def _is_probe(path: Path) -> bool:
    """Whether Python's `tempfile` wrote it to check a directory: a process that is killed at this moment leaves it."""
    with contextlib.suppress(FileNotFoundError, IsADirectoryError):
        return re.fullmatch("[a-z0-9_]{8}", path.name) is not None and path.read_bytes() in (b"", b"blat")
    return False


def find_temporary_files(run: Run) -> list[Path]:
    found = (path for path in run.path.rglob("*") if any(part in path.name for part in TEMPORARY_NAME_PARTS))
    return sorted(path for path in found if not any(part in path.parent.name for part in TEMPORARY_NAME_PARTS))


def verify_run(
    run: Run,
    expected: str,
    outcome: ChaosOutcome,
    num_planned: int,
    num_injected: int,
    leftovers: Sequence[str],
    digest_of: Callable[[Run], str],
) -> tuple[str, ...]:
    """Return a sentence for each problem. `digest_of` computes the digest of a run's newest checkpoint on disk."""
    reasons = []
    result = run.read_json(run.result) or {}
    if outcome.hang is not None:
        reasons.append(f"the run hangs: {outcome.hang}")
    elif outcome.exit_code != ExitCode.DONE:
        message_text = f": {result['message']}" if result.get("message") else ""
        reasons.append(f"the run ended with exit code {outcome.exit_code}{message_text}")
    else:
        if result.get("digest") != expected:
            reasons.append(f"the digest is {result.get('digest')}, and {expected} without faults")
        if (stored := digest_of(run)) != expected:
            reasons.append(f"the digest of the last checkpoint is {stored}, and {expected} without faults")
        if num_injected < num_planned:
            reasons.append(
                f"only {num_injected} of {num_planned} faults struck before the run was over: give it more steps, or "
                f"fewer faults"
            )
    return (*reasons, *(f"left behind: {each}" for each in leftovers))
