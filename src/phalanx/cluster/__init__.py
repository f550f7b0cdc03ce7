"""Hardware facts: what this machine is (discover), what it could do on paper (datasheet), what it does when measured
(matmul), what software it runs (environment), and clusters by name or from a file (naming), filled in from the
catalogue. Torch is imported only where something is measured, the catalogue's files are read when something is asked.
"""

from phalanx.cluster.datasheet import DataSheet, find_data_sheet
from phalanx.cluster.description import Cluster
from phalanx.cluster.discover import Cpu, DetectedGpu, Machine, detect_gpus, discover_machine
from phalanx.cluster.environment import collect_environment
from phalanx.cluster.matmul import measure_matmul
from phalanx.cluster.naming import load_cluster, save_cluster

__all__ = [
    "Cluster",
    "Cpu",
    "DataSheet",
    "DetectedGpu",
    "Machine",
    "collect_environment",
    "detect_gpus",
    "discover_machine",
    "find_data_sheet",
    "load_cluster",
    "measure_matmul",
    "save_cluster",
]
