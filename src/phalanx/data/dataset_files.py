"""Where a prepared dataset lies: in a directory, or at a URL, of which a node keeps a copy.

The copy begins with the manifest and the tokenizer. Shards are downloaded into it one by one, when they are read or a
little before, and may be evicted again; the processes of a node share it. All is verified against the manifest as in
any directory.
"""

import contextlib
import logging
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import BinaryIO

from phalanx.data.manifest import MANIFEST_FILE, TOKENIZER_FILE, DatasetManifest, ShardEntry, read_manifest
from phalanx.errors import DataError, UsageError
from phalanx.recipe.locations import describe_version
from phalanx.storage.cache import find_objects, free_space, localize_files, localize_into, open_held
from phalanx.storage.errors import NotFound
from phalanx.storage.hub import pin_revision
from phalanx.storage.store import PARALLEL_REQUESTS, check_writable, open_store
from phalanx.storage.url import StoreUrl, is_url, parse_url

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DatasetFiles:
    """The files of a dataset in `directory`; at `url` are those that are not there yet."""

    directory: Path
    url: StoreUrl | None = None

    def fetch(self, *names: str) -> None:
        """Download these files unless they are there. DataError where the store has none of that name."""
        if self.url is None:
            return
        if self.url.scheme == "hf":
            localize_files(self.url, names)
            return
        for name in names:
            try:
                localize_into(self.directory, self.url / name)
            except NotFound:
                raise DataError(f"{self.url / name}: the shard is missing, from block 0 on") from None

    @property
    def is_evictable(self) -> bool:
        """Whether its shards are in the cache of Phalanx, which may evict them."""
        return self.url is not None and self.url.scheme != "hf"

    def open_shard(self, entry: ShardEntry) -> contextlib.AbstractContextManager[BinaryIO | None]:
        """Fetch a shard. Open the file of one that may be evicted: not while it, or a mapping of it, is open."""
        while True:
            self.fetch(entry.sidecar, entry.file)
            if not self.is_evictable:
                return contextlib.nullcontext()
            with contextlib.suppress(FileNotFoundError):  # evicted since
                return open_held(self.directory / entry.file)

    def fetch_ahead(self, entries: Iterable[ShardEntry]) -> None:
        """Download shards in this order in the background, as far as the cache has space. What fails there is
        reported to the reader of the shard."""
        if self.url is not None:
            Thread(target=self._fetch_quietly, args=(list(entries),), name="shards", daemon=True).start()

    def _fetch_quietly(self, entries: list[ShardEntry]) -> None:
        for entry in entries:
            try:
                is_here = (self.directory / entry.file).exists()
                if not is_here and self.is_evictable and free_space(entry.bytes, keeps_announced=True) > 0:
                    return
                self.fetch(entry.sidecar, entry.file)
            except Exception as error:  # noqa: BLE001 - the reader meets it again, and raises it
                logger.debug("%s: %s", entry.file, error)

    def check_sizes(self, manifest: DatasetManifest) -> None:
        """DataError where the store lacks a shard or has one of another size. A store that is not listed is asked when
        the shard is needed."""
        if self.url is None or self.url.scheme in ("http", "https", "hf"):
            return
        sizes = {each.key: each.size for each in find_objects(self.url)}
        for entry in manifest.shards:
            size = sizes.get((self.url / entry.file).key)
            if size != entry.bytes or (self.url / entry.sidecar).key not in sizes:
                what = "the shard is missing" if size is None else f"has {size} bytes"
                raise DataError(f"{self.url / entry.file}: {what}; {MANIFEST_FILE} says {entry.bytes} bytes")


def open_dataset_files(location: str | Path) -> DatasetFiles:
    """The files of the dataset at a path or URL. DataError where there is none."""
    if not is_url(location):
        return DatasetFiles(Path(location))
    url = parse_url(str(location))
    try:
        manifest = read_manifest(localize_files(url, (MANIFEST_FILE,)))
    except NotFound:
        raise DataError(
            f"{url}: no dataset here ({MANIFEST_FILE} is missing); `phalanx data prepare --out {url}` makes one"
        ) from None
    if url.scheme == "hf":
        url = pin_revision(url, describe_version(localize_files(url, (MANIFEST_FILE,))))
    has_tokenizer = "file" in (manifest.tokenizer or {})
    names = (MANIFEST_FILE, TOKENIZER_FILE) if has_tokenizer else (MANIFEST_FILE,)
    return DatasetFiles(localize_files(url, names, [entry.bytes for entry in manifest.shards]), url)


def check_upload(url: StoreUrl) -> None:
    """UsageError unless a dataset can be written at a URL: before the work that makes it."""
    if open_store(url).list_objects(url.key):
        raise UsageError(f"{url}: already exists; choose another --out, or remove it first")
    check_writable(url)


def upload_dataset(directory: Path, url: StoreUrl) -> None:
    """Upload a dataset directory, the manifest last: a dataset without one is none."""
    store, manifest = open_store(url), read_manifest(directory)
    names = [name for entry in manifest.shards for name in (entry.file, entry.sidecar)]
    names += [TOKENIZER_FILE] if (directory / TOKENIZER_FILE).exists() else []
    with ThreadPoolExecutor(PARALLEL_REQUESTS // 4, thread_name_prefix="upload") as pool:
        for done in [pool.submit(store.upload, (url / name).key, directory / name) for name in names]:
            done.result()
    store.upload((url / MANIFEST_FILE).key, directory / MANIFEST_FILE)
