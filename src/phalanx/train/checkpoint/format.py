"""The checkpoint format on disk: files, manifest, checksums. This module does not read or write tensors.

    step-000000060/
        rank-00000.safetensors    the shards that rank 0 wrote; any safetensors reader opens it
        rank-00001.safetensors    ...
        MANIFEST.json             every tensor: dtype, global shape, and its shards;
                                  every file: its size and the xxh3 of each chunk, header included
        MANIFEST.xxh3             the hash of the manifest itself, so that every byte of a checkpoint is verified

A tensor in the manifest is *logical*: its shape is the global shape, and each shard says which block of it is in which
bytes of which file. A checkpoint can therefore be read under another parallelism or world size than it was written
with. Logical names: parameters and buffers by their module names ("blocks.0.attn.wq.weight"), optimizer state as
`optimizer/<parameter>/<state>`, then `scaler/<name>`, `grad_sync/<name>` (`error_feedback.py`), `local_sgd/<name>`
(`local_sgd/step.py`), `extra/<module>` (`get_extra_state`) and `settings/groups` (param groups of an optimizer).
"""

import itertools
import json
import math
import os
import struct
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator, model_validator

from phalanx.errors import DataError, is_storage_error
from phalanx.recipe.schema import AdapterConfig
from phalanx.safe_files import read_bytes
from phalanx.storage.run_objects import CHECKPOINT_NAME_PATTERN
from phalanx.storage.run_objects import MANIFEST_NAME as MANIFEST_NAME
from phalanx.storage.run_objects import format_checkpoint_name as format_checkpoint_name
from phalanx.storage.url import StoreUrl
from phalanx.train.distributed.module_state import TORCH_DTYPES

CHECKPOINT_FORMAT = 1
CHUNK_BYTES = 1 << 20
MANIFEST_HASH_NAME = "MANIFEST.xxh3"


Bytes = npt.NDArray[np.uint8]
Shape = Annotated[tuple[Annotated[int, Field(ge=0, lt=1 << 62)], ...], Field(max_length=64)]
"""torch supports at most 64 dimensions."""
MAX_MANIFEST_BYTES = 1 << 30
"""Maximum bytes of a manifest."""
MAX_CELLS = 1_000_000
"""Maximum cells into which the edges of all shards divide a tensor."""


class CorruptCheckpointError(DataError):
    """A file of a checkpoint is missing, truncated or changed; an older checkpoint may still be good.

    `storage_error` is set if the file could not be read because storage failed: it may be readable later."""

    def __init__(self, file: Path | StoreUrl, reason: str, storage_error: OSError | None = None):
        super().__init__(f"{file}: {reason}")
        self.file = file
        self.reason = reason
        self.storage_error = storage_error


def make_unreadable_error(file: Path, error: OSError, where: str = "") -> CorruptCheckpointError:
    """Make the error for a file that cannot be opened or read. `where` says how far it could be read."""
    reason = "missing" if isinstance(error, FileNotFoundError) else f"{where}{error.strerror}"
    return CorruptCheckpointError(file, reason, error if is_storage_error(error) else None)


class _FrozenRecord(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


FileName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9_.-]*$", max_length=200)]
"""Name of a file in the checkpoint's own directory; it cannot be a path."""


def rank_file_name(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


class ShardRecord(_FrozenRecord):
    """One block of a tensor: `extent` elements from `offset`, in C order, in the bytes [start, end) of a file."""

    file: FileName
    bytes: tuple[int, int]
    offset: Shape
    extent: Shape


class TensorRecord(_FrozenRecord):
    dtype: str
    shape: Shape
    pieces: tuple[ShardRecord, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype.itemsize


class FileRecord(_FrozenRecord):
    bytes: Annotated[int, Field(ge=0)]
    chunks: tuple[str, ...]


class RankManifest(_FrozenRecord):
    """The shards that one rank wrote. The manifests of all ranks are merged into the checkpoint's manifest."""

    files: dict[FileName, FileRecord]
    tensors: dict[str, TensorRecord]


FloatDtype = Literal["float64", "float32", "float16", "bfloat16"]
"""Names of torch's dtypes of weights in a Hugging Face directory."""


class _MetaSection(BaseModel):
    """A section of the metadata that Phalanx itself reads; unknown keys are allowed."""

    model_config = ConfigDict(extra="allow", strict=True)


class _ConvertedMeta(_MetaSection):
    tensors: list[str]


class _OriginMeta(_MetaSection):
    """Origin of the model's architecture (`huggingface.describe_for_export`)."""

    directory: str
    config: dict[str, Any]
    converted: list[_ConvertedMeta] = []
    tied: dict[str, str] | None = None
    names: dict[str, str] = {}
    unused: list[str] = []
    dtype: FloatDtype | None = None
    dtypes: dict[str, FloatDtype] = {}
    kept_in_fp32: list[str] = []
    file_bytes: Annotated[int, Field(gt=0)] | None = None


class _ModelMeta(_MetaSection):
    build: str = ""
    huggingface: _OriginMeta | None = None


class _RecipeMeta(_MetaSection):
    adapter: AdapterConfig | None = None


class _KnownMeta(_MetaSection):
    samples_consumed: Annotated[int, Field(ge=0, lt=1 << 64)] | None = None
    model: _ModelMeta = _ModelMeta()
    recipe: _RecipeMeta = _RecipeMeta()


class CheckpointManifest(RankManifest):
    """The contents of a checkpoint. Validation checks that the shards hold each element of each tensor exactly once."""

    format: Literal[1] = 1
    chunk_bytes: Annotated[int, Field(gt=0, le=1 << 40)] = CHUNK_BYTES
    meta: dict[str, Any]

    @field_validator("meta")
    @classmethod
    def _check_meta(cls, meta: dict[str, Any]) -> dict[str, Any]:
        _KnownMeta.model_validate(meta)
        return meta

    @property
    def nbytes(self) -> int:
        """Return the total bytes of the data files."""
        return sum(file.bytes for file in self.files.values())

    @model_validator(mode="after")
    def _check_consistent(self) -> Self:
        for name, file in self.files.items():
            if len(file.chunks) != math.ceil(file.bytes / self.chunk_bytes):
                raise ValueError(f"file {name}: {len(file.chunks)} chunk hashes do not cover {file.bytes} bytes")
        for name, tensor in self.tensors.items():
            if tensor.dtype not in TORCH_DTYPES:
                raise ValueError(f"tensor {name}: unknown dtype {tensor.dtype}")
            for shard in tensor.pieces:
                self._check_shard(name, tensor, shard)
            if not _covers_tensor_once(tensor):
                raise ValueError(f"tensor {name}: its pieces do not hold each element exactly once")
        self._check_bytes()
        return self

    def _check_bytes(self) -> None:
        """Check that no two shards use the same bytes of a file."""
        spans: dict[str, list[tuple[int, int, str]]] = {}
        for name, tensor in self.tensors.items():
            for piece in tensor.pieces:
                if piece.bytes[0] < piece.bytes[1]:
                    spans.setdefault(piece.file, []).append((*piece.bytes, name))
        for file, found in spans.items():
            for (_, end, first), (start, _, second) in itertools.pairwise(sorted(found)):
                if start < end:
                    raise ValueError(f"tensors {first} and {second} are the same bytes of {file}")

    def _check_shard(self, name: str, tensor: TensorRecord, shard: ShardRecord) -> None:
        start, end = shard.bytes
        if not len(shard.offset) == len(shard.extent) == len(tensor.shape):
            raise ValueError(f"tensor {name}: a piece has other dimensions than the tensor")
        if any(a + n > full_size for a, n, full_size in zip(shard.offset, shard.extent, tensor.shape, strict=True)):
            raise ValueError(f"tensor {name}: a piece reaches beyond the shape {list(tensor.shape)}")
        if end - start != math.prod(shard.extent) * tensor.torch_dtype.itemsize:
            raise ValueError(f"tensor {name}: bytes {start} to {end} do not fit a piece of {list(shard.extent)}")
        if shard.file not in self.files or not 0 <= start <= end <= self.files[shard.file].bytes:
            raise ValueError(f"tensor {name}: bytes {start} to {end} are not in {shard.file}")


def _covers_tensor_once(tensor: TensorRecord) -> bool:
    """Return whether the shards hold each element exactly once. The edges of all shards divide the tensor into cells,
    which are marked shard by shard. Raises ValueError for more cells than any sharding has."""
    shards = [shard for shard in tensor.pieces if math.prod(shard.extent)]
    if sum(math.prod(shard.extent) for shard in shards) != math.prod(tensor.shape):
        return False
    edges = [
        sorted({edge for shard in shards for edge in (shard.offset[d], shard.offset[d] + shard.extent[d])})
        for d in range(len(tensor.shape))
    ]
    cut_dimensions = [d for d, values in enumerate(edges) if len(values) > 2]
    sizes = [len(edges[d]) - 1 for d in cut_dimensions]
    if math.prod(sizes) > MAX_CELLS:
        raise ValueError("its pieces are cut in too many ways")
    is_held = np.zeros(sizes, np.bool_)
    for shard in shards:
        cells = tuple(
            slice(bisect_left(edges[d], shard.offset[d]), bisect_left(edges[d], shard.offset[d] + shard.extent[d]))
            for d in cut_dimensions
        )
        if is_held[cells].any():
            return False
        is_held[cells] = True
    return True


def merge_rank_manifests(
    rank_manifests: Iterable[RankManifest], meta: dict[str, Any], replicated: bool = False
) -> CheckpointManifest:
    """Merge the manifests of all ranks into the checkpoint's manifest. `replicated`: several ranks may hold the same
    block, which is read from the first of them; files that are then not needed are left out. Raises ValueError if they
    do not cover every tensor."""
    files: dict[str, FileRecord] = {}
    tensors: dict[str, TensorRecord] = {}
    pieces: dict[str, dict[object, ShardRecord]] = {}
    for rank_manifest in rank_manifests:
        files |= rank_manifest.files
        for name, tensor in rank_manifest.tensors.items():
            known, blocks = tensors.setdefault(name, tensor), pieces.setdefault(name, {})
            if (known.dtype, known.shape) != (tensor.dtype, tensor.shape):
                raise ValueError(f"tensor {name}: ranks disagree about its dtype or shape")
            for piece in tensor.pieces:
                blocks.setdefault((piece.offset, piece.extent) if replicated else piece, piece)
    merged = {
        name: tensors[name].model_copy(update={"pieces": tuple(pieces[name].values())}) for name in sorted(pieces)
    }
    if replicated:
        used = {piece.file for tensor in merged.values() for piece in tensor.pieces}
        files = {name: file for name, file in files.items() if name in used}
    return CheckpointManifest(files=files, tensors=merged, meta=meta)


def encode_manifest(manifest: CheckpointManifest) -> tuple[bytes, bytes]:
    """Return the bytes of MANIFEST.json and of MANIFEST.xxh3."""
    content = json.dumps(manifest.model_dump(mode="json"), indent=1).encode() + b"\n"
    return content, _manifest_hash(content)


def _manifest_hash(content: bytes) -> bytes:
    """Return the manifest's hash and the hash of that hash; the second shows which of the two files is damaged."""
    digest = xxhash.xxh3_128_hexdigest(content)
    return f"{digest} {xxhash.xxh3_64_hexdigest(digest.encode())}\n".encode()


def read_manifest(checkpoint: Path) -> CheckpointManifest:
    """Read and verify the manifest. Raises CorruptCheckpointError if it or its sidecar is missing, damaged or
    malformed, and DataError if a newer Phalanx wrote it."""
    content = _read_manifest_file(checkpoint / MANIFEST_NAME)
    return parse_manifest(checkpoint, content, _read_manifest_file(checkpoint / MANIFEST_HASH_NAME))


def parse_manifest(checkpoint: Path | StoreUrl, content: bytes, sidecar: bytes) -> CheckpointManifest:
    """Verify and parse the bytes of MANIFEST.json and MANIFEST.xxh3. Raises the errors of `read_manifest`."""
    file = checkpoint / MANIFEST_NAME
    if sidecar != _manifest_hash(content):
        digest, _, check = sidecar.partition(b" ")
        if check != xxhash.xxh3_64_hexdigest(digest).encode() + b"\n":
            raise CorruptCheckpointError(checkpoint / MANIFEST_HASH_NAME, "damaged (its own checksum differs)")
        raise CorruptCheckpointError(file, f"damaged (its checksum differs from {MANIFEST_HASH_NAME})")
    try:
        value = json.loads(content)
        if isinstance(value, dict) and value.get("format") != CHECKPOINT_FORMAT:
            raise DataError(
                f"{file}: checkpoint format {value.get('format')!r}; this Phalanx reads format {CHECKPOINT_FORMAT}"
            )
        return CheckpointManifest.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(key) for key in first["loc"])
        named = f"{where}: " if where else ""
        raise CorruptCheckpointError(file, f"malformed manifest: {named}{first['msg']}") from None
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(file, f"malformed manifest: {error}") from None


def _read_manifest_file(file: Path) -> bytes:
    try:
        return read_bytes(file, MAX_MANIFEST_BYTES)
    except DataError as error:
        raise CorruptCheckpointError(file, str(error).partition(": ")[2]) from None
    except OSError as error:
        raise make_unreadable_error(file, error) from None


def make_safetensors_header(entries: Sequence[tuple[str, str, Sequence[int], int, int]]) -> bytes:
    """Make the header of a safetensors file of `entries` (key, dtype, shape, start, end; offsets from the header's
    end). It is padded to 64 bytes, so that tensors ordered from the widest element to the narrowest are all aligned."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for key, dtype, shape, start, end in entries:
        table[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    return struct.pack("<Q", len(text)) + text


def parse_step(checkpoint: Path) -> int:
    """Return the step in a checkpoint's name. Raises DataError if it is not the name of a checkpoint."""
    match = CHECKPOINT_NAME_PATTERN.fullmatch(checkpoint.name)
    if match is None:
        raise DataError(f"{checkpoint}: not a checkpoint (its name would be like {format_checkpoint_name(60)})")
    return int(match[1])


def list_checkpoints(directory: Path) -> list[Path]:
    """List the checkpoints of a directory, newest first, without verifying them. Temporary ones are left out. A
    directory that does not exist has none. Raises OSError if storage fails, since the answer is then unknown."""
    try:
        names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    paths = (directory / name for name in names if CHECKPOINT_NAME_PATTERN.fullmatch(name))
    return sorted(paths, key=parse_step, reverse=True)
