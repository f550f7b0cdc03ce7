"""Disks, and what a folder lies on: the disk, or the file system of a network.

Linux only, read from /sys and /proc below a given root, like discovery.py. How fast they are is measured elsewhere
(calibration/storage.py).
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

SECTOR_BYTES = 512
"""Bytes in which /sys/block counts, whatever the disk's own sectors are."""
NON_DISK_NAMES = re.compile(r"(loop|ram|zram|sr|fd)\d+")
"""Block devices that are no disks."""
SHARED_FILE_SYSTEMS = frozenset(
    {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "9p", "virtiofs", "afs", "glusterfs", "wekafs"}
)
"""File systems that other machines may see, too."""
MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs"})


@dataclass(frozen=True)
class Disk:
    """One block device. `rotational` comes from the kernel, and is often wrong for virtual disks."""

    name: str
    size_bytes: int
    rotational: bool
    model: str = ""


@dataclass(frozen=True)
class Mount:
    """The mount of a directory. `disk` is None for network, memory and overlay file systems."""

    mount_point: str
    source: str
    file_system: str
    """Of file system: "ext4"."""
    disk: Disk | None = None

    @property
    def is_shared(self) -> bool:
        """Whether other machines may see it. File systems in user space are believed to be shared."""
        return self.file_system in SHARED_FILE_SYSTEMS or self.file_system.startswith("fuse.")


def discover_disks(root: Path = Path("/")) -> tuple[Disk, ...]:
    """Return all disks with a size, by name."""
    folder = root / "sys/block"
    names = sorted(each.name for each in folder.iterdir()) if folder.is_dir() else []
    found = [_read_disk(folder / name) for name in names if not NON_DISK_NAMES.fullmatch(name)]
    return tuple(disk for disk in found if disk.size_bytes > 0)


def find_mount(path: Path, root: Path = Path("/")) -> Mount | None:
    """Return the mount of `path`, which need not exist; None if unknown. The last mount on a point hides those before
    it."""
    best: tuple[str, str, str] | None = None
    for line in (_read_text(root / "proc/self/mountinfo") or "").splitlines():
        fields, _, rest = line.partition(" - ")
        point = _unescape(fields.split(" ")[4])
        kind, source, *_ = rest.split(" ")
        if _is_below(point, os.path.abspath(path)) and (best is None or len(point) >= len(best[0])):
            best = (point, _unescape(source), kind)
    if best is None:
        return None
    point, source, kind = best
    return Mount(point, source, kind, _disk_of_device(source, root))


def _is_below(point: str, folder: str) -> bool:
    return point == "/" or folder == point or folder.startswith(f"{point}/")


def _disk_of_device(source: str, root: Path) -> Disk | None:
    """The disk of a device: itself, or the one of which it is a partition."""
    if not source.startswith("/dev/"):
        return None
    name, block = (root / source.lstrip("/")).resolve().name, root / "sys/block"  # /dev/mapper/x is a link to dm-0
    if (block / name).is_dir():
        return _read_disk(block / name)
    holders = sorted(block.glob(f"*/{name}"))
    return _read_disk(holders[0].parent) if holders else None


def _read_disk(folder: Path) -> Disk:
    return Disk(
        name=folder.name,
        size_bytes=int(_read_text(folder / "size") or 0) * SECTOR_BYTES,
        rotational=_read_text(folder / "queue/rotational") == "1",
        model=_read_text(folder / "device/model") or "",
    )


def _unescape(text: str) -> str:
    """Mount tables write spaces and the like as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:  # absent on this kernel, or hidden in this container
        return None
