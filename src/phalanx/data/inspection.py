"""Verify every byte of a dataset directory (`verify_dataset`), and describe its content (`inspect_dataset`)."""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from phalanx.data.chat_images import unpack_files
from phalanx.data.dataset_files import DatasetFiles, open_dataset_files
from phalanx.data.manifest import (
    LABEL_BYTES,
    LOSS_BIT,
    NUMBERED_RECORDS,
    TOKEN_MASK,
    DatasetManifest,
    ShardEntry,
    read_manifest,
)
from phalanx.data.prepare_plan import PrepareProgress, ignore_progress
from phalanx.data.rows import count_skipped
from phalanx.data.shard import BLOCK_BYTES, MappedShard, ValueArray, check_shard_size, describe_block, read_sidecar
from phalanx.data.tokenizers import Tokenizer, load_tokenizer, show_tokens
from phalanx.errors import DataError, describe_os_error, is_storage_error
from phalanx.storage.errors import NotFound, StoreUnavailable
from phalanx.storage.store import open_location


@dataclass(frozen=True)
class VerifiedDataset:
    """What was read of a dataset directory, all of it good."""

    num_shards: int
    num_blocks: int
    size_bytes: int
    duration_s: float
    fingerprint: str


def verify_dataset(
    location: str | Path,
    report_progress: Callable[[PrepareProgress], None] = ignore_progress,
    clock: Callable[[], float] = time.perf_counter,
) -> VerifiedDataset:
    """Read a dataset from end to end, where it lies, and compare everything with its checksums.

    DataError names the first bad file and block, and says how many more there are.
    """
    files, started = open_dataset_files(location), clock()
    manifest, folder = read_manifest(files.directory), files.directory
    problems: list[str] = []
    if manifest.kind == "tokens":
        load_tokenizer(folder)
    blocks = bytes_done = count = 0
    for entry in manifest.shards:
        try:
            problems += _find_bad_blocks(files, entry)
        except StoreUnavailable:
            raise
        except NotFound as error:
            problems.append(f"{error}: the shard is missing, from block 0 on")
        except DataError as error:
            problems.append(str(error))
        except OSError as error:
            if not is_storage_error(error):
                raise
            problems.append(f"{describe_os_error(error)}, in {location}/{entry.file} or its .idx file")
        blocks += -(-entry.bytes // BLOCK_BYTES)
        bytes_done += entry.bytes
        count += entry.count
        report_progress(PrepareProgress(bytes_done, manifest.bytes, count, clock() - started))
    if problems:
        raise DataError(
            problems[0] + (f"\n{len(problems) - 1} more like it in {location}" if len(problems) > 1 else "")
        )
    return VerifiedDataset(len(manifest.shards), blocks, bytes_done, clock() - started, manifest.fingerprint)


def _find_bad_blocks(files: DatasetFiles, entry: ShardEntry) -> list[str]:
    problems = []
    if files.url is None:
        check_shard_size(files.directory, entry)
        path = str(files.directory / entry.file)
    else:
        files.fetch(entry.sidecar)
        path = str(files.url / entry.file)
    with open_location(path) as file:
        for block, expected in enumerate(read_sidecar(files.directory, entry).hashes):
            data = file.read(BLOCK_BYTES)
            if xxh3_64_intdigest(data) != expected:
                problems.append(f"{path} {describe_block(block, len(data))}")
    return problems


def inspect_dataset(location: str | Path, max_tokens: int = 200) -> dict[str, Any]:
    """Describe a dataset as JSON values: of text with its first `max_tokens` tokens decoded (`begins`, where control
    tokens have their names in brackets), of images with its first labels."""
    files = open_dataset_files(location)
    folder = files.directory
    manifest = read_manifest(folder)
    entry = manifest.shards[0]
    files.fetch(entry.sidecar, entry.file)
    first = MappedShard(folder, entry, np.dtype(manifest.dtype))
    content = {
        "path": str(location),
        "kind": manifest.kind,
        "dtype": np.dtype(manifest.dtype).name,
        "count": manifest.count,
        "size_bytes": manifest.bytes,
        "num_shards": len(manifest.shards),
        "fingerprint": manifest.fingerprint,
        "num_skipped_rows": count_skipped(folder) or None,
    }
    if manifest.records is not None:
        return content | _inspect_conversations(files, manifest, first)
    if manifest.kind == "tokens":
        tokenizer = load_tokenizer(folder)
        count = min(max_tokens, len(first.values))
        first.verify_range(0, count)
        return content | {
            "num_documents": manifest.documents,
            "vocab_size": manifest.vocab,
            "tokenizer": tokenizer.name,
            "begins": show_tokens(tokenizer, first.values[:count].tolist()),
        }
    count = min(20, entry.count)
    first.verify_range(0, count * manifest.record)
    records = first.values[: count * manifest.record].reshape(count, manifest.record)
    return content | {
        "classes": manifest.classes,
        "shape": manifest.shape,
        "labels": manifest.labels,
        "first_labels": records[:, :LABEL_BYTES].copy().view("<u4")[:, 0].tolist(),
    }


SHOWN_CONVERSATIONS = 3


def _inspect_conversations(files: DatasetFiles, manifest: DatasetManifest, first: MappedShard) -> dict[str, Any]:
    """Describe conversations: how long they are, the share of tokens in the loss, and the first ones as pieces of text,
    each with whether it is in the loss."""
    lengths: list[int] = []
    stride = 1 if manifest.processor is None else 2  # every second document has image files
    for entry in manifest.shards:
        files.fetch(entry.sidecar)
        starts = read_sidecar(files.directory, entry).documents
        lengths += np.diff([*starts, entry.count]).tolist()[::stride]
    first.verify_range(0, len(first.values))
    tokenizer, edges = load_tokenizer(files.directory), [*first.document_starts, len(first.values)]
    parts = [first.values[start:stop] for start, stop in pairwise(edges[: SHOWN_CONVERSATIONS * stride + 1])]
    skipped = int(manifest.records in NUMBERED_RECORDS)
    shown = [show_marked_tokens(tokenizer, values[skipped:]) for values in parts[::stride]]
    if stride == 2:
        shown = [_show_images(*each) for each in zip(shown, map(unpack_files, parts[1::2]), strict=True)]
    tokens = [first.values[start:stop] for start, stop in list(pairwise(edges))[::2]] if stride == 2 else [first.values]
    half, most, longest = np.quantile(lengths, [0.5, 0.95, 1], method="higher").tolist()
    return {
        "count": sum(lengths),
        "num_documents": len(lengths),
        "vocab_size": manifest.vocab,
        "tokenizer": tokenizer.name,
        "records": manifest.records,
        "loss_fraction": round(float(np.mean(np.concatenate(tokens) & LOSS_BIT != 0)), 4),
        "median_document_tokens": half,
        "p95_document_tokens": most,
        "max_document_tokens": longest,
        "conversations": shown,
    }


def _show_images(pieces: list[tuple[str, bool]], files: list[bytes]) -> list[tuple[str, bool]]:
    """Return the pieces of a conversation with its image files before it, and repeated control tokens as a count."""
    listed = "".join(f"[image {number}: {len(file):,} bytes]\n" for number, file in enumerate(files, 1))
    repeated = re.compile("(\u27e6[^\u27e7]*\u27e7)\\1+")
    short = [(repeated.sub(lambda run: f"{run[1]} x {len(run[0]) // len(run[1])} ", text), on) for text, on in pieces]
    return [(listed, False), *short]


def show_marked_tokens(tokenizer: Tokenizer, values: ValueArray) -> list[tuple[str, bool]]:
    """Return the text of marked tokens [n] in pieces, each with whether it is in the loss."""
    in_loss = values & LOSS_BIT != 0
    edges = [0, *(np.flatnonzero(np.diff(in_loss)) + 1).tolist(), len(values)]
    return [
        (show_tokens(tokenizer, (values[start:stop] & TOKEN_MASK).tolist()), bool(in_loss[start]))
        for start, stop in pairwise(edges)
    ]
