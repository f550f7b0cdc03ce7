"""Which sources this machine has, and where its samples are kept."""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from phalanx.cluster.gpu_topology import import_nvml
from phalanx.fleet.telemetry.host import HostSource
from phalanx.fleet.telemetry.nvml import NvmlSource
from phalanx.fleet.telemetry.source import SourceUnavailableError, TelemetrySource

TELEMETRY_DIR_VARIABLE = "PHALANX_TELEMETRY_DIR"
"""Where samples of the last day are kept: a directory of this node, not one that nodes share."""


def open_local_sources() -> tuple[list[TelemetrySource], list[str]]:
    """The sources of this machine, and what they cannot read, in words."""
    host = HostSource()
    sources: list[TelemetrySource] = [host]
    problems = list(host.problems)
    if (nvml := import_nvml()) is not None:
        try:
            gpus = NvmlSource(nvml)
        except SourceUnavailableError as error:
            problems.append(str(error))
        else:
            sources.append(gpus)
            problems += gpus.problems
    return sources, problems


def ring_path(node: str, environment: Mapping[str, str] = os.environ) -> Path:
    """The file with this node's samples of the last day."""
    given = environment.get(TELEMETRY_DIR_VARIABLE)
    folder = Path(given) if given else Path(tempfile.gettempdir()) / f"phalanx-telemetry-{os.getuid()}"
    return folder / f"{node}.ring"
