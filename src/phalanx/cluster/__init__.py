"""Hardware facts: what this machine is (discover), what it could do on paper (datasheet), what it does when measured
(matmul), and what software it runs (environment). Torch is imported only where something is measured.
"""

from phalanx.cluster.datasheet import DataSheet, peak
from phalanx.cluster.discover import Accelerator, Cpu, Machine, accelerators, this_machine
from phalanx.cluster.environment import environment
from phalanx.cluster.matmul import measure_matmul

__all__ = [
    "Accelerator",
    "Cpu",
    "DataSheet",
    "Machine",
    "accelerators",
    "environment",
    "measure_matmul",
    "peak",
    "this_machine",
]
