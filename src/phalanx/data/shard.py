"""One shard on disk: fixed-width little-endian values in `shard-00000.bin`, and its sidecar `shard-00000.idx`.

Sidecar: the magic `PHXSHRD1`; bytes of the shard, number of blocks and number of documents as uint64; the xxh3_64 of
every 64 KiB block; the position (in values) where every document starts. All little-endian. The document starts are
authoritative: a separator among the tokens is only there for the model to read.
"""

import os
import struct
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from phalanx.bounded import read_bytes
from phalanx.data.manifest import MANIFEST, ShardEntry
from phalanx.errors import DataError, storage_failed
from phalanx.run.directory import sync

BLOCK = 1 << 16
_MAGIC = b"PHXSHRD1"
_HEADER = struct.Struct("<8sQQQ")

Values = npt.NDArray[Any]


class ShardWriter:
    """Writes one shard front to back in constant memory (besides its checksums and document starts).

    `record` is the number of values that make one token (1) or image. Until `finish` has renamed it, nothing under
    the shard's own name exists.
    """

    def __init__(self, folder: Path, number: int, dtype: np.dtype[Any], record: int = 1):
        self._file, self._sidecar = folder / f"shard-{number:05d}.bin", folder / f"shard-{number:05d}.idx"
        self._out = open(_temporary(self._file), "wb")  # noqa: SIM115 - `__exit__` closes it
        self._dtype, self._record = dtype, record
        self._pending = bytearray()
        self._hashes, self._documents = array("Q"), array("Q")
        self._bytes = 0

    @property
    def count(self) -> int:
        """Tokens or images so far."""
        return self._bytes // (self._dtype.itemsize * self._record)

    def start_document(self) -> None:
        """The next value is the first of a document."""
        self._documents.append(self._bytes // self._dtype.itemsize)

    def append(self, values: Values) -> None:
        """Write values behind what is there."""
        data = np.ascontiguousarray(values, self._dtype).tobytes()
        self._out.write(data)
        self._bytes += len(data)
        self._pending += data
        whole = len(self._pending) // BLOCK * BLOCK
        if whole:
            self._hashes.extend(_hashes(memoryview(self._pending)[:whole]))
            del self._pending[:whole]

    def finish(self) -> ShardEntry:
        """Put the shard and its sidecar safely on disk under their names and say what they hold."""
        if self._pending:
            self._hashes.append(xxh3_64_intdigest(self._pending))
        header = _HEADER.pack(_MAGIC, self._bytes, len(self._hashes), len(self._documents))
        arrays = (np.asarray(numbers, "<u8").tobytes() for numbers in (self._hashes, self._documents))
        sidecar = b"".join((header, *arrays))
        with open(_temporary(self._sidecar), "wb") as out:
            out.write(sidecar)
            sync(out.fileno())
        self._out.flush()
        sync(self._out.fileno())
        os.replace(_temporary(self._sidecar), self._sidecar)
        os.replace(_temporary(self._file), self._file)
        return ShardEntry(
            file=self._file.name,
            bytes=self._bytes,
            count=self.count,
            documents=len(self._documents),
            sidecar=self._sidecar.name,
            sidecar_xxh3=xxh3_64_hexdigest(sidecar),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Let go of the file; without `finish` only a temporary one is left."""
        self._out.close()


def _temporary(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")


def _hashes(data: memoryview) -> Iterator[int]:
    return (xxh3_64_intdigest(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK))


@dataclass(frozen=True)
class Sidecar:
    """Checksums of a shard's blocks (uint64 [blocks]) and where its documents start (int64 [documents], in values)."""

    hashes: npt.NDArray[np.uint64]
    documents: npt.NDArray[np.int64]


def read_sidecar(folder: Path, entry: ShardEntry) -> Sidecar:
    """A shard's sidecar; DataError unless it is the very one that the manifest describes, OSError when storage
    fails."""
    path = folder / entry.sidecar
    blocks = -(-entry.bytes // BLOCK)
    where = f"{path}: blocks 0 to {max(blocks - 1, 0)} of {entry.file} cannot be checked:"
    try:
        data = read_bytes(path, _HEADER.size + 8 * (blocks + entry.documents))
    except DataError as error:
        raise DataError(f"{where} {error}") from None
    except OSError as error:
        if storage_failed(error):
            raise
        raise DataError(f"{where} their checksums cannot be read ({error.strerror})") from None
    if xxh3_64_hexdigest(data) != entry.sidecar_xxh3:
        raise DataError(f"{where} the file is damaged, or {MANIFEST} is that of another dataset")
    magic, size, count, documents = _HEADER.unpack_from(data)
    if (magic, size, count, documents) != (_MAGIC, entry.bytes, blocks, entry.documents):
        raise DataError(f"{where} it describes {size} bytes and {documents} documents, {MANIFEST} another shard")
    return Sidecar(
        hashes=np.frombuffer(data, "<u8", blocks, _HEADER.size),
        documents=np.frombuffer(data, "<i8", documents, _HEADER.size + 8 * blocks),
    )


def check_size(folder: Path, entry: ShardEntry) -> None:
    """DataError unless the shard's file is there and has all its bytes."""
    path = folder / entry.file
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise DataError(f"{path}: the shard is missing, from block 0 on") from None
    if size != entry.bytes:
        what = "cut short" if size < entry.bytes else "too long"
        block = min(size, entry.bytes) // BLOCK
        raise DataError(f"{path} block {block}: the shard is {what}: {size} bytes, {MANIFEST} says {entry.bytes}")


class Shard:
    """A shard mapped into memory. `values` may be read only where `check` has been.

    Each block is compared with its checksum the first time that this process touches it after `forget`; `checked` is
    True once that was done for all of them, so that a reader can save itself the call.
    """

    def __init__(self, folder: Path, entry: ShardEntry, dtype: np.dtype[Any]):
        check_size(folder, entry)
        self.path = folder / entry.file
        self.sidecar = read_sidecar(folder, entry)
        mapped = np.memmap(self.path, np.uint8, mode="r")
        self._bytes = memoryview(mapped)  # type: ignore[arg-type]
        # A plain array over the same memory: slicing a numpy.memmap costs ten times as much.
        self.values: Values = np.frombuffer(mapped, dtype)
        self.starts = self.sidecar.documents.data  # as a memoryview, since bisect wants plain numbers
        self._width = dtype.itemsize
        self._seen = bytearray(len(self.sidecar.hashes))
        self.checked = False

    def check(self, start: int, stop: int) -> None:
        """DataError unless the blocks that hold the values start .. stop - 1 are what was written."""
        for block in range(start * self._width // BLOCK, (stop * self._width - 1) // BLOCK + 1):
            if not self._seen[block]:
                self._check_block(block)
                self._seen[block] = 1
                self.checked = 0 not in self._seen

    def forget(self) -> None:
        """Have each block compared again when it is touched next."""
        self._seen = bytearray(len(self._seen))
        self.checked = False

    def _check_block(self, block: int) -> None:
        data = self._bytes[block * BLOCK : (block + 1) * BLOCK]
        if xxh3_64_intdigest(data) != self.sidecar.hashes[block]:
            raise DataError(f"{self.path} {describe_block(block, len(data))}")


def describe_block(block: int, size: int) -> str:
    """The words for a block whose checksum differs."""
    return (
        f"block {block} (bytes {block * BLOCK} to {block * BLOCK + size - 1}): the checksum differs, so the shard is "
        "damaged. Copy it anew or prepare the dataset again"
    )
