"""Verify every byte of a dataset directory (`verify_dataset`), and describe its content (`inspect_dataset`)."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from xxhash import xxh3_64_intdigest

from phalanx.data.bad_rows import count_skipped
from phalanx.data.dataset_files import DatasetFiles, open_dataset_files
from phalanx.data.manifest import LABEL_BYTES, DatasetManifest, ShardEntry, read_manifest
from phalanx.data.prepare_plan import PrepareProgress, ignore_progress
from phalanx.data.shard import BLOCK_BYTES, MappedShard, check_shard_size, describe_block, read_sidecar
from phalanx.data.tokenizers import load_tokenizer, show_tokens
from phalanx.errors import DataError, describe_os_error, is_storage_error
from phalanx.storage.errors import NotFound, StoreUnavailable
from phalanx.storage.reader import open_location


@dataclass(frozen=True)
class VerifiedDataset:
    """What was read of a dataset directory, all of it good."""

    num_shards: int
    num_blocks: int
    size_bytes: int
    duration_s: float
    fingerprint: str


@dataclass(frozen=True)
class DatasetContent:
    """What a dataset directory holds."""

    path: str
    kind: str
    dtype: str
    count: int
    """Tokens, or images."""
    size_bytes: int
    num_shards: int
    fingerprint: str
    num_skipped_rows: int | None
    """Rows of the source that were left out because they cannot be read; None: none."""


@dataclass(frozen=True)
class TextContent(DatasetContent):
    """What a dataset directory of text holds."""

    num_documents: int
    vocab_size: int | None
    tokenizer: str
    begins: str
    """The first tokens, decoded; control tokens have their names in brackets."""


@dataclass(frozen=True)
class ImageContent(DatasetContent):
    """What a dataset directory of images holds."""

    classes: int | None
    shape: tuple[int, int, int] | None
    """Height, width, channels."""
    labels: tuple[str, ...] | None
    """Names of the classes, where they have names."""
    first_labels: list[int]


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


def inspect_dataset(location: str | Path, max_tokens: int = 200) -> TextContent | ImageContent:
    """Describe a dataset, with its first `max_tokens` tokens decoded, or its first labels."""
    files = open_dataset_files(location)
    folder = files.directory
    manifest = read_manifest(folder)
    files.fetch(manifest.shards[0].sidecar, manifest.shards[0].file)
    first = MappedShard(folder, manifest.shards[0], np.dtype(manifest.dtype))
    content = DatasetContent(
        path=str(location),
        kind=manifest.kind,
        dtype=np.dtype(manifest.dtype).name,
        count=manifest.count,
        size_bytes=manifest.bytes,
        num_shards=len(manifest.shards),
        fingerprint=manifest.fingerprint,
        num_skipped_rows=count_skipped(folder) or None,
    )
    if manifest.kind == "tokens":
        return _describe_text(content, folder, manifest, first, max_tokens)
    return _describe_images(content, manifest, first)


def _describe_text(
    content: DatasetContent, folder: Path, manifest: DatasetManifest, shard: MappedShard, max_tokens: int
) -> TextContent:
    tokenizer = load_tokenizer(folder)
    count = min(max_tokens, len(shard.values))
    shard.verify_range(0, count)
    begins = show_tokens(tokenizer, shard.values[:count].tolist())
    return TextContent(
        **vars(content),
        num_documents=manifest.documents,
        vocab_size=manifest.vocab,
        tokenizer=tokenizer.name,
        begins=begins,
    )


def _describe_images(content: DatasetContent, manifest: DatasetManifest, shard: MappedShard) -> ImageContent:
    count = min(20, manifest.shards[0].count)
    shard.verify_range(0, count * manifest.record)
    records = shard.values[: count * manifest.record].reshape(count, manifest.record)
    first_labels = records[:, :LABEL_BYTES].copy().view("<u4")[:, 0].tolist()
    return ImageContent(
        **vars(content),
        classes=manifest.classes,
        shape=manifest.shape,
        labels=manifest.labels,
        first_labels=first_labels,
    )
