"""Check `leaked-resources`: what dead runs left behind: workers without an agent, unused files in /dev/shm, processes
blocked in the kernel, zombies.

Reads /proc below `CheckContext.root`; of other users' processes only what is readable for all users.
"""

import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from phalanx.cluster.health.context import CheckContext, read_small_file
from phalanx.cluster.health.finding import FindingValue, HealthFinding, HealthVerdict
from phalanx.cluster.health.thresholds import evaluate_threshold
from phalanx.formatting import BYTES_PER_MIB

FORKSERVER_MODULE = "phalanx.jobs.agent.fork_server"
"""Module in the command line of fork servers and workers."""
INIT_PROCESS_NAMES = frozenset({"init", "systemd", "tini", "dumb-init", "catatonit"})
"""Processes that adopt orphans."""
NUM_LOOKS, LOOK_INTERVAL_S = 3, 0.1
"""A process counts as blocked when it is uninterruptible in all of these samples; a moment of it is normal."""
MAX_SHOWN = 5


@dataclass(frozen=True)
class ProcessInfo:
    """One process. `state`: R running, S sleeping, D uninterruptible, Z zombie."""

    pid: int
    parent: int
    name: str
    state: str
    command: tuple[str, ...]
    is_own: bool
    """Whether it belongs to `CheckContext.uid`; always true for root."""


UNKNOWN_PARENT = ProcessInfo(1, 0, "init", "S", (), False)
"""Placeholder for a parent that is not visible."""


def list_processes(context: CheckContext) -> list[ProcessInfo]:
    """List all processes by pid."""
    folder = context.root / "proc"
    found = (_read_process(each, context.uid) for each in folder.iterdir() if each.name.isdigit())
    return sorted((each for each in found if each is not None), key=lambda each: each.pid)


def _read_process(folder: Path, uid: int) -> ProcessInfo | None:
    stat = read_small_file(folder / "stat")
    begin, end = stat.find("("), stat.rfind(")")
    try:
        mine = uid in (0, folder.stat().st_uid)
        state, parent = stat[end + 1 :].split()[:2]
        command = tuple(word for word in read_small_file(folder / "cmdline").split("\0") if word)
    except (OSError, ValueError):  # it ended meanwhile
        return None
    return ProcessInfo(int(folder.name), int(parent), stat[begin + 1 : end], state, command, mine)


def find_orphans(found: list[ProcessInfo], environment_of: Callable[[int], str]) -> list[ProcessInfo]:
    """Find workers without a supervisor: those of a dead agent, and adopted ones of torchrun.

    `environment_of` returns the environment of a process, empty if not readable.
    """
    by_pid = {each.pid: each for each in found}
    return [each for each in found if each.is_own and each.state != "Z" and _is_orphan(each, by_pid, environment_of)]


def _is_orphan(process: ProcessInfo, by_pid: dict[int, ProcessInfo], environment_of: Callable[[int], str]) -> bool:
    top = process
    while (
        FORKSERVER_MODULE in top.command
        and FORKSERVER_MODULE in (above := by_pid.get(top.parent, UNKNOWN_PARENT)).command
    ):
        top = above
    # an adopted process has lost its parent; pids in command lines may belong to another namespace
    if by_pid.get(top.parent, UNKNOWN_PARENT).name not in INIT_PROCESS_NAMES:
        return False
    if FORKSERVER_MODULE in process.command:
        return True
    words = environment_of(process.pid)
    return all(re.search(rf"(^|\0){name}=", words) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))


def find_abandoned_shm(context: CheckContext, found: list[ProcessInfo]) -> dict[str, int]:
    """Return bytes by name of the user's files in /dev/shm (root: all files) that no process has open or mapped."""
    folder = context.root / "dev/shm"
    files_by_name = {each.name: each for each in folder.iterdir()} if folder.is_dir() else {}
    files = {}
    for name, path in files_by_name.items():
        try:
            stat = path.lstat()
        except FileNotFoundError:  # its owner has just removed it
            continue
        if context.uid in (0, stat.st_uid) and path.is_file() and not path.is_symlink():
            files[name] = stat.st_size
    if not files:
        return {}
    used = {name for each in found if each.is_own for name in _shm_names_of(context.root / "proc" / str(each.pid))}
    return {name: size for name, size in files.items() if name not in used and not _is_semaphore(name)}


def _shm_names_of(folder: Path) -> Iterator[str]:
    """Yield the names below /dev/shm that a process has open or mapped."""
    for line in read_small_file(folder / "maps").splitlines():
        if "/dev/shm/" in line:
            yield line.partition("/dev/shm/")[2]
    try:
        descriptors = list((folder / "fd").iterdir())
    except OSError:  # it ended, or is not readable
        return
    for each in descriptors:
        try:
            link = os.readlink(each)
        except OSError:  # closed meanwhile, like the descriptor of our own listing
            continue
        if link.startswith("/dev/shm/"):
            yield link.removeprefix("/dev/shm/")


def _is_semaphore(name: str) -> bool:
    """Whether a file is a named semaphore: these take 32 bytes, and databases never remove theirs."""
    return name.startswith("sem.")


def check_leaked_resources(context: CheckContext, sleep: Callable[[float], None] = time.sleep) -> list[HealthFinding]:
    found = list_processes(context)
    left = find_orphans(found, lambda pid: read_small_file(context.root / "proc" / str(pid) / "environ"))
    return [
        _orphan_finding(left),
        _shm_finding(find_abandoned_shm(context, found)),
        _blocked_finding(context, found, sleep),
    ]


def _orphan_finding(orphans_left: list[ProcessInfo]) -> HealthFinding:
    figures: dict[str, FindingValue] = {"pids": " ".join(str(each.pid) for each in orphans_left)}
    if not orphans_left:
        return HealthFinding("leaked-resources/workers", HealthVerdict.PASS, "no worker without its agent", figures)
    numbers = ", ".join(str(each.pid) for each in orphans_left[:MAX_SHOWN]) + (
        " ..." if len(orphans_left) > MAX_SHOWN else ""
    )
    text = f"{len(orphans_left)} workers without an agent still hold memory or devices: end them (kill {numbers})"
    return HealthFinding("leaked-resources/workers", HealthVerdict.FAIL, text, figures)


def _shm_finding(files: dict[str, int]) -> HealthFinding:
    size = sum(files.values())
    figures: dict[str, FindingValue] = {"num_files": len(files), "size_bytes": size}
    if not files:
        return HealthFinding("leaked-resources/shm", HealthVerdict.PASS, "no unused file in /dev/shm", figures)
    names = ", ".join(sorted(files)[:MAX_SHOWN]) + (" ..." if len(files) > MAX_SHOWN else "")
    text = f"{len(files)} files in /dev/shm ({size / BYTES_PER_MIB:.1f} MiB) that no process has open: {names}"
    return HealthFinding("leaked-resources/shm", HealthVerdict.WARN, text, figures)


def _blocked_finding(context: CheckContext, found: list[ProcessInfo], sleep: Callable[[float], None]) -> HealthFinding:
    blocked = _find_blocked(found)
    for _ in range(NUM_LOOKS - 1):
        if blocked:
            sleep(LOOK_INTERVAL_S)
            blocked &= _find_blocked(list_processes(context))
    zombies = [each for each in found if each.state == "Z"]
    names = {each.pid: each.name for each in found}
    figures: dict[str, FindingValue] = {"stuck": len(blocked), "zombies": len(zombies)}
    if (verdict := evaluate_threshold("uninterruptible processes", len(blocked))) is not HealthVerdict.PASS:
        shown = ", ".join(f"{names[pid]} ({pid})" for pid in sorted(blocked)[:MAX_SHOWN])
        text = f"{len(blocked)} processes wait within the kernel, as for a dead disk or GPU: {shown}"
        return HealthFinding("leaked-resources/uninterruptible", verdict, text, figures)
    verdict = evaluate_threshold("zombies", len(zombies))
    return HealthFinding(
        "leaked-resources/uninterruptible", verdict, f"none waits within the kernel; {len(zombies)} zombies", figures
    )


def _find_blocked(found: list[ProcessInfo]) -> set[int]:
    """Return pids in state D, except kernel threads, which have no command line and are often in this state."""
    return {each.pid for each in found if each.state == "D" and each.command}
