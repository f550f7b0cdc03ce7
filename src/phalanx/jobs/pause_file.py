"""Why a job is paused: a file in its folder says so. The daemon of the local queue starts no job that has one; Slurm
holds the job as well."""

from pathlib import Path

from phalanx.errors import DataError
from phalanx.run.directory import write_json
from phalanx.safe_files import read_json

PAUSE_FILE = "paused.json"


def is_paused(job_dir: Path) -> bool:
    """Whether a job is paused."""
    return (job_dir / PAUSE_FILE).exists()


def read_pause(job_dir: Path) -> str | None:
    """Return why a job is paused; None when it is not."""
    try:
        return str(read_json(job_dir / PAUSE_FILE).get("reason"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except DataError:  # it is paused all the same
        return f"{PAUSE_FILE} is damaged"


def write_pause(job_dir: Path, reason: str) -> None:
    """Pause a job."""
    write_json(job_dir / PAUSE_FILE, {"reason": reason})


def remove_pause(job_dir: Path) -> None:
    """End the pause of a job."""
    (job_dir / PAUSE_FILE).unlink(missing_ok=True)
