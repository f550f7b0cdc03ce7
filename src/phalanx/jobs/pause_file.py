"""Files that hold jobs, with the reason: in a job's directory that job, in that of the local queue all of them."""

from pathlib import Path

from phalanx.errors import DataError
from phalanx.run.directory import write_json
from phalanx.safe_files import read_json

PAUSE_FILE = "paused.json"
DRAIN_FILE = "drained.json"


def is_paused(job_dir: Path) -> bool:
    return (job_dir / PAUSE_FILE).exists()


def read_pause(job_dir: Path, file_name: str = PAUSE_FILE) -> str | None:
    """Return why a job is paused; None when it is not."""
    try:
        return str(read_json(job_dir / file_name).get("reason"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except DataError:  # it is paused all the same
        return f"{file_name} is damaged"


def write_pause(job_dir: Path, reason: str, file_name: str = PAUSE_FILE) -> None:
    """Pause a job."""
    write_json(job_dir / file_name, {"reason": reason})


def remove_pause(job_dir: Path, file_name: str = PAUSE_FILE) -> None:
    (job_dir / file_name).unlink(missing_ok=True)
