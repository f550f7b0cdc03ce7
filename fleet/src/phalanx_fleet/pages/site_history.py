"""What the server records for the lines of 24 hours, the readings of nodes and of power levels, in an SQLite file of
bounded size: seconds, and their roll-ups by SQL.

One process writes a file; others read it meanwhile (WAL). A commit survives the end of the process at any time."""

import contextlib
import fcntl
import logging
import math
import os
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from urllib.parse import quote

from phalanx.errors import DataError
from phalanx_fleet.fleet_node import FleetNode
from phalanx_fleet.power.committed_power import LevelReading

HISTORY_FORMAT = 1
MINUTE_S, TEN_MINUTES_S, HOUR_S, DAY_S = 60, 600, 3600, 86400
RETENTION_S = {1: 900, MINUTE_S: DAY_S + HOUR_S, TEN_MINUTES_S: DAY_S + HOUR_S}
"""Seconds for which points are kept, by the seconds that they span. Each is rolled up from the one before."""
LOCK_TIMEOUT_S = 5.0
SeriesKey = tuple[str, str]
"""What is measured (a node, a power level), and the name of the value."""

SCHEMA_SQL = f"""
CREATE TABLE series (id INTEGER PRIMARY KEY, source TEXT NOT NULL, name TEXT NOT NULL, UNIQUE (source, name));
CREATE TABLE points (
  period_s INTEGER, time INTEGER, series INTEGER, num_samples INTEGER, min REAL, mean REAL, max REAL,
  PRIMARY KEY (period_s, time, series)
) WITHOUT ROWID;
PRAGMA user_version = {HISTORY_FORMAT};
"""
INSERT_SQL = """
INSERT OR REPLACE INTO points SELECT 1, ?1, id, 1, ?2, ?2, ?2 FROM series WHERE source = ?3 AND name = ?4
"""
ROLL_UP_SQL = """
INSERT OR REPLACE INTO points
SELECT :period_s, time / :period_s * :period_s AS start, series,
  sum(num_samples), min(min), sum(mean * num_samples) / sum(num_samples), max(max)
FROM points WHERE period_s = :from_s AND time <= :now AND time >= (
  SELECT coalesce(max(time), 0) FROM points WHERE period_s = :period_s AND time <= :now
) GROUP BY start, series
"""
READ_SQL = """
WITH RECURSIVE grid (at) AS (SELECT :since UNION ALL SELECT at + :period_s FROM grid WHERE at <= :until - :period_s)
SELECT time, num_samples, min, mean, max FROM grid CROSS JOIN points
ON period_s = :period_s AND time = at AND series = (SELECT id FROM series WHERE source = :source AND name = :name)
"""
"""Looks each point up, since an index by series would be written all over with each sample."""
logger = logging.getLogger(__name__)
NODE_VALUES = ("draw_w", "device_draw_w", "margin_k")
"""Values of a reading that are recorded."""


class HistoryBusyError(OSError):
    """Another process writes this file."""


@dataclass(frozen=True)
class HistoryPoint:
    """A value from `time` (seconds since the epoch) on, in `num_samples` samples."""

    time: float
    num_samples: int
    min: float
    mean: float
    max: float


class HistoryWriter:
    """Writes values into the file at `path`.

    Raises HistoryBusyError where another process writes it, and OSError where it cannot be written.
    """

    def __init__(self, path: Path):
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if (owner := path.parent.stat().st_uid) not in (0, os.getuid()):
            raise PermissionError(f"{path.parent} belongs to user {owner}")
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._lock = os.open(path.with_name(f"{path.name}.lock"), flags, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._open()
        except BaseException as error:
            os.close(self._lock)
            if isinstance(error, BlockingIOError):
                raise HistoryBusyError(f"{path}: another process writes it") from None
            if isinstance(error, sqlite3.Error):
                raise OSError(f"{path}: {error}; remove it if it is damaged") from error
            raise

    def write(self, time_s: float, values: Mapping[SeriesKey, float]) -> None:
        """Write values of a second, and roll up once a minute. OSError where storage is full or fails."""
        try:
            self._write(int(time_s), values)
        except sqlite3.Error as error:
            raise OSError(f"{self._path}: {error}") from error

    def close(self) -> None:
        self._db.close()
        os.close(self._lock)

    def _open(self) -> None:
        self._db = sqlite3.connect(self._path, timeout=LOCK_TIMEOUT_S)
        self._rolled_up_minute: int | None = None
        try:
            if not self._db.execute("PRAGMA user_version").fetchone()[0]:
                self._db.executescript(f"PRAGMA journal_mode = WAL; BEGIN; {SCHEMA_SQL} COMMIT;")
            _check_version(self._db)
            self._db.execute("PRAGMA synchronous = NORMAL")
            with self._db:
                self._db.execute("DELETE FROM series WHERE id NOT IN (SELECT DISTINCT series FROM points)")
        except sqlite3.Error:
            self._db.close()
            raise

    def _write(self, time_s: int, values: Mapping[SeriesKey, float]) -> None:
        with self._db:
            self._db.executemany("INSERT OR IGNORE INTO series (source, name) VALUES (?, ?)", values)
            self._db.executemany(
                INSERT_SQL, ((time_s, value, *key) for key, value in values.items() if math.isfinite(value))
            )
            if time_s // MINUTE_S != self._rolled_up_minute:
                for from_s, period_s in pairwise(RETENTION_S):
                    self._db.execute(ROLL_UP_SQL, {"from_s": from_s, "period_s": period_s, "now": time_s})
                for period_s, kept_s in RETENTION_S.items():
                    self._db.execute("DELETE FROM points WHERE period_s = ? AND time < ?", (period_s, time_s - kept_s))
        self._rolled_up_minute = time_s // MINUTE_S


def read_history(
    path: Path, keys: Sequence[SeriesKey], since: float, until: float, period_s: int
) -> dict[SeriesKey, list[HistoryPoint]]:
    """Return the points of each series from `since` to `until` (seconds since the epoch), in order; none where there
    is no file. `period_s`: one of RETENTION_S. DataError for a file that is damaged, or of another version.
    """
    if not path.exists():
        return {key: [] for key in keys}
    # without a log no process writes, and SQLite must not make one: this user may not be allowed to
    mode = "" if path.with_name(f"{path.name}-wal").exists() else "&immutable=1"
    span = {"since": int(since) // period_s * period_s, "until": int(until), "period_s": period_s}
    try:
        with contextlib.closing(
            sqlite3.connect(f"file:{quote(str(path))}?mode=ro{mode}", LOCK_TIMEOUT_S, uri=True)
        ) as db:
            _check_version(db)
            return {
                (source, name): [
                    HistoryPoint(*row) for row in db.execute(READ_SQL, {**span, "source": source, "name": name})
                ]
                for source, name in keys
            }
    except sqlite3.Error as error:
        raise DataError(
            f"{path}: no telemetry of this version ({error}). Remove it: `phalanx serve` begins a new "
            "one at its next start"
        ) from error


def _check_version(db: sqlite3.Connection) -> None:
    """Raise DatabaseError for what is no history of this version."""
    if (version := db.execute("PRAGMA user_version").fetchone()[0]) != HISTORY_FORMAT:
        raise sqlite3.DatabaseError(f"format {version}, expected {HISTORY_FORMAT}")


class SiteHistory:
    """The file at `path`. One server writes it; others of the same user show what is there.

    Attributes:
        problem: Why nothing is recorded, in words.
        level_lines: Draw of each level in the last day, by its label.
    """

    def __init__(self, path: Path):
        self._path, self.problem = path, ""
        self._writer: HistoryWriter | None = None
        self._minute = -1.0
        self.level_lines: Mapping[str, Sequence[HistoryPoint]] = {}

    def record(self, nodes: Sequence[FleetNode], levels: Sequence[LevelReading], now: float) -> None:
        """Write what is read and not late. Call it from one thread."""
        values = {
            (node.name, name): value
            for node in nodes
            if node.reading is not None and not node.reading.is_late(now)
            for name in NODE_VALUES
            if (value := getattr(node.reading, name)) is not None
        }
        values |= {(each.label, "draw_w"): each.draw_w for each in levels if each.num_read and not each.node}
        problem = ""
        try:
            self._writer = self._writer or HistoryWriter(self._path)
            self._writer.write(now, values)
            if now // MINUTE_S != self._minute:
                self._minute, keys = now // MINUTE_S, [(each.label, "draw_w") for each in levels if not each.node]
                lines = read_history(self._path, keys, now - DAY_S, now, TEN_MINUTES_S)
                self.level_lines = {label: points for (label, _), points in lines.items()}
        except (OSError, DataError) as error:
            problem = f"nothing is recorded for the lines of 24 hours: {error}"
            if problem != self.problem:
                logger.warning(problem)
            self.close()
        self.problem = problem

    def read_node(self, name: str, now: float) -> dict[str, list[HistoryPoint]]:
        """Return the last day of a node, by the name of the value. DataError for a file that is damaged."""
        found = read_history(self._path, [(name, each) for each in NODE_VALUES], now - DAY_S, now, MINUTE_S)
        return {each: points for (_, each), points in found.items()}

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
