"""What Phalanx can make again and keeps to save time: where it lies, and measurements that are remembered for a day."""

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

from phalanx.errors import DataError, UsageError
from phalanx.run.directory import write_atomic
from phalanx.run.lock import LocksUnsupportedError, acquire_lock
from phalanx.run.private_files import check_owner
from phalanx.safe_files import read_json

logger = logging.getLogger(__name__)

MAX_ENTRY_BYTES = 64 << 20
CACHE_ADVICE = "set PHALANX_CACHE_DIR to a directory that can be written"
MAX_AGE_S = 86400.0
"""Seconds for which a measurement is taken as it is."""
LOCK_TIMEOUT_S = 120.0
"""Seconds to wait for another process that measures the same; then measure anyway."""


def cache_root(environ: Mapping[str, str] = os.environ) -> Path:
    """$PHALANX_CACHE_DIR, else $XDG_CACHE_HOME/phalanx, else ~/.cache/phalanx. UsageError where another user owns it,
    or may write there: what lies in it is trained on."""
    if given := environ.get("PHALANX_CACHE_DIR"):
        root = Path(given)
    elif shared := environ.get("XDG_CACHE_HOME"):
        root = Path(shared) / "phalanx"
    else:
        root = Path.home() / ".cache" / "phalanx"
    check_owner(root, "the cache")
    return root


def check_cache_writable() -> None:
    """Raise UsageError, with the variable that names another, where no cache directory is and none can be made."""
    root = cache_root()
    parent = next(path for path in (root, *root.absolute().parents) if path.exists())
    if parent != root and not os.access(parent, os.W_OK):
        raise UsageError(f"{root}: cannot be made, since {parent} cannot be written; {CACHE_ADVICE}")


def load_or_measure(
    kind: str,
    key: dict[str, Any],
    measure: Callable[[], dict[str, Any]],
    *,
    is_kept: Callable[[dict[str, Any]], bool] = lambda value: True,
    folder: Path | None = None,
    now: Callable[[], float] = time.time,
) -> dict[str, Any]:
    """Return what `measure` returns (JSON values), or returned within the last day under the same `kind` and `key`.
    Processes that ask for the same at the same time all get what the first of them measures: two runs of one recipe
    that start together then make the same choices. Where the file is torn or unreadable, measure again; where it
    cannot be written, nothing is cached, and neither is a value that `is_kept` refuses."""
    digest = xxhash.xxh3_64_hexdigest(json.dumps(key, sort_keys=True).encode())
    path = (cache_root() if folder is None else folder) / kind / f"{digest}.json"
    with _lock_entry(path):
        cached = _read_entry(path, key)
        if cached is not None and now() - path.stat().st_mtime < MAX_AGE_S:
            logger.debug("%s: read from %s", kind, path)
            return cached
        value = measure()
        logger.debug("%s: measured for %s", kind, path)
        if is_kept(value):
            # a read-only or full home costs measuring again at the next start, and nothing else
            with contextlib.suppress(OSError):
                write_atomic(path, json.dumps({"key": key, "value": value}, indent=1))
    return value


@contextlib.contextmanager
def _lock_entry(path: Path) -> Iterator[None]:
    """Hold the lock of an entry where the file system has locks and the cache can be written."""
    with contextlib.ExitStack() as stack:
        # without the lock, processes measure side by side, and each keeps its own value
        with contextlib.suppress(OSError, LocksUnsupportedError):
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(path.with_suffix(".lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            stack.callback(os.close, fd)
            acquire_lock(fd, LOCK_TIMEOUT_S, f"the measurement {path.stem}, which another process makes")
        yield


def _read_entry(path: Path, key: dict[str, Any]) -> dict[str, Any] | None:
    try:
        found = read_json(path, MAX_ENTRY_BYTES)
        value = found["value"]
        known = isinstance(value, dict) and found["key"] == key
    except (OSError, DataError, KeyError):  # absent or torn: measuring again is as good
        return None
    return value if known else None
