"""Hardware facts: what this machine is (discover), what it could do on paper (datasheet), what it does when measured
(matmul), what software it runs (environment), and clusters by name or from a file (naming), filled in from the
catalogue. Torch is imported only where something is measured, the catalogue's files are read when something is asked.
"""

from phalanx.cluster.datasheet import DataSheet, peak
from phalanx.cluster.description import Cluster
from phalanx.cluster.discover import Accelerator, Cpu, Machine, accelerators, this_machine
from phalanx.cluster.environment import environment
from phalanx.cluster.matmul import measure_matmul
from phalanx.cluster.naming import load_cluster, save_cluster

__all__ = [
    "Accelerator",
    "Cluster",
    "Cpu",
    "DataSheet",
    "Machine",
    "accelerators",
    "environment",
    "load_cluster",
    "measure_matmul",
    "peak",
    "save_cluster",
    "this_machine",
]
