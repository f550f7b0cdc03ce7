"""The directories of jobs on the shared file system, with scripts, log and results: a name, a number, an id in a file.

A member of an array has its own below that of the array.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from phalanx.errors import UsageError
from phalanx.jobs.backends.slurm.batch_script import (
    BATCH_FILE,
    RESULT_FILE,
    RUN_FILE,
    SECRETS_FILE,
    SNAPSHOT_DIR,
    render_secret_file,
)
from phalanx.jobs.backends.slurm.status import SlurmResult, parse_result
from phalanx.jobs.snapshot import unpack_snapshot
from phalanx.jobs.spec import Job
from phalanx.run.lock import LocksUnsupportedError, acquire_lock, lock_on_this_machine
from phalanx.run.private_files import make_state_dir

ID_FILE = "id"
LOCK_TIMEOUT_S = 300.0
"""Seconds to wait for another process that submits."""


class SlurmJobDirs:
    """The directories of jobs in `root`."""

    def __init__(self, root: Path):
        self.root = root

    def job_name(self, folder: Path) -> str:
        """The name of a job; that of an array's member ends with its index."""
        name = self.find_array_dir(folder).name.rpartition("-")[0]
        return name if folder.parent == self.root else f"{name}.{folder.name}"

    def make_new_path(self, name: str) -> Path:
        """The first path that no job of this name has had."""
        used = [found.name.rpartition("-") for found in self.root.glob(f"{name}-*")]
        numbers = [int(number) for before, _, number in used if before == name and number.isdecimal()]
        return self.root / f"{name}-{max(numbers, default=0) + 1}"

    def find_array_dir(self, folder: Path) -> Path:
        """The directory of the array that a job belongs to, or its own."""
        return folder if folder.parent == self.root else folder.parent

    def script_suffix(self, folder: Path) -> str:
        """How the path of a job's batch script ends."""
        return f"/{self.find_array_dir(folder).name}/{BATCH_FILE}"

    def list_all(self) -> dict[str, Path]:
        """The jobs' directories by id; of two with one id, as after a new start of Slurm's numbers, the later one."""
        found = [*self.root.glob(f"*/{ID_FILE}"), *self.root.glob(f"*/[0-9]*/{ID_FILE}")]
        files = sorted(found, key=lambda file: file.stat().st_mtime)
        return {file.read_text().strip(): file.parent for file in files}

    @contextmanager
    def hold_lock(self) -> Iterator[None]:
        """Prevent other processes from submitting here during the block."""
        make_state_dir(self.root)
        with open(self.root / ".lock", "w") as lock, ExitStack() as stack:
            what = f"another command, which is submitting to Slurm in {self.root}"
            try:
                acquired = acquire_lock(lock.fileno(), LOCK_TIMEOUT_S, what)
            except LocksUnsupportedError:
                acquired = stack.enter_context(lock_on_this_machine(lock.fileno(), LOCK_TIMEOUT_S, what))
            if not acquired:
                raise UsageError(
                    f"{self.root}: another command has been submitting there for {LOCK_TIMEOUT_S:.0f} s; "
                    "`ps -ef | grep phalanx` shows it: end it if it hangs, and submit again"
                )
            yield


def write_job_dir(folder: Path, job: Job, secrets: dict[str, str]) -> None:
    """Write the files of a job's directory other than its scripts."""
    folder.mkdir(mode=0o700, exist_ok=True)
    if secrets:
        write_private_file(folder / SECRETS_FILE, render_secret_file(secrets))
    if job.run_dir is not None:
        write_private_file(folder / RUN_FILE, f"{job.run_dir}\n")
    if job.snapshot is not None:
        unpack_snapshot(job.snapshot.tar, folder / SNAPSHOT_DIR)


def write_private_file(path: Path, text: str) -> None:
    """A file that only its owner can read."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", errors="surrogateescape") as file:
        file.write(text)


def read_result_file(folder: Path) -> SlurmResult | None:
    """Read what the last attempt of a job left behind, if there is any."""
    path = folder / RESULT_FILE
    return parse_result(path.read_text()) if path.exists() else None
