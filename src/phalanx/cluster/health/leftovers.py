"""Check `leftovers`: what dead runs left behind. Workers whose agent is gone, files in /dev/shm that nobody has open,
processes that wait within the kernel, zombies.

Read from /proc below the site's root; of other users' processes only what everybody may see.
"""

import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from phalanx.cluster.health.finding import Figure, Finding, Verdict
from phalanx.cluster.health.site import Site, read
from phalanx.cluster.health.thresholds import MIB, judge

NURSERY = "phalanx.jobs.nursery"
"""In the command of the process that forks workers, and of these."""
INITIAL = frozenset({"init", "systemd", "tini", "dumb-init", "catatonit"})
"""Who adopts processes whose parent is gone."""
LOOKS, BETWEEN = 3, 0.1
"""How often, and how many seconds apart, a process must be found waiting within the kernel: a moment of it is usual."""
SHOWN = 5


@dataclass(frozen=True)
class Process:
    """One process. `state`: R running, S sleeping, D waiting within the kernel, Z zombie."""

    pid: int
    parent: int
    name: str
    state: str
    command: tuple[str, ...]
    mine: bool
    """Whether it belongs to the user for whom is looked; for root all do."""


INIT = Process(1, 0, "init", "S", (), False)
"""Stands for a parent that cannot be seen."""


def processes(site: Site) -> list[Process]:
    """All processes."""
    folder = site.root / "proc"
    found = (_process(each, site.uid) for each in folder.iterdir() if each.name.isdigit())
    return sorted((each for each in found if each is not None), key=lambda each: each.pid)


def _process(folder: Path, uid: int) -> Process | None:
    stat = read(folder / "stat")
    begin, end = stat.find("("), stat.rfind(")")
    try:
        mine = uid in (0, folder.stat().st_uid)
        state, parent = stat[end + 1 :].split()[:2]
        command = tuple(word for word in read(folder / "cmdline").split("\0") if word)
    except (OSError, ValueError):  # it ended meanwhile
        return None
    return Process(int(folder.name), int(parent), stat[begin + 1 : end], state, command, mine)


def orphans(found: list[Process], variables: Callable[[int], str]) -> list[Process]:
    """Workers of a run that nobody looks after any more: ours whose agent is gone, and torchrun's which were adopted.
    `variables` gives a process's environment, empty where it may not be seen."""
    by_pid = {each.pid: each for each in found}
    return [each for each in found if each.mine and each.state != "Z" and _orphan(each, by_pid, variables)]


def _orphan(one: Process, by_pid: dict[int, Process], variables: Callable[[int], str]) -> bool:
    top = one
    while NURSERY in top.command and NURSERY in (above := by_pid.get(top.parent, INIT)).command:
        top = above
    # who is adopted has lost its parent; the numbers in commands may be those of another namespace
    if by_pid.get(top.parent, INIT).name not in INITIAL:
        return False
    if NURSERY in one.command:
        return True
    words = variables(one.pid)
    return all(re.search(rf"(^|\0){name}=", words) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))


def abandoned(site: Site, found: list[Process]) -> dict[str, int]:
    """Files of the user (for root: all) in /dev/shm that no process has open or mapped, by name, with their bytes."""
    folder = site.root / "dev/shm"
    here = {each.name: each for each in folder.iterdir()} if folder.is_dir() else {}
    files = {}
    for name, path in here.items():
        try:
            stat = path.lstat()
        except FileNotFoundError:  # its owner has just removed it
            continue
        if site.uid in (0, stat.st_uid) and path.is_file() and not path.is_symlink():
            files[name] = stat.st_size
    if not files:
        return {}
    used = {name for each in found if each.mine for name in _in_shm(site.root / "proc" / str(each.pid))}
    return {name: size for name, size in files.items() if name not in used and not _semaphore(name)}


def _in_shm(folder: Path) -> Iterator[str]:
    """Names below /dev/shm that a process has open or mapped."""
    for line in read(folder / "maps").splitlines():
        if "/dev/shm/" in line:
            yield line.partition("/dev/shm/")[2]
    try:
        descriptors = list((folder / "fd").iterdir())
    except OSError:  # it ended, or may not be seen
        return
    for each in descriptors:
        try:
            link = os.readlink(each)
        except OSError:  # this one was closed meanwhile, as the one by which we have just read our own
            continue
        if link.startswith("/dev/shm/"):
            yield link.removeprefix("/dev/shm/")


def _semaphore(name: str) -> bool:
    """Named semaphores take 32 bytes, and databases keep theirs for ever."""
    return name.startswith("sem.")


def check(site: Site, sleep: Callable[[float], None] = time.sleep) -> list[Finding]:
    found = processes(site)
    left = orphans(found, lambda pid: read(site.root / "proc" / str(pid) / "environ"))
    return [_processes(left), _files(abandoned(site, found)), _stuck(site, found, sleep)]


def _processes(left: list[Process]) -> Finding:
    figures: dict[str, Figure] = {"pids": " ".join(str(each.pid) for each in left)}
    if not left:
        return Finding("leaked-resources/workers", Verdict.OK, "no worker without its agent", figures)
    numbers = ", ".join(str(each.pid) for each in left[:SHOWN]) + (" ..." if len(left) > SHOWN else "")
    text = f"{len(left)} workers of a run whose agent is gone still hold memory or devices: end them (kill {numbers})"
    return Finding("leaked-resources/workers", Verdict.BAD, text, figures)


def _files(files: dict[str, int]) -> Finding:
    size = sum(files.values())
    figures: dict[str, Figure] = {"files": len(files), "bytes": size}
    if not files:
        return Finding("leaked-resources/shm", Verdict.OK, "no file in /dev/shm that nobody has open", figures)
    names = ", ".join(sorted(files)[:SHOWN]) + (" ..." if len(files) > SHOWN else "")
    text = f"{len(files)} files in /dev/shm ({size / MIB:.1f} MiB) that no process has open: {names}"
    return Finding("leaked-resources/shm", Verdict.WARN, text, figures)


def _stuck(site: Site, found: list[Process], sleep: Callable[[float], None]) -> Finding:
    stuck = _waiting(found)
    for _ in range(LOOKS - 1):
        if stuck:
            sleep(BETWEEN)
            stuck &= _waiting(processes(site))
    zombies = [each for each in found if each.state == "Z"]
    names = {each.pid: each.name for each in found}
    figures: dict[str, Figure] = {"stuck": len(stuck), "zombies": len(zombies)}
    if (verdict := judge("uninterruptible processes", len(stuck))) is not Verdict.OK:
        told = ", ".join(f"{names[pid]} ({pid})" for pid in sorted(stuck)[:SHOWN])
        text = f"{len(stuck)} processes wait within the kernel, as for a dead disk or GPU: {told}"
        return Finding("leaked-resources/uninterruptible", verdict, text, figures)
    verdict = judge("zombies", len(zombies))
    return Finding(
        "leaked-resources/uninterruptible", verdict, f"none waits within the kernel; {len(zombies)} zombies", figures
    )


def _waiting(found: list[Process]) -> set[int]:
    """Those in state D; the kernel's own threads, which have no command, wait there as a habit."""
    return {each.pid for each in found if each.state == "D" and each.command}
