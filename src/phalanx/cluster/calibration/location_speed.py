"""Measure the paths and URLs that a recipe names, in a few seconds and with a few tens of MiB each."""

import errno
import math
import mmap
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from phalanx.cluster.calibration.timing import ClockFn
from phalanx.cluster.spec import LocationSpeed
from phalanx.errors import UsageError
from phalanx.formatting import format_bytes, format_count, format_duration
from phalanx.recipe.locations import StorageLocation
from phalanx.storage.cache import find_objects
from phalanx.storage.store import PARALLEL_REQUESTS, ObjectInfo, Store, check_writable, open_store
from phalanx.storage.url import StoreUrl, is_url, parse_url

MAX_BYTES, PART_BYTES, SMALL_BYTES = 32 << 20, 2 << 20, 4 << 10
"""Most bytes that are written, or read, to measure a bandwidth; of one request; of a small file or object."""
BANDWIDTH_S, LATENCIES_S = 1.5, 0.5
"""Seconds within which the parts of a bandwidth, and the repeats of a latency begin."""
MAX_REPEATS, MAX_LISTED = 100, 1000
ItemT = TypeVar("ItemT")


def measure_location(place: StorageLocation, probe_name: str, clock: ClockFn = time.perf_counter) -> LocationSpeed:
    """Measure a location: one that a run writes with files or objects below `probe_name`, which are removed again; one
    that it reads by what is there. Raises OSError or PhalanxError where that cannot be done."""
    url, is_path = _url_of(place), not is_url(place.location)
    if not place.is_written:
        if is_path:
            os.stat(place.location)  # raises
        figures = _read_objects(open_store(url), find_objects(url, max_count=MAX_LISTED), clock)
        return LocationSpeed(location=place.location, **figures)
    probe = _probe_url(url, probe_name)
    if is_path:
        os.mkdir(f"/{probe.key}", 0o700)
    else:
        check_writable(probe)
    try:
        figures = _write_objects(open_store(url), probe, clock)
        figures |= _measure_directory(Path(f"/{probe.key}"), clock) if is_path else {}
        return LocationSpeed(location=place.location, **figures)
    finally:
        remove_probe(place, probe_name)


def remove_probe(place: StorageLocation, probe_name: str) -> None:
    """Remove what a measurement has written."""
    probe = _probe_url(_url_of(place), probe_name)
    if probe.scheme == "file":
        shutil.rmtree(f"/{probe.key}", ignore_errors=True)
    elif place.is_written:
        open_store(probe).delete([each.key for each in open_store(probe).list_objects(probe.key)])


def describe_speed(speed: LocationSpeed) -> str:
    """What was measured, in a line."""
    rates = (("write", speed.write_gbps), ("read", speed.read_gbps))
    parts = [f"{name} {format_bytes(1e9 * gbps)}/s" for name, gbps in rates if gbps]
    unit = "objects" if is_url(speed.location) else "files"
    parts += [f"{format_count(round(speed.files_per_s))} {unit}/s"] if speed.files_per_s is not None else []
    for name, (median, p99) in speed.latencies_s.items():
        parts.append(f"{name} {format_duration(median)} (p99 {format_duration(p99)})")
    return ", ".join(parts) or "not measured"


def _url_of(place: StorageLocation) -> StoreUrl:
    return parse_url(place.location) if is_url(place.location) else StoreUrl("file", "", place.location.strip("/"))


def _probe_url(url: StoreUrl, probe_name: str) -> StoreUrl:
    path = Path(f"/{url.key}")
    if url.scheme == "file":  # no directory is left either
        url = replace(url, key=str(next(each for each in (path, *path.parents) if each.is_dir())).strip("/"))
    return url / probe_name


def _write_objects(store: Store, base: StoreUrl, clock: ClockFn) -> dict[str, Any]:
    data = os.urandom(PART_BYTES)  # a store that compresses must not look faster
    small = [(base / f"small-{number}").key for number in range(MAX_REPEATS)]
    put_s = _time_each(small, lambda key: store.write(key, data[:SMALL_BYTES]), clock)
    listed_s = _time_each([base.key], store.list_objects, clock)
    deleted_s = _time_each([small[: len(put_s)]], store.delete, clock)

    def write(number: int) -> int:
        store.write((base / f"part-{number}").key, data)
        return PART_BYTES

    write_gbps = _measure_bandwidth(range(MAX_BYTES // PART_BYTES), write, clock)
    figures = _read_objects(store, store.list_objects(base.key), clock)
    figures["latencies_s"] = {"PUT": _median_and_p99(put_s), **figures["latencies_s"]}
    return figures | {"write_gbps": write_gbps, "files_per_s": len(put_s) / sum((*put_s, *listed_s, *deleted_s))}


def _read_objects(store: Store, objects: Sequence[ObjectInfo], clock: ClockFn) -> dict[str, Any]:
    """Read the largest of some objects, with requests of all sizes up to PART_BYTES."""
    objects = sorted(objects, key=lambda info: -info.size)
    if store.url.scheme == "file":
        for info in objects[: MAX_BYTES // PART_BYTES]:  # a read from the page cache says nothing
            with open(f"/{info.key}", "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    ranges = [(info, start) for info in objects for start in range(0, min(info.size, MAX_BYTES), PART_BYTES)]

    def read(part: tuple[ObjectInfo, int], size: int = PART_BYTES) -> int:
        return len(store.read_range(part[0].key, part[1], min(part[1] + size, part[0].size)))

    read_gbps = _measure_bandwidth(ranges[: MAX_BYTES // PART_BYTES], read, clock)
    get_s = _time_each((ranges * MAX_REPEATS)[:MAX_REPEATS], lambda part: read(part, SMALL_BYTES), clock)
    return {"read_gbps": read_gbps, "latencies_s": {"GET": _median_and_p99(get_s)} if get_s else {}}


def _measure_directory(directory: Path, clock: ClockFn) -> dict[str, Any]:
    """What a store has not: bandwidths of the disk itself, synced and past the page cache, and other latencies."""
    write_gbps, read_gbps = measure_storage(directory, MAX_BYTES, 2 * BANDWIDTH_S, clock)
    first, second = directory / "first", directory / "second"
    with open(first, "wb", buffering=0) as file:

        def append(_: int) -> None:
            file.write(bytes(SMALL_BYTES))
            os.fsync(file.fileno())

        synced_s = _time_each(range(MAX_REPEATS), append, clock)
    renamed_s = _time_each([(first, second), (second, first)] * 50, lambda names: os.rename(*names), clock)
    latencies = {"fsync": _median_and_p99(synced_s), "rename": _median_and_p99(renamed_s)}
    return {"write_gbps": write_gbps, "read_gbps": read_gbps, "latencies_s": latencies}


def _measure_bandwidth(parts: Sequence[ItemT], transfer: Callable[[ItemT], int], clock: ClockFn) -> float | None:
    """GB/s of parts, of which `transfer` returns the bytes; several at once. None: too few bytes to say."""
    begun = clock()
    with ThreadPoolExecutor(PARALLEL_REQUESTS, thread_name_prefix="store") as pool:
        nbytes = sum(pool.map(lambda part: transfer(part) if clock() - begun < BANDWIDTH_S else 0, parts))
    return nbytes / max(clock() - begun, 1e-9) / 1e9 if nbytes >= PART_BYTES // 2 else None


def _time_each(items: Iterable[ItemT], act: Callable[[ItemT], object], clock: ClockFn) -> list[float]:
    """Return the seconds of each call, one after the other, until LATENCIES_S have passed."""
    times_s, begun = list[float](), clock()
    for item in items:
        started = clock()
        act(item)
        times_s.append(max(clock() - started, 1e-9))
        if started - begun > LATENCIES_S:
            break
    return times_s


def _median_and_p99(times_s: Sequence[float]) -> tuple[float, float]:
    return statistics.median(times_s), sorted(times_s)[math.ceil(0.99 * len(times_s)) - 1]


BLOCK_BYTES = 16 * 2**20
PILOT_BYTES = 2 * BLOCK_BYTES
MAX_WRITTEN_BYTES = {True: 128 * 10**6, False: 10**9}
"""Maximum bytes written, by `quick`."""
FREE_SPACE_FACTOR = 1.1
"""Free space that is required, over what is written."""


def check_free_space(directory: Path, quick: bool) -> None:
    """Raise UsageError unless the file system of `directory` has enough free space for the measurement."""
    needed_bytes, free_bytes = MAX_WRITTEN_BYTES[quick] * FREE_SPACE_FACTOR, shutil.disk_usage(directory).free
    if free_bytes < needed_bytes:
        raise UsageError(
            f"{directory}: too little free space to measure the disk: needs {format_bytes(needed_bytes)}, "
            f"{format_bytes(free_bytes)} are free; choose another --dir"
        )


def measure_storage(directory: Path, max_bytes: int, seconds: float, clock: ClockFn) -> tuple[float, float | None]:
    """Return GB/s of writing and of reading a file of at most `max_bytes` in `directory`, within about `seconds`. The
    latter is None where the file system does not support O_DIRECT. Raises OSError when the disk fails."""
    path = directory / "probe.bin"
    block = mmap.mmap(-1, BLOCK_BYTES)  # aligned to pages, as O_DIRECT wants its buffers
    block.write(os.urandom(BLOCK_BYTES))  # a disk that compresses must not look faster
    try:
        rate = PILOT_BYTES / max(write_file(path, block, PILOT_BYTES, clock), 1e-9)
        nbytes = max(BLOCK_BYTES, int(min(max_bytes, rate * seconds / 2) // BLOCK_BYTES * BLOCK_BYTES))
        write_s = write_file(path, block, nbytes, clock)
        read_rate = read_file(path, block, nbytes, seconds / 2, clock)
        return nbytes / write_s / 1e9, None if read_rate is None else read_rate / 1e9
    finally:
        path.unlink(missing_ok=True)
        block.close()


def write_file(path: Path, block: mmap.mmap, nbytes: int, clock: ClockFn) -> float:
    """Write a new file of `nbytes` and return the seconds, including fsync."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        started, remaining = clock(), nbytes
        while remaining > 0:
            remaining -= os.write(fd, memoryview(block)[: min(remaining, BLOCK_BYTES)])
        os.fsync(fd)
        return clock() - started
    finally:
        os.close(fd)


def read_file(path: Path, block: mmap.mmap, nbytes: int, seconds: float, clock: ClockFn) -> float | None:
    """Read the file for at most `seconds` with O_DIRECT. Returns bytes per second, None where it is not supported."""
    fd = None
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        started, done = clock(), 0
        while done < nbytes and (done == 0 or clock() - started < seconds):
            done += os.preadv(fd, [block], done)
        return done / max(clock() - started, 1e-9)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return None
    finally:
        if fd is not None:
            os.close(fd)
