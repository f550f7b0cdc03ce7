"""Looking at a dataset directory: is every byte what was written (`verify`), and what is in it (`inspect`)."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from phalanx.data.manifest import LABEL_BYTES, MANIFEST, Manifest, ShardEntry, read_manifest
from phalanx.data.prepare import Progress, silent
from phalanx.data.shard import BLOCK, Shard, check_size, describe_block, read_sidecar
from phalanx.data.tokenizers import load_tokenizer
from phalanx.errors import DataError, storage_failed, words_of


def verify(
    folder: Path, progress: Callable[[Progress], None] = silent, clock: Callable[[], float] = time.perf_counter
) -> dict[str, Any]:
    """Read a dataset directory from end to end and compare everything with its checksums.

    Returns what was verified: shards, blocks, bytes, seconds, fingerprint. DataError names the first bad file and
    block, and says how many more there are.
    """
    manifest, begun = read_manifest(folder), clock()
    bad: list[str] = []
    if manifest.kind == "tokens":
        load_tokenizer(folder)
    blocks = done = count = 0
    for entry in manifest.shards:
        try:
            bad += _bad_blocks(folder, entry) or _impossible(folder, manifest, entry)
        except DataError as error:
            bad.append(str(error))
        except OSError as error:
            if not storage_failed(error):
                raise
            bad.append(f"{words_of(error)}, in {folder / entry.file} or beside it")
        blocks += -(-entry.bytes // BLOCK)
        done += entry.bytes
        count += entry.count
        progress(Progress(done, manifest.bytes, count, clock() - begun))
    if bad:
        raise DataError(bad[0] + (f"\n{len(bad) - 1} more like it in {folder}" if len(bad) > 1 else ""))
    return {
        "shards": len(manifest.shards),
        "blocks": blocks,
        "bytes": done,
        "seconds": clock() - begun,
        "fingerprint": manifest.fingerprint,
    }


def _bad_blocks(folder: Path, entry: ShardEntry) -> list[str]:
    check_size(folder, entry)
    bad = []
    path = folder / entry.file
    with open(path, "rb") as file:
        for block, expected in enumerate(read_sidecar(folder, entry).hashes):
            data = file.read(BLOCK)
            if xxh3_64_intdigest(data) != expected:
                bad.append(f"{path} {describe_block(block, len(data))}")
    return bad


def _impossible(folder: Path, manifest: Manifest, entry: ShardEntry) -> list[str]:
    """What a shard whose bytes are those that were written cannot hold: tokens beyond the vocabulary, labels beyond the
    classes, documents that begin outside of it."""
    values = (
        np.memmap(folder / entry.file, np.dtype(manifest.dtype), mode="r") if entry.bytes else np.zeros(0, np.uint8)
    )
    starts = read_sidecar(folder, entry).documents
    if starts.size and not (starts[0] >= 0 and starts[-1] < len(values) and (np.diff(starts) >= 0).all()):
        return [f"{folder / entry.sidecar}: documents begin where the shard has no tokens"]
    what, limit = "token", manifest.vocab
    if manifest.kind == "images":
        what, limit = "label", manifest.classes
        values = values.reshape(-1, manifest.record)[:, :LABEL_BYTES].copy().view("<u4")
    most = max((int(values[at : at + (1 << 24)].max()) for at in range(0, len(values), 1 << 24)), default=0)
    if limit is not None and len(values) and most >= limit:
        return [f"{folder / entry.file}: has the {what} {most}, but {MANIFEST} says that there are {limit}"]
    return []


def inspect(folder: Path, tokens: int = 200) -> dict[str, Any]:
    """What a dataset directory holds, as plain values, with its first `tokens` tokens decoded (or its first labels)."""
    manifest = read_manifest(folder)
    facts: dict[str, Any] = {
        "path": str(folder),
        "kind": manifest.kind,
        "dtype": np.dtype(manifest.dtype).name,
        "count": manifest.count,
        "bytes": manifest.bytes,
        "shards": len(manifest.shards),
        "fingerprint": manifest.fingerprint,
    }
    first = Shard(folder, manifest.shards[0], np.dtype(manifest.dtype))
    return facts | (
        _text_facts(folder, manifest, first, tokens) if manifest.kind == "tokens" else _image_facts(manifest, first)
    )


def _text_facts(folder: Path, manifest: Manifest, shard: Shard, tokens: int) -> dict[str, Any]:
    tokenizer = load_tokenizer(folder)
    count = min(tokens, len(shard.values))
    shard.check(0, count)
    return {
        "documents": manifest.documents,
        "vocab": manifest.vocab,
        "tokenizer": tokenizer.name,
        "begins": tokenizer.decode(shard.values[:count].tolist()),
    }


def _image_facts(manifest: Manifest, shard: Shard) -> dict[str, Any]:
    count = min(20, manifest.shards[0].count)
    shard.check(0, count * manifest.record)
    records = shard.values[: count * manifest.record].reshape(count, manifest.record)
    return {
        "classes": manifest.classes,
        "shape": manifest.shape,
        "labels": manifest.labels,
        "first_labels": records[:, :LABEL_BYTES].copy().view("<u4")[:, 0].tolist(),
    }
