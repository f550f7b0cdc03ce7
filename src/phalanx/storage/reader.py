"""Reading an object as a seekable file, with the next range on its way."""

import io
from concurrent.futures import Future, ThreadPoolExecutor
from typing import BinaryIO

from phalanx.storage.store import RANGE_BYTES, ObjectInfo, Store, open_store
from phalanx.storage.url import is_url, parse_url

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
