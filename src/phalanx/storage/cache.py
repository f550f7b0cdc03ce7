"""The node-local copies of objects: made once a node, shared by the processes and jobs of a user.

    CACHE/store/<hash of URL, names, sizes and ETags>/
        files/NAME...     the objects
        entry.json        written last: URL and the xxh3 of each file

An entry without entry.json was not finished and is made again. A process holds a shared lock on the entries that it
uses, and on the shards of datasets (*.bin) that it has open: these are not evicted. Shards are evicted one by one.

What was not used for longest is evicted first, and at last the shards that a process has announced, of these the one
that it needs after the most samples. The time of change of a file says so: one of an announced shard is in the future.
It counts as long as a process uses the entry, so not after a kill. Of two jobs that read one dataset the last to
announce is heard: the other may download a shard again.
"""

import contextlib
import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from functools import cache
from hashlib import file_digest
from pathlib import Path
from typing import BinaryIO, NamedTuple

import xxhash

from phalanx.errors import UsageError
from phalanx.formatting import format_bytes
from phalanx.run.cache import CACHE_ADVICE, cache_root
from phalanx.run.directory import write_json
from phalanx.run.lock import acquire_lock, is_locked
from phalanx.safe_files import read_json
from phalanx.storage.errors import NotFound
from phalanx.storage.hub import download_snapshot
from phalanx.storage.peers import ObjectPeers
from phalanx.storage.store import ObjectInfo, open_store
from phalanx.storage.url import StoreUrl, is_url, parse_url

logger = logging.getLogger(__name__)

ENTRY_FILE = "entry.json"
CACHE_LIMIT_VARIABLE = "PHALANX_STORE_CACHE_GIB"
"""Environment variable with the size of the cache in GiB; by default half of what is free on its disk."""
_LOCK_TIMEOUT_S = 86400.0
_ANNOUNCED_S = 2**31 - 2**20
"""Time of change, in 2038, of a shard that is needed at once: some file systems know no later one."""
_UNSEEN_SHARE = 1 / 32
"""Share of the free bytes that a process uses before it looks again, since others use them, too: to look takes 15 us
a file."""
_spare_bytes: dict[tuple[Path, str | None], float] = {}  # by the cache's directory and its limit
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


def localize_files(url: StoreUrl, names: Sequence[str], shard_bytes: Sequence[int] = ()) -> Path:
    """The node-local directory with the objects of these names directly below a URL, which is not listed.
    `shard_bytes`: of the shards that `localize_into` adds to it; UsageError where the cache is too small for one."""
    if url.scheme == "hf":
        return download_snapshot(url, names)
    store = open_store(url)
    directory = _localize_objects(url, [store.head((url / name).key) for name in names])
    limit, largest = _find_limit(sum(item.size for item in _list_items())), max(shard_bytes, default=0)
    _check_space(url, largest, largest - limit)
    if sum(shard_bytes) > limit:
        _warn_of_size(url, sum(shard_bytes))
    if _peers is not None:
        _peers.add_directory(str(url), directory)
    return directory


@cache
def _warn_of_size(url: StoreUrl, size: int) -> None:
    text = "%s: its %s exceed the cache, so shards are downloaded several times in an epoch; set %s to more, or %s"
    logger.warning(text, url, format_bytes(size), CACHE_LIMIT_VARIABLE, "PHALANX_CACHE_DIR to a larger disk")


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
            info = store.head(url.key)
            free_space(info.size)  # what is lacking then is in use, and exceeds the limit
            if _peers is None or not _peers.copy(url, unfinished):
                store.download(info, unfinished)
            announce_use(unfinished, 0)
            os.replace(unfinished, path)


def open_held(path: Path) -> BinaryIO:
    """Open a shard, which is not evicted as long as this file or a mapping of it is open. FileNotFoundError where it
    was evicted before."""
    file = open(path, "rb")  # noqa: SIM115 - the caller closes it
    fcntl.flock(file, fcntl.LOCK_SH)
    os.stat(path)
    return file


def announce_use(path: Path, samples: int | None) -> None:
    """Say after how many samples this process needs a shard, if it is there; None: later than it knows."""
    with contextlib.suppress(FileNotFoundError):
        os.utime(path, (time.time(), time.time() if samples is None else _ANNOUNCED_S - samples))


@contextlib.contextmanager
def lock_download(path: Path, what: object) -> Iterator[None]:
    """Hold the lock of a file, which is created, while this process downloads something; wait while another does."""
    with open(path, "w") as lock:
        acquire_lock(lock.fileno(), _LOCK_TIMEOUT_S, f"the download of {what}, which another process makes")
        yield


def _localize_objects(url: StoreUrl, objects: Sequence[ObjectInfo]) -> Path:
    identity = json.dumps([str(url), objects], sort_keys=True).encode()
    entry = cache_root() / "store" / xxhash.xxh3_64_hexdigest(identity)
    path = entry / "files" / (url.name or url.bucket)
    _hold(entry)
    if _is_complete(entry):
        os.utime(entry / ENTRY_FILE)
        return path
    with lock_download(entry / "download.lock", url):
        if not _is_complete(entry):
            _download(url, objects, entry, path)
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


def _download(url: StoreUrl, objects: Sequence[ObjectInfo], entry: Path, path: Path) -> None:
    needed = sum(each.size for each in objects)
    _check_space(url, needed, free_space(needed))
    shutil.rmtree(entry / "files", ignore_errors=True)
    checksums, store = {}, open_store(url)
    for each in objects:
        target = path / url.relative(each.key)
        target.parent.mkdir(parents=True, exist_ok=True)
        store.download(each, target)
        checksums[str(target.relative_to(entry))] = _checksum(target)
    write_json(entry / ENTRY_FILE, {"url": str(url), "files": checksums})


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


class _Item(NamedTuple):
    """What is evicted as a whole: a shard, or an entry, of which `size` leaves out its shards."""

    used_at: float
    size: int
    path: Path


def _list_items() -> list[_Item]:
    """What is in the cache, in the order in which it is evicted."""
    items = []
    for path in (cache_root() / "store").glob(f"*/{ENTRY_FILE}"):
        with contextlib.suppress(FileNotFoundError):  # another process evicts
            listed, used_at, size = read_json(path)["files"], path.stat().st_mtime, 0
            is_used = is_locked(path.with_name("lock"))
            for file in (f"{folder}/{name}" for folder, _, names in os.walk(path.parent / "files") for name in names):
                stat = os.stat(file)
                if file.endswith(".bin") and os.path.relpath(file, path.parent) not in listed:
                    items.append(_Item(stat.st_mtime if is_used else stat.st_atime, stat.st_size, Path(file)))
                    used_at = max(used_at, items[-1].used_at)  # after its shards
                else:
                    size += stat.st_size
            items.append(_Item(used_at, size, path.parent))
    return sorted(items)


def _find_limit(used: int) -> float:
    """The bytes that the cache may take, of which `used` are taken."""
    available = shutil.disk_usage(cache_root() / "store").free + used
    given = os.environ.get(CACHE_LIMIT_VARIABLE)
    return min(float(given) * 2**30, available) if given else available / 2


def free_space(needed: int, keeps_announced: bool = False) -> float:
    """Evict until `needed` more bytes fit; return how many are lacking, above 0 where the rest is in use. With
    `keeps_announced` shards that a process has announced stay."""
    key = cache_root(), os.environ.get(CACHE_LIMIT_VARIABLE)
    _spare_bytes[key] = spare = _spare_bytes.get(key, 0.0) - needed
    if spare >= 0:
        return -spare
    items = _list_items()
    used = sum(item.size for item in items)
    lacking = used + needed - _find_limit(used)
    for item in items:
        if lacking <= 0 or (keeps_announced and item.used_at > time.time()):
            break
        if _remove_unused(item.path):
            lacking -= item.size
    _spare_bytes[key] = -lacking * _UNSEEN_SHARE
    return lacking


def _check_space(url: StoreUrl, needed: int, lacking: float) -> None:
    if lacking > 0:
        raise UsageError(
            f"{url}: its {format_bytes(needed)} do not fit into the cache {cache_root() / 'store'}, which lacks "
            f"{format_bytes(int(lacking))}; set {CACHE_LIMIT_VARIABLE} or PHALANX_CACHE_DIR"
        )


def _remove_unused(path: Path) -> bool:
    """Remove an entry or shard unless it is in use."""
    is_entry = path.is_dir()
    try:
        fd = os.open(path / "lock" if is_entry else path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:  # with its entry, or by another process
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (path / ENTRY_FILE if is_entry else path).unlink(missing_ok=True)
        shutil.rmtree(path / "files", ignore_errors=True)
    except BlockingIOError:  # in use
        return False
    finally:
        os.close(fd)
    return True
