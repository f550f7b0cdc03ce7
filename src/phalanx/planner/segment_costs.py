"""What one rank computes and sends for one micro-batch in one segment of a model under a given parallelism: seconds of
compute, and bytes. Functions take numbers or NumPy arrays of configurations, so that a search evaluates thousands at
once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.planner.collectives import CollectiveKind
from phalanx.planner.device_costs import DeviceCosts, attention_seconds, gemm_seconds, memory_op_seconds
from phalanx.planner.model_profile import (
    Affine,
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

    @property
    def total(self) -> ArrayLike:
        """Seconds of all parts."""
        return self.gemm + self.attention + self.memory_bound

    def __add__(self, other: "ComputeTime") -> "ComputeTime":
        return ComputeTime(
            self.gemm + other.gemm, self.attention + other.attention, self.memory_bound + other.memory_bound
        )

    def __mul__(self, factor: ArrayLike) -> "ComputeTime":
        return ComputeTime(self.gemm * factor, self.attention * factor, self.memory_bound * factor)


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
            reduce_bytes.append(_evaluate(op.num_bytes, shard.samples))
        elif isinstance(op, ExpertAllToAll):
            # Each tensor rank sends its own part of the tokens.
            dispatch_bytes.append(_evaluate(op.num_bytes, shard.samples) / shard.tensor)
            copies = op.copies_per_token
        else:
            total = total + cost_of(op, shard)
            if isinstance(op, Gemm) and op.is_grouped:
                num_expert_gemms = num_expert_gemms + np.maximum(_evaluate(op.count, shard.samples) / shard.expert, 1.0)
            if isinstance(op, AttentionOp):
                heads = op.num_kv_heads / np.minimum(shard.tensor, op.num_kv_heads)
                tokens = _evaluate(op.samples, shard.samples) * shard.context * op.num_keys
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
    dims = {name: _evaluate(getattr(op, name), shard.samples) for name in ("count", "m", "n", "k")}
    if op.is_expert:
        # The tokens of all ranks of a group meet at the rank that has their expert; where tensor ranks have divided
        # the sequence, each brings its part.
        rows = "m" if op.m.per_sample else "k"
        dims["count"] = np.maximum(dims["count"] / shard.expert, 1.0)
        dims[rows] = dims[rows] * shard.expert / shard.tensor
    elif op.tp_dim:
        dims[op.tp_dim] = np.maximum(dims[op.tp_dim] / shard.tensor, 1.0)
    return gemm_seconds(
        device, **dims, element_bytes=op.element_bytes, has_weight=op.has_weight, is_grouped=op.is_grouped
    )


def _memory_op_time(device: DeviceCosts, op: MemoryOp, shard: ShardSpec) -> ArrayLike:
    moved_bytes = _evaluate(op.fused_bytes if shard.fuses_memory_ops else op.unfused_bytes, shard.samples)
    launches = float(op.launches) if shard.fuses_memory_ops else 1.0
    num_ranks = shard.tensor if op.tp_sharded or shard.sequence_parallel else 1
    return memory_op_seconds(device, moved_bytes / num_ranks, launches)


def _evaluate(size: Affine, samples: ArrayLike) -> ArrayLike:
    return size.fixed + size.per_sample * samples


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
    recompute_s: ArrayLike = 0.0
    num_reduces, num_dispatches = work_done.num_reduces, work_done.num_dispatches
    launch_s = _launch_seconds(stack, work_done)
    if recomputed is not None:
        launch_s = launch_s + _launch_seconds(stack, recomputed)
        recompute_s = recomputed.compute.memory_bound if mode == "selective" else recomputed.compute.total
        if mode != "selective":
            num_reduces += recomputed.num_reduces
            num_dispatches += recomputed.num_dispatches
    expert_factor = stack.expert_factor if has_experts else 1.0
    compute_factor = expert_factor * stack.compute_factor
    reduced_bytes = work_done.reduce_bytes if work_done.num_reduces or recomputed is None else recomputed.reduce_bytes
    dispatched_bytes = (
        work_done.dispatch_bytes if work_done.num_dispatches or recomputed is None else recomputed.dispatch_bytes
    )
    kv_gather_s = collective_time("all_gather", "context", work_done.kv_bytes, 1.0)
    return PassBreakdown(
        gemm=work_done.compute.gemm * compute_factor * (stack.fp8_gemm_factor if quantized else 1.0),
        attention=work_done.compute.attention * compute_factor,
        memory_bound=work_done.compute.memory_bound * compute_factor,
        recomputation=recompute_s * compute_factor,
        tp_all_reduce=num_reduces
        * collective_time("all_reduce", "tensor", reduced_bytes, 1.0)
        * (1 - stack.max_tp_overlap),
        cp_all_gather_kv=np.maximum(0.0, kv_gather_s - work_done.compute.attention * stack.compute_factor),
        ep_all_to_all=num_dispatches
        * collective_time("all_to_all", "expert", dispatched_bytes, work_done.copies_per_token)
        * expert_factor,
        fsdp_exposed=0.0,
        kernel_launch=launch_s,
    )


def _launch_seconds(stack: SoftwareStack, work_done: SegmentWork) -> ArrayLike:
    """Seconds that the host needs for what a pass through a segment launches."""
    launches = work_done.num_launches + work_done.num_expert_gemms * stack.launches_per_expert_gemm
    return launches * stack.launch_s + work_done.num_dispatches * stack.routing_sync_s
