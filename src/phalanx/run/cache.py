"""What Phalanx can make again and keeps to save time: where it lies, and measurements that are remembered for a day."""

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import xxhash

FRESH = 86400.0
"""Seconds for which a measurement is taken as it is."""


def cache_root(environ: Mapping[str, str] = os.environ) -> Path:
    """$PHALANX_CACHE, else $XDG_CACHE_HOME/phalanx, else ~/.cache/phalanx."""
    if given := environ.get("PHALANX_CACHE"):
        return Path(given)
    if shared := environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "phalanx"
    return Path.home() / ".cache" / "phalanx"


def remembered(
    kind: str,
    key: dict[str, Any],
    measure: Callable[[], dict[str, Any]],
    *,
    folder: Path | None = None,
    now: Callable[[], float] = time.time,
) -> dict[str, Any]:
    """What `measure` returns (JSON values), or returned within the last day under the same `kind` and `key`. A file
    that is torn or cannot be read is measured anew, one that cannot be written costs only the measuring."""
    digest = xxhash.xxh3_64_hexdigest(json.dumps(key, sort_keys=True).encode())
    path = (cache_root() if folder is None else folder) / kind / f"{digest}.json"
    old = _kept(path, key)
    if old is not None and now() - path.stat().st_mtime < FRESH:
        return old
    value = measure()
    _keep(path, {"key": key, "value": value})
    return value


def _kept(path: Path, key: dict[str, Any]) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text())
        value = found["value"] if found["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError):  # absent or torn: measuring mends either
        return None
    return value if isinstance(value, dict) else None


def _keep(path: Path, value: dict[str, Any]) -> None:
    """Whole or not at all, also when several processes do it at once."""
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(value, indent=1))
        draft.replace(path)
    except OSError:  # a read-only or full home costs measuring again at the next start, and nothing else
        return
