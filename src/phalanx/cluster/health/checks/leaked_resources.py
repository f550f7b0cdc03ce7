"""Check `leaked-resources`: shared memory that dead runs of Phalanx left behind. (Their workers die with the agent.)

Reads /proc below `CheckContext.root`; of other users' processes only what is readable for all users.
"""

import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from phalanx.cluster.health.finding import CheckContext, FindingValue, HealthFinding, HealthVerdict
from phalanx.cluster.system_files import read_small_file
from phalanx.formatting import BYTES_PER_MIB
from phalanx.run.in_memory_checkpoint import DIR_PREFIX

SHM_PREFIXES = (DIR_PREFIX, "nccl-", "torch_")
"""What workers create in /dev/shm: in-memory checkpoints, and files of NCCL and torch."""
IN_MEMORY_IDLE_S = 3600.0
"""Seconds without a change after which in-memory checkpoints count as abandoned."""
MAX_SHOWN = 5


def find_abandoned_shm(context: CheckContext) -> dict[str, int]:
    """Return bytes by name of what Phalanx' workers of this user (root: of all) left in /dev/shm: files that no process
    has open or mapped, and in-memory checkpoints that did not change for long."""
    shm = context.root / "dev/shm"
    sizes: dict[str, int] = {}
    for path in shm.iterdir() if shm.is_dir() else ():
        try:
            status = path.lstat()
            if not path.name.startswith(SHM_PREFIXES) or context.uid not in (0, status.st_uid):
                continue
            if stat.S_ISREG(status.st_mode):
                sizes[path.name] = status.st_size
            elif stat.S_ISDIR(status.st_mode) and time.time() - status.st_mtime > IN_MEMORY_IDLE_S:
                sizes[path.name] = sum(file.lstat().st_size for file in path.rglob("*"))
        except OSError:  # its owner has just removed it
            continue
    if sizes:
        for process_dir in (context.root / "proc").glob("[0-9]*"):
            for name in _shm_names_of(process_dir):
                sizes.pop(name, None)
    return sizes


def _shm_names_of(process_dir: Path) -> Iterator[str]:
    """Yield the names below /dev/shm that a process has open or mapped."""
    for line in read_small_file(process_dir / "maps").splitlines():
        if "/dev/shm/" in line:
            yield line.partition("/dev/shm/")[2]
    try:
        descriptors = list((process_dir / "fd").iterdir())
    except OSError:  # it ended, or is not readable
        return
    for descriptor in descriptors:
        try:
            link = os.readlink(descriptor)
        except OSError:  # closed meanwhile, like the descriptor of our own listing
            continue
        if link.startswith("/dev/shm/"):
            yield link.removeprefix("/dev/shm/")


def check_leaked_resources(context: CheckContext) -> list[HealthFinding]:
    sizes = find_abandoned_shm(context)
    total = sum(sizes.values())
    figures: dict[str, FindingValue] = {"num_files": len(sizes), "size_bytes": total}
    if not sizes:
        return [HealthFinding("leaked-resources", HealthVerdict.PASS, "nothing left in /dev/shm", figures)]
    names = ", ".join(sorted(sizes)[:MAX_SHOWN]) + (" ..." if len(sizes) > MAX_SHOWN else "")
    reason = f"dead runs left {total / BYTES_PER_MIB:.1f} MiB in /dev/shm: {names}"
    return [HealthFinding("leaked-resources", HealthVerdict.WARN, reason, figures)]
