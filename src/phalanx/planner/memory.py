"""Predict how much memory of a device a step needs, part by part: the training state (state_memory.py), activations by
the pipeline's order of work (activation_memory.py), what comes and goes at the fullest moment of backward, and what
lies outside tensors.

All quantities are bytes on one device. `allocated` is what torch's `max_memory_allocated` counts, `reserved`
`max_memory_reserved`, `total` what `nvidia-smi` shows for the process.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from phalanx.cluster.spec import AcceleratorSpec
from phalanx.formatting import BYTES_PER_GIB
from phalanx.planner.activation_memory import LossMode, StageActivations, estimate_stage_activations
from phalanx.planner.pipeline import PipelineOpKind, PipelineSchedule, StageSegments, rank_schedule, split_into_stages
from phalanx.planner.scenario import Scenario
from phalanx.planner.state_memory import (
    NO_OPTIMIZER_STATE,
    OptimizerState,
    ParameterCounts,
    StateBytes,
    count_parameters,
    optimizer_state_of,
    state_bytes_of,
)

MemoryCounter = Literal["allocated", "reserved", "total"]
GPU_CONTEXT_BYTES = 0.6 * BYTES_PER_GIB
"""Bytes of a GPU's driver context with torch's kernels, which are loaded when needed."""
NCCL_COMMUNICATOR_BYTES = 0.3 * BYTES_PER_GIB
"""Bytes that NCCL takes for each process group of a device."""
CPU_PROCESS_BYTES = 0.3 * BYTES_PER_GIB
"""Bytes of a Python process with torch, on a CPU: measured with torch 2.11, resident after the first backward."""
FRAGMENTATION_SHARE = 0.03
"""Memory that torch's allocator reserves beyond the allocated peak, as a fraction of it, with expandable segments."""
USABLE_MEMORY_FRACTION = 0.95
"""Usable fraction of a device's memory: the rest covers errors of the prediction."""
RELATIVE_UNCERTAINTY = (0.02, 0.25, 0.5)
"""Relative uncertainty of the training state; of activations and temporaries; and of the rest. 95% of the 264 measured
runs in tests/helpers/memory_rows.py are within."""


@dataclass(frozen=True)
class NonTensorMemory:
    """What a stack needs that no tensor of the model shows: fragmentation as a share of what is allocated, bytes of the
    context, and bytes of buckets in which gradients and weights travel."""

    fragmentation_share: float = FRAGMENTATION_SHARE
    context_bytes: float = GPU_CONTEXT_BYTES
    bucket_bytes: float = 0.0


OVERHEAD_BY_STACK = {
    "megatron-2021": NonTensorMemory(fragmentation_share=0.08, context_bytes=1573 * 2.0**20, bucket_bytes=2 * 2 * 5e8)
}
"""Stacks from before segments could grow and kernels were loaded one by one: all of them took 1573 MiB on an A100
(measured with nvidia-smi; BLOOM, chronicles-prequel). DeepSpeed's two buckets have 5e8 elements of 16 bits each."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device at the fullest moment of a step, by part."""

    parameters: float
    gradients: float
    optimizer_state: float
    activations: float
    temporaries: float
    """Temporary buffers: a recomputed block, gradients of activations, logits, gathered weights."""
    comm_buffers: float
    """Buffers of communication; on a CPU those of the checkpoint that is being written, which is divided among
    replicas."""
    fragmentation: float
    context: float
    """The device's context; on a CPU the process."""

    @property
    def persistent_state(self) -> float:
        """What is there all the time."""
        return self.parameters + self.gradients + self.optimizer_state

    @property
    def allocated(self) -> float:
        """What torch's `max_memory_allocated` says."""
        return self.persistent_state + self.activations + self.temporaries

    @property
    def reserved(self) -> float:
        """What `max_memory_reserved` says."""
        return self.allocated + self.fragmentation

    @property
    def total(self) -> float:
        """All of it, as `nvidia-smi` shows it."""
        return self.reserved + self.comm_buffers + self.context

    def interval(self, counter: MemoryCounter = "total") -> tuple[float, float]:
        """The lowest and the highest that a measurement may show: from how far the measured runs of
        `RELATIVE_UNCERTAINTY` were off."""
        state_error, activation_error, other_error = RELATIVE_UNCERTAINTY
        other_bytes = {"allocated": 0.0, "reserved": self.fragmentation}.get(
            counter, self.fragmentation + self.comm_buffers + self.context
        )
        error_bytes = (
            state_error * self.persistent_state
            + activation_error * (self.activations + self.temporaries)
            + other_error * other_bytes
        )
        predicted_bytes = float(getattr(self, counter))
        return predicted_bytes - error_bytes, predicted_bytes + error_bytes


@dataclass(frozen=True)
class TrainingOptions:
    """What memory depends on and is not part of a `Scenario`. `optimizer`, its `momentum`, `state_dtype` (fp32, bf16,
    8bit: adamw's moments) and `offload` (of the optimizer, to the host) are as in a recipe. `loss_mode`: whether logits
    exist in fp32 (whole), only in 16 bits (fused) or never all at once (chunked)."""

    optimizer: str = "adamw"
    state_dtype: str = "fp32"
    offload: bool = False
    loss_mode: LossMode = "whole"
    momentum: float = 0.9
    has_ema: bool = False


DEFAULT_OPTIONS = TrainingOptions()


def estimate_memory(scenario: Scenario, options: TrainingOptions = DEFAULT_OPTIONS) -> MemoryEstimate:
    """Estimate the memory of the pipeline rank that needs most. Raises KeyError for an unknown optimizer or state."""
    return max(estimate_memory_by_rank(scenario, options), key=lambda each: each.total)


def lower_bound_bytes(scenario: Scenario, optimizer_state: OptimizerState = NO_OPTIMIZER_STATE) -> float:
    """Bytes that the setup needs at least, with any micro-batch, loss and activation checkpointing: its estimate
    without activations and temporary buffers."""
    stages, num_ranks = split_into_stages(scenario), scenario.parallelism.pipeline
    state_bytes = [
        _persistent_state(scenario, rank, stages[rank::num_ranks], optimizer_state)[1] for rank in range(num_ranks)
    ]
    return max(_assemble_estimate(scenario, state, 0.0, 0.0).total for state in state_bytes)


def estimate_memory_by_rank(scenario: Scenario, options: TrainingOptions = DEFAULT_OPTIONS) -> list[MemoryEstimate]:
    """Estimate the memory of each pipeline rank, in order; see `estimate_memory`."""
    loss_mode = options.loss_mode
    if scenario.stack.name == "phalanx" and loss_mode == "whole":
        if scenario.parallelism.tensor > 1:
            loss_mode = "chunked"  # ranks that divide the vocabulary never have all logits
        elif not is_cpu(scenario.cluster.node.accelerator):
            loss_mode = "fused"  # one kernel from the logits to their gradient (train/ops/cross_entropy_kernel.py)
    optimizer_state = optimizer_state_of(
        options.optimizer, options.state_dtype, options.offload, options.momentum, options.has_ema
    )
    stages, pipeline = split_into_stages(scenario), scenario.parallelism.pipeline
    estimates = []
    for rank in range(pipeline):
        rank_stages = stages[rank::pipeline]
        parameters, state_bytes = _persistent_state(scenario, rank, rank_stages, optimizer_state)
        chunks = [estimate_stage_activations(scenario, chunk, parameters, loss_mode) for chunk in rank_stages]
        estimates.append(_assemble_estimate(scenario, state_bytes, *_find_peak(scenario, rank, chunks)))
    return estimates


def _persistent_state(
    scenario: Scenario, rank: int, rank_stages: Sequence[StageSegments], optimizer_state: OptimizerState
) -> tuple[ParameterCounts, StateBytes]:
    """Parameters of a rank, and the bytes of its training state."""
    parallelism = scenario.parallelism
    parameters = count_parameters(scenario, [pair for chunk in rank_stages for pair in chunk.segments])
    if 0 < rank == parallelism.pipeline - 1:  # a tied weight stands at both ends
        parameters = replace(
            parameters, dense_count=parameters.dense_count + scenario.profile.tied_elements / parallelism.tensor
        )
    return parameters, state_bytes_of(scenario, parameters, optimizer_state)


def _assemble_estimate(
    scenario: Scenario, state_bytes: StateBytes, activations: float, temporaries: float
) -> MemoryEstimate:
    parallelism = scenario.parallelism
    allocated = state_bytes.parameters + state_bytes.gradients + state_bytes.optimizer_state + activations + temporaries
    overhead = OVERHEAD_BY_STACK.get(scenario.stack.name, NonTensorMemory())
    on_cpu = is_cpu(scenario.cluster.node.accelerator)
    inner_sizes = (parallelism.tensor, parallelism.pipeline, parallelism.context, parallelism.expert)
    num_communicators = sum(size > 1 for size in (scenario.data_parallel, *inner_sizes))
    saved = (state_bytes.parameters + state_bytes.optimizer_state) / parallelism.replicate
    return MemoryEstimate(
        parameters=state_bytes.parameters,
        gradients=state_bytes.gradients,
        optimizer_state=state_bytes.optimizer_state,
        activations=activations,
        temporaries=temporaries,
        comm_buffers=saved
        if on_cpu
        else NCCL_COMMUNICATOR_BYTES * num_communicators
        + (overhead.bucket_bytes if scenario.zero_level and scenario.data_parallel > 1 else 0.0),
        fragmentation=overhead.fragmentation_share * allocated,
        context=CPU_PROCESS_BYTES if on_cpu else overhead.context_bytes,
    )


def is_cpu(accelerator: AcceleratorSpec) -> bool:
    """Whether a device is the host's processor, which shares the host's memory."""
    return accelerator.generation == "cpu" or "CPU" in accelerator.name


def _find_peak(scenario: Scenario, rank: int, stages: Sequence[StageActivations]) -> tuple[float, float]:
    """Bytes that are held for backward, and that come and go, at the fullest moment of a rank: its work in order, and
    each moment of every backward."""
    live_bytes, peak_saved, peak_transient = 0.0, 0.0, 0.0
    for kind, chunk, releases in _schedule_of_rank(scenario, rank):
        stage = stages[chunk]
        if kind == "F":
            live_bytes += stage.saved_bytes
        elif kind == "B":
            for point in stage.backward_points:
                if live_bytes - point.released_bytes + point.transient_bytes > peak_saved + peak_transient:
                    peak_saved, peak_transient = live_bytes - point.released_bytes, point.transient_bytes
        if releases:
            live_bytes -= stage.saved_bytes
    return peak_saved, peak_transient


def _schedule_of_rank(scenario: Scenario, rank: int) -> Iterator[tuple[PipelineOpKind, int, bool]]:
    """What a rank does, as (kind, chunk, whether it is the last that needs what forward kept). Twice as many
    micro-batches as ranks fill a pipeline, more hold no more; fewer are what is left of a full one."""
    ranks, num_micro_batches = scenario.parallelism.pipeline, scenario.num_micro_batches
    schedule: PipelineSchedule = (
        "interleaved" if scenario.virtual_stages > 1 else scenario.parallelism.pipeline_schedule
    )
    releasing_kind = "W" if schedule == "zero-bubble" else "B"
    num_simulated = num_micro_batches if schedule == "gpipe" else 2 * ranks
    for kind, chunk, micro in rank_schedule(schedule, rank, ranks, scenario.virtual_stages, num_simulated):
        if micro < num_micro_batches:
            yield kind, chunk, kind == releasing_kind
