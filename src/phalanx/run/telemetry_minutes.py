"""Telemetry of a node over a minute, as it stands in RUN/telemetry/NODE.jsonl: one line a minute, one writer a file."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from phalanx.errors import DataError
from phalanx.run.events import LineTail
from phalanx.run.fields import read_as, to_json
from phalanx.safe_files import parse_json

TELEMETRY_FORMAT = 1
LAST_MINUTES_BYTES = 1 << 20
"""Bytes in which the newest minute of a file is: one with 16 accelerators has 20 kB."""


class ValueRollup(NamedTuple):
    """A value over a minute; `num_readings` readings had one."""

    min: float
    mean: float
    max: float
    num_readings: int


@dataclass(frozen=True)
class Rollups:
    """Values by the name of a sample's field, and the increases of counters, without what is missing all the minute."""

    values: dict[str, ValueRollup] = field(default_factory=dict)
    increases: dict[str, float] = field(default_factory=dict)
    xids: tuple[int, ...] = ()
    """Numbers of the Xid errors within the minute, of each second the newest."""


@dataclass(frozen=True)
class NodeEnergy:
    """What a run has used on a node so far, in all attempts."""

    device_j: float = 0.0
    """Joules of the run's accelerators: differences of their counters, else mean power times seconds. Of all of the
    node where the run's own are not known."""
    num_devices: int = 0
    cpu_j: float = 0.0
    """Joules of all CPU packages; an estimate where their power is."""
    measured_s: float = 0.0
    missing_device_s: float = 0.0
    """Seconds of accelerators without power and counter, summed over these; their energy is not in `device_j`."""


@dataclass(frozen=True)
class NodeMinute:
    """A node from `time` (seconds since the epoch) on. `num_samples` of `duration_s` seconds were read."""

    time: float
    duration_s: float
    num_samples: int
    node: str
    host: Rollups
    devices: dict[str, Rollups]
    cpu_power_is_estimate: bool = False
    run_energy: NodeEnergy | None = None
    """Up to the end of this minute; None in the minutes of no run."""

    def to_line(self) -> bytes:
        return json.dumps({"format": TELEMETRY_FORMAT, **to_json(self)}).encode() + b"\n"


class NodeMinuteTail:
    """The minutes of a file as they are added to it. Lines that are none are skipped. `max_bytes`: of what is there
    now, only as much is read, from the end."""

    def __init__(self, path: Path, max_bytes: int | None = None):
        self._path, self._lines = path, LineTail(path)
        if max_bytes is not None:
            self._lines.skip(max_bytes)

    def read(self) -> Iterator[NodeMinute]:
        """The minutes since the last call, in order; none where there is no file. DataError for anything but a file."""
        for line in self._read_lines():
            yield from _parse_line(line)

    def read_chosen(self, is_chosen: Callable[[bytes], bool]) -> Iterator[NodeMinute]:
        """The minutes of chosen lines since the last call, and the newest one, in order: to parse a day of a node
        with 8 accelerators takes a second."""
        newest, is_pending = b"", False
        for line in self._read_lines():
            newest, is_pending = line, not is_chosen(line)
            if not is_pending:
                yield from _parse_line(line)
        if is_pending:
            yield from _parse_line(newest)

    def _read_lines(self) -> Iterator[bytes]:
        if self._path.parent.is_symlink():  # the run may come from another person
            raise DataError(f"{self._path.parent}: expected a directory, found a link")
        return self._lines.read()


def _parse_line(line: bytes) -> Iterator[NodeMinute]:
    """The minute of a line; none for one that is no minute."""
    try:
        found = parse_json(line.decode(errors="replace"))
        if found["format"] == TELEMETRY_FORMAT:
            yield read_as(NodeMinute, found)
    except (ValueError, TypeError, KeyError, OverflowError):
        return


def read_newest_energy(path: Path) -> NodeMinute | None:
    """The newest minute of a node's file that has `run_energy`; None without one. Errors as of NodeMinuteTail.read."""
    minutes = list(NodeMinuteTail(path, LAST_MINUTES_BYTES).read())
    return next((each for each in reversed(minutes) if each.run_energy is not None), None)
