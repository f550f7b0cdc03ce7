"""How fast a folder writes and reads: one file, large blocks, synced to the disk, then read past the page cache.

Of a read that comes from memory one learns nothing, so what was written is dropped from the page cache, and read with
O_DIRECT where the file system can; `read_mode` says which it was. A short pilot decides how much is written, so that a
slow disk costs no more time than a fast one. The caller gives a folder of its own and removes it.
"""

import errno
import mmap
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from phalanx.errors import UsageError
from phalanx.formatting import format_bytes

ClockFn = Callable[[], float]
BLOCK_BYTES = 16 * 2**20
"""Bytes of one write or read."""
PILOT_BYTES = 2 * BLOCK_BYTES
MAX_WRITTEN_BYTES = {True: 128 * 10**6, False: 10**9}
"""Bytes that are written at most, by quickness."""
FREE_SPACE_FACTOR = 1.1
"""Free space that is asked for, over what is written."""


@dataclass(frozen=True)
class StorageRates:
    """GB/s of one writer and one reader; `read_mode`: how the read kept clear of the page cache, "direct", "dropped",
    or "cached" where it could not, which makes `read_gbps` None."""

    write_gbps: float
    read_gbps: float | None
    num_bytes: int
    read_mode: str


def check_free_space(folder: Path, quick: bool) -> None:
    """Raise UsageError unless the file system of `folder` has enough free space for the measurement."""
    needed_bytes, free_bytes = MAX_WRITTEN_BYTES[quick] * FREE_SPACE_FACTOR, shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise UsageError(
            f"{folder}: too little free space to measure the disk: needs {format_bytes(needed_bytes)}, "
            f"{format_bytes(free_bytes)} are free; choose another --dir"
        )


def measure_storage(directory: Path, quick: bool, seconds: float, clock: ClockFn) -> StorageRates:
    """Write and read a file in `folder` within about `seconds`. Raises OSError when the disk fails."""
    path = directory / "probe.bin"
    block = mmap.mmap(-1, BLOCK_BYTES)  # aligned to pages, as O_DIRECT wants its buffers
    block.write(os.urandom(BLOCK_BYTES))  # a disk that compresses must not look faster
    try:
        pilot = write_file(path, block, PILOT_BYTES, clock)
        rate = PILOT_BYTES / max(pilot, 1e-9)
        nbytes = max(BLOCK_BYTES, int(min(MAX_WRITTEN_BYTES[quick], rate * seconds / 2) // BLOCK_BYTES * BLOCK_BYTES))
        writing = write_file(path, block, nbytes, clock)
        reading, cache = read_file(path, block, nbytes, seconds / 2, clock)
        return StorageRates(nbytes / writing / 1e9, None if cache == "cached" else reading / 1e9, nbytes, cache)
    finally:
        path.unlink(missing_ok=True)
        block.close()


def write_file(path: Path, block: mmap.mmap, nbytes: int, clock: ClockFn) -> float:
    """Write a new file of `nbytes` and return the seconds, including fsync."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        started, remaining = clock(), nbytes
        while remaining > 0:
            remaining -= os.write(fd, memoryview(block)[: min(remaining, BLOCK_BYTES)])
        os.fsync(fd)
        return clock() - started
    finally:
        os.close(fd)


def read_file(path: Path, block: mmap.mmap, nbytes: int, seconds: float, clock: ClockFn) -> tuple[float, str]:
    """Read the file for at most `seconds`. Returns bytes per second, and how the page cache was avoided."""
    dropped = drop_page_cache(path)
    fd, direct = open_for_direct_read(path)
    try:
        started, done = clock(), 0
        while done < nbytes and (done == 0 or clock() - started < seconds):
            try:
                got = os.preadv(fd, [block], done)
            except OSError as error:
                if not direct or error.errno != errno.EINVAL:
                    raise
                os.close(fd)  # it opens files for direct reads, and then refuses them
                fd, direct = os.open(path, os.O_RDONLY), False
                continue
            if got == 0:
                break
            done += got
        rate = done / max(clock() - started, 1e-9)
    finally:
        os.close(fd)
    return rate, "direct" if direct else "dropped" if dropped else "cached"


def drop_page_cache(path: Path) -> bool:
    """Drop the page cache of a synced file; False where the system does not support it."""
    if not hasattr(os, "posix_fadvise"):
        return False
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError:  # a file system in user space may not know it
        return False
    finally:
        os.close(fd)
    return True


def open_for_direct_read(path: Path) -> tuple[int, bool]:
    """Open the file with O_DIRECT where the file system supports it."""
    if hasattr(os, "O_DIRECT"):
        try:
            return os.open(path, os.O_RDONLY | os.O_DIRECT), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    return os.open(path, os.O_RDONLY), False
