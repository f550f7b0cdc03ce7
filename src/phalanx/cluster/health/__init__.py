"""Check whether this machine is fit to train.

`runner` lists the checks and runs each within its time limit, `checks/` has one file a family, `compare_nodes` compares
nodes, and `run_preflight` is what an agent runs before an attempt.
"""

from phalanx.cluster.health.checks.host import run_preflight
from phalanx.cluster.health.finding import CheckContext, HealthFinding, HealthVerdict, worst_verdict

__all__ = ["CheckContext", "HealthFinding", "HealthVerdict", "run_preflight", "worst_verdict"]
