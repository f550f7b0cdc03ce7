"""Check whether this machine is fit to train.

`runner` lists the checks and runs each within its time limit, `checks/` has one file a family, `compare_nodes` compares
nodes, and `preflight` is what an agent runs before an attempt.
"""

from phalanx.cluster.health.finding import CheckContext, HealthFinding, HealthVerdict, worst_verdict
from phalanx.cluster.health.preflight import run_preflight

__all__ = ["CheckContext", "HealthFinding", "HealthVerdict", "run_preflight", "worst_verdict"]
