"""Calibration: measure this machine in seconds or minutes and write a cluster file.

`runner` runs the measurements, each other file measures one thing. torch is imported only in processes that measure.
"""

from phalanx.cluster.calibration.hardware_key import default_calibration_path, hardware_key
from phalanx.cluster.calibration.reference_gemm import reference_slowdown, time_reference_gemm
from phalanx.cluster.calibration.runner import Executor, MeasurementFailed, calibrate_machine, default_num_processes

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
