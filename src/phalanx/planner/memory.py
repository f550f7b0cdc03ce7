"""Predict how much memory of a device a step needs, part by part: the training state (state_memory.py), activations by
the pipeline's order of work (activation_memory.py), what comes and goes at the fullest moment of backward, and what
lies outside tensors; and by how much a run does not fit, with the single change of its recipe that would make it fit.

All quantities are bytes on one device. `allocated` is what torch's `max_memory_allocated` counts, `reserved`
`max_memory_reserved`, `total` what `nvidia-smi` shows for the process.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from phalanx.cluster.spec import AcceleratorSpec
from phalanx.formatting import BYTES_PER_GIB
from phalanx.planner.activation_memory import LossMode, StageActivations, estimate_stage_activations
from phalanx.planner.pipeline import PipelineOpKind, StageSegments, rank_schedule, split_into_stages
from phalanx.planner.scenario import PipelineSchedule, Scenario
from phalanx.planner.state_memory import (
    NO_OPTIMIZER_STATE,
    OptimizerState,
    ParameterCounts,
    StateBytes,
    count_parameters,
    optimizer_state_of,
    state_bytes_of,
)
from phalanx.recipe.work_division import list_divisors

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
MAX_DEVICE_FACTOR = 1024
"""How many times as many devices are thought of at most."""
MEMORY_LABELS = {
    "parameters": "weights",
    "gradients": "gradients",
    "optimizer_state": "the optimizer's state",
    "activations": "activations",
    "temporaries": "temporary buffers in backward",
    "comm_buffers": "buffers of communication and of checkpoints",
    "fragmentation": "fragmentation",
    "context": "the device's context",
}


@dataclass(frozen=True)
class NonTensorMemory:
    """What a stack needs that no tensor of the model shows: fragmentation as a share of what is allocated, bytes of the
    context, and bytes of buckets in which gradients and weights travel."""

    fragmentation_share: float = FRAGMENTATION_SHARE
    context_bytes: float = GPU_CONTEXT_BYTES
    bucket_bytes: float = 0.0


OVERHEAD_BY_STACK = {
    "megatron-2021": NonTensorMemory(fragmentation_share=0.08, context_bytes=1573 * 2.0**20),
    "megatron-deepspeed": NonTensorMemory(0.08, context_bytes=1573 * 2.0**20, bucket_bytes=2 * 2 * 5e8),
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


@dataclass(frozen=True)
class RecipeChange:
    """Overrides of a recipe, and the memory that it needs then."""

    overrides: str
    memory: MemoryEstimate


def suggest_memory_changes(scenario: Scenario, options: TrainingOptions, capacity_bytes: float) -> str:
    """What a run needs that does not fit into `capacity_bytes` bytes of a device, in GiB, and what would help."""
    memory = estimate_memory(scenario, options)
    low, high = memory.interval()
    largest_parts = sorted(((getattr(memory, name), word) for name, word in MEMORY_LABELS.items()), reverse=True)
    needs = (
        f"needs {_format_gib(memory.total)} GiB ({_format_gib(low)} to {_format_gib(high)}) of a device that has "
        f"{_format_gib(capacity_bytes)}, {_format_gib(memory.total - capacity_bytes)} too many; most are "
        f"{', '.join(f'{word} {_format_gib(size)}' for size, word in largest_parts[:3])}"
    )
    if changes := find_sufficient_changes(scenario, options, capacity_bytes):
        return f"{needs}. Would fit: {', or '.join(_format_change(each) for each in changes)}"
    change = combine_changes(scenario, options, capacity_bytes)
    outcome = "together would fit" if change.memory.total <= capacity_bytes else "not even together would fit"
    return f"{needs}. No single change is enough; {outcome}: {_format_change(change)}"


def find_sufficient_changes(scenario: Scenario, options: TrainingOptions, capacity_bytes: float) -> list[RecipeChange]:
    """Changes of which each alone would make a run fit into `capacity_bytes` bytes, what costs least first."""
    sufficient_changes = []
    for propose in (
        _try_chunked_loss,
        _try_smaller_micro_batches,
        _try_checkpointing,
        _try_state_dtypes,
        _try_sharding,
        _try_offload,
        _try_more_devices,
    ):
        for overrides, changed_scenario, changed_options in propose(scenario, options):
            if (changed_memory := estimate_memory(changed_scenario, changed_options)).total <= capacity_bytes:
                sufficient_changes.append(RecipeChange(overrides, changed_memory))
                break
    return sufficient_changes


# --- kinds of changes, each from the mildest on -----------------------------------------------------------------------

ChangeCandidates = Iterator[tuple[str, Scenario, TrainingOptions]]


def _try_chunked_loss(scenario: Scenario, options: TrainingOptions) -> ChangeCandidates:
    if options.loss_mode != "chunked" and scenario.profile.units_per_sample > 1:
        yield "memory.chunked_loss=true", scenario, replace(options, loss_mode="chunked")


def _try_smaller_micro_batches(scenario: Scenario, options: TrainingOptions) -> ChangeCandidates:
    for micro_size in list_divisors(scenario.micro_size)[::-1]:
        if micro_size < scenario.micro_size:
            yield f"batch.micro_size={micro_size}", replace(scenario, micro_size=micro_size), options


def _try_checkpointing(scenario: Scenario, options: TrainingOptions) -> ChangeCandidates:
    modes = ("none", "selective", "full")
    current = 0 if scenario.checkpointing == "attention" else modes.index(scenario.checkpointing)
    for mode in modes[current + 1 :]:
        yield f"memory.activation_checkpointing={mode}", replace(scenario, checkpointing=mode), options


def _try_state_dtypes(scenario: Scenario, options: TrainingOptions) -> ChangeCandidates:
    formats = ("fp32", "bf16", "int8")
    if options.optimizer == "adamw" and not options.offload:
        for dtype in formats[formats.index(options.state_dtype) + 1 :]:
            yield f"optimizer.state_dtype={dtype}", scenario, replace(options, state_dtype=dtype)


def _try_sharding(scenario: Scenario, options: TrainingOptions) -> ChangeCandidates:
    current_shard = scenario.parallelism.shard if scenario.zero_level == 3 else 1
    for ranks in [] if scenario.profile.must_be_whole else list_divisors(scenario.data_parallel):
        if ranks > current_shard:
            yield (
                _format_sharding(scenario, ranks, scenario.data_parallel // ranks),
                _with_sharding(scenario, ranks, scenario.data_parallel // ranks),
                options,
            )


def _try_offload(scenario: Scenario, options: TrainingOptions) -> ChangeCandidates:
    if not options.offload and options.optimizer in ("adamw", "sgd") and not is_cpu(scenario.cluster.node.accelerator):
        yield "optimizer.offload=true", scenario, replace(options, offload=True)


def _try_more_devices(scenario: Scenario, options: TrainingOptions) -> ChangeCandidates:
    """Shards on more devices, of which each has its part of the same batch."""
    factor = MAX_DEVICE_FACTOR + 1 if scenario.profile.must_be_whole else 2
    while (
        factor <= MAX_DEVICE_FACTOR
        and scenario.global_batch % (scenario.data_parallel * factor * scenario.micro_size) == 0
    ):
        ranks = scenario.data_parallel * factor
        cluster = scenario.cluster.model_copy(update={"nodes": scenario.cluster.nodes * factor})
        changed = _with_sharding(replace(scenario, cluster=cluster), ranks, 1)
        yield f"{changed.parallelism.world} devices with {_format_sharding(scenario, ranks, 1)}", changed, options
        factor *= 2


def combine_changes(scenario: Scenario, options: TrainingOptions, capacity_bytes: float) -> RecipeChange:
    """Everything at once, without tensor or pipeline ranks; on more devices if it takes them and they are enough."""
    overrides, changed_scenario, changed_options = [], scenario, options
    for propose in (_try_chunked_loss, _try_smaller_micro_batches, _try_checkpointing, _try_sharding, _try_offload):
        for override, next_scenario, next_options in list(propose(changed_scenario, changed_options))[-1:]:
            overrides.append(override)
            changed_scenario, changed_options = next_scenario, next_options
    change = RecipeChange(" ".join(overrides), estimate_memory(changed_scenario, changed_options))
    if change.memory.total > capacity_bytes:
        for override, next_scenario, _ in _try_more_devices(changed_scenario, changed_options):
            if (memory := estimate_memory(next_scenario, changed_options)).total <= capacity_bytes:
                return RecipeChange(f"{override} {change.overrides}".strip(), memory)
    return change


def _with_sharding(scenario: Scenario, shard: int, replicate: int) -> Scenario:
    parallelism = scenario.parallelism.model_copy(update={"shard": shard, "replicate": replicate})
    return replace(scenario, parallelism=parallelism, zero_level=3)


def _format_sharding(scenario: Scenario, shard: int, replicate: int) -> str:
    same = replicate == scenario.parallelism.replicate
    return f"parallelism.shard={shard}" + ("" if same else f" parallelism.replicate={replicate}")


def _format_change(change: RecipeChange) -> str:
    return f"{change.overrides} ({_format_gib(change.memory.total)} GiB)"


def _format_gib(size: float) -> str:
    return f"{size / BYTES_PER_GIB:.1f}"
