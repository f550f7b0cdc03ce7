"""Which sources this machine has, and where its samples are kept."""

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx.cluster.gpu_topology import import_nvml
from phalanx.fleet.telemetry.amd import AmdsmiSource
from phalanx.fleet.telemetry.host import HostSource
from phalanx.fleet.telemetry.nvml import NvmlSource
from phalanx.fleet.telemetry.source import SourceUnavailableError, TelemetrySource

NODE_DIR = Path("/var/tmp")
"""On the node, and kept: TMPDIR may be a directory of one job that is removed with it, and a home may be shared."""
TELEMETRY_DIR_VARIABLE = "PHALANX_TELEMETRY_DIR"
"""Where samples of the last day are kept: a directory of this node, not one that nodes share."""


def open_local_sources() -> tuple[list[TelemetrySource], list[str]]:
    """The sources of this machine, and what they cannot read, in words."""
    sources: list[TelemetrySource] = [HostSource()]
    problems: list[str] = []
    for library, make_source in ((import_nvml(), NvmlSource), (import_amdsmi(), AmdsmiSource)):
        if library is not None:
            try:
                sources.append(make_source(library))
            except SourceUnavailableError as error:
                problems.append(str(error))
    return sources, [*(problem for source in sources for problem in source.problems), *problems]


def import_amdsmi() -> Any:
    """AMD's library, where ROCm and its Python package are installed; else None."""
    try:
        return importlib.import_module("amdsmi")
    except (ImportError, KeyError, OSError):  # KeyError: the package is there, and ROCm's library is not
        return None


def ring_path(node: str, environment: Mapping[str, str] = os.environ) -> Path:
    """The file with this node's samples of the last day."""
    given = environment.get(TELEMETRY_DIR_VARIABLE)
    folder = Path(given) if given else NODE_DIR / f"phalanx-telemetry-{os.getuid()}"
    return folder / f"{node}.ring"
