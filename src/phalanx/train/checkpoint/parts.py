"""Parts of a hot copy: a rank's share of the state as one safetensors file, with a record that makes it whole.

    phalanx-hot-.../step-000000060-<token>/
        rank-00000.safetensors      as in a checkpoint
        rank-00000.json             its hash, then what the file holds, its checksums, and the run's progress

A node holds parts of its own workers and of others. The record is put there last, under its name at once, so a part
is whole or it is not there; a copy is whole when the parts that are left, on whichever nodes, hold every tensor.
Several parts may hold the same block, since each node keeps all that its workers hold: `merge_parts` takes each once.
"""

import json
import os
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import xxhash
from pydantic import Field, StringConstraints, ValidationError, model_validator

from phalanx.bounded import read_bytes
from phalanx.errors import DataError
from phalanx.train.checkpoint.buffer import Bytes
from phalanx.train.checkpoint.format import (
    CHUNK,
    LARGEST,
    CorruptError,
    FileRecord,
    Manifest,
    PieceRecord,
    Share,
    TensorRecord,
    checkpoint_name,
    rank_file,
)
from phalanx.train.checkpoint.load import verify_files
from phalanx.train.checkpoint.save import Saver, write_image
from phalanx.train.checkpoint.staging import Layout


class Part(Share):
    """What one rank holds of a copy. `token` names the line of history, `meta` is what a checkpoint's manifest has."""

    format: Literal[1] = 1
    step: Annotated[int, Field(ge=0)]
    token: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_]+$", max_length=64)]
    rank: Annotated[int, Field(ge=0)]
    meta: dict[str, Any]

    @model_validator(mode="after")
    def _own(self) -> Self:
        if set(self.files) != {rank_file(self.rank)}:
            raise ValueError("it names other files than its rank's")
        return self

    @property
    def file(self) -> str:
        """The name of its one file."""
        (name,) = self.files
        return name


TENSORS = "tensors"
"""Key of `meta`: how many tensors the whole state has. A worker that is gone takes some along of which no other part
tells."""
Deliver = Callable[[Part, Bytes], None]
"""Brings a part to the node that keeps a second copy of it. OSError when that fails."""


def copy_name(step: int, token: str) -> str:
    """The folder of a copy."""
    return f"{checkpoint_name(step)}-{token}"


def list_copies(folder: Path) -> list[tuple[int, str]]:
    """Step and token of the copies of which a node's folder has anything, the newest first."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        words = path.name.split("-")
        if len(words) == 3 and words[0] == "step" and words[1].isdecimal():
            found.append((int(words[1]), words[2]))
    return sorted(found, reverse=True)


def list_parts(copy: Path) -> list[Path]:
    """The records of a copy's parts here, by rank."""
    return sorted(copy.glob("rank-[0-9]*.json"))


def rank_of(record: Path) -> int:
    """Whose part a record is."""
    return int(record.stem.removeprefix("rank-"))


def encode_part(part: Part) -> bytes:
    """The bytes of its record."""
    text = json.dumps(part.model_dump(mode="json")).encode()
    return xxhash.xxh3_128_hexdigest(text).encode() + b"\n" + text


def decode_part(content: bytes, path: Path) -> Part:
    """The part whose record this is, read from `path`. CorruptError when it is damaged."""
    digest, _, text = content.partition(b"\n")
    if xxhash.xxh3_128_hexdigest(text).encode() != digest:
        raise CorruptError(path, "damaged (its own checksum differs)")
    try:
        return Part.model_validate_json(text)
    except ValidationError as error:
        raise CorruptError(path, f"malformed record: {error.errors()[0]['msg']}") from None


def read_part(path: Path) -> Part:
    """The part of a record, with every byte of its file verified. CorruptError when either is damaged."""
    try:
        content = read_bytes(path, LARGEST)
    except DataError as error:
        raise CorruptError(path, str(error).partition(": ")[2]) from None
    except OSError as error:
        raise CorruptError(path, str(error.strerror)) from None
    part = decode_part(content, path)
    verify_files(path.parent, part.files, CHUNK, threads=1)
    return part


def put_part(copy: Path, part: Part) -> None:
    """Write the record of a part whose file is there."""
    path = (copy / part.file).with_suffix(".json")
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(encode_part(part))
    os.replace(temporary, path)


def merge_parts(parts: Sequence[Part], here: Collection[int] = ()) -> Manifest:
    """The manifest of a copy from its parts: a block that several hold is taken from ranks in `here`, else from the
    first. ValueError when they do not hold every tensor whole, of so many as their `meta` says under TENSORS."""
    ordered = sorted(parts, key=lambda part: (part.rank not in here, part.rank))
    tensors: dict[str, TensorRecord] = {}
    taken: dict[str, dict[tuple[tuple[int, ...], tuple[int, ...]], PieceRecord]] = {}
    for part in ordered:
        for name, tensor in part.tensors.items():
            known = tensors.setdefault(name, tensor)
            if (known.dtype, known.shape) != (tensor.dtype, tensor.shape):
                raise ValueError(f"tensor {name}: parts disagree about its dtype or shape")
            blocks = taken.setdefault(name, {})
            for piece in tensor.pieces:
                blocks.setdefault((piece.offset, piece.extent), piece)
    merged = {
        name: tensors[name].model_copy(update={"pieces": tuple(blocks.values())})
        for name, blocks in sorted(taken.items())
    }
    used = {piece.file for tensor in merged.values() for piece in tensor.pieces}
    files: dict[str, FileRecord] = {}
    for part in ordered:
        files |= {name: file for name, file in part.files.items() if name in used}
    meta = ordered[0].meta if ordered else {}
    if not merged:
        raise ValueError("there is no part")
    if len(merged) < meta.get(TENSORS, 0):
        raise ValueError(f"{len(merged)} of {meta[TENSORS]} tensors are there")
    return Manifest(files=files, tensors=merged, meta=meta)


class PartSaver(Saver):
    """Saves one rank's parts, into the folder of its node and by `deliver` to another. `token` is the line of history;
    `before` is called in the background before anything is written. `written` are never removed by `abandon`."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        token: str,
        before: Callable[[int], None],
        deliver: Deliver | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        super().__init__(folder, rank, 1, clock=clock)
        self._token, self._before, self._deliver = token, before, deliver
        self.cpu = 0.0
        """Seconds of a core that the background took for the last part."""

    def begin_line(self, token: str) -> None:
        """Parts belong to another line of history from now on."""
        self._token = token

    def keep(self) -> None:
        """The part that was written is part of a whole copy: it stays."""
        self.wait()
        self._settle()

    def _folder(self, step: int) -> Path:
        return self._directory / copy_name(step, self._token)

    def _check_room(self, nbytes: int) -> None:
        """The node's workers look for room together, before the first."""

    def _store(self, step: int, image: Bytes, layout: Layout) -> None:
        self._before(step)
        folder = self._folder(step)
        folder.mkdir(mode=0o700, exist_ok=True)
        chunks = tuple(write_image(folder / self._file, image, self._given_up))
        part = Part(
            files={self._file: FileRecord(bytes=layout.nbytes, chunks=chunks)},
            tensors=layout.tensors,
            step=step,
            token=self._token,
            rank=self._rank,
            meta=self._meta,
        )
        put_part(folder, part)
        if self._deliver is not None:
            self._deliver(part, image)
        self.cpu = time.thread_time()  # each save has a thread of its own
