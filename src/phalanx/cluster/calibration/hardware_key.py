"""The key of a calibration: hardware, driver and library versions. A file with another key is not found, so a stale
calibration is never used. Also the path of this machine's calibration file.
"""

import json
import platform
import re
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path

import xxhash

from phalanx.cluster.discovery import Machine, discover_machine
from phalanx.cluster.environment import package_version
from phalanx.run.cache import cache_root

KEY_FORMAT = "3"
"""Incremented when the meaning of a measurement, or what is measured, changes."""


def hardware_key(
    machine: Machine, root: Path = Path("/"), version_of: Callable[[str], str | None] = package_version
) -> dict[str, str]:
    """Return hardware, driver and library versions of this machine as text, without importing torch."""
    found = {
        "format": KEY_FORMAT,
        "device": machine.device_name,
        "count": str(machine.device_count),
        "cpu": machine.cpu.name,
        "flags": " ".join(machine.cpu.flags),
        "cores": f"{machine.physical_cores} of {machine.logical_cores} threads",
        "memory_gib": f"{machine.device_memory_bytes / 2**30:.0f}",
        "driver": read_driver_version(root),
        "kernel": platform.release(),
        "torch": version_of("torch"),
        "nccl": _nccl_version(version_of) if machine.device == "cuda" else None,
    }
    return {name: text for name, text in found.items() if text}


def default_calibration_path(machine: Machine | None = None, directory: Path | None = None) -> Path:
    """Return the path that `phalanx calibrate` writes and other commands read by default. It lies in the cache
    directory (`run.cache.cache_root`) and is named by the machine and a digest of its key."""
    machine = machine or discover_machine()
    digest = xxhash.xxh3_64_hexdigest(json.dumps(hardware_key(machine), sort_keys=True).encode())
    name = re.sub(r"[^a-z0-9]+", "-", machine.device_name.lower()).strip("-") or "machine"
    return (directory or cache_root() / "clusters") / f"{name}-{digest[:12]}.yaml"


def read_driver_version(root: Path) -> str | None:
    """Return the version of the NVIDIA or AMD driver, from the files that the driver exposes."""
    try:
        line = (root / "proc/driver/nvidia/version").read_text().splitlines()[0]
        found = re.search(r"\d+\.\d+(\.\d+)?", line)
        return f"nvidia {found[0]}" if found else None
    except (OSError, IndexError):
        pass
    try:
        return f"amdgpu {(root / 'sys/module/amdgpu/version').read_text().strip()}"
    except OSError:
        return None


def _nccl_version(version_of: Callable[[str], str | None]) -> str | None:
    """Return the NCCL packages with their versions. The package name includes the CUDA version."""
    names = {str(each.metadata["Name"]) for each in distributions()}
    found = [f"{name} {version_of(name)}" for name in sorted(names) if name and name.startswith("nvidia-nccl")]
    return ", ".join(found) or None
