"""Check `disk`: room and inodes where a run, the cache and temporary files lie, and whether they can be written to."""

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from phalanx.cluster.disks import mount_of
from phalanx.cluster.health.finding import Figure, Finding, Verdict, worst
from phalanx.cluster.health.site import Site
from phalanx.cluster.health.thresholds import GIB, judge

Space = Callable[[Path], os.statvfs_result]


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next((each for each in (folder, *folder.parents) if each.exists()), Path("/"))


def look(folder: Path, site: Site, space: Space = os.statvfs) -> dict[str, Figure]:
    """Room in a folder, or in the one above it in which it would be made. OSError where the disk fails."""
    nearest = existing(folder.absolute())
    found, mount = space(nearest), mount_of(nearest, site.root)
    return {
        "folder": str(folder),
        "nearest": str(nearest),
        "kind": mount.kind if mount else None,
        "free": found.f_bavail * found.f_frsize,
        "total": found.f_blocks * found.f_frsize,
        "inodes": found.f_files or None,  # file systems that make inodes when needed count none
        "inodes_free": found.f_favail if found.f_files else None,
        "read_only": bool(found.f_flag & os.ST_RDONLY),
        "writable": os.access(nearest, os.W_OK | os.X_OK),
    }


def evaluate(what: str, figures: dict[str, Figure]) -> Finding:
    """`what` it is: "run", "cache" or "temp"."""
    free, total, inodes, folder = (figures[name] for name in ("free", "total", "inodes_free", "folder"))
    assert isinstance(free, int)
    assert isinstance(total, int)
    check = f"disk/{what}"
    if figures["read_only"]:
        return Finding(check, Verdict.BAD, f"{folder}: its file system is mounted read-only", figures)
    if not figures["writable"]:
        return Finding(check, Verdict.BAD, f"{folder}: this user may not write there", figures)
    verdicts = [judge("run disk free" if what == "run" else "cache disk free", free)]
    where = "" if figures["nearest"] == folder else f" (would be made in {figures['nearest']})"
    told = f"{folder}{where}: {free / GIB:.1f} of {total / GIB:.1f} GiB free"
    if isinstance(inodes, int) and (verdict := judge("inodes free", inodes)) is not Verdict.OK:
        verdicts.append(verdict)
        told += f", room for {inodes} more files only"
    return Finding(check, worst(verdicts), told, figures)


def check(site: Site, space: Space = os.statvfs) -> list[Finding]:
    return list(_each(site, space))


def _each(site: Site, space: Space) -> Iterator[Finding]:
    for what, folder in (("run", site.run), ("cache", site.cache), ("temp", site.temp)):
        try:
            yield evaluate(what, look(folder, site, space))
        except OSError as error:
            how = "a network file system's server does not know it any more; mount it anew: "
            text = f"{folder}: {how if error.errno == errno.ESTALE else ''}{error.strerror}"
            yield Finding(f"disk/{what}", Verdict.BAD, text, {"folder": str(folder), "errno": error.errno})
