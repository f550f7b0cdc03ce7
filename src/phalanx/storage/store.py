"""One bucket: reads, writes and lists of its objects, with retries that are counted; and objects as seekable files.

obstore's clients are safe between threads but not across fork, so each process makes its own.
"""

import configparser
import contextlib
import io
import logging
import os
import random
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, TypeVar

from phalanx.errors import DataError, UsageError
from phalanx.storage.errors import NotFound, ObjectChanged, ObjectExists, StoreUnavailable, describe, is_expired, refuse
from phalanx.storage.url import StoreUrl, is_url, parse_url

if TYPE_CHECKING:
    from obstore.store import ObjectStore


logger = logging.getLogger(__name__)

PROBE_PREFIX = ".probe-"
"""How the name of an object begins that `check_writable` writes."""
RANGE_BYTES = 8 << 20
"""Bytes of one request of a large read or upload."""
PARALLEL_REQUESTS = 8
"""Requests of one transfer at once; with RANGE_BYTES they bound its memory to 64 MiB."""
FIRST_CONTACT_S = 20.0
"""Seconds to retry before the first answer of a store: a wrong endpoint should be known before any long work."""
RETRY_S = 300.0
"""Seconds to retry once a store has answered before."""
_REQUEST_TIMEOUT = timedelta(seconds=60)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 15.0

ResultT = TypeVar("ResultT")


class ObjectInfo(NamedTuple):
    """An object as a store lists it. `etag` changes with its content; it is no checksum. `modified`: seconds since
    1970 by the store's clock."""

    key: str
    size: int
    etag: str
    modified: float


@dataclass
class StoreCounters:
    """What this process asked of a store. `retries` has the reasons."""

    requests: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    retries: Counter[str] = field(default_factory=Counter)


class Store:
    """The objects of one bucket. Methods are safe between threads. They raise UsageError for what the user can cure,
    NotFound for a key without an object, and StoreUnavailable, a storage error, when the store does not answer."""

    def __init__(
        self,
        url: StoreUrl,
        make_client: Callable[[StoreUrl], "ObjectStore"],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self.url = StoreUrl(url.scheme, url.bucket)
        self.counters = StoreCounters()
        self._make_client, self._clock, self._sleep = make_client, clock, sleep
        self._client = self._connect()
        self._answered = False

    def _connect(self) -> "ObjectStore":
        from obstore.exceptions import BaseError

        try:
            return self._make_client(self.url)
        except BaseError as error:
            raise refuse(str(self.url), error) or UsageError(f"{self.url}: {describe(error)}") from None

    def head(self, key: str) -> ObjectInfo:
        """Size and ETag of an object."""
        return _info(self._call(key, lambda client: client.head(key)))

    def list_objects(self, prefix: str, max_count: int | None = None) -> list[ObjectInfo]:
        """Every object below `prefix/`, or the object `prefix` itself; in the order of keys. Empty if there is none.
        With `max_count` no more are asked for once there are as many."""

        def fetch(client: "ObjectStore") -> list[Any]:
            found: list[Any] = []
            for chunk in client.list(prefix or None):
                found += chunk
                if max_count is not None and len(found) >= max_count:
                    break
            if not found and prefix:
                with contextlib.suppress(FileNotFoundError):
                    found = [client.head(prefix)]
            return found

        return sorted(map(_info, self._call(prefix, fetch)))

    def list_names(self, prefix: str) -> tuple[list[str], list[ObjectInfo]]:
        """The next parts of keys below `prefix/` that others follow, and the objects directly below it."""
        found = self._call(prefix, lambda client: client.list_with_delimiter(prefix or None))
        names = sorted(each.rstrip("/").rpartition("/")[2] for each in found["common_prefixes"])
        return names, sorted(map(_info, found["objects"]))

    def read(self, key: str) -> bytes:
        """A small object as a whole."""
        data: bytes = self._call(key, lambda client: bytes(client.get(key).bytes()))
        self.counters.bytes_read += len(data)
        return data

    def read_range(self, key: str, start: int, stop: int, etag: str = "") -> memoryview:
        """The bytes [start, stop) of an object; ObjectChanged if it no longer has the ETag."""

        def fetch(client: "ObjectStore") -> memoryview:
            options: Any = {"range": (start, stop)} | ({"if_match": etag} if etag else {})
            data = memoryview(client.get(key, options=options).bytes())
            if len(data) != stop - start:
                raise ConnectionError(f"{len(data)} of {stop - start} bytes arrived")
            return data

        data = self._call(key, fetch) if stop > start else memoryview(b"")
        self.counters.bytes_read += len(data)
        return data

    def read_parallel(self, info: ObjectInfo, put: Callable[[int, memoryview], None]) -> None:
        """Read an object by several ranges at once; `put` gets each with its offset, from several threads."""

        def fetch(start: int) -> None:
            put(start, self.read_range(info.key, start, min(start + RANGE_BYTES, info.size), info.etag))

        with ThreadPoolExecutor(PARALLEL_REQUESTS, thread_name_prefix="store") as pool:
            for done in [pool.submit(fetch, start) for start in range(0, info.size, RANGE_BYTES)]:
                done.result()

    def download(self, info: ObjectInfo, path: Path) -> None:
        """Read an object into a new file."""
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.truncate(fd, info.size)
            self.read_parallel(info, lambda start, data: write_at(fd, data, start))
        finally:
            os.close(fd)

    def write(self, key: str, data: "bytes | memoryview", if_absent: bool = False) -> None:
        """Write an object of one request, whole or not at all. `if_absent`: ObjectExists if there is one."""
        mode: Any = "create" if if_absent else "overwrite"
        self._call(key, lambda client: client.put(key, data, mode=mode, use_multipart=False))
        self.counters.bytes_written += len(data)

    def upload(self, key: str, path: Path) -> None:
        """Write a file as an object, in parallel parts; it is listed once it is whole."""
        size = path.stat().st_size
        part = max(RANGE_BYTES, -(-size // 10_000))  # a store takes at most 10,000 parts
        self._call(key, lambda client: client.put(key, path, chunk_size=part, max_concurrency=PARALLEL_REQUESTS))
        self.counters.bytes_written += size

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; what is not there is no error."""
        # A directory that is used as a store ends a list of deletes at the first file that is missing.
        batches = [[key] for key in keys] if self.url.scheme == "file" else [list(keys)]
        for batch in filter(None, batches):
            with contextlib.suppress(NotFound):
                self._call(batch[0], methodcaller("delete", batch))

    def _call(self, key: str, request: Callable[["ObjectStore"], ResultT]) -> ResultT:
        """Make a request, and again with growing pauses as long as its failure may pass."""
        from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

        url, started, pause = str(self.url / key), self._clock(), _FIRST_PAUSE_S
        while True:
            self.counters.requests += 1
            try:
                result = request(self._client)
            except FileNotFoundError as error:
                raise refuse(url, error) or NotFound(f"{url}: there is no such object") from None
            except AlreadyExistsError:
                raise ObjectExists(url) from None
            except PreconditionError:
                raise ObjectChanged(f"{url}: the object was changed while this run reads it") from None
            except (BaseError, ConnectionError, TimeoutError, PermissionError) as error:
                expired, reason = is_expired(error) or self._answered, describe(error)
                refused = refuse(url, error)
                if refused is not None and not expired:
                    raise refused from None
                if self._clock() - started > (RETRY_S if self._answered else FIRST_CONTACT_S):
                    raise refused or StoreUnavailable(url, reason) from None
                if refused is not None or is_expired(error):  # credentials may have been renewed meanwhile
                    self._client = self._connect()
                self.counters.retries[reason] += 1
                logger.warning("%s: %s; trying again in %.1f s", url, reason, pause)
                self._sleep(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, _LONGEST_PAUSE_S)
            else:
                self._answered = True
                return result


_stores: dict[tuple[int, str, str], Store] = {}


def open_store(url: StoreUrl | str) -> Store:
    """The store of a URL, one a bucket and process. No request is made."""
    url = parse_url(url) if isinstance(url, str) else url
    key = (os.getpid(), url.scheme, url.bucket)
    if key not in _stores:
        _stores[key] = Store(url, make_client)
    return _stores[key]


def check_writable(url: StoreUrl) -> None:
    """Raise UsageError where no objects can be written below `url`: write a small one and remove it."""
    if url.scheme in ("hf", "http", "https"):
        raise UsageError(f"{url}: nothing can be written there; expected an s3://, gs:// or az:// URL")
    store, probe = open_store(url), f"{PROBE_PREFIX}{secrets.token_hex(8)}"
    try:
        store.write((url / probe).key, b"")
        store.delete([(url / probe).key])
    except UsageError as error:
        raise UsageError(str(error).replace(f"/{probe}", "")) from None
    except StoreUnavailable as error:
        raise StoreUnavailable(str(url), str(error.strerror).replace(f"/{probe}", "")) from None


def make_client(url: StoreUrl, environ: Mapping[str, str] = os.environ) -> "ObjectStore":
    """A client with the credentials of the environment, a profile or the machine's role. Its own retries are off."""
    from obstore import store

    options: dict[str, Any] = {"timeout": _REQUEST_TIMEOUT, "connect_timeout": timedelta(seconds=5)}
    common: Any = {"client_options": options, "retry_config": {"max_retries": 0, "retry_timeout": timedelta(0)}}
    if url.scheme == "s3":
        config: Any = _read_profile(environ)
        endpoint = environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL") or config.get("endpoint", "")
        if endpoint and not re.match(r"https?://[^/:]+", endpoint):
            raise UsageError(f"AWS_ENDPOINT_URL={endpoint}: no address of a store; expected http(s)://HOST[:PORT]")
        options["allow_http"] = endpoint.startswith("http://")
        if not any(environ.get(name) for name in ("AWS_REGION", "AWS_DEFAULT_REGION")):
            config.setdefault("region", "us-east-1")
        return store.S3Store(url.bucket, config=config, **common)
    if url.scheme == "gs":
        options["allow_http"] = True  # an emulator's; Google's own addresses are https
        return store.GCSStore(url.bucket, **common)
    if url.scheme == "az":
        options["allow_http"] = environ.get("AZURE_STORAGE_USE_EMULATOR", "").lower() in ("1", "true")
        return store.AzureStore(url.bucket, **common)
    if url.scheme in ("http", "https"):
        options["allow_http"] = url.scheme == "http"
        return store.HTTPStore.from_url(f"{url.scheme}://{url.bucket}", **common)
    if url.scheme == "file":
        return store.LocalStore("/")
    raise UsageError(f"{url}: {url.scheme}:// has no objects that can be read by keys")


def _read_profile(environ: Mapping[str, str]) -> dict[str, str]:
    """Credentials of the profile AWS_PROFILE (`default`) in ~/.aws, where the environment has none."""
    if environ.get("AWS_ACCESS_KEY_ID"):
        return {}
    profile, home = environ.get("AWS_PROFILE") or "default", Path(environ.get("HOME", "/")) / ".aws"
    files = configparser.ConfigParser(interpolation=None)
    credentials = environ.get("AWS_SHARED_CREDENTIALS_FILE") or str(home / "credentials")
    files.read([environ.get("AWS_CONFIG_FILE") or str(home / "config"), credentials])
    found: dict[str, str] = {}
    for section in (f"profile {profile}", profile):
        if files.has_section(section):
            found.update(files[section])
    if not found and environ.get("AWS_PROFILE"):
        raise UsageError(f"AWS_PROFILE: there is no profile {profile!r} in {home}; `aws configure` makes one")
    names = {"aws_access_key_id": "access_key_id", "aws_secret_access_key": "secret_access_key"}
    names |= {"aws_session_token": "session_token", "region": "region", "endpoint_url": "endpoint"}
    return {name: found[key] for key, name in names.items() if key in found}


def _info(meta: Any) -> ObjectInfo:
    if ".." in meta["path"].split("/"):
        raise DataError(f"{meta['path']}: a key that leads out of a local copy; expected none with `..` as a part")
    return ObjectInfo(meta["path"], meta["size"], meta["e_tag"] or "", meta["last_modified"].timestamp())


def write_at(fd: int, data: memoryview, start: int) -> None:
    """Write all of `data` at a place of a file."""
    while data:
        written = os.pwrite(fd, data, start)
        data, start = data[written:], start + written


_RANGES_AHEAD = 2


class _RangeReader(io.RawIOBase):
    """The bytes of one object. Ranges are requested ahead of a reader that goes forward; host memory: four ranges."""

    def __init__(self, store: Store, info: ObjectInfo):
        self.name = str(store.url / info.key)
        self._store, self._info, self._position = store, info, 0
        self._pool = ThreadPoolExecutor(_RANGES_AHEAD, thread_name_prefix="store-reader")
        self._ranges: dict[int, Future[memoryview]] = {}

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._info.size}[whence]
        self._position = max(start + offset, 0)
        return self._position

    def readinto(self, buffer: "memoryview") -> int:  # type: ignore[override]
        if self._position >= self._info.size:
            return 0
        number, offset = divmod(self._position, RANGE_BYTES)
        goes_forward = number in self._ranges or number - 1 in self._ranges
        wanted = range(number, number + 1 + (_RANGES_AHEAD if goes_forward else 0))
        for each in wanted:
            if each not in self._ranges and each * RANGE_BYTES < self._info.size:
                self._ranges[each] = self._pool.submit(self._fetch, each)
        for each in [each for each in self._ranges if each not in wanted]:
            self._ranges.pop(each).cancel()
        data = self._ranges[number].result()[offset : offset + len(buffer)]
        memoryview(buffer)[: len(data)] = data
        self._position += len(data)
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._ranges.clear()
        super().close()

    def _fetch(self, number: int) -> memoryview:
        start = number * RANGE_BYTES
        return self._store.read_range(self._info.key, start, min(start + RANGE_BYTES, self._info.size), self._info.etag)


def open_location(location: str) -> BinaryIO:
    """A file, or the object of a URL, for reading. A read raises ObjectChanged if the object is another by then."""
    if not is_url(location):
        return open(location, "rb")
    store = open_store(location)
    return io.BufferedReader(_RangeReader(store, store.head(parse_url(location).key)), 1 << 20)
