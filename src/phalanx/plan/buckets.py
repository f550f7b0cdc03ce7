"""How many gradients should travel together: few, so that the last of a backward wait for little; or many, so that few
exchanges have to begin.

Buckets of equal size are full one after the other while backward goes on, and travel one after the other, as
`train.exchange` has it (Li et al. 2020, "PyTorch Distributed", sec. 3.2.3). What is left when backward is over is
exposed: a whole bucket at most, since there the last is cut smaller where parameters allow it.
"""

from phalanx.plan.rates import Rates
from phalanx.plan.setup import Setup
from phalanx.plan.step import Costs, chunks, through
from phalanx.recipe.exchanges import BUCKET, MIB

SIZES = (BUCKET, 12.0, 6.0, 3.0, 1.5, 0.75, 0.4)
"""MiB that are considered."""
WORTH = 0.02
"""More buckets must save so much of a backward: each costs the host some work, too."""
GLOO = 3e-4
"""Seconds that an all-reduce of gloo takes on CPUs, however little is sent: 0.2 to 0.5 ms between two processes of a
virtual machine (1 kB over loopback, torch 2.13)."""


def exposed(count: int, backward: float, each: float) -> float:
    """Seconds after a backward of so many until the last of `count` equal buckets has travelled for `each` seconds:
    either it alone is left, or all had to wait for one another from the first on."""
    return max(each, count * each - backward * (count - 1) / count)


def best_bucket(setup: Setup, rates: Rates) -> float | None:
    """MiB of the best bucket, for `grad_sync.bucket_mib`; None where gradients do not travel in buckets of ours: there
    is one replica, it is divided otherwise than by tensor ranks, or nothing travels beside backward."""
    layout, costs = setup.layout, Costs(setup, rates)
    whole = layout.shard * layout.context * layout.expert * layout.pipeline == 1
    if layout.replicate == 1 or not whole or not setup.wire.hides or setup.wire.keeps:
        return None
    (model,) = chunks(setup)
    size = sum(costs.trained(segment) * count for segment, count in model.segments) * setup.stack.gradient_bytes
    backward = through(costs, model, "backward").total
    over = costs.replicas
    on_cpu = setup.cluster.node.accelerator.generation == "cpu"
    start = max(2 * over.latency, GLOO if on_cpu else 0.0)  # of a reduce-scatter and an all-gather

    def left(mib: float) -> float:
        count = max(1, round(size / (mib * MIB)))
        bytes_ = size * setup.wire.share / count
        return exposed(count, backward, start + 2 * (over.ranks - 1) / over.ranks * bytes_ / over.bandwidth)

    enough = min(map(left, SIZES)) + WORTH * backward
    return next(mib for mib in SIZES if left(mib) <= enough)
