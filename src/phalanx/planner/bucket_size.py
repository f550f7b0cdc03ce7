"""Choose the size of gradient buckets: small buckets leave little to send after backward; large ones start fewer
all-reduces.

Buckets of equal size fill one after the other during backward and are reduced one after the other, as in
`train.grad_sync` (Li et al. 2020, "PyTorch Distributed", sec. 3.2.3). What is left when backward ends is exposed:
one bucket at most, since the last bucket is cut smaller where the parameters allow it.
"""

from phalanx.formatting import BYTES_PER_MIB
from phalanx.planner.collectives import group_links
from phalanx.planner.device_costs import DeviceCosts
from phalanx.planner.layouts import layout_of
from phalanx.planner.scenario import Scenario
from phalanx.planner.stages import split_into_stages
from phalanx.planner.step_time import LayoutCosts, stage_pass_time
from phalanx.recipe.grad_sync_defaults import DEFAULT_BUCKET_MIB

CANDIDATE_BUCKETS_MIB = (DEFAULT_BUCKET_MIB, 12.0, 6.0, 3.0, 1.5, 0.75, 0.4)
"""MiB that are considered."""
MIN_SAVING_OF_BACKWARD = 0.02
"""More buckets must save so much of a backward: each costs the host some work, too."""
GLOO_ALL_REDUCE_LATENCY_S = 3e-4
"""Seconds that an all-reduce of gloo takes on CPUs, however little is sent: 0.2 to 0.5 ms between two processes of a
virtual machine (1 kB over loopback, torch 2.13)."""


def exposed_seconds(count: int, backward_s: float, bucket_s: float) -> float:
    """Seconds from the end of a backward of `backward_s` until the last of `count` equal buckets, `bucket_s` seconds
    each, is reduced: either only the last bucket is left, or all buckets queued from the first on."""
    return max(bucket_s, count * bucket_s - backward_s * (count - 1) / count)


def best_bucket_mib(scenario: Scenario, rates: DeviceCosts) -> float | None:
    """MiB of the best bucket, for `grad_sync.bucket_mib`. None where there are no gradient buckets: one replica, a
    parallelism other than tensor parallelism, or no overlap with backward."""
    parallelism = scenario.parallelism
    unsharded = parallelism.shard * parallelism.context * parallelism.expert * parallelism.pipeline == 1
    if (
        parallelism.replicate == 1
        or not unsharded
        or not scenario.transport.overlaps_backward
        or scenario.transport.needed_by_single_replica
    ):
        return None
    costs = LayoutCosts(scenario, layout_of(scenario), rates)
    (model,) = split_into_stages(scenario)
    size = (
        sum(costs.num_trained(segment).item() * count for segment, count in model.segments)
        * scenario.stack.gradient_bytes
    )
    backward = stage_pass_time(costs, model, "backward").total.item()
    replica_links = group_links(
        scenario.cluster, parallelism.replicate, parallelism.tensor, scenario.stack.latency_factor
    )
    is_cpu = scenario.cluster.node.accelerator.generation == "cpu"
    latency_s = max(
        2 * replica_links.latency_s, GLOO_ALL_REDUCE_LATENCY_S if is_cpu else 0.0
    )  # of a reduce-scatter and an all-gather

    def exposed_s(mib: float) -> float:
        count = max(1, round(size / (mib * BYTES_PER_MIB)))
        bytes_ = size * scenario.transport.wire_ratio / count
        return exposed_seconds(
            count,
            backward,
            latency_s + 2 * (replica_links.ranks - 1) / replica_links.ranks * bytes_ / replica_links.bus_bandwidth,
        )

    limit_s = min(map(exposed_s, CANDIDATE_BUCKETS_MIB)) + MIN_SAVING_OF_BACKWARD * backward
    return next(mib for mib in CANDIDATE_BUCKETS_MIB if exposed_s(mib) <= limit_s)
