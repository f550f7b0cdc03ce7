"""One micro-batch in one stage of a model: the bytes that it leaves between forward and backward, and those of each
moment of its backward, by layout, precision and way of recomputing (Korthikanti et al. 2022).
"""

from dataclasses import dataclass
from typing import Literal

from phalanx.planner.model_profile import Affine, AttentionOp, ModelSegment, SavedActivations
from phalanx.planner.pipeline import StageSegments
from phalanx.planner.scenario import Scenario
from phalanx.planner.state_memory import (
    HALF_OR_LOWER_PRECISIONS,
    ParameterCounts,
    count_parameters,
    gathered_weight_bytes,
    gathers_root_in_fp32,
    new_gradient_bytes,
    reduce_scatter_buffer_bytes,
)

LossMode = Literal["whole", "fused", "chunked"]
"""Whether logits exist in fp32, in 16 bits alone (one kernel from there to the loss), or never all at once."""
IN_PLACE_LOSS_STACKS = ("megatron", "megatron-2021", "megatron-deepspeed", "xla")
"""Stacks with a loss that turns logits into fp32 probabilities, and these into gradients, in place. In the others the
compiler, if any, compiles only the blocks, and there are three fp32 copies of the logits."""
PARALLEL_LOSS_COPIES = {"torch": 4 / 3}
"""By what those copies are more where tensor ranks divide the vocabulary: torch's `loss_parallel` has four at a time in
backward (torch/distributed/tensor/parallel/loss.py)."""
GATHERED_INPUT_COPIES = {"torch": 4}
"""How many times what enters a block stands gathered along the sequence in its backward, where tensor ranks divide it:
the input of a product and the gradient of another's result, 2, if products gather their inputs again; torch's layers
keep theirs, two to a block."""
SELECTIVE_SAVED_SHARE = {"torch": 0.6}
"""What selective recomputation keeps of the results of products and attention: torchtitan's policy, every second
product and all attention, 0.6 of the bytes in a Llama."""
BYTES_PER_ATTENTION_SCORE = 5.0
"""Bytes of a score where attention stores them: the softmax, dropout's mask and what it leaves (Korthikanti et al.
2022, section 4.1)."""
LOSS_CHUNK_ROWS = 1024
"""Rows of logits that a chunked loss has at a time (train/ops/linear_cross_entropy.py; Liger's are of the same
order)."""


@dataclass(frozen=True)
class BackwardPoint:
    """A moment of backward: bytes of what forward kept that are gone by then, and of what comes and goes."""

    released_bytes: float
    transient_bytes: float


@dataclass(frozen=True)
class StageActivations:
    """A micro-batch in one stage: bytes held from forward to backward, and the moments of backward."""

    saved_bytes: float
    backward_points: tuple[BackwardPoint, ...]


def estimate_stage_activations(
    scenario: Scenario, stage: StageSegments, rank_parameters: ParameterCounts, loss_mode: LossMode
) -> StageActivations:
    """Estimate the activations of a micro-batch in a stage of a rank; `rank_parameters` counts all stages of that
    rank."""
    saved = [(segment, count, _saved_bytes(scenario, segment, loss_mode)) for segment, count in stage.segments]
    weight_copies = _weight_copy_bytes(scenario, stage, rank_parameters)
    released, pending_gradients, points = 0.0, 0.0, []
    for segment, count, saved_bytes in reversed(saved):
        segment_gradients = 0.0
        if not segment.is_block:
            segment_gradients = new_gradient_bytes(scenario, count_parameters(scenario, [(segment, 1)]))
            is_chunked = loss_mode == "chunked" and segment.has_logits and scenario.stack.name == "phalanx"
            if is_chunked or gathers_root_in_fp32(scenario):
                segment_gradients *= 2  # in fp32; Liger adds chunks up in the weight's format
        peak_bytes = _peak_backward_bytes(scenario, segment, loss_mode)
        points.append(
            BackwardPoint(
                released, weight_copies + pending_gradients + segment_gradients + max(0.0, peak_bytes - saved_bytes)
            )
        )
        released += count * saved_bytes
        if scenario.zero_level == 3:  # what is outside of blocks is scattered together, when backward is through
            pending_gradients += segment_gradients
    return StageActivations(released, tuple(points))


def _weight_copy_bytes(scenario: Scenario, stage: StageSegments, rank_parameters: ParameterCounts) -> float:
    """Bytes of copies of weights and gradients that are there in all of backward."""
    blocks = [count_parameters(scenario, [(segment, 1)]) for segment, _ in stage.segments if segment.is_block]
    largest_block = max(blocks, key=lambda each: each.count, default=ParameterCounts())
    outside_blocks = count_parameters(
        scenario, [(segment, count) for segment, count in stage.segments if not segment.is_block]
    )
    if scenario.zero_level < 3:
        copies = gathered_weight_bytes(scenario, rank_parameters)
        if scenario.checkpointing in ("selective", "full"):
            # Autocast casts frozen weights in each call: a checkpointed block's are there only while it is at work.
            parts = (
                (rank_parameters, 1.0 - rank_parameters.frozen_share),
                *((part, part.frozen_share) for part in (largest_block, outside_blocks)),
            )
            copies = min(copies, sum(gathered_weight_bytes(scenario, part) * share for part, share in parts))
        return copies + new_gradient_bytes(scenario, largest_block)
    if scenario.parallelism.pipeline > 1:
        # Torch's pipeline keeps weights gathered and whole fp32 gradients from the first micro-batch to the last.
        return (
            gathered_weight_bytes(scenario, rank_parameters)
            - gathered_weight_bytes(scenario, outside_blocks)
            + gathered_weight_bytes(scenario, outside_blocks, of_root=True)
            + reduce_scatter_buffer_bytes(scenario, rank_parameters)
            + new_gradient_bytes(scenario, largest_block)
        )
    # The block at work and the one that is gathered ahead; what is outside of blocks stays (FSDP2's root).
    return (
        2 * gathered_weight_bytes(scenario, largest_block)
        + gathered_weight_bytes(scenario, outside_blocks, of_root=True)
        + new_gradient_bytes(scenario, largest_block)
        + reduce_scatter_buffer_bytes(scenario, largest_block)
    )


def _saved_bytes(scenario: Scenario, segment: ModelSegment, loss_mode: LossMode) -> float:
    """Bytes that a micro-batch leaves in one segment between forward and backward."""
    inputs = SavedActivations(replicated=segment.input_bytes)
    if segment.is_block and scenario.checkpointing == "full":
        return _bytes_per_rank(scenario, inputs)
    if segment.is_block and scenario.checkpointing == "selective":
        selective_bytes = _bytes_per_rank(scenario, segment.saved_when_selective) * SELECTIVE_SAVED_SHARE.get(
            scenario.stack.name, 1.0
        ) + _bytes_per_rank(scenario, inputs)
        return min(
            selective_bytes, _bytes_per_rank(scenario, _saved_and_peaks(scenario, segment, loss_mode)[0])
        ) + _attention_score_bytes(scenario, segment)
    score_bytes = 0.0 if scenario.checkpointing == "attention" else _attention_score_bytes(scenario, segment)
    return _bytes_per_rank(scenario, _saved_and_peaks(scenario, segment, loss_mode)[0]) + score_bytes


def _peak_backward_bytes(scenario: Scenario, segment: ModelSegment, loss_mode: LossMode) -> float:
    """Bytes of a segment, what forward kept among them, in the fullest moment of its backward."""
    saved, peaks = _saved_and_peaks(scenario, segment, loss_mode)
    peak_bytes = max(_bytes_per_rank(scenario, each) for each in (saved, *peaks))
    tensor = scenario.parallelism.tensor
    if segment.is_block and tensor > 1 and scenario.stack.sequence_parallel:
        peak_bytes += (
            GATHERED_INPUT_COPIES.get(scenario.stack.name, 2)
            * (tensor - 1)
            * _bytes_per_rank(scenario, SavedActivations(replicated=segment.input_bytes))
        )
    return peak_bytes + _attention_score_bytes(scenario, segment)


def _saved_and_peaks(
    scenario: Scenario, segment: ModelSegment, loss_mode: LossMode
) -> tuple[SavedActivations, tuple[SavedActivations, ...]]:
    """What a segment keeps without recomputation, and its fullest moments, by how it is computed."""
    plain, fused = (segment.saved, segment.peaks), (segment.saved_when_fused, segment.peaks_when_fused)
    if segment.is_block or loss_mode == "fused" or not segment.has_logits:
        return fused if scenario.stack.fuses_memory_ops else plain
    logits = segment.saved.tp_sharded  # in fp32
    if loss_mode == "chunked":
        chunk_share = min(
            1.0,
            LOSS_CHUNK_ROWS / (scenario.profile.units_per_sample * scenario.micro_size / scenario.parallelism.context),
        )
        return SavedActivations(Affine(), segment.saved.replicated), tuple(
            SavedActivations(_scale_size(it.tp_sharded, chunk_share), it.replicated) for it in plain[1]
        )
    if scenario.stack.name in IN_PLACE_LOSS_STACKS:
        replicated = segment.saved_when_fused.replicated
        return SavedActivations(logits, replicated), (
            SavedActivations(_scale_size(logits, 1.5), replicated),
        )  # their gradient in 16 bits
    copies = PARALLEL_LOSS_COPIES.get(scenario.stack.name, 1.0) if scenario.parallelism.tensor > 1 else 1.0
    return segment.saved, tuple(
        SavedActivations(_scale_size(each.tp_sharded, copies), each.replicated) for each in segment.peaks
    )


def _attention_score_bytes(scenario: Scenario, segment: ModelSegment) -> float:
    """Bytes of scores, where attention stores them."""
    if scenario.stack.attention_speed:
        return 0.0
    score_bytes, samples = 0.0, scenario.micro_size / scenario.parallelism.context
    for op in segment.ops_of("forward"):
        if isinstance(op, AttentionOp):
            num_heads = op.num_heads / scenario.parallelism.tensor if op.tp_sharded else op.num_heads
            score_bytes += (
                BYTES_PER_ATTENTION_SCORE * num_heads * op.num_queries * op.num_keys * op.samples.evaluate(samples)
            )
    return score_bytes


def _bytes_per_rank(scenario: Scenario, saved: SavedActivations) -> float:
    """Bytes of a micro-batch on one rank, in the precision of the run."""
    num_bytes = saved.bytes_on_rank(
        scenario.micro_size / scenario.parallelism.context,
        scenario.parallelism.tensor,
        scenario.stack.sequence_parallel,
    )
    return num_bytes * (2 if scenario.precision in HALF_OR_LOWER_PRECISIONS else 4) / scenario.profile.element_bytes


def _scale_size(size: Affine, factor: float) -> Affine:
    return Affine(size.fixed * factor, size.per_sample * factor)
