"""What a checkpoint is on disk: its files, its manifest, its checksums. Writing and reading tensors are not here.

    step-000000060/
        rank-00000.safetensors    what rank 0 held; any safetensors reader opens it
        rank-00001.safetensors    ...
        MANIFEST.json             every tensor: dtype, global shape, and the pieces that make it up;
                                  every file: its size and the xxh3 of each chunk, header included
        MANIFEST.xxh3             the manifest's own hash, so that no byte of a checkpoint goes unverified

A tensor of the manifest is *logical*: its shape is the global one, and each piece says which block of it lies in which
bytes of which file. So a checkpoint can be read under another layout or world size than it was written by.
Logical names: parameters and buffers by their module names ("blocks.0.attn.wq.weight"), optimizer state as
`optimizer/<parameter>/<state>`, then `scaler/<name>`, `exchange/<name>`, `extra/<module>` and `settings/<name>`.
"""

import itertools
import json
import math
import os
import re
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch
import xxhash
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator, model_validator

from phalanx.bounded import read_bytes
from phalanx.errors import DataError, storage_failed
from phalanx.recipe.schema import LoraConfig

FORMAT = 1
CHUNK = 1 << 20
MANIFEST = "MANIFEST.json"
SIDECAR = "MANIFEST.xxh3"
EXTRA = "extra/"
"""Begins the logical names of what modules say in `get_extra_state`; the module's own name follows."""

# Names of the safetensors format.
DTYPES = {
    "C64": torch.complex64,
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Shape = Annotated[tuple[Annotated[int, Field(ge=0, lt=1 << 62)], ...], Field(max_length=64)]
"""torch knows no more dimensions."""
LARGEST = 1 << 30
"""Bytes of a manifest."""
MOST_CUTS = 50
"""How often each piece of a tensor may be looked at, on average, to see that it meets no other."""


class CorruptError(DataError):
    """A file of a checkpoint is missing, torn or changed: the next older checkpoint may still be good. `storage`: what
    storage said that could not read it, where it was that: it may be able to later."""

    def __init__(self, file: Path, reason: str, storage: OSError | None = None):
        super().__init__(f"{file}: {reason}")
        self.file = file
        self.reason = reason
        self.storage = storage


def unreadable(file: Path, error: OSError, where: str = "") -> CorruptError:
    """What a file is that cannot be opened or read; `where`: how far it could be."""
    reason = "missing" if isinstance(error, FileNotFoundError) else f"{where}{error.strerror}"
    return CorruptError(file, reason, error if storage_failed(error) else None)


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


FileName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9_.-]*$", max_length=200)]
"""Of a file within its checkpoint's folder, and nowhere else."""


def rank_file(rank: int) -> str:
    """The name of what a rank writes."""
    return f"rank-{rank:05d}.safetensors"


class PieceRecord(_Record):
    """One block of a tensor: `extent` elements from `offset` on, in C order in the bytes [start, end) of a file."""

    file: FileName
    bytes: tuple[int, int]
    offset: Shape
    extent: Shape


class TensorRecord(_Record):
    dtype: str
    shape: Shape
    pieces: tuple[PieceRecord, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype.itemsize


class FileRecord(_Record):
    bytes: Annotated[int, Field(ge=0)]
    chunks: tuple[str, ...]


class Share(_Record):
    """What one rank wrote; the shares of all ranks make the manifest."""

    files: dict[FileName, FileRecord]
    tensors: dict[str, TensorRecord]


class _Meta(BaseModel):
    """A part of what goes along with a checkpoint that is read for more than its own sake; other keys are anything."""

    model_config = ConfigDict(extra="allow", strict=True)


class _Converted(_Meta):
    tensors: list[str]


class _Origin(_Meta):
    """Where the model's architecture came from (`huggingface.describe`)."""

    directory: str
    config: dict[str, Any]
    converted: list[_Converted] = []
    tied: dict[str, str] | None = None
    names: dict[str, str] = {}


class _Model(_Meta):
    build: str = ""
    huggingface: _Origin | None = None


class _Recipe(_Meta):
    model: _Model = _Model()
    adapter: LoraConfig | None = None


class _Known(_Meta):
    samples: Annotated[int, Field(ge=0, lt=1 << 64)] | None = None
    model: _Model = _Model()
    recipe: _Recipe = _Recipe()


class Manifest(Share):
    """What a checkpoint holds. Making one checks that every tensor is held whole, each element once."""

    format: Literal[1] = 1
    chunk_bytes: Annotated[int, Field(gt=0, le=1 << 40)] = CHUNK
    meta: dict[str, Any]

    @field_validator("meta")
    @classmethod
    def _known(cls, meta: dict[str, Any]) -> dict[str, Any]:
        _Known.model_validate(meta)
        return meta

    @property
    def nbytes(self) -> int:
        """Bytes of all data files."""
        return sum(file.bytes for file in self.files.values())

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for name, file in self.files.items():
            if len(file.chunks) != math.ceil(file.bytes / self.chunk_bytes):
                raise ValueError(f"file {name}: {len(file.chunks)} chunk hashes do not cover {file.bytes} bytes")
        for name, tensor in self.tensors.items():
            if tensor.dtype not in DTYPES:
                raise ValueError(f"tensor {name}: unknown dtype {tensor.dtype}")
            for piece in tensor.pieces:
                self._check_piece(name, tensor, piece)
            if not _covered(tensor):
                raise ValueError(f"tensor {name}: its pieces do not hold each element exactly once")
        self._check_bytes()
        return self

    def _check_bytes(self) -> None:
        """No two pieces of a file are the same bytes."""
        spans: dict[str, list[tuple[int, int, str]]] = {}
        for name, tensor in self.tensors.items():
            for piece in tensor.pieces:
                if piece.bytes[0] < piece.bytes[1]:
                    spans.setdefault(piece.file, []).append((*piece.bytes, name))
        for file, found in spans.items():
            for (_, end, first), (start, _, second) in itertools.pairwise(sorted(found)):
                if start < end:
                    raise ValueError(f"tensors {first} and {second} are the same bytes of {file}")

    def _check_piece(self, name: str, tensor: TensorRecord, piece: PieceRecord) -> None:
        start, end = piece.bytes
        if not len(piece.offset) == len(piece.extent) == len(tensor.shape):
            raise ValueError(f"tensor {name}: a piece has other dimensions than the tensor")
        if any(a + n > whole for a, n, whole in zip(piece.offset, piece.extent, tensor.shape, strict=True)):
            raise ValueError(f"tensor {name}: a piece reaches beyond the shape {list(tensor.shape)}")
        if end - start != math.prod(piece.extent) * tensor.torch_dtype.itemsize:
            raise ValueError(f"tensor {name}: bytes {start} to {end} do not fit a piece of {list(piece.extent)}")
        if piece.file not in self.files or not 0 <= start <= end <= self.files[piece.file].bytes:
            raise ValueError(f"tensor {name}: bytes {start} to {end} are not in {piece.file}")


def _covered(tensor: TensorRecord) -> bool:
    """Whether the pieces fill the tensor without overlap: as many elements as it has, and no two blocks meet."""
    if sum(math.prod(piece.extent) for piece in tensor.pieces) != math.prod(tensor.shape):
        return False
    if not tensor.shape:
        return True
    return _apart([piece for piece in tensor.pieces if math.prod(piece.extent)])


def _apart(pieces: Sequence[PieceRecord]) -> bool:
    """Whether no two pieces meet: they are cut, in one dimension after the other, into groups that cannot, down to
    single pieces. ValueError where that takes too long; tensors that are cut along dimensions take few cuts."""
    groups, left = [list(pieces)], MOST_CUTS * len(pieces) + MOST_CUTS**2
    while groups:
        group = groups.pop()
        for dimension in range(len(group[0].offset)) if len(group) > 1 else ():
            left -= len(group)
            if len(parted := _cut(group, dimension)) > 1:
                groups += parted
                break
        else:
            left -= len(group) ** 2
            if left > 0 and any(_meet(a, b) for a, b in itertools.combinations(group, 2)):
                return False
        if left < 0:
            raise ValueError("its pieces are cut in too many ways")
    return True


def _cut(group: Sequence[PieceRecord], dimension: int) -> list[list[PieceRecord]]:
    """Pieces that may meet, as far as one dimension tells, stay together."""
    parted: list[list[PieceRecord]] = []
    end = -1
    for piece in sorted(group, key=lambda piece: piece.offset[dimension]):
        if piece.offset[dimension] >= end:
            parted.append([])
        parted[-1].append(piece)
        end = max(end, piece.offset[dimension] + piece.extent[dimension])
    return parted


def _meet(a: PieceRecord, b: PieceRecord) -> bool:
    ranges = zip(a.offset, a.extent, b.offset, b.extent, strict=True)
    return all(x < y + m and y < x + n for x, n, y, m in ranges)


def merge(shares: Iterable[Share], meta: dict[str, Any]) -> Manifest:
    """The manifest of a checkpoint whose ranks wrote `shares`. ValueError if together they do not hold every tensor."""
    files: dict[str, FileRecord] = {}
    tensors: dict[str, TensorRecord] = {}
    for share in shares:
        files |= share.files
        for name, tensor in share.tensors.items():
            known = tensors.setdefault(name, tensor)
            if known is tensor:
                continue
            if (known.dtype, known.shape) != (tensor.dtype, tensor.shape):
                raise ValueError(f"tensor {name}: ranks disagree about its dtype or shape")
            tensors[name] = known.model_copy(update={"pieces": known.pieces + tensor.pieces})
    return Manifest(files=files, tensors=dict(sorted(tensors.items())), meta=meta)


def encode_manifest(manifest: Manifest) -> tuple[bytes, bytes]:
    """The bytes of MANIFEST.json and of MANIFEST.xxh3."""
    content = json.dumps(manifest.model_dump(mode="json"), indent=1).encode() + b"\n"
    return content, _sidecar(content)


def _sidecar(content: bytes) -> bytes:
    """The manifest's hash, and the hash of that hash: so it can be told which of the two files was damaged."""
    digest = xxhash.xxh3_128_hexdigest(content)
    return f"{digest} {xxhash.xxh3_64_hexdigest(digest.encode())}\n".encode()


def read_manifest(checkpoint: Path) -> Manifest:
    """The verified manifest. CorruptError when it or its sidecar is missing, damaged or malformed; DataError when a
    newer Phalanx wrote it."""
    file = checkpoint / MANIFEST
    content, sidecar = _read(file), _read(checkpoint / SIDECAR)
    if sidecar != _sidecar(content):
        digest, _, check = sidecar.partition(b" ")
        if check != xxhash.xxh3_64_hexdigest(digest).encode() + b"\n":
            raise CorruptError(checkpoint / SIDECAR, "damaged (its own checksum differs)")
        raise CorruptError(file, f"damaged (its checksum differs from {SIDECAR})")
    try:
        value = json.loads(content)
        if isinstance(value, dict) and value.get("format") != FORMAT:
            raise DataError(f"{file}: checkpoint format {value.get('format')!r}; this Phalanx reads format {FORMAT}")
        return Manifest.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(key) for key in first["loc"])
        raise CorruptError(file, f"malformed manifest: {where + ': ' if where else ''}{first['msg']}") from None
    except (ValueError, RecursionError) as error:
        raise CorruptError(file, f"malformed manifest: {error}") from None


def _read(file: Path) -> bytes:
    try:
        return read_bytes(file, LARGEST)
    except DataError as error:
        raise CorruptError(file, str(error).partition(": ")[2]) from None
    except OSError as error:
        raise unreadable(file, error) from None


def safetensors_header(entries: Sequence[tuple[str, str, Sequence[int], int, int]]) -> bytes:
    """The head of a safetensors file of `entries` (key, dtype, shape, start, end; positions from the end of the head).
    It is padded to 64 bytes, so that tensors laid out from the widest element to the narrowest are all aligned."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for key, dtype, shape, start, end in entries:
        table[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    return struct.pack("<Q", len(text)) + text


_STEP = re.compile(r"step-(\d{9,})")


def checkpoint_name(step: int) -> str:
    return f"step-{step:09d}"


def step_of(checkpoint: Path) -> int:
    """The step in a checkpoint's name; DataError when it is no checkpoint's name."""
    match = _STEP.fullmatch(checkpoint.name)
    if match is None:
        raise DataError(f"{checkpoint}: not a checkpoint (its name would be like {checkpoint_name(60)})")
    return int(match[1])


def list_checkpoints(directory: Path) -> list[Path]:
    """The checkpoints in a directory, newest first. Whether they are good is not looked at; temporary ones are left
    out, and a directory that does not exist has none. OSError when storage fails: then nobody knows."""
    try:
        names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted((directory / name for name in names if _STEP.fullmatch(name)), key=step_of, reverse=True)
