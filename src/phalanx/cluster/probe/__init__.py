"""Probes: what this machine really does, measured in seconds or minutes and written down as a cluster. `session` runs
them, each other file measures one thing; torch is imported only in the processes that measure.
"""

from phalanx.cluster.probe.key import default_cluster_file, key_of
from phalanx.cluster.probe.reference import time_reference, verify_reference
from phalanx.cluster.probe.session import Means, NotMeasured, default_processes, probe

__all__ = [
    "Means",
    "NotMeasured",
    "default_cluster_file",
    "default_processes",
    "key_of",
    "probe",
    "time_reference",
    "verify_reference",
]
