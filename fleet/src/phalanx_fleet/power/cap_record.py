"""What a node keeps of its caps over restarts, and where."""

import logging
from pathlib import Path

from phalanx.errors import DataError
from phalanx.run.directory import write_json
from phalanx.run.fields import TypedMessage, read_as, to_fields
from phalanx.safe_files import read_json

logger = logging.getLogger(__name__)


class CapRecord(TypedMessage, kw_only=False):
    """What a node keeps over restarts.

    `original_w`: caps before the first write, for `phalanx power release`. `enforced_w`: what devices enforced when
    this was written; a crash leaves each device there or at its new cap, so any other one is someone else's.
    `revert_w`: caps that come back when the lease ends, of a sweep.
    """

    epoch: int = 0
    writer: str = ""
    device_ids: tuple[str, ...] = ()
    caps_w: tuple[float, ...] = ()
    fallback_w: tuple[float, ...] = ()
    original_w: tuple[float, ...] = ()
    enforced_w: tuple[float, ...] = ()
    revert_w: tuple[float, ...] = ()


class RecordStore:
    """Keeps the record in the file at `path`."""

    def __init__(self, path: Path):
        self._path = path

    def load(self) -> CapRecord | None:
        """Return the record; None without one. A damaged one is empty: then the node starts with its lowest caps."""
        try:
            record: CapRecord = read_as(CapRecord, read_json(self._path))
            return record
        except FileNotFoundError:
            return None
        except (DataError, ValueError, OverflowError, OSError) as error:
            logger.warning("power: %s cannot be read (%s): the node starts with its lowest caps", self._path, error)
            return CapRecord()

    def save(self, record: CapRecord) -> None:
        """Write the record. Raises OSError."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._path, to_fields(record))
