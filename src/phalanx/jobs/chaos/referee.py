"""Lets a run go through its faults, and judges it: the same digest as without them, and nothing left behind."""

import contextlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.cluster.health.leftovers import abandoned, processes
from phalanx.cluster.health.site import Site
from phalanx.errors import ExitCode
from phalanx.jobs.chaos.ground import Ground, command_of, marked
from phalanx.jobs.chaos.inject import LOOK, Scene, play
from phalanx.jobs.chaos.plan import Fault
from phalanx.run import Event, Run

GRACE = 10.0
"""Seconds in which the processes of a run that is over must have ended; a queue's supervisor waits two for more."""
SILENCE, STEPS = 300.0, 20.0
"""Seconds, or usual steps, without a word of the run after which it is taken for stuck."""
TEMPORARY = (".tmp", ".old")
"""What names of files have in them that are not whole yet, or not needed any more, in a run directory."""


@dataclass(frozen=True)
class Ended:
    """How a run under faults ended: its exit code, None when it had to be ended, with a sentence then."""

    code: int | None
    starts: int
    stuck: str | None = None


@dataclass(frozen=True)
class Verdict:
    """Whether a run went through its faults unharmed; `reasons`: what was wrong, a sentence each."""

    reasons: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Nothing was wrong."""
        return not self.reasons


def disturb(
    ground: Ground,
    scene: Scene,
    faults: Sequence[Fault],
    heard: Callable[[Event], None],
    again: Callable[[int], None],
    over: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Ended:
    """Start the run, let the faults strike, start it again until it is over. `heard` gets each of its events, `again`
    the number of each start but the first; `over` is called when it is over by itself, before what is left of it is
    ended. Whatever happens, the run has ended when this returns or raises."""
    story, course = scene.story, play(faults, scene)
    patience = max(SILENCE, STEPS * scene.usual.step)
    starts, last = 1, clock()
    try:
        ground.start()
        while True:
            pause = next(course, LOOK)
            events = story.read()
            for event in events:
                heard(event)
            code = ground.tend()
            if ground.starts > starts:
                starts = ground.starts
                again(starts)
            if code is not None:
                for event in story.read():
                    heard(event)
                over()
                return Ended(code, ground.starts)
            if events:
                last = clock()
            elif clock() - last > patience:
                return Ended(None, ground.starts, f"nothing was heard of it for {patience:.0f} s")
            sleep(pause)
    finally:
        course.close()
        ground.end()


@dataclass(frozen=True)
class Before:
    """What was there before a run."""

    shared: frozenset[str]
    """Names in /dev/shm."""


def look() -> Before:
    """What is there now."""
    folder = Path("/dev/shm")
    return Before(frozenset(os.listdir(folder)) if folder.is_dir() else frozenset())


def left_behind(
    run: Run,
    mark: str,
    scratch: Path,
    before: Before,
    queue: Callable[[], Sequence[str]] = tuple,
    grace: float = GRACE,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[str]:
    """What a run that is over has left, a sentence each: processes, shared memory that nobody has open, temporary files
    in its directory and among those of the system, entries of a queue."""
    until, quiet = clock() + grace, 0
    while True:
        found = marked(mark)
        quiet = 0 if found else quiet + 1
        if quiet > 1 or clock() >= until:  # one that is just being started has no environment for a moment
            break
        sleep(0.05)
    left = [f"process {each.pid} still runs: {' '.join(command_of(each))[:100]}" for each in found]
    site = Site(run=run.path)
    shared = sorted(set(abandoned(site, processes(site))) - before.shared)
    left += [f"shared memory: /dev/shm/{name}" for name in shared]
    left += [f"temporary file: {path}" for path in temporary_files(run)]
    left += [f"temporary file: {path}" for path in sorted((scratch / "tmp").iterdir()) if not _is_probe(path)]
    return left + [f"queue: {entry}" for entry in queue()]


def _is_probe(path: Path) -> bool:
    """Whether it is what Python's `tempfile` makes for a moment, to see that it can write to a folder: a process that
    was killed just then leaves it."""
    with contextlib.suppress(FileNotFoundError, IsADirectoryError):
        return re.fullmatch("[a-z0-9_]{8}", path.name) is not None and path.read_bytes() in (b"", b"blat")
    return False


def temporary_files(run: Run) -> list[Path]:
    """What is half made in a run directory."""
    found = (path for path in run.path.rglob("*") if any(part in path.name for part in TEMPORARY))
    return sorted(path for path in found if not any(part in path.parent.name for part in TEMPORARY))


def judge(
    run: Run,
    expected: str,
    ended: Ended,
    planned: int,
    struck: int,
    left: Sequence[str],
    digest_of: Callable[[Run], str],
) -> Verdict:
    """The verdict. `digest_of` reads the newest checkpoint of a run: what is on disk, not what was said of it."""
    reasons = []
    result = run.read_json(run.result) or {}
    if ended.stuck is not None:
        reasons.append(f"the run hangs: {ended.stuck}")
    elif ended.code != ExitCode.DONE:
        said = f": {result['message']}" if result.get("message") else ""
        reasons.append(f"the run ended with exit code {ended.code}{said}")
    else:
        if result.get("digest") != expected:
            reasons.append(f"the digest is {result.get('digest')}, and {expected} without faults")
        if (stored := digest_of(run)) != expected:
            reasons.append(f"the digest of the last checkpoint is {stored}, and {expected} without faults")
        if struck < planned:
            reasons.append(
                f"only {struck} of {planned} faults struck before the run was over: give it more steps, or fewer faults"
            )
    return Verdict((*reasons, *(f"left behind: {each}" for each in left)))


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder for what runs need beside their directories; its path is short, since sockets may lie in it."""
    path = Path(tempfile.mkdtemp(prefix="phalanx-chaos-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
