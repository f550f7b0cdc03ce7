"""Looking at a dataset directory: is every byte what was written (`verify_dataset`), and what is in it
(`inspect_dataset`)."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from phalanx.data.manifest import LABEL_BYTES, MANIFEST_FILE, DatasetManifest, ShardEntry, read_manifest
from phalanx.data.prepare import PrepareProgress, ignore_progress
from phalanx.data.shard import BLOCK_BYTES, MappedShard, check_shard_size, describe_block, read_sidecar
from phalanx.data.tokenizers import load_tokenizer
from phalanx.errors import DataError, describe_os_error, is_storage_error


def verify_dataset(
    folder: Path,
    report_progress: Callable[[PrepareProgress], None] = ignore_progress,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Read a dataset directory from end to end and compare everything with its checksums.

    Returns what was verified: shards, blocks, bytes, seconds, fingerprint. DataError names the first bad file and
    block, and says how many more there are.
    """
    manifest, started = read_manifest(folder), clock()
    problems: list[str] = []
    if manifest.kind == "tokens":
        load_tokenizer(folder)
    blocks = bytes_done = count = 0
    for entry in manifest.shards:
        try:
            problems += _find_bad_blocks(folder, entry) or _find_impossible_values(folder, manifest, entry)
        except DataError as error:
            problems.append(str(error))
        except OSError as error:
            if not is_storage_error(error):
                raise
            problems.append(f"{describe_os_error(error)}, in {folder / entry.file} or its .idx file")
        blocks += -(-entry.bytes // BLOCK_BYTES)
        bytes_done += entry.bytes
        count += entry.count
        report_progress(PrepareProgress(bytes_done, manifest.bytes, count, clock() - started))
    if problems:
        raise DataError(problems[0] + (f"\n{len(problems) - 1} more like it in {folder}" if len(problems) > 1 else ""))
    return {
        "shards": len(manifest.shards),
        "blocks": blocks,
        "bytes": bytes_done,
        "seconds": clock() - started,
        "fingerprint": manifest.fingerprint,
    }


def _find_bad_blocks(folder: Path, entry: ShardEntry) -> list[str]:
    check_shard_size(folder, entry)
    problems = []
    path = folder / entry.file
    with open(path, "rb") as file:
        for block, expected in enumerate(read_sidecar(folder, entry).hashes):
            data = file.read(BLOCK_BYTES)
            if xxh3_64_intdigest(data) != expected:
                problems.append(f"{path} {describe_block(block, len(data))}")
    return problems


def _find_impossible_values(folder: Path, manifest: DatasetManifest, entry: ShardEntry) -> list[str]:
    """Find values that a shard cannot hold even though its checksums match: tokens beyond the vocabulary, labels beyond
    the classes, documents that begin outside of it."""
    values = (
        np.memmap(folder / entry.file, np.dtype(manifest.dtype), mode="r") if entry.bytes else np.zeros(0, np.uint8)
    )
    starts = read_sidecar(folder, entry).documents
    if starts.size and not (starts[0] >= 0 and starts[-1] < len(values) and (np.diff(starts) >= 0).all()):
        return [f"{folder / entry.sidecar}: documents begin where the shard has no tokens"]
    value_name, limit = "token", manifest.vocab
    if manifest.kind == "images":
        value_name, limit = "label", manifest.classes
        values = values.reshape(-1, manifest.record)[:, :LABEL_BYTES].copy().view("<u4")
    largest = max((int(values[at : at + (1 << 24)].max()) for at in range(0, len(values), 1 << 24)), default=0)
    if limit is not None and len(values) and largest >= limit:
        return [
            f"{folder / entry.file}: has the {value_name} {largest}, but {MANIFEST_FILE} says that there are {limit}"
        ]
    return []


def inspect_dataset(folder: Path, max_tokens: int = 200) -> dict[str, Any]:
    """What a dataset directory holds, as plain values, with its first `max_tokens` tokens decoded (or its first
    labels)."""
    manifest = read_manifest(folder)
    info: dict[str, Any] = {
        "path": str(folder),
        "kind": manifest.kind,
        "dtype": np.dtype(manifest.dtype).name,
        "count": manifest.count,
        "bytes": manifest.bytes,
        "shards": len(manifest.shards),
        "fingerprint": manifest.fingerprint,
    }
    first = MappedShard(folder, manifest.shards[0], np.dtype(manifest.dtype))
    return info | (
        _text_info(folder, manifest, first, max_tokens) if manifest.kind == "tokens" else _image_info(manifest, first)
    )


def _text_info(folder: Path, manifest: DatasetManifest, shard: MappedShard, tokens: int) -> dict[str, Any]:
    tokenizer = load_tokenizer(folder)
    count = min(tokens, len(shard.values))
    shard.verify_range(0, count)
    return {
        "documents": manifest.documents,
        "vocab": manifest.vocab,
        "tokenizer": tokenizer.name,
        "begins": tokenizer.decode(shard.values[:count].tolist()),
    }


def _image_info(manifest: DatasetManifest, shard: MappedShard) -> dict[str, Any]:
    count = min(20, manifest.shards[0].count)
    shard.verify_range(0, count * manifest.record)
    records = shard.values[: count * manifest.record].reshape(count, manifest.record)
    return {
        "classes": manifest.classes,
        "shape": manifest.shape,
        "labels": manifest.labels,
        "first_labels": records[:, :LABEL_BYTES].copy().view("<u4")[:, 0].tolist(),
    }
