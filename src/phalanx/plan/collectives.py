"""How long collectives take, by the links that they cross. Bytes are those of the whole buffer, as nccl-tests counts
them; the bus bandwidth is what the slowest link carries whatever the number of ranks (NVIDIA, nccl-tests
doc/PERFORMANCE.md): a ring moves 2 (n - 1) / n of the buffer over each link for an all-reduce (Patarasuk & Yuan 2009),
half of that for an all-gather or a reduce-scatter.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from phalanx.cluster.description import Cluster

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
REACHED = 0.80
"""Share of a scale-up link's rate that collectives reach at best: 228 of 300 GB/s on A100, 363 to 473 of 450 on H200
(rings and, above 450, sums in the switch)."""
REACHED_OUT = 0.85
"""The same between nodes."""
START = 12e-6
HOP = 3e-6
HOP_OUT = 6e-6
"""Seconds: to begin, and for each step of a ring within and between nodes (NVIDIA NCCL, src/graph/tuning.cc: Simple
protocol 8.4 us + 3.4 us a step on NVLink, 14 us on the network, less with LL128)."""
KNEE, RAMP = 4e6, 0.55
"""Bandwidth is reached only by large buffers: beta / (1 + (knee / S)^ramp), S bytes (fitted to 8 x H200 and 8 x B200
by stas00/ml-engineering: knee 6 and 33 MB, ramp 0.46)."""


@dataclass(frozen=True)
class Links:
    """What a group of ranks communicates over. bytes/s and seconds."""

    ranks: int
    nodes: int
    bandwidth: float
    """Bus bandwidth of its slowest link, as collectives reach it."""
    inner: float
    """Of the links within a node."""
    outer: float
    """Between nodes, for one rank."""
    latency: float
    """Of one all-gather, however little is sent."""


def links(cluster: Cluster, ranks: int, stride: int = 1, late: float = 1.0) -> Links:
    """Of a group of so many ranks, each `stride` devices from the next: what stands further inside a layout has smaller
    strides. A scale-up domain may be more than a node. `late` multiplies latencies."""
    node = cluster.node
    up, out = node.scale_up, node.scale_out
    domain = max(up.domain if up is not None else 1, node.count)
    inner = (up.gbps if up is not None else (node.accelerator.host_gbps or 8.0)) * 1e9 * REACHED
    together = max(1, min(ranks, domain // stride)) if stride <= domain else 1
    islands = math.ceil(ranks / together)
    a_device = math.inf
    if out is not None:
        a_device = out.gbps * out.ports / node.count * 1e9 * REACHED_OUT
        if islands > (cluster.topology.nodes_a_leaf or 1) or cluster.topology.nodes_a_leaf is None:
            a_device /= cluster.topology.oversubscription
    if islands == 1:
        hops = late * (START + HOP * (ranks - 1))
        return Links(ranks, 1, inner, inner, a_device, hops)
    # Several rings use all network cards of the ranks that stand together in a node.
    bandwidth = min(inner, together * a_device) if together > 1 else a_device
    # Within a node NVIDIA's and AMD's libraries use rings, between many nodes trees: latency grows with the logarithm.
    across = HOP_OUT * (islands - 1 if islands <= 4 else 2 * math.log2(islands))
    return Links(ranks, islands, bandwidth, inner, a_device, late * (START + HOP * (together - 1) + across))


def collective_seconds(kind: Kind, size: Any, over: Links, scale: float = 1.0, copies: float = 1.0) -> Any:
    """Of one collective of `size` bytes (a number or an array). `scale` multiplies the time that bytes take, not the
    latency. `copies`: of each part of an all-to-all, sent to different ranks."""
    n = over.ranks
    if n == 1:
        return np.zeros_like(np.asarray(size, dtype=float))
    size = np.asarray(size, dtype=float)
    ramp = 1.0 + (KNEE / np.maximum(size, 1.0)) ** RAMP
    if kind == "send":
        rate = over.outer if over.nodes > 1 else over.inner
        return HOP_OUT + START + scale * size / rate
    if kind == "all_to_all":
        # Between nodes a token that several experts of a node want travels once (DeepEP; Lepikhin et al. 2021).
        reached = over.nodes * (1.0 - (1.0 - 1.0 / over.nodes) ** copies)
        here = max(1, n // over.nodes)
        inside, outside = (here - 1) / n, (n - here) / n
        slow = outside / over.outer * reached / copies if over.nodes > 1 else 0.0
        return over.latency + scale * size * np.maximum(inside / over.inner, slow) * ramp
    steps = 2.0 if kind == "all_reduce" else 1.0
    return steps * (over.latency + scale * size * (n - 1) / n / over.bandwidth * ramp)
