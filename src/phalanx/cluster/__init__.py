"""Hardware facts: what this machine is (discovery), its peak rates by the data sheet (catalog), its measured rates
(calibration.gemm), its software (environment), and clusters by name or from a file (load), completed by the catalog.

torch is imported only where something is measured; the catalog's files are read on first use.
"""

from typing import TYPE_CHECKING

from phalanx.lazy_exports import make_getattr

if TYPE_CHECKING:
    from phalanx.cluster.calibration.gemm import measure_matmul
    from phalanx.cluster.catalog import find_data_sheet
    from phalanx.cluster.discovery import Machine, discover_machine
    from phalanx.cluster.environment import collect_environment
    from phalanx.cluster.load import load_cluster, save_cluster
    from phalanx.cluster.spec import Cluster

__all__ = [
    "Cluster",
    "Machine",
    "collect_environment",
    "discover_machine",
    "find_data_sheet",
    "load_cluster",
    "measure_matmul",
    "save_cluster",
]

if not TYPE_CHECKING:
    __getattr__ = make_getattr(
        __name__,
        {
            "catalog": ("find_data_sheet",),
            "discovery": ("Machine", "discover_machine"),
            "environment": ("collect_environment",),
            "load": ("load_cluster", "save_cluster"),
            "calibration.gemm": ("measure_matmul",),
            "spec": ("Cluster",),
        },
    )
