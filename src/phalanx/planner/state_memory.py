"""What a training run holds from step to step on one device: weights, their gradients and the optimizer's state; and
the copies of weights and gradients that come and go while a step is computed. Elements and bytes, no activations.

Bytes of a parameter. Megatron-LM's table (docs, distributed optimizer): bf16 weights with fp32 gradients 18, or
6 + 12/d where d replicas divide the optimizer; fp16 20, or 4 + 16/d, since an fp32 copy of gradients is made for the
update; fp32 16. Where weights are held in fp32 and cast when they are used (torch's FSDP2, autocast, Phalanx) 16, and 2
for the cast. ZeRO: Rajbhandari et al. 2020, section 5.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from phalanx.planner.model_profile import ModelSegment
from phalanx.planner.scenario import Scenario
from phalanx.planner.segment_costs import ArrayLike

FP32_WEIGHT_STACKS = ("phalanx", "torch", "xla")
"""Stacks that keep weights in fp32 and cast them at use; others keep 16 bits and an fp32 copy."""
HALF_OR_LOWER_PRECISIONS = ("bf16", "fp16", "fp8", "fp4")
"""Precisions in which products read weights in 16 bits or fewer."""
DOUBLE_GRADIENT_STACKS = ("megatron-deepspeed",)
"""Stacks that keep bf16 gradients in addition to fp32 ones (DeepSpeed's BF16 optimizer as BLOOM was trained with)."""
MOMENTS_BY_OPTIMIZER = {"adamw": 2, "lamb": 2, "sgd": 1, "lars": 1, "muon": 1}
"""Numbers that an optimizer keeps for each parameter. (muon's vectors have two, but they are few.)"""
BYTES_PER_MOMENT = {"fp32": 4.0, "bf16": 2.0, "int8": 1.03}
"""Bytes of each moment. int8 has a scale for each block (Dettmers et al. 2022): 4 bytes for 128 values."""


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters of a part of a model on one rank, before data-parallel ranks divide them."""

    dense_count: float = 0.0
    expert_count: float = 0.0
    frozen_share: float = 0.0
    """Fraction of both that is not trained."""
    int8_share: float = 0.0
    """Fraction of both that is held in 8 bits, and turned into 16 only while its layer computes."""
    largest_weight: float = 0.0
    """Elements of the largest weight."""

    @property
    def count(self) -> float:
        """All of them."""
        return self.dense_count + self.expert_count


@dataclass(frozen=True)
class StateBytes:
    """Bytes on one device for the whole of a step."""

    parameters: float
    gradients: float
    optimizer_state: float


@dataclass(frozen=True)
class OptimizerState:
    """How an optimizer keeps its state: `moments` bytes for each parameter; `offloaded`: in the host's memory. The
    moving average of the weights is always with these."""

    bytes_per_parameter: float
    offloaded: bool
    ema_bytes_per_parameter: float = 0.0


NO_OPTIMIZER_STATE = OptimizerState(0.0, True)
"""The optimizer that keeps the least state."""


def optimizer_state_of(
    optimizer: str, state_dtype: str, offload: bool, momentum: float = 0.9, has_ema: bool = False
) -> OptimizerState:
    """The optimizer state for the names of a recipe. Raises KeyError for an unknown optimizer or format."""
    bytes_per_moment = BYTES_PER_MOMENT[state_dtype] if optimizer == "adamw" else BYTES_PER_MOMENT["fp32"]
    # lars and muon have their buffer at momentum 0, too
    num_moments = 0 if optimizer == "sgd" and not momentum else MOMENTS_BY_OPTIMIZER[optimizer]
    return OptimizerState(num_moments * bytes_per_moment, offload, 4.0 if has_ema else 0.0)


def count_parameters(scenario: Scenario, segments: Iterable[tuple[ModelSegment, int]]) -> ParameterCounts:
    """Parameters of segments, each so often, on one rank."""
    parallelism = scenario.parallelism
    dense_count = expert_count = frozen_count = int8_count = largest_weight = 0.0
    for segment, count in segments:
        weights = segment.weights
        dense_per_rank = weights.tp_sharded / parallelism.tensor + weights.replicated
        expert_per_rank = weights.expert / parallelism.expert
        dense_count += count * dense_per_rank
        expert_count += count * expert_per_rank
        largest_weight = max(
            largest_weight, weights.largest_weight / (parallelism.expert if weights.expert else parallelism.tensor)
        )
        if weights.count:
            count_per_rank = count * (dense_per_rank + expert_per_rank)
            frozen_count += count_per_rank * weights.frozen_count / weights.count
            int8_count += count_per_rank * weights.int8_count / weights.count
    total_count = dense_count + expert_count or 1.0
    return ParameterCounts(
        dense_count, expert_count, frozen_count / total_count, int8_count / total_count, largest_weight
    )


def state_bytes_of(scenario: Scenario, parameters: ParameterCounts, optimizer_state: OptimizerState) -> StateBytes:
    """Bytes of the training state on one rank that has these parameters."""
    half_precision, fp16 = scenario.precision in HALF_OR_LOWER_PRECISIONS, scenario.precision == "fp16"
    fp32_weights = scenario.zero_level == 3 or scenario.stack.name in FP32_WEIGHT_STACKS or not half_precision
    weight_bytes = 4.0 if fp32_weights else 2.0
    gradient_bytes = 4.0 if fp32_weights else (2.0 if fp16 else float(scenario.stack.gradient_bytes))
    if scenario.precision == "bf16" and not fp32_weights and scenario.stack.name in DOUBLE_GRADIENT_STACKS:
        gradient_bytes += 2.0
    master_bytes = 0.0 if fp32_weights else 4.0
    fp32_grad_copy_bytes = 4.0 if fp16 and not fp32_weights else 0.0
    # An optimizer that updates in the host's memory has its fp32 weights there, if those of the device are copies.
    state_bytes = (
        0.0 if optimizer_state.offloaded else master_bytes + fp32_grad_copy_bytes + optimizer_state.bytes_per_parameter
    )
    state_bytes += optimizer_state.ema_bytes_per_parameter
    optimizer_count, gradient_count, weight_count = (sharded_count(scenario, parameters, level) for level in (1, 2, 3))
    trained_share = 1.0 - parameters.frozen_share
    return StateBytes(
        parameters=(weight_bytes * (1.0 - parameters.int8_share) + 1.0 * parameters.int8_share) * weight_count,
        gradients=(
            gradient_bytes
            + scenario.transport.extra_bytes_per_element
            * (scenario.parallelism.replicate > 1 or not scenario.transport.overlaps_backward)
        )
        * gradient_count
        * trained_share,
        optimizer_state=state_bytes * optimizer_count * trained_share,
    )


def sharded_count(scenario: Scenario, parameters: ParameterCounts, zero_level: int) -> float:
    """Parameters of which one rank holds what ZeRO divides from `zero_level` on: 1 the optimizer's state, 2 gradients,
    too, 3 weights, too."""
    if scenario.zero_level < zero_level:
        return parameters.count
    parallelism = scenario.parallelism
    # Copies of a sharded model (hybrid sharding) divide nothing among each other.
    num_ranks = parallelism.context * (parallelism.shard if scenario.zero_level == 3 else scenario.data_parallel)
    return float(shard_elements(parameters.dense_count, parameters.expert_count, num_ranks, parallelism.expert))


def shard_elements(dense: ArrayLike, expert: ArrayLike, num_ranks: ArrayLike, expert_parallel: ArrayLike) -> ArrayLike:
    """Elements on each of `num_ranks` that divide those of one: an expert is where its rank of expert parallelism is,
    so fewer ranks have the same. Numbers or arrays."""
    return dense / num_ranks + expert / np.maximum(1.0, num_ranks / expert_parallel)


def gathers_root_in_fp32(scenario: Scenario) -> bool:
    """Whether sharded weights outside of blocks are gathered in fp32 though products read 16 bits: Phalanx does, since
    embeddings and norms read fp32 (train/distributed/fsdp.py)."""
    half_precision = scenario.precision in HALF_OR_LOWER_PRECISIONS
    return half_precision and scenario.zero_level == 3 and scenario.stack.name == "phalanx"


def gathered_weight_bytes(scenario: Scenario, parameters: ParameterCounts, *, of_root: bool = False) -> float:
    """Bytes of weights as products read them, where these are not what the rank holds anyway. `of_root`: weights
    outside of blocks, where autocast copies the largest, the head's, from fp32."""
    half_precision = scenario.precision in HALF_OR_LOWER_PRECISIONS
    if of_root and gathers_root_in_fp32(scenario):
        return 4.0 * parameters.count + 2.0 * parameters.largest_weight
    if scenario.zero_level == 3:
        return (2.0 if half_precision else 4.0) * parameters.count
    has_copies = half_precision and scenario.stack.name in FP32_WEIGHT_STACKS
    return 2.0 * parameters.count * (1.0 - parameters.int8_share) if has_copies else 0.0


def new_gradient_bytes(scenario: Scenario, parameters: ParameterCounts) -> float:
    """Bytes of gradients as backward makes them, before they are added to those that are held. Autograd makes each in
    the precision of its product, one after the other. Sharded weights have theirs together. Transformer Engine, which
    adds to the held ones at once, keeps an empty one for each shape of a weight all the same (`get_dummy_wgrad`): in
    SimuMax's runs of Megatron-LM on B200 just what is missing without."""
    element_bytes = 2.0 if scenario.precision in HALF_OR_LOWER_PRECISIONS else 4.0
    if scenario.zero_level < 3 and scenario.stack.name in FP32_WEIGHT_STACKS:
        trained_count = parameters.count * (1.0 - parameters.frozen_share)
        return (element_bytes + (4.0 if scenario.precision in HALF_OR_LOWER_PRECISIONS else 0.0)) * min(
            parameters.largest_weight, trained_count
        )
    return element_bytes * parameters.count * (1.0 - parameters.frozen_share)


def reduce_scatter_buffer_bytes(scenario: Scenario, parameters: ParameterCounts) -> float:
    """Bytes of the fp32 copy of a gathered gradient that sharding ranks add up."""
    return 4.0 * parameters.count * (1.0 - parameters.frozen_share) if scenario.zero_level == 3 else 0.0
