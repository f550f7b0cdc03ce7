"""Keep the samples of the last day on the node, in one file of bounded size that one process writes.

The file begins with a line of JSON, padded to whole pages: the columns. A row has a fixed place, by its second modulo
the capacity, and begins with its time: so no pointer has to be kept, and a row that is older than a day is overwritten
by the next one in its place. Missing values are NaN.
"""

import fcntl
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.errors import DataError
from phalanx.fleet.telemetry.sample import DeviceSample, HostSample, NodeSample, SlowReason

RING_FORMAT = 1
CAPACITY_ROWS = 24 * 3600
PAGE_BYTES = 4096
MAX_HEADER_BYTES = 1 << 20
HOST_COLUMNS = tuple(each.name for each in fields(HostSample))
DEVICE_COLUMNS = tuple(each.name for each in fields(DeviceSample) if each.name not in ("id", "name"))


class RingBusyError(Exception):
    """Another process writes this file."""


@dataclass(frozen=True)
class RingLayout:
    """What a row consists of: its time, the host's columns, and the columns of each device."""

    devices: tuple[tuple[str, str], ...]
    """Id and name of each."""
    capacity: int = CAPACITY_ROWS

    @property
    def num_columns(self) -> int:
        return 1 + len(HOST_COLUMNS) + len(self.devices) * len(DEVICE_COLUMNS)

    def to_header(self) -> bytes:
        """The file's first line, padded."""
        found = {
            "format": RING_FORMAT,
            "capacity": self.capacity,
            "host_columns": HOST_COLUMNS,
            "device_columns": DEVICE_COLUMNS,
            "devices": self.devices,
        }
        line = json.dumps(found).encode() + b"\n"
        return line.rjust(-(-len(line) // PAGE_BYTES) * PAGE_BYTES)

    def to_row(self, sample: NodeSample) -> bytes:
        """A sample as a row; devices that the file does not have are left out, those it has and the sample lacks are
        missing."""
        row = np.full(self.num_columns, math.nan)
        row[0] = sample.time
        row[1 : 1 + len(HOST_COLUMNS)] = _numbers(sample.host, HOST_COLUMNS)
        by_id = {device.id: device for device in sample.devices}
        for index, (id, _) in enumerate(self.devices):
            if id in by_id:
                begin = 1 + len(HOST_COLUMNS) + index * len(DEVICE_COLUMNS)
                row[begin : begin + len(DEVICE_COLUMNS)] = _numbers(by_id[id], DEVICE_COLUMNS)
        return row.tobytes()

    def to_sample(self, row: "np.ndarray[Any, np.dtype[np.float64]]") -> NodeSample:
        """The sample of a row."""
        values = [None if math.isnan(value) else value for value in row.tolist()]
        host = dict(zip(HOST_COLUMNS, values[1:], strict=False))
        host["cpu_power_is_estimate"] = bool(host["cpu_power_is_estimate"])
        devices = []
        for index, (id, name) in enumerate(self.devices):
            device: dict[str, Any] = dict(
                zip(DEVICE_COLUMNS, values[1 + len(HOST_COLUMNS) + index * len(DEVICE_COLUMNS) :], strict=False)
            )
            if device["slow_reasons"] is not None:
                device["slow_reasons"] = SlowReason(int(device["slow_reasons"]))
            devices.append(DeviceSample(id=id, name=name, **device))
        return NodeSample(float(row[0]), HostSample(**host), tuple(devices))  # type: ignore[arg-type]


class RingWriter:
    """Writes samples into the file at `path`. A file of other devices or of another format is replaced by a new one.

    RingBusyError: another process writes it. OSError: it cannot be written.
    """

    def __init__(self, path: Path, layout: RingLayout):
        self._layout, header = layout, layout.to_header()
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if (owner := path.parent.stat().st_uid) not in (0, os.getuid()):
            raise PermissionError(f"{path.parent} belongs to user {owner}")
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            raise RingBusyError(f"{path}: another agent writes it") from None
        self._first_row, self._row_bytes = len(header), 8 * layout.num_columns
        if os.pread(self._fd, len(header), 0) != header:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, header, 0)

    def write(self, sample: NodeSample) -> None:
        """Write a sample. OSError where storage is full or fails; the file stays readable."""
        slot = int(sample.time) % self._layout.capacity
        os.pwrite(self._fd, self._layout.to_row(sample), self._first_row + slot * self._row_bytes)

    def close(self) -> None:
        """Let another process write."""
        os.close(self._fd)


def read_ring(path: Path, since: float, until: float, every_s: int = 1) -> Iterator[NodeSample]:
    """The samples from `since` to `until` (seconds since the epoch), in order; none where there is no file. Of
    `every_s` seconds, only those of the first second.

    Raises DataError for a file that is no ring of this format.
    """
    try:
        file = open(path, "rb")  # noqa: SIM115 - closed below
    except FileNotFoundError:
        return
    with file:
        layout, first_row = _read_layout(path, file.readline(MAX_HEADER_BYTES))
        for slots in _slot_ranges(since, until, layout.capacity):
            file.seek(first_row + slots.start * 8 * layout.num_columns)
            content = file.read(len(slots) * 8 * layout.num_columns)
            whole = len(content) // (8 * layout.num_columns)
            rows = np.frombuffer(content, np.float64, whole * layout.num_columns).reshape(whole, layout.num_columns)
            times = rows[:, 0]  # 0 where nothing was written yet
            chosen = (times > 0) & (times >= since) & (times <= until) & (np.floor(times) % every_s == 0)
            yield from map(layout.to_sample, rows[chosen])


def _slot_ranges(since: float, until: float, capacity: int) -> Sequence[range]:
    """The places of these seconds, in the order of time."""
    first = max(int(since), int(until) - capacity + 1)
    if until < first:
        return ()
    begin, count = first % capacity, int(until) - first + 1
    around = max(0, begin + count - capacity)
    return (range(begin, begin + count - around), range(around))


def _read_layout(path: Path, line: bytes) -> tuple[RingLayout, int]:
    try:
        found = json.loads(line)
        columns = tuple(found["host_columns"]), tuple(found["device_columns"])
        layout = RingLayout(tuple((str(id), str(name)) for id, name in found["devices"]), int(found["capacity"]))
        known = found["format"] == RING_FORMAT and columns == (HOST_COLUMNS, DEVICE_COLUMNS) and layout.capacity > 0
    except (ValueError, TypeError, KeyError):
        known = False
    if not known:
        raise DataError(f"{path}: is no telemetry of this version; the next agent on this node replaces it")
    return layout, len(line)


def _numbers(sample: HostSample | DeviceSample, columns: Sequence[str]) -> list[float]:
    values = (getattr(sample, name) for name in columns)
    return [math.nan if value is None else float(value) for value in values]
