"""Probes: what this machine really does, measured in seconds or minutes and written down as a cluster. `session` runs
them, each other file measures one thing; torch is imported only in the processes that measure.
"""

from phalanx.cluster.probe.key import default_calibration_path, hardware_key
from phalanx.cluster.probe.reference import reference_slowdown, time_reference_gemm
from phalanx.cluster.probe.session import Executor, MeasurementFailed, calibrate_machine, default_num_processes

__all__ = [
    "Executor",
    "MeasurementFailed",
    "calibrate_machine",
    "default_calibration_path",
    "default_num_processes",
    "hardware_key",
    "reference_slowdown",
    "time_reference_gemm",
]
