"""Copies of the state in a node's folder: each a directory like that of a checkpoint on disk before its commit.

    phalanx-in-memory-.../step-000000060-<token>/
        rank-00000.safetensors      as in a checkpoint
        rank-00000.json             the rank's record (`shard_file.py`)

A node holds shards of its own workers and of others. A copy is complete if the shards that are left, over all nodes,
hold every tensor. Several shards may hold the same block, since each node keeps all that its workers hold.
"""

import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

from phalanx.errors import DataError
from phalanx.safe_files import read_bytes
from phalanx.train.checkpoint.format import (
    CHUNK_BYTES,
    MAX_MANIFEST_BYTES,
    CheckpointManifest,
    CorruptCheckpointError,
    format_checkpoint_name,
    merge_rank_manifests,
)
from phalanx.train.checkpoint.load import verify_files
from phalanx.train.checkpoint.shard_file import RankRecord, decode_record

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


def prune_copies(folder: Path, keep: Collection[str] = ()) -> None:
    """Remove all copies of a node's folder except those named in `keep`."""
    for step, token in list_copies(folder):
        name = format_copy_name(step, token)
        if name not in keep:
            shutil.rmtree(folder / name, ignore_errors=True)  # a worker may be removing its shard at the same time


def list_shard_records(copy: Path) -> list[Path]:
    """List the records of a copy's shards on this node, by rank."""
    return sorted(copy.glob("rank-[0-9]*.json"))


def parse_rank(record: Path) -> int:
    """Return the rank of the shard that a record describes."""
    return int(record.stem.removeprefix("rank-"))


def read_shard(path: Path) -> RankRecord:
    """Read a record and verify every byte of its file. Raises CorruptCheckpointError if either is damaged."""
    try:
        content = read_bytes(path, MAX_MANIFEST_BYTES)
    except DataError as error:
        raise CorruptCheckpointError(path, str(error).partition(": ")[2]) from None
    except OSError as error:
        raise CorruptCheckpointError(path, str(error.strerror)) from None
    shard = decode_record(content, path, RankRecord)
    verify_files(path.parent, shard.files, CHUNK_BYTES, threads=1)
    return shard


def merge_copy(records: Sequence[RankRecord], preferred_ranks: Collection[int] = ()) -> CheckpointManifest:
    """Merge records into the manifest of a copy. A block that several ranks hold is read from a rank in
    `preferred_ranks`, else from the lowest. Raises ValueError unless every tensor is held whole, and as many tensors as
    `meta` says under NUM_TENSORS_KEY."""
    ordered = sorted(records, key=lambda record: (record.rank not in preferred_ranks, record.rank))
    if not ordered:
        raise ValueError("there is no part")
    meta = ordered[0].meta
    merged = merge_rank_manifests(ordered, meta, replicated=True)
    if len(merged.tensors) < meta.get(NUM_TENSORS_KEY, 0):
        raise ValueError(f"{len(merged.tensors)} of {meta[NUM_TENSORS_KEY]} tensors are there")
    return merged
