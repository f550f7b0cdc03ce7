"""manifest.json: what a dataset directory holds. Names, counts and checksums, never the data itself.

The fingerprint is a hash of everything else in the manifest, and the manifest holds hashes of everything else in the
directory. So it names the contents: the same text prepared anywhere, at any time, by any number of workers has the
same fingerprint, and an edited manifest is found out because its fingerprint no longer fits.
"""

import json
import math
import re
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from xxhash import xxh3_128_hexdigest

from phalanx.errors import DataError, is_storage_error
from phalanx.run.directory import write_json
from phalanx.safe_files import read_json

DATASET_FORMAT = 1
MAX_MANIFEST_BYTES = 1 << 28
"""Bytes of a manifest."""
MANIFEST_FILE = "manifest.json"
STREAM_FILE = "stream.json"
"""What a dataset directory has that is, or was, prepared while a run trains on it (`stream.py`)."""
TOKENIZER_FILE = "tokenizer.json"
"""The tokenizer of a dataset that has one of its own."""
_SHARD_FILE_REGEX = r"shard-\d{5,}\.(bin|idx)"
_MAX_COUNT = 1 << 32
"""More than any vocabulary, number of classes, or side of an image."""
TOKEN_MASK = (1 << 29) - 1
"""Bits of a value of a conversation that are its token."""
LOSS_BIT, SEQUENCE_BIT, REJECTED_BIT = 1 << 31, 1 << 30, 1 << 29
"""Bits of a value of a conversation: the token is in the loss; it begins a sequence, of which a pair has two; its
sequence is rejected."""
NUMBERED_RECORDS = ("rewards", "classes", "texts")
LABEL_BYTES = 4  # an image record is its label, as a little-endian uint32, followed by its pixels


@dataclass(frozen=True)
class ShardEntry:
    """One shard: its file, and the sidecar that holds the checksums of its blocks and where its documents start."""

    file: str
    bytes: int
    count: int  # tokens, or images
    documents: int
    sidecar: str
    sidecar_xxh3: str


@dataclass(frozen=True)
class DatasetManifest:
    """The contents of a dataset directory. Tokens have `vocab` and `tokenizer`; images `classes`, `shape`, `labels`."""

    kind: Literal["tokens", "images"]
    dtype: str  # of one token or pixel, little-endian
    shards: tuple[ShardEntry, ...]
    vocab: int | None = None
    tokenizer: dict[str, Any] | None = None
    classes: int | None = None
    shape: tuple[int, int, int] | None = None  # height, width, channels
    labels: tuple[str, ...] | None = None  # names of the classes, where they have names
    records: Literal["chat", "pairs", "labels", "rewards", "classes", "texts"] | None = None
    """What a document of conversations is; its values are tokens with LOSS_BIT, SEQUENCE_BIT and REJECTED_BIT. Those of
    NUMBERED_RECORDS begin with a number (`text_records.py`)."""
    processor: dict[str, str] | None = None
    """Settings of the processor of images, by file. Every second document then has the image files of the one before
    it (`chat_images.py`)."""

    @property
    def count(self) -> int:
        """Tokens or images in all."""
        return sum(shard.count for shard in self.shards)

    @property
    def bytes(self) -> int:
        """Bytes of all shards, without sidecars."""
        return sum(shard.bytes for shard in self.shards)

    @property
    def documents(self) -> int:
        """Documents in all; one that was split over shards counts once in each."""
        return sum(shard.documents for shard in self.shards)

    @property
    def record(self) -> int:
        """How many values make one token (1) or one image with its label."""
        return 1 if self.shape is None else LABEL_BYTES + math.prod(self.shape)

    @cached_property
    def fingerprint(self) -> str:
        """XXH3-128 of the contents."""
        return xxh3_128_hexdigest(json.dumps(self._body(), sort_keys=True).encode())

    def _body(self) -> dict[str, Any]:
        fields = asdict(self)
        for key in ("records", "processor"):
            if fields[key] is None:
                del fields[key]  # as fingerprints of plain text have always been
        return {"format": DATASET_FORMAT, **fields}

    def write(self, folder: Path) -> None:
        """Write manifest.json into `folder`, whole or not at all."""
        write_json(folder / MANIFEST_FILE, {**self._body(), "fingerprint": self.fingerprint})


def narrowest_token_dtype(vocab: int) -> np.dtype[Any]:
    """The narrowest little-endian unsigned type that holds the tokens 0 .. vocab - 1."""
    return np.dtype("<u1" if vocab <= 1 << 8 else "<u2" if vocab <= 1 << 16 else "<u4")


def _read_manifest_json(path: Path) -> dict[str, Any]:
    try:
        return read_json(path, MAX_MANIFEST_BYTES)
    except DataError as error:
        raise ValueError(str(error).removeprefix(f"{path}: ")) from None


def is_dataset(folder: Path) -> bool:
    """Whether a dataset was prepared here. Its contents are not looked at."""
    return (folder / MANIFEST_FILE).is_file()


def read_manifest(folder: Path) -> DatasetManifest:
    """The manifest of a dataset directory; DataError when it is missing, unreadable or was changed."""
    path = folder / MANIFEST_FILE
    try:
        body = _read_manifest_json(path)
        fingerprint, version = body.pop("fingerprint"), body.pop("format")
        if version != DATASET_FORMAT:
            raise DataError(
                f"{path}: dataset format {version}; this Phalanx reads format {DATASET_FORMAT}. Prepare it again"
            )
        body["shards"] = tuple(ShardEntry(**entry) for entry in body["shards"])
        for key in ("shape", "labels"):
            body[key] = None if body[key] is None else tuple(body[key])
        manifest = DatasetManifest(**body)
    except FileNotFoundError:
        raise DataError(
            f"{folder}: no dataset here ({MANIFEST_FILE} is missing); `phalanx data prepare` makes one"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if is_storage_error(error):
            raise
        raise DataError(f"{path}: not a dataset manifest ({type(error).__name__}: {error})") from None
    if manifest.fingerprint != fingerprint:
        raise DataError(
            f"{path}: was changed: its contents have the fingerprint {manifest.fingerprint}, but it says {fingerprint}"
        )
    if not manifest.shards and not (folder / STREAM_FILE).is_file():
        raise DataError(f"{path}: not a dataset manifest (no shards)")
    try:
        _validate_manifest(manifest)
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: not a dataset manifest ({error})") from None
    return manifest


def _validate_manifest(manifest: DatasetManifest) -> None:
    """ValueError when a manifest says what no dataset can be."""
    kind: str = manifest.kind
    tokens = kind == "tokens"
    if kind not in ("tokens", "images"):
        raise ValueError(f"kind {kind!r}")
    numbers = [manifest.vocab] if tokens else [manifest.classes, *(manifest.shape or (None,))]
    if not all(isinstance(number, int) and 0 < number <= _MAX_COUNT for number in numbers):
        raise ValueError(f"{'vocab' if tokens else 'classes and shape'} {', '.join(map(str, numbers))}")
    if tokens != (manifest.shape is None) or (not tokens and len(numbers) != 4):
        raise ValueError(f"shape {manifest.shape}")
    vocab = TOKEN_MASK if manifest.records is not None else manifest.vocab or 0
    dtype = narrowest_token_dtype(vocab) if tokens else np.dtype("<u1")
    if manifest.dtype.replace("|", "<") != dtype.str.replace("|", "<"):
        raise ValueError(f"values of {manifest.dtype!r}, expected {dtype.str!r}")
    if manifest.labels is not None and len(manifest.labels) != manifest.classes:
        raise ValueError(f"{len(manifest.labels)} labels for {manifest.classes} classes")
    if not (
        is_tokenizer_description(manifest.tokenizer, manifest.vocab or 0) if tokens else manifest.tokenizer is None
    ):
        raise ValueError(f"tokenizer {manifest.tokenizer}")
    settings = {} if manifest.processor is None else manifest.processor
    if not all(isinstance(text, str) and Path(name).name == name for name, text in settings.items()):
        raise ValueError("processor: expected texts by file name")
    for shard in manifest.shards:
        if not all(re.fullmatch(_SHARD_FILE_REGEX, str(name)) for name in (shard.file, shard.sidecar)):
            raise ValueError(f"files {shard.file!r}, {shard.sidecar!r}")
        counts = (shard.bytes, shard.count, shard.documents)
        if not all(isinstance(number, int) and number >= 0 for number in counts):
            raise ValueError(f"{shard.file} has {counts} bytes, {'tokens' if tokens else 'images'} and documents")
        if shard.bytes != shard.count * manifest.record * dtype.itemsize:
            raise ValueError(f"{shard.file} cannot have {shard.count} {manifest.kind} in {shard.bytes} bytes")


def is_tokenizer_description(value: object, vocab: int) -> bool:
    """Whether a dataset can have such a tokenizer: `bytes`, or one that lies in its folder."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return False
    separator, begin = value.get("separator"), value.get("begin", [])
    around = [*begin, *([] if separator is None else [separator])] if isinstance(begin, list) else [None]
    if not all(type(token) is int and 0 <= token < vocab for token in around):
        return False
    return "file" not in value or (value["file"] == TOKENIZER_FILE and isinstance(value.get("xxh3"), str))
