"""Check whether this machine is fit to train.

`registry` lists the checks, `checks/` has one file a family, `runner` runs each within its time limit, `compare_nodes`
compares nodes, and `preflight` is what an agent runs before an attempt.
"""

from phalanx.cluster.health.context import CheckContext
from phalanx.cluster.health.finding import HealthFinding, HealthVerdict, worst_verdict
from phalanx.cluster.health.preflight import run_preflight

__all__ = ["CheckContext", "HealthFinding", "HealthVerdict", "run_preflight", "worst_verdict"]
