"""By how much a run does not fit into a device's memory, and which single change of its recipe would make it fit, as
text for the end of an error message. Predicted by memory.py; nothing is tried.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from phalanx.formatting import BYTES_PER_GIB
from phalanx.planner.memory import MemoryEstimate, TrainingOptions, estimate_memory, is_cpu
from phalanx.planner.scenario import Scenario
from phalanx.recipe.work_division import list_divisors

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
