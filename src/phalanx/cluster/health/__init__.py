"""Whether this machine is fit to train, and why not. `checks` lists what is looked at, a file a family; `examine` does
it, each check within its time; `fleet` judges nodes beside each other; `quick` is what an agent asks before an attempt.
"""

from phalanx.cluster.health.finding import HealthFinding, HealthVerdict, worst_verdict
from phalanx.cluster.health.quick import run_preflight
from phalanx.cluster.health.site import CheckContext

__all__ = ["CheckContext", "HealthFinding", "HealthVerdict", "run_preflight", "worst_verdict"]
