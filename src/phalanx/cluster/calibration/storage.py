"""Measure how fast a directory writes and reads: one file, large blocks, synced to the disk, then read with O_DIRECT,
since a read from the page cache says nothing. A short pilot decides how much is written, so that a slow disk costs no
more time than a fast one. The caller gives an own directory and removes it. `location_speed.py` measures more.
"""

import errno
import mmap
import os
import shutil
from pathlib import Path

from phalanx.cluster.calibration.timing import ClockFn
from phalanx.errors import UsageError
from phalanx.formatting import format_bytes

BLOCK_BYTES = 16 * 2**20
"""Bytes of one write or read."""
PILOT_BYTES = 2 * BLOCK_BYTES
MAX_WRITTEN_BYTES = {True: 128 * 10**6, False: 10**9}
"""Maximum bytes written, by `quick`."""
FREE_SPACE_FACTOR = 1.1
"""Free space that is required, over what is written."""


def check_free_space(directory: Path, quick: bool) -> None:
    """Raise UsageError unless the file system of `directory` has enough free space for the measurement."""
    needed_bytes, free_bytes = MAX_WRITTEN_BYTES[quick] * FREE_SPACE_FACTOR, shutil.disk_usage(directory).free
    if free_bytes < needed_bytes:
        raise UsageError(
            f"{directory}: too little free space to measure the disk: needs {format_bytes(needed_bytes)}, "
            f"{format_bytes(free_bytes)} are free; choose another --dir"
        )


def measure_storage(directory: Path, max_bytes: int, seconds: float, clock: ClockFn) -> tuple[float, float | None]:
    """Return GB/s of writing and of reading a file of at most `max_bytes` in `directory`, within about `seconds`. The
    latter is None where the file system does not support O_DIRECT. Raises OSError when the disk fails."""
    path = directory / "probe.bin"
    block = mmap.mmap(-1, BLOCK_BYTES)  # aligned to pages, as O_DIRECT wants its buffers
    block.write(os.urandom(BLOCK_BYTES))  # a disk that compresses must not look faster
    try:
        rate = PILOT_BYTES / max(write_file(path, block, PILOT_BYTES, clock), 1e-9)
        nbytes = max(BLOCK_BYTES, int(min(max_bytes, rate * seconds / 2) // BLOCK_BYTES * BLOCK_BYTES))
        write_s = write_file(path, block, nbytes, clock)
        read_rate = read_file(path, block, nbytes, seconds / 2, clock)
        return nbytes / write_s / 1e9, None if read_rate is None else read_rate / 1e9
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


def read_file(path: Path, block: mmap.mmap, nbytes: int, seconds: float, clock: ClockFn) -> float | None:
    """Read the file for at most `seconds` with O_DIRECT. Returns bytes per second, None where it is not supported."""
    fd = None
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        started, done = clock(), 0
        while done < nbytes and (done == 0 or clock() - started < seconds):
            done += os.preadv(fd, [block], done)
        return done / max(clock() - started, 1e-9)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return None
    finally:
        if fd is not None:
            os.close(fd)
