"""Device time and energy of all runs, read whole by one thread that leaves most of its time to others. Results are kept
in a file of the cache, so that a server that starts again reads only what changed."""

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phalanx.errors import DataError
from phalanx.run import Run
from phalanx.run.directory import write_atomic
from phalanx.safe_files import read_json
from phalanx.serve.run_index import RunIndex
from phalanx.serve.run_row import RunRow

logger = logging.getLogger(__name__)

READ_SHARE = 0.2
"""Share of the time in which runs are read."""
LIVE_INTERVAL_S = 600.0
"""Between two readings of a run that grows."""
MAX_EVENTS_BYTES = 1 << 30
"""A run with more events has no account: reading takes minutes and gigabytes."""
MAX_FILE_BYTES = 64 << 20
SAVE_INTERVAL_S = 60.0
IDLE_INTERVAL_S = 5.0
STOP_TIMEOUT_S = 5.0
FILE_FORMAT = 1


@dataclass(frozen=True, slots=True)
class RunAccount:
    """What a run has used. `size` and `changed_at` are of the events that were read."""

    size: int
    changed_at: float
    device_s: float
    """Seconds x devices that it held."""
    productive_s: float
    """Part of it that was productive."""
    energy_j: float | None
    """Of CPUs and, on nodes that the run does not share, accelerators; None where nothing was recorded."""


class AccountReader:
    """The accounts of an index's runs, by their id. `file` keeps them; `start` and `stop` have a thread read."""

    def __init__(self, index: RunIndex, file: Path | None = None, clock: Callable[[], float] = time.monotonic):
        self._index, self._file, self._clock = index, file, clock
        self._accounts: dict[str, RunAccount] = {}
        self._read_at: dict[str, float] = {}
        self._due: list[str] = []
        self._saved_at = clock()
        self._is_saved = True
        self._stop_requested = threading.Event()
        self._thread = threading.Thread(target=self._run, name="accounts", daemon=True)

    @property
    def accounts(self) -> Mapping[str, RunAccount]:
        """What was read so far."""
        return dict(self._accounts)

    def start(self) -> None:
        """Read in a thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop_requested.set()
        self._thread.join(STOP_TIMEOUT_S)

    def load(self) -> None:
        """Take over what an earlier server has read."""
        if self._file is not None:
            self._accounts = _load_accounts(self._file)

    def update_one(self) -> bool:
        """Read a run that has changed; whether there was one."""
        if not self._due:
            self._due = [id for id, row in self._index.rows.items() if self._is_due(id, row)]
        while self._due:
            id = self._due.pop()
            if (row := self._index.find(id)) is not None and row.state is not None:
                self._accounts[id] = _read_account(row)
                self._read_at[id] = self._clock()
                self._is_saved = False
                return True
        return False

    def save(self) -> None:
        """Keep what was read. A cache that cannot be written is left out."""
        if self._file is None or self._is_saved:
            return
        found = {"format": FILE_FORMAT, "accounts": {id: asdict(each) for id, each in self._accounts.items()}}
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self._file, json.dumps(found))
        except OSError as error:
            logger.info("accounts of runs are not kept in %s: %s", self._file, error)
        self._saved_at, self._is_saved = self._clock(), True

    def _is_due(self, id: str, row: RunRow) -> bool:
        if row.state is None or row.problem is not None:
            return False
        account = self._accounts.get(id)
        if account is None:
            return True
        if (account.size, account.changed_at) == (row.state.size, row.state.changed_at):
            return False
        return self._clock() - self._read_at.get(id, -LIVE_INTERVAL_S) >= LIVE_INTERVAL_S or row.ended_as is not None

    def _run(self) -> None:
        self.load()
        while not self._stop_requested.is_set():
            began = self._clock()
            found = self.update_one()
            if not found or self._clock() - self._saved_at > SAVE_INTERVAL_S:
                self.save()
            busy_s = self._clock() - began
            self._stop_requested.wait(busy_s * (1 - READ_SHARE) / READ_SHARE if found else IDLE_INTERVAL_S)
        self.save()


def _read_account(row: RunRow) -> RunAccount:
    """Read a run whole. One that is too long, or of another version, counts as nothing."""
    from phalanx.observe.goodput import compute_device_time
    from phalanx.observe.history import read_history
    from phalanx.observe.run_energy import read_run_energy

    assert row.state is not None
    run, device_s, productive_s = Run(row.path), 0.0, 0.0
    if row.state.size <= MAX_EVENTS_BYTES:
        try:
            time_of_devices = compute_device_time(read_history(run.events))
            device_s, productive_s = time_of_devices.allocated_s, time_of_devices.productive_s
        except (OSError, DataError) as error:
            logger.debug("%s has no account: %s", row.path, error)
    energy = read_run_energy(run)
    is_whole = energy is not None and (row.device == "cpu" or energy.num_devices == row.world_size)
    energy_j = None if energy is None else energy.cpu_j + (energy.device_j if is_whole and row.device != "cpu" else 0.0)
    return RunAccount(row.state.size, row.state.changed_at, device_s, productive_s, energy_j)


def _load_accounts(file: Path) -> dict[str, RunAccount]:
    """The accounts of a file; none where it is missing or damaged."""
    try:
        found = read_json(file, max_bytes=MAX_FILE_BYTES)
        if found.get("format") != FILE_FORMAT:
            return {}
        return {str(id): _to_account(each) for id, each in found["accounts"].items()}
    except (OSError, DataError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def _to_account(found: Any) -> RunAccount:
    energy = found["energy_j"]
    return RunAccount(
        size=int(found["size"]),
        changed_at=float(found["changed_at"]),
        device_s=float(found["device_s"]),
        productive_s=float(found["productive_s"]),
        energy_j=None if energy is None else float(energy),
    )
