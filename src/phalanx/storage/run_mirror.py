"""Read a run at a URL as a local run: a directory in this machine's cache that follows it."""

import logging
import os
import threading
import time
from pathlib import Path

from phalanx.errors import PhalanxError
from phalanx.run.lock import acquire_lock
from phalanx.storage.run_objects import RunObjects, find_local_directory, make_local_directory
from phalanx.storage.url import is_url

logger = logging.getLogger(__name__)

REFRESH_INTERVAL_S = 5.0
"""Seconds between two updates of a run that is followed."""
LOCK_TIMEOUT_S = 3600.0


def mirror_run(location: str | Path, logs: bool = False) -> Path:
    """The path of a run directory as it is; of a URL the path of a local directory with the run's small files and
    events, and with its logs and telemetry if `logs`, as they are now. UsageError where the URL has no run."""
    if not is_url(location):
        return Path(location)
    run = make_local_directory(str(location), "run-mirrors")
    fd = os.open(run.path.parent / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        acquire_lock(fd, LOCK_TIMEOUT_S, f"the download of {location}, which another process makes")
        objects = RunObjects(run)
        objects.check_run()
        objects.download(logs=logs)
    finally:
        os.close(fd)
    return run.path


def follow_run(location: str | Path) -> Path:
    """`mirror_run` with logs, of a run that may begin later; a thread updates it until this process ends."""

    def update() -> None:
        while True:
            time.sleep(REFRESH_INTERVAL_S)
            _try_to_mirror(location)

    if not is_url(location):
        return Path(location)
    _try_to_mirror(location)
    threading.Thread(target=update, name="run-mirror", daemon=True).start()
    return find_local_directory(str(location), "run-mirrors")


def _try_to_mirror(location: str | Path) -> None:
    try:
        mirror_run(location, logs=True)
    except (PhalanxError, OSError) as error:
        logger.info("%s: %s", location, error)
