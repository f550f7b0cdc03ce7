"""Whether this machine is fit to train, and why not. `checks` lists what is looked at, a file a family; `examine` does
it, each check within its time; `fleet` judges nodes beside each other; `quick` is what an agent asks before an attempt.
"""

from phalanx.cluster.health.finding import Finding, Verdict, worst
from phalanx.cluster.health.quick import quick
from phalanx.cluster.health.site import Site

__all__ = ["Finding", "Site", "Verdict", "quick", "worst"]
