"""Whether this machine is drained: a file in the queue's folder says so. The daemon starts no job while it is there."""

from dataclasses import asdict, dataclass
from pathlib import Path

from phalanx.errors import DataError
from phalanx.run.directory import write_json
from phalanx.safe_files import read_json

DRAIN_FILE = "drained.json"


@dataclass(frozen=True)
class QueueDrain:
    """Why the queue starts no jobs, and the user that drained it."""

    reason: str
    actor: str

    def __str__(self) -> str:
        return f"{self.reason} ({self.actor})"


def is_drained(folder: Path) -> bool:
    """Whether the queue in a folder is drained."""
    return (folder / DRAIN_FILE).exists()


def read_drain(folder: Path) -> QueueDrain | None:
    """Return why the queue in a folder is drained; None when it is not."""
    try:
        found = read_json(folder / DRAIN_FILE)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except DataError:  # it is drained all the same
        return QueueDrain(f"{DRAIN_FILE} is damaged", "unknown")
    return QueueDrain(str(found.get("reason")), str(found.get("actor")))


def write_drain(folder: Path, drain: QueueDrain) -> None:
    """Drain the queue in a folder."""
    write_json(folder / DRAIN_FILE, asdict(drain))


def remove_drain(folder: Path) -> None:
    """Undrain the queue in a folder."""
    (folder / DRAIN_FILE).unlink(missing_ok=True)
