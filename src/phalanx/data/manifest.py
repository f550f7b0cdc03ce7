"""manifest.json: what a dataset directory holds. Names, counts and checksums, never the data itself.

The fingerprint is a hash of everything else in the manifest, and the manifest holds hashes of everything else in the
directory. So it names the contents: the same text prepared anywhere, at any time, by any number of workers has the
same fingerprint, and an edited manifest is found out because its fingerprint no longer fits.
"""

import json
import re
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from xxhash import xxh3_128_hexdigest

from phalanx.bounded import read_json
from phalanx.errors import DataError, storage_failed
from phalanx.run.directory import write_json

FORMAT = 1
LARGEST = 1 << 28
"""Bytes of a manifest."""
_FILE = re.compile(r"[\w-][\w.-]*")
MANIFEST = "manifest.json"
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
class Manifest:
    """The contents of a dataset directory. Tokens have `vocab` and `tokenizer`; images `classes`, `shape`, `labels`."""

    kind: Literal["tokens", "images"]
    dtype: str  # of one token or pixel, little-endian
    shards: tuple[ShardEntry, ...]
    vocab: int | None = None
    tokenizer: dict[str, Any] | None = None
    classes: int | None = None
    shape: tuple[int, int, int] | None = None  # height, width, channels
    labels: tuple[str, ...] | None = None  # names of the classes, where they have names

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
        return 1 if self.shape is None else LABEL_BYTES + int(np.prod(self.shape))

    @cached_property
    def fingerprint(self) -> str:
        """XXH3-128 of the contents."""
        return xxh3_128_hexdigest(json.dumps(self._body(), sort_keys=True).encode())

    def _body(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}

    def check(self) -> None:
        """ValueError or TypeError where sizes do not fit each other, or a file lies elsewhere. The fingerprint fits
        whatever somebody wrote there."""
        dtype = np.dtype(self.dtype)
        if dtype.kind != "u" or self.kind not in ("tokens", "images"):
            raise ValueError(f"{self.kind} of dtype {self.dtype}")
        if (self.kind == "images") is (self.shape is None) or not all(size > 0 for size in self.shape or ()):
            raise ValueError(f"{self.kind} of shape {self.shape}")
        for shard in self.shards:
            if not all(_FILE.fullmatch(name) for name in (shard.file, shard.sidecar)):
                raise ValueError(f"{shard.file!r} and {shard.sidecar!r} are no names of files here")
            if min(shard.bytes, shard.count, shard.documents) < 0:
                raise ValueError(f"{shard.file} has fewer than 0 bytes")
            if shard.bytes != shard.count * self.record * dtype.itemsize:
                raise ValueError(f"{shard.file}: {shard.count} records are not {shard.bytes} bytes")

    def write(self, folder: Path) -> None:
        """Write manifest.json into `folder`, whole or not at all."""
        write_json(folder / MANIFEST, {**self._body(), "fingerprint": self.fingerprint})


def token_dtype(vocab: int) -> np.dtype[Any]:
    """The narrowest little-endian unsigned type that holds the tokens 0 .. vocab - 1."""
    return np.dtype("<u1" if vocab <= 1 << 8 else "<u2" if vocab <= 1 << 16 else "<u4")


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_json(path, LARGEST)
    except DataError as error:
        raise ValueError(str(error).removeprefix(f"{path}: ")) from None


def is_dataset(folder: Path) -> bool:
    """Whether a dataset was prepared here. Its contents are not looked at."""
    return (folder / MANIFEST).is_file()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a dataset directory; DataError when it is missing, unreadable or was changed."""
    path = folder / MANIFEST
    try:
        body = _read(path)
        fingerprint, version = body.pop("fingerprint"), body.pop("format")
        if version != FORMAT:
            raise DataError(f"{path}: dataset format {version}; this Phalanx reads format {FORMAT}. Prepare it again")
        body["shards"] = tuple(ShardEntry(**entry) for entry in body["shards"])
        for key in ("shape", "labels"):
            body[key] = None if body[key] is None else tuple(body[key])
        manifest = Manifest(**body)
        manifest.check()
    except FileNotFoundError:
        raise DataError(
            f"{folder}: no dataset here ({MANIFEST} is missing); `phalanx data prepare` makes one"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if storage_failed(error):
            raise
        raise DataError(f"{path}: not a dataset manifest ({type(error).__name__}: {error})") from None
    if manifest.fingerprint != fingerprint:
        raise DataError(
            f"{path}: was changed: its contents have the fingerprint {manifest.fingerprint}, but it says {fingerprint}"
        )
    return manifest
