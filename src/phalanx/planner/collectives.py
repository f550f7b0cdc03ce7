"""How long collectives take, by the links that they cross. Bytes are those of the whole buffer, as nccl-tests counts
them; the bus bandwidth is what the slowest link carries whatever the number of ranks (NVIDIA, nccl-tests
doc/PERFORMANCE.md): a ring moves 2 (n - 1) / n of the buffer over each link for an all-reduce (Patarasuk & Yuan 2009),
half of that for an all-gather or a reduce-scatter.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from phalanx.cluster.spec import Cluster

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
INTRA_NODE_EFFICIENCY = 0.80
"""Share of a scale-up link's rate that collectives reach at best: 228 of 300 GB/s on A100, 363 to 473 of 450 on H200
(rings and, above 450, sums in the switch)."""
INTER_NODE_EFFICIENCY = 0.85
"""The same between nodes."""
LATENCY_ALPHA_S = 12e-6
RING_HOP_LATENCY_S = 3e-6
INTER_NODE_HOP_LATENCY_S = 6e-6
"""Seconds: to begin, and for each step of a ring within and between nodes (NVIDIA NCCL, src/graph/tuning.cc: Simple
protocol 8.4 us + 3.4 us a step on NVLink, 14 us on the network, less with LL128)."""
MESSAGE_KNEE_BYTES, BANDWIDTH_RAMP_EXPONENT = 4e6, 0.55
"""Bandwidth is reached only by large buffers: beta / (1 + (knee / S)^ramp), S bytes (fitted to 8 x H200 and 8 x B200
by stas00/ml-engineering: knee 6 and 33 MB, ramp 0.46)."""


@dataclass(frozen=True)
class GroupLinks:
    """What a group of ranks communicates over. bytes/s and seconds."""

    ranks: int
    nodes: int
    bus_bandwidth: float
    """Bus bandwidth of its slowest link, as collectives reach it."""
    intra_node_bandwidth: float
    """Bandwidth of the links within a node."""
    inter_node_bandwidth: float
    """Bandwidth between nodes, for one rank."""
    latency_s: float
    """Latency of one all-gather, without its bytes."""


def group_links(cluster: Cluster, ranks: int, stride: int = 1, latency_factor: float = 1.0) -> GroupLinks:
    """Links of a group of `ranks` ranks, each `stride` devices from the next. Inner dimensions of the device mesh have
    smaller strides. A scale-up domain may be larger than a node. `latency_factor` multiplies latencies."""
    node = cluster.node
    scale_up, scale_out = node.scale_up, node.scale_out
    domain = max(scale_up.domain if scale_up is not None else 1, node.count)
    intra_node_bandwidth = (
        (scale_up.gbps if scale_up is not None else (node.accelerator.host_gbps or 8.0)) * 1e9 * INTRA_NODE_EFFICIENCY
    )
    ranks_per_domain = max(1, min(ranks, domain // stride)) if stride <= domain else 1
    num_domains = math.ceil(ranks / ranks_per_domain)
    inter_node_bandwidth = math.inf
    if scale_out is not None:
        inter_node_bandwidth = scale_out.gbps * scale_out.ports / node.count * 1e9 * INTER_NODE_EFFICIENCY
        if num_domains > (cluster.topology.nodes_a_leaf or 1) or cluster.topology.nodes_a_leaf is None:
            inter_node_bandwidth /= cluster.topology.oversubscription
    if num_domains == 1:
        latency_s = latency_factor * (LATENCY_ALPHA_S + RING_HOP_LATENCY_S * (ranks - 1))
        return GroupLinks(ranks, 1, intra_node_bandwidth, intra_node_bandwidth, inter_node_bandwidth, latency_s)
    # Several rings use all network cards of the ranks that stand together in a node.
    bandwidth = (
        min(intra_node_bandwidth, ranks_per_domain * inter_node_bandwidth)
        if ranks_per_domain > 1
        else inter_node_bandwidth
    )
    # Within a node NVIDIA's and AMD's libraries use rings, between many nodes trees: latency grows with the logarithm.
    inter_node_latency_s = INTER_NODE_HOP_LATENCY_S * (
        num_domains - 1 if num_domains <= 4 else 2 * math.log2(num_domains)
    )
    return GroupLinks(
        ranks,
        num_domains,
        bandwidth,
        intra_node_bandwidth,
        inter_node_bandwidth,
        latency_factor * (LATENCY_ALPHA_S + RING_HOP_LATENCY_S * (ranks_per_domain - 1) + inter_node_latency_s),
    )


def collective_seconds(
    kind: CollectiveKind, num_bytes: Any, links: GroupLinks, byte_time_factor: float = 1.0, copies: float = 1.0
) -> Any:
    """Seconds of one collective of `num_bytes` bytes (a number or an array). `byte_time_factor` multiplies the transfer
    time, not the latency. `copies`: copies of each part of an all-to-all that go to different ranks."""
    num_ranks = links.ranks
    if num_ranks == 1:
        return np.zeros_like(np.asarray(num_bytes, dtype=float))
    num_bytes = np.asarray(num_bytes, dtype=float)
    ramp = 1.0 + (MESSAGE_KNEE_BYTES / np.maximum(num_bytes, 1.0)) ** BANDWIDTH_RAMP_EXPONENT
    if kind == "send":
        rate = links.inter_node_bandwidth if links.nodes > 1 else links.intra_node_bandwidth
        return INTER_NODE_HOP_LATENCY_S + LATENCY_ALPHA_S + byte_time_factor * num_bytes / rate
    if kind == "all_to_all":
        # Between nodes a token that several experts of a node want travels once (DeepEP; Lepikhin et al. 2021).
        distinct_nodes = links.nodes * (1.0 - (1.0 - 1.0 / links.nodes) ** copies)
        ranks_per_node = max(1, num_ranks // links.nodes)
        intra_node_share, inter_node_share = (ranks_per_node - 1) / num_ranks, (num_ranks - ranks_per_node) / num_ranks
        inter_node_s_per_byte = (
            inter_node_share / links.inter_node_bandwidth * distinct_nodes / copies if links.nodes > 1 else 0.0
        )
        return (
            links.latency_s
            + byte_time_factor
            * num_bytes
            * np.maximum(intra_node_share / links.intra_node_bandwidth, inter_node_s_per_byte)
            * ramp
        )
    steps = 2.0 if kind == "all_reduce" else 1.0
    return steps * (
        links.latency_s + byte_time_factor * num_bytes * (num_ranks - 1) / num_ranks / links.bus_bandwidth * ramp
    )


class GroupCollectives:
    """Seconds of collectives for arrays of layouts: links are the same for all that share ranks and stride."""

    def __init__(self, cluster: Cluster, byte_time_factor: float, latency_factor: float) -> None:
        self._cluster, self._byte_time_factor, self._latency_factor = cluster, byte_time_factor, latency_factor

    def seconds(
        self, kind: CollectiveKind, ranks: np.ndarray, stride: np.ndarray, num_bytes: Any, copies: float = 1.0
    ) -> np.ndarray:
        """Seconds of one collective of `num_bytes` bytes for each group of `ranks` ranks with a stride of `stride`
        devices; 0 in a group of one."""
        num_bytes = np.broadcast_to(num_bytes, ranks.shape)
        seconds = np.zeros(ranks.shape)
        group_codes = np.where(ranks > 1, ranks.astype(np.int64) * 2**32 + stride.astype(np.int64), 0)
        for code in set(group_codes.tolist()) - {0}:
            selected = group_codes == code
            group_ranks, group_stride = divmod(code, 2**32)
            links = group_links(self._cluster, group_ranks, group_stride, self._latency_factor)
            seconds[selected] = collective_seconds(kind, num_bytes[selected], links, self._byte_time_factor, copies)
        return seconds
