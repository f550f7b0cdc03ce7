"""Shards of an in-memory checkpoint: one safetensors file per rank, and a record that marks it as complete.

    phalanx-in-memory-.../step-000000060-<token>/
        rank-00000.safetensors      as in a durable checkpoint
        rank-00000.json             its own hash, then the contents and checksums of the file, and the run's progress

A node holds shards of its own workers and of others. The record is written last and atomically, so a shard is either
complete or absent. A copy is complete if the remaining shards, over all nodes, hold every tensor. Several shards may
hold the same block, since each node keeps all that its workers hold; `merge_shards` uses each block once.
"""

import json
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import xxhash
from pydantic import Field, StringConstraints, ValidationError, model_validator

from phalanx.errors import DataError
from phalanx.safe_files import read_bytes
from phalanx.train.checkpoint.format import (
    CHUNK_BYTES,
    MAX_MANIFEST_BYTES,
    CheckpointManifest,
    CorruptCheckpointError,
    FileRecord,
    RankManifest,
    ShardRecord,
    TensorRecord,
    format_checkpoint_name,
    rank_file_name,
)
from phalanx.train.checkpoint.load import verify_files


class InMemoryShard(RankManifest):
    """The shard of one rank. `token` names the epoch in the run's history; `meta` is as in a checkpoint's manifest."""

    format: Literal[1] = 1
    step: Annotated[int, Field(ge=0)]
    token: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_]+$", max_length=64)]
    rank: Annotated[int, Field(ge=0)]
    meta: dict[str, Any]

    @model_validator(mode="after")
    def _check_own_file(self) -> Self:
        if set(self.files) != {rank_file_name(self.rank)}:
            raise ValueError("it names other files than its rank's")
        return self

    @property
    def file_name(self) -> str:
        """Return the name of its one file."""
        (name,) = self.files
        return name


NUM_TENSORS_KEY = "tensors"
"""Key of `meta`: the number of tensors in the whole state. It shows when tensors were lost together with a worker."""


def format_copy_name(step: int, token: str) -> str:
    """Return the name of a copy's folder."""
    return f"{format_checkpoint_name(step)}-{token}"


def list_copies(folder: Path) -> list[tuple[int, str]]:
    """List step and token of each copy of which a node's folder holds anything, newest first."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        words = path.name.split("-")
        if len(words) == 3 and words[0] == "step" and words[1].isdecimal():
            found.append((int(words[1]), words[2]))
    return sorted(found, reverse=True)


def list_shard_records(copy: Path) -> list[Path]:
    """List the records of a copy's shards on this node, by rank."""
    return sorted(copy.glob("rank-[0-9]*.json"))


def parse_rank(record: Path) -> int:
    """Return the rank of the shard that a record describes."""
    return int(record.stem.removeprefix("rank-"))


def encode_shard(shard: InMemoryShard) -> bytes:
    """Return the bytes of the shard's record."""
    text = json.dumps(shard.model_dump(mode="json")).encode()
    return xxhash.xxh3_128_hexdigest(text).encode() + b"\n" + text


def decode_shard(content: bytes, path: Path) -> InMemoryShard:
    """Parse a record that was read from `path`. Raises CorruptCheckpointError if it is damaged."""
    digest, _, text = content.partition(b"\n")
    if xxhash.xxh3_128_hexdigest(text).encode() != digest:
        raise CorruptCheckpointError(path, "damaged (its own checksum differs)")
    try:
        return InMemoryShard.model_validate_json(text)
    except ValidationError as error:
        raise CorruptCheckpointError(path, f"malformed record: {error.errors()[0]['msg']}") from None


def read_shard(path: Path) -> InMemoryShard:
    """Read a record and verify every byte of its file. Raises CorruptCheckpointError if either is damaged."""
    try:
        content = read_bytes(path, MAX_MANIFEST_BYTES)
    except DataError as error:
        raise CorruptCheckpointError(path, str(error).partition(": ")[2]) from None
    except OSError as error:
        raise CorruptCheckpointError(path, str(error.strerror)) from None
    shard = decode_shard(content, path)
    verify_files(path.parent, shard.files, CHUNK_BYTES, threads=1)
    return shard


def write_shard_record(copy: Path, shard: InMemoryShard) -> None:
    """Write the record of a shard after its file is complete."""
    path = (copy / shard.file_name).with_suffix(".json")
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(encode_shard(shard))
    os.replace(temporary, path)


def merge_shards(shards: Sequence[InMemoryShard], preferred_ranks: Collection[int] = ()) -> CheckpointManifest:
    """Merge shards into the manifest of a copy. A block that several shards hold is read from a rank in
    `preferred_ranks`, else from the lowest. Raises ValueError unless every tensor is held whole, and as many tensors as
    `meta` says under NUM_TENSORS_KEY."""
    ordered = sorted(shards, key=lambda shard: (shard.rank not in preferred_ranks, shard.rank))
    tensors: dict[str, TensorRecord] = {}
    taken: dict[str, dict[tuple[tuple[int, ...], tuple[int, ...]], ShardRecord]] = {}
    for shard in ordered:
        for name, tensor in shard.tensors.items():
            known = tensors.setdefault(name, tensor)
            if (known.dtype, known.shape) != (tensor.dtype, tensor.shape):
                raise ValueError(f"tensor {name}: parts disagree about its dtype or shape")
            blocks = taken.setdefault(name, {})
            for tensor_shard in tensor.pieces:
                blocks.setdefault((tensor_shard.offset, tensor_shard.extent), tensor_shard)
    merged = {
        name: tensors[name].model_copy(update={"pieces": tuple(blocks.values())})
        for name, blocks in sorted(taken.items())
    }
    used = {tensor_shard.file for tensor in merged.values() for tensor_shard in tensor.pieces}
    files: dict[str, FileRecord] = {}
    for shard in ordered:
        files |= {name: file for name, file in shard.files.items() if name in used}
    meta = ordered[0].meta if ordered else {}
    if not merged:
        raise ValueError("there is no part")
    if len(merged) < meta.get(NUM_TENSORS_KEY, 0):
        raise ValueError(f"{len(merged)} of {meta[NUM_TENSORS_KEY]} tensors are there")
    return CheckpointManifest(files=files, tensors=merged, meta=meta)
