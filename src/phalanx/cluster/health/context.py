"""Input of the health checks: paths and expectations, as a value that can be sent to other processes."""

import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from phalanx.run.cache import cache_root


@dataclass(frozen=True)
class CheckContext:
    """Input of the checks. `root`: the directory that contains /proc and /sys."""

    run_dir: Path
    """The directory that a run writes to; it need not exist yet."""
    cache_dir: Path = field(default_factory=cache_root)
    temp_dir: Path = field(default_factory=lambda: Path(tempfile.gettempdir()))
    root: Path = Path("/")
    uid: int = field(default_factory=os.getuid)
    expected_devices: int | None = None
    """Expected number of GPUs; None takes it from the calibration."""
    is_quick: bool = False

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        paths = {name: str(getattr(self, name)) for name in ("run_dir", "cache_dir", "temp_dir", "root")}
        return {**paths, "uid": self.uid, "expected_devices": self.expected_devices, "is_quick": self.is_quick}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """The site of plain values."""
        paths = {name: Path(value[name]) for name in ("run_dir", "cache_dir", "temp_dir", "root")}
        return cls(**paths, uid=value["uid"], expected_devices=value["expected_devices"], is_quick=value["is_quick"])


def read_small_file(path: Path) -> str:
    """A small file of /proc or /sys; empty where it is absent on this kernel, or hidden in this container."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
