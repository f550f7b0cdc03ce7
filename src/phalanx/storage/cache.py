"""The node-local copies of objects: made once a node, shared by the processes and jobs of a user, evicted by age.

    CACHE/store/<hash of URL, names, sizes and ETags>/
        files/NAME...     the objects
        entry.json        written last: URL and the xxh3 of each file

An entry without entry.json was not finished and is made again. A process holds a shared lock on the entries that it
uses; an entry that is locked is not evicted.
"""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from hashlib import file_digest
from pathlib import Path

import xxhash

from phalanx.errors import UsageError
from phalanx.formatting import format_bytes
from phalanx.run.cache import CACHE_ADVICE, cache_root
from phalanx.run.directory import write_json
from phalanx.run.lock import acquire_lock
from phalanx.safe_files import read_json
from phalanx.storage.errors import NotFound
from phalanx.storage.hub import download_snapshot
from phalanx.storage.peers import ObjectPeers
from phalanx.storage.store import ObjectInfo, open_store
from phalanx.storage.url import StoreUrl, is_url, parse_url

ENTRY_FILE = "entry.json"
CACHE_LIMIT_VARIABLE = "PHALANX_STORE_CACHE_GIB"
"""Environment variable with the size of the cache in GiB; by default half of what is free on its disk."""
_LOCK_TIMEOUT_S = 86400.0
_entry_locks: dict[tuple[int, Path], int] = {}
_peers: ObjectPeers | None = None


def localize(location: str | Path, patterns: Sequence[str] = ()) -> Path:
    """A path as it is; of a URL the path of its node-local copy, which is downloaded if it is not there.

    The copy of an object is a file; of a prefix a directory with all objects below it, or those that match one
    of `patterns`. Raises UsageError for what is not there or too large, StoreUnavailable when the store fails.
    """
    if not is_url(location):
        return Path(location)
    url = parse_url(str(location))
    if url.scheme == "hf":
        return download_snapshot(url, patterns)
    return _localize_objects(url, find_objects(url, patterns))


def localize_files(url: StoreUrl, names: Sequence[str], reserve_bytes: int = 0) -> Path:
    """The node-local directory with the objects of these names directly below a URL, which is not listed. The cache
    keeps `reserve_bytes` more free for what `localize_into` adds to it."""
    if url.scheme == "hf":
        return download_snapshot(url, names)
    store = open_store(url)
    directory = _localize_objects(url, [store.head((url / name).key) for name in names], reserve_bytes)
    if _peers is not None:
        _peers.add_directory(str(url), directory)
    return directory


def set_peers(peers: ObjectPeers | None) -> None:
    """Have `localize_into` copy objects from other nodes from now on; None: read the store only."""
    global _peers
    _peers = peers


def localize_into(directory: Path, url: StoreUrl) -> None:
    """Download one object into a directory that `localize_files` returned, unless this or another process has."""
    path = directory / url.name
    if path.exists():
        return
    with lock_download(path.with_name(f".{url.name}.lock"), url):
        if not path.exists():
            store, unfinished = open_store(url), path.with_name(f".{url.name}.tmp")
            if _peers is None or not _peers.copy(url, unfinished):
                store.download(store.head(url.key), unfinished)
            os.replace(unfinished, path)


@contextlib.contextmanager
def lock_download(path: Path, what: object) -> Iterator[None]:
    """Hold the lock of a file, which is created, while this process downloads something; wait while another does."""
    with open(path, "w") as lock:
        acquire_lock(lock.fileno(), _LOCK_TIMEOUT_S, f"the download of {what}, which another process makes")
        yield


def _localize_objects(url: StoreUrl, objects: Sequence[ObjectInfo], reserve_bytes: int = 0) -> Path:
    identity = json.dumps([str(url), objects], sort_keys=True).encode()
    entry = cache_root() / "store" / xxhash.xxh3_64_hexdigest(identity)
    path = entry / "files" / (url.name or url.bucket)
    _hold(entry)
    if _is_complete(entry):
        os.utime(entry / ENTRY_FILE)
        return path
    with lock_download(entry / "download.lock", url):
        if not _is_complete(entry):
            _download(url, objects, entry, path, reserve_bytes)
    return path


def find_objects(url: StoreUrl, patterns: Sequence[str] = (), max_count: int | None = None) -> list[ObjectInfo]:
    """The objects of a URL: the one with its key, or those below it; at least `max_count` if there are more. Raises
    UsageError if there are none."""
    store = open_store(url)
    if url.scheme in ("http", "https"):  # servers of files do not list them
        return [store.head(url.key)]
    objects = store.list_objects(url.key, max_count)
    if patterns:
        names = {each: url.relative(each.key) for each in objects}
        objects = [each for each in objects if not names[each] or any(fnmatch(names[each], one) for one in patterns)]
    if not objects:
        raise NotFound(f"{url}: no object has this key, and none has a key below it")
    return objects


def _download(url: StoreUrl, objects: Sequence[ObjectInfo], entry: Path, path: Path, reserve_bytes: int) -> None:
    needed = sum(each.size for each in objects) + reserve_bytes
    _evict(entry.parent, needed, str(url))
    shutil.rmtree(entry / "files", ignore_errors=True)
    checksums, store = {}, open_store(url)
    for each in objects:
        target = path / url.relative(each.key)
        target.parent.mkdir(parents=True, exist_ok=True)
        store.download(each, target)
        checksums[str(target.relative_to(entry))] = _checksum(target)
    write_json(entry / ENTRY_FILE, {"url": str(url), "bytes": needed, "files": checksums})


def _is_complete(entry: Path) -> bool:
    """Whether every file of an entry is what was downloaded. One that a disk damaged is downloaded again."""
    try:
        files = read_json(entry / ENTRY_FILE)["files"]
        return all(_checksum(entry / name) == checksum for name, checksum in files.items())
    except (FileNotFoundError, NotADirectoryError):
        return False


def _checksum(path: Path) -> str:
    with open(path, "rb") as file:
        return file_digest(file, xxhash.xxh3_64).hexdigest()


def _hold(entry: Path) -> None:
    """Share an entry's lock until this process ends, so that it is not evicted."""
    key = (os.getpid(), entry)
    if key in _entry_locks:
        return
    try:
        entry.mkdir(parents=True, exist_ok=True)
        _entry_locks[key] = os.open(entry / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(f"{entry}: cannot be written: {error.strerror}; {CACHE_ADVICE}") from None
    fcntl.flock(_entry_locks[key], fcntl.LOCK_SH)


def _evict(directory: Path, needed: int, what: str) -> None:
    """Free space: remove the entries that were not used for longest. UsageError if `needed` bytes do not fit."""
    free = shutil.disk_usage(directory).free
    entries = sorted(directory.glob(f"*/{ENTRY_FILE}"), key=lambda path: path.stat().st_mtime)
    sizes = {path.parent: read_json(path)["bytes"] for path in entries}
    held = sum(sizes.values())
    given = os.environ.get(CACHE_LIMIT_VARIABLE)
    limit = float(given) * 2**30 if given else (free + held) / 2
    for entry, size in sizes.items():
        if held + needed <= limit:
            break
        if _remove_unused(entry):
            held -= size
    if held + needed > limit or needed > shutil.disk_usage(directory).free:
        raise UsageError(
            f"{what}: its {format_bytes(needed)} do not fit into the cache {directory}, of {format_bytes(int(limit))}, "
            f"of which {format_bytes(held)} are in use; set {CACHE_LIMIT_VARIABLE} or PHALANX_CACHE_DIR"
        )


def _remove_unused(entry: Path) -> bool:
    fd = os.open(entry / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (entry / ENTRY_FILE).unlink()
        shutil.rmtree(entry / "files")
    except BlockingIOError:  # in use
        return False
    finally:
        os.close(fd)
    return True
