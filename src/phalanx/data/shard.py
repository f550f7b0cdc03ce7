"""One shard on disk: fixed-width little-endian values in `shard-00000.bin`, and its sidecar `shard-00000.idx`.

Sidecar: the magic `PHXSHRD1`; bytes of the shard, number of blocks and number of documents as uint64; the xxh3_64 of
every 64 KiB block; the position (in values) where every document starts. All little-endian. The document starts are
authoritative: a separator among the tokens is only there for the model to read.
"""

import os
import struct
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from phalanx.data.manifest import MANIFEST_FILE, ShardEntry
from phalanx.errors import DataError, is_storage_error
from phalanx.run.directory import fsync_if_supported, write_synced
from phalanx.safe_files import read_bytes

BLOCK_BYTES = 1 << 16
_SIDECAR_MAGIC = b"PHXSHRD1"
_SIDECAR_HEADER = struct.Struct("<8sQQQ")

ValueArray = npt.NDArray[Any]


class ShardWriter:
    """Writes one shard front to back in constant memory (besides its checksums and document starts).

    `record` is the number of values that make one token (1) or image. Until `commit` has renamed it, nothing under
    the shard's own name exists.
    """

    def __init__(self, folder: Path, number: int, dtype: np.dtype[Any], record: int = 1):
        self._file, self._sidecar = folder / f"shard-{number:05d}.bin", folder / f"shard-{number:05d}.idx"
        self._out = open(_temporary_path(self._file), "wb")  # noqa: SIM115 - `__exit__` closes it
        self._dtype, self._record = dtype, record
        self._pending = bytearray()
        self._hashes, self._documents = array("Q"), array("Q")
        self._bytes = 0

    @property
    def num_written(self) -> int:
        """Tokens or images so far."""
        return self._bytes // (self._dtype.itemsize * self._record)

    def start_document(self) -> None:
        """The next value is the first of a document."""
        self._documents.append(self._bytes // self._dtype.itemsize)

    def append_values(self, values: ValueArray) -> None:
        """Write values behind what is there."""
        data = np.ascontiguousarray(values, self._dtype).tobytes()
        self._out.write(data)
        self._bytes += len(data)
        self._pending += data
        whole = len(self._pending) // BLOCK_BYTES * BLOCK_BYTES
        if whole:
            blocks = memoryview(self._pending)
            self._hashes.extend(xxh3_64_intdigest(blocks[at : at + BLOCK_BYTES]) for at in range(0, whole, BLOCK_BYTES))
            blocks.release()
            del self._pending[:whole]

    def commit(self) -> ShardEntry:
        """Put the shard and its sidecar safely on disk under their names and say what they hold."""
        if self._pending:
            self._hashes.append(xxh3_64_intdigest(self._pending))
        header = _SIDECAR_HEADER.pack(_SIDECAR_MAGIC, self._bytes, len(self._hashes), len(self._documents))
        arrays = (np.asarray(numbers, "<u8").tobytes() for numbers in (self._hashes, self._documents))
        sidecar = b"".join((header, *arrays))
        write_synced(_temporary_path(self._sidecar), sidecar)
        self._out.flush()
        fsync_if_supported(self._out.fileno())
        os.replace(_temporary_path(self._sidecar), self._sidecar)
        os.replace(_temporary_path(self._file), self._file)
        return ShardEntry(
            file=self._file.name,
            bytes=self._bytes,
            count=self.num_written,
            documents=len(self._documents),
            sidecar=self._sidecar.name,
            sidecar_xxh3=xxh3_64_hexdigest(sidecar),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Let go of the file; without `commit` only a temporary one is left."""
        self._out.close()


def _temporary_path(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")


@dataclass(frozen=True)
class ShardSidecar:
    """Checksums of a shard's blocks (uint64 [blocks]) and where its documents start (int64 [documents], in values)."""

    hashes: npt.NDArray[np.uint64]
    documents: npt.NDArray[np.int64]


def read_sidecar(folder: Path, entry: ShardEntry) -> ShardSidecar:
    """Read a shard's sidecar. Raises DataError unless it is the one that the manifest describes, OSError when storage
    fails."""
    path = folder / entry.sidecar
    blocks = -(-entry.bytes // BLOCK_BYTES)
    where = f"{path}: blocks 0 to {max(blocks - 1, 0)} of {entry.file} cannot be checked:"
    try:
        data = read_bytes(path, _SIDECAR_HEADER.size + 8 * (blocks + entry.documents))
    except DataError as error:
        raise DataError(f"{where} {error}") from None
    except OSError as error:
        if is_storage_error(error):
            raise
        raise DataError(f"{where} their checksums cannot be read ({error.strerror})") from None
    if xxh3_64_hexdigest(data) != entry.sidecar_xxh3:
        raise DataError(f"{where} the file is damaged, or {MANIFEST_FILE} is that of another dataset")
    magic, size, count, documents = _SIDECAR_HEADER.unpack_from(data)
    if (magic, size, count, documents) != (_SIDECAR_MAGIC, entry.bytes, blocks, entry.documents):
        raise DataError(f"{where} it describes {size} bytes and {documents} documents, {MANIFEST_FILE} another shard")
    return ShardSidecar(
        hashes=np.frombuffer(data, "<u8", blocks, _SIDECAR_HEADER.size),
        documents=np.frombuffer(data, "<i8", documents, _SIDECAR_HEADER.size + 8 * blocks),
    )


def check_shard_size(folder: Path, entry: ShardEntry) -> None:
    """DataError unless the shard's file is there and has all its bytes."""
    path = folder / entry.file
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise DataError(f"{path}: the shard is missing, from block 0 on") from None
    if size != entry.bytes:
        what = "cut short" if size < entry.bytes else "too long"
        block = min(size, entry.bytes) // BLOCK_BYTES
        raise DataError(f"{path} block {block}: the shard is {what}: {size} bytes, {MANIFEST_FILE} says {entry.bytes}")


class MappedShard:
    """A shard mapped into memory. `values` may be read only where `verify_range` has been.

    Each block is compared with its checksum the first time that this process touches it after `reset_verification`;
    `all_verified` is True once that was done for all of them, so that a reader can save itself the call.
    """

    def __init__(self, folder: Path, entry: ShardEntry, dtype: np.dtype[Any], file: BinaryIO | None = None):
        check_shard_size(folder, entry)
        self.path = folder / entry.file
        self.sidecar = read_sidecar(folder, entry)
        mapped = np.memmap(file or self.path, np.uint8, mode="r")  # it holds the lock of `file`
        self._bytes = memoryview(mapped)  # type: ignore[arg-type]
        # A plain array over the same memory: slicing a numpy.memmap costs ten times as much.
        self.values: ValueArray = np.frombuffer(mapped, dtype)
        self.document_starts = self.sidecar.documents.data  # as a memoryview, since bisect wants plain numbers
        self._width = dtype.itemsize
        self._verified_blocks = bytearray(len(self.sidecar.hashes))
        self.all_verified = False

    def verify_range(self, start: int, stop: int) -> None:
        """DataError unless the blocks that hold the values start .. stop - 1 are what was written."""
        for block in range(start * self._width // BLOCK_BYTES, (stop * self._width - 1) // BLOCK_BYTES + 1):
            if not self._verified_blocks[block]:
                self._verify_block(block)
                self._verified_blocks[block] = 1
                self.all_verified = 0 not in self._verified_blocks

    def reset_verification(self) -> None:
        """Have each block compared again when it is touched next."""
        self._verified_blocks = bytearray(len(self._verified_blocks))
        self.all_verified = False

    def _verify_block(self, block: int) -> None:
        data = self._bytes[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
        if xxh3_64_intdigest(data) != self.sidecar.hashes[block]:
            raise DataError(f"{self.path} {describe_block(block, len(data))}")


def describe_block(block: int, size: int) -> str:
    """Describe a block with a wrong checksum."""
    return (
        f"block {block} (bytes {block * BLOCK_BYTES} to {block * BLOCK_BYTES + size - 1}): the checksum differs, so "
        "the shard is damaged. Copy it again or prepare the dataset again"
    )
