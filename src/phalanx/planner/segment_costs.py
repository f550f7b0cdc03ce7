"""What one rank computes and sends for one micro-batch in one segment of a model under a given parallelism: seconds of
compute, and bytes. Functions take numbers or NumPy arrays of configurations, so that a search evaluates thousands at
once.

How long collectives take follows from the links that they cross. Bytes are those of the whole buffer, as nccl-tests
counts them; the bus bandwidth is what the slowest link carries whatever the number of ranks (NVIDIA, nccl-tests
doc/PERFORMANCE.md): a ring moves 2 (n - 1) / n of the buffer over each link for an all-reduce (Patarasuk & Yuan 2009),
half of that for an all-gather or a reduce-scatter.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from phalanx.cluster.spec import Cluster
from phalanx.planner.device_costs import DeviceCosts, attention_seconds, gemm_seconds, memory_op_seconds
from phalanx.planner.model_profile import (
    AttentionOp,
    ExpertAllToAll,
    Gemm,
    MemoryOp,
    ModelSegment,
    PassDirection,
    ProfiledOp,
    TensorAllReduce,
)
from phalanx.planner.scenario import SoftwareStack

ArrayLike = Any
"""A number, or an array of them."""
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


@dataclass(frozen=True)
class ShardSpec:
    """How a segment is divided; each a number or an array. `samples` of the micro-batch: less than one where context
    parallelism cuts a sample."""

    samples: ArrayLike
    tensor: ArrayLike = 1
    context: ArrayLike = 1
    expert: ArrayLike = 1
    fuses_memory_ops: bool = True
    """Whether a compiler or hand-written kernels fuse what is bound by memory."""
    sequence_parallel: bool = True
    """Whether tensor ranks divide by sequence what they do not divide by width (Korthikanti et al. 2022)."""


@dataclass(frozen=True)
class ComputeTime:
    """Seconds of compute, by what bounds it."""

    gemm: ArrayLike = 0.0
    attention: ArrayLike = 0.0
    memory_bound: ArrayLike = 0.0

    def __add__(self, other: "ComputeTime") -> "ComputeTime":
        return ComputeTime(
            self.gemm + other.gemm, self.attention + other.attention, self.memory_bound + other.memory_bound
        )


@dataclass(frozen=True)
class SegmentWork:
    """One phase of a segment: computing, and what is communicated in it, in bytes of whole buffers: sums over tensor
    ranks (`num_reduces` of `reduce_bytes` bytes each), tokens that travel to experts (`num_dispatches` of
    `dispatch_bytes` bytes), keys and values that context ranks show each other."""

    compute: ComputeTime
    num_reduces: int
    reduce_bytes: ArrayLike
    num_dispatches: int
    dispatch_bytes: ArrayLike
    copies_per_token: float
    kv_bytes: ArrayLike
    num_launches: float = 0.0
    """Kernels that the host has to launch."""
    num_expert_gemms: ArrayLike = 0.0
    """Products of single experts among those that are grouped: launches of their own where software loops over them."""


OpCost = Callable[[ProfiledOp, ShardSpec], ComputeTime]
"""What an operation costs, divided so."""


def segment_work(
    segment: ModelSegment, pass_direction: PassDirection, shard: ShardSpec, cost_of: OpCost
) -> SegmentWork:
    """What a phase of a segment asks of one rank."""
    total = ComputeTime()
    reduce_bytes: list[ArrayLike] = []
    dispatch_bytes: list[ArrayLike] = []
    copies = 1.0
    kv_bytes: ArrayLike = 0.0
    num_launches = 0.0
    num_expert_gemms: ArrayLike = 0.0
    for op in segment.ops_of(pass_direction):
        num_launches += float(op.launches) if isinstance(op, MemoryOp) and shard.fuses_memory_ops else 1.0
        if isinstance(op, TensorAllReduce):
            reduce_bytes.append(op.num_bytes.evaluate(shard.samples))
        elif isinstance(op, ExpertAllToAll):
            # Each tensor rank sends its own part of the tokens.
            dispatch_bytes.append(op.num_bytes.evaluate(shard.samples) / shard.tensor)
            copies = op.copies_per_token
        else:
            total = total + cost_of(op, shard)
            if isinstance(op, Gemm) and op.is_grouped:
                num_expert_gemms = num_expert_gemms + np.maximum(op.count.evaluate(shard.samples) / shard.expert, 1.0)
            if isinstance(op, AttentionOp):
                heads = op.num_kv_heads / np.minimum(shard.tensor, op.num_kv_heads)
                tokens = op.samples.evaluate(shard.samples) * shard.context * op.num_keys
                kv_bytes = kv_bytes + 2.0 * op.element_bytes * heads * op.head_dim * tokens * (
                    2 if pass_direction == "backward" else 1
                )
    return SegmentWork(
        total,
        len(reduce_bytes),
        sum(reduce_bytes) / len(reduce_bytes) if reduce_bytes else 0.0,
        len(dispatch_bytes),
        sum(dispatch_bytes) / len(dispatch_bytes) if dispatch_bytes else 0.0,
        copies,
        kv_bytes,
        num_launches,
        num_expert_gemms,
    )


def op_cost_from(device: DeviceCosts) -> OpCost:
    """Costs by data sheet or fitted curves."""

    def cost(op: ProfiledOp, division: ShardSpec) -> ComputeTime:
        if isinstance(op, Gemm):
            return ComputeTime(gemm=_gemm_time(device, op, division))
        if isinstance(op, AttentionOp):
            heads = op.num_heads / division.tensor if op.tp_sharded else op.num_heads
            return ComputeTime(attention=attention_seconds(device, op, division.samples, heads))
        if isinstance(op, MemoryOp):
            return ComputeTime(memory_bound=_memory_op_time(device, op, division))
        return ComputeTime()

    return cost


def _gemm_time(device: DeviceCosts, op: Gemm, shard: ShardSpec) -> ArrayLike:
    dims = {name: getattr(op, name).evaluate(shard.samples) for name in ("count", "m", "n", "k")}
    if op.is_expert:
        # The tokens of all ranks of a group meet at the rank that has their expert; where tensor ranks have divided
        # the sequence, each brings its part.
        rows = "m" if op.m.per_sample else "k"
        dims["count"] = np.maximum(dims["count"] / shard.expert, 1.0)
        dims[rows] = dims[rows] * shard.expert / shard.tensor
    elif op.tp_dim:
        dims[op.tp_dim] = np.maximum(dims[op.tp_dim] / shard.tensor, 1.0)
    return gemm_seconds(
        device,
        **dims,
        element_bytes=op.element_bytes,
        has_weight=op.has_weight,
        is_grouped=op.is_grouped,
        row_elements=_row_elements(op, dims) if op.has_weight and not op.is_grouped else 0,
    )


def _row_elements(op: Gemm, dims: dict[str, ArrayLike]) -> ArrayLike:
    """What the features of a product are multiples of. Tokens, of which more samples have more, are rows."""
    features = [np.asarray(dims[name], np.int64) for name in ("m", "n", "k") if not getattr(op, name).per_sample]
    return np.gcd.reduce(np.broadcast_arrays(0, *features))


def _memory_op_time(device: DeviceCosts, op: MemoryOp, shard: ShardSpec) -> ArrayLike:
    moved_bytes = (op.fused_bytes if shard.fuses_memory_ops else op.unfused_bytes).evaluate(shard.samples)
    launches = float(op.launches) if shard.fuses_memory_ops else 1.0
    num_ranks = shard.tensor if op.tp_sharded or shard.sequence_parallel else 1
    return memory_op_seconds(device, moved_bytes / num_ranks, launches)


@dataclass(frozen=True)
class PassBreakdown:
    """One micro-batch through one chunk, one way: seconds by cause, numbers or arrays of layouts."""

    gemm: ArrayLike
    attention: ArrayLike
    memory_bound: ArrayLike
    recomputation: ArrayLike
    tp_all_reduce: ArrayLike
    cp_all_gather_kv: ArrayLike
    ep_all_to_all: ArrayLike
    fsdp_exposed: ArrayLike
    kernel_launch: ArrayLike
    """Seconds for which the device waits for the host to launch kernels."""

    @property
    def total(self) -> ArrayLike:
        """Seconds of all parts."""
        return sum(vars(self).values())


CollectiveTime = Callable[[CollectiveKind, str, ArrayLike, float], ArrayLike]
"""Seconds of a collective among "tensor", "context" or "expert" ranks, by its kind, bytes and copies."""


def segment_pass_time(
    stack: SoftwareStack,
    work_done: SegmentWork,
    recomputed: SegmentWork | None,
    mode: str,
    has_experts: bool,
    quantized: bool,
    collective_time: CollectiveTime,
) -> PassBreakdown:
    """What a segment does one way and what is computed `recomputed` for it, in seconds, without sharding; `way` of
    recomputing. `has_experts`: whether any segment of the model has them. Numbers or arrays of layouts."""
    expert_factor = stack.expert_factor if has_experts else 1.0
    compute_factor = stack.compute_factor
    recompute_s: ArrayLike = 0.0
    num_reduces, num_dispatches = work_done.num_reduces, work_done.num_dispatches
    launch_s = _launch_seconds(stack, work_done)
    if recomputed is not None:
        launch_s = launch_s + _launch_seconds(stack, recomputed)
        recompute_s = recomputed.compute.memory_bound * expert_factor
        if mode != "selective":
            recompute_s = recompute_s + recomputed.compute.gemm + recomputed.compute.attention
            num_reduces += recomputed.num_reduces
            num_dispatches += recomputed.num_dispatches
    reduced_bytes = work_done.reduce_bytes if work_done.num_reduces or recomputed is None else recomputed.reduce_bytes
    dispatched_bytes = (
        work_done.dispatch_bytes if work_done.num_dispatches or recomputed is None else recomputed.dispatch_bytes
    )
    kv_gather_s = collective_time("all_gather", "context", work_done.kv_bytes, 1.0)
    return PassBreakdown(
        gemm=work_done.compute.gemm * compute_factor * (stack.fp8_gemm_factor if quantized else 1.0),
        attention=work_done.compute.attention * compute_factor,
        memory_bound=work_done.compute.memory_bound * compute_factor * expert_factor,
        recomputation=recompute_s * compute_factor,
        tp_all_reduce=num_reduces
        * collective_time("all_reduce", "tensor", reduced_bytes, 1.0)
        * (1 - stack.max_tp_overlap),
        cp_all_gather_kv=np.maximum(0.0, kv_gather_s - work_done.compute.attention * stack.compute_factor),
        ep_all_to_all=num_dispatches
        * collective_time("all_to_all", "expert", dispatched_bytes, work_done.copies_per_token),
        fsdp_exposed=0.0,
        kernel_launch=launch_s,
    )


def _launch_seconds(stack: SoftwareStack, work_done: SegmentWork) -> ArrayLike:
    """Seconds that the host needs for what a pass through a segment launches."""
    launches = work_done.num_launches + work_done.num_expert_gemms * stack.launches_per_expert_gemm
    return launches * stack.launch_s + work_done.num_dispatches * stack.routing_sync_s
