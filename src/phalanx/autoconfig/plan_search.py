"""Search the precision, parallelism, micro-batch and checkpointing of a planned run, within the memory of a device."""

from dataclasses import replace
from typing import Any

from phalanx.autoconfig.micro_batch import LANGUAGE_MODELING_TASK, LARGE_LOGITS_BYTES
from phalanx.cluster import Cluster
from phalanx.errors import RecipeError
from phalanx.formatting import BYTES_PER_GIB
from phalanx.planner.device_costs import DeviceCosts
from phalanx.planner.memory import MemoryEstimate, TrainingOptions, estimate_memory
from phalanx.planner.memory_advice import suggest_memory_changes
from phalanx.planner.model_profile import Gemm, ModelProfile
from phalanx.planner.scenario import Scenario, transport_of
from phalanx.planner.search import SearchResult, SearchSpace, search_parallelism
from phalanx.planner.stacks import device_costs_for_stack, phalanx_stack
from phalanx.planner.state_memory import optimizer_state_of
from phalanx.recipe import Recipe
from phalanx.recipe.schema import Parallelism

USABLE_MEMORY_FRACTION = 0.95
"""Usable fraction of a device's memory: the rest covers errors of the prediction."""
MIN_PRECISION_GAIN = 0.99
"""Another precision than the usual one must save at least so much."""


def search_precisions(
    recipe: Recipe, profile: ModelProfile, cluster: Cluster, num_devices: int, slowdown: float = 1.0
) -> tuple[SearchResult, DeviceCosts, float]:
    """The best of every precision that may be used, where computing takes `slowdown` times as long as usual."""
    device, device_stack = cluster.node.accelerator, phalanx_stack(cluster.node.accelerator, num_devices)
    used_stack = replace(
        device_stack,
        compute_factor=device_stack.compute_factor * slowdown,
        fuses_memory_ops=recipe.compile is not False,
    )
    memory_limit = device.memory_gib * BYTES_PER_GIB * USABLE_MEMORY_FRACTION
    space = SearchSpace(
        devices=num_devices,
        global_batch=recipe.batch.global_size,
        parallelism=recipe.parallelism if isinstance(recipe.parallelism, Parallelism) else None,
        micro_size=recipe.batch.micro_size if isinstance(recipe.batch.micro_size, int) else None,
        checkpointing_modes=("none", "selective", "full")
        if recipe.memory.activation_checkpointing == "auto"
        else (recipe.memory.activation_checkpointing,),
        domain_size=cluster.domain,
        replicas_only=recipe.determinism == "elastic" or recipe.local_sgd is not None,
        has_sequences=profile.units_per_sample > 1,
    )

    def memory_needed(setup: Scenario) -> float:
        return predict_memory(recipe, setup).total

    offload = recipe.optimizer.offload
    optimizer_state = optimizer_state_of(
        recipe.optimizer.name, recipe.optimizer.state_dtype, offload, recipe.optimizer.momentum
    )
    best_found: tuple[SearchResult, DeviceCosts] | None = None
    for precision in _candidate_precisions(recipe, device.tflops):
        rates = device_costs_for_stack(device, precision, used_stack)
        base = Scenario(
            profile,
            cluster,
            space.parallelism or Parallelism(),
            1,
            recipe.batch.global_size,
            precision,
            stack=used_stack,
            optimizer=recipe.optimizer.name,
            transport=transport_of(recipe, profile),
        )
        if (
            best_found is not None
            and best_found[0].candidates
            and rates.sustained_gemm_flops < best_found[1].sustained_gemm_flops
        ):
            continue  # nothing else differs but that it takes more memory
        found = search_parallelism(base, rates, space, memory_needed, memory_limit, optimizer_state)
        if best_found is None or (
            found.candidates
            and (
                not best_found[0].candidates or _best_seconds(found) < MIN_PRECISION_GAIN * _best_seconds(best_found[0])
            )
        ):
            best_found = found, rates
    assert best_found is not None
    if best_found[0].num_valid == 0:
        raise RecipeError(
            f"batch.global_size: {recipe.batch.global_size} samples and {profile.num_blocks} blocks cannot be divided "
            f"among {num_devices} devices; a multiple of {num_devices} samples can"
        )
    return best_found[0], best_found[1], memory_limit


def _best_seconds(found: SearchResult) -> float:
    return found.candidates[0].step_s


def _candidate_precisions(recipe: Recipe, known: Any) -> list[str]:
    """What may be computed in: as given, else what `auto` chooses from, if the device has it."""
    if recipe.precision != "auto":
        if recipe.precision not in known and not (recipe.precision == "bf16" and "fp16" in known):
            raise RecipeError(
                f"precision: {recipe.precision} is not among what the device computes in: {', '.join(known)}"
            )
        return [recipe.precision]
    return [name for name in ("bf16", "fp32") if name in known] or [next(iter(known))]


def predict_memory(recipe: Recipe, setup: Scenario) -> MemoryEstimate:
    """Bytes on the fullest device, with the recipe's optimizer and loss."""
    return estimate_memory(setup, make_training_options(recipe, setup))


def make_training_options(recipe: Recipe, setup: Scenario) -> TrainingOptions:
    """Return what the memory of a recipe's run depends on besides the scenario. With `memory.chunked_loss: auto`,
    large logits are chunked."""
    chunked = recipe.memory.chunked_loss
    if chunked == "auto":
        head = setup.profile.segments[-1]
        heads = (op for op in head.ops_of("forward") if isinstance(op, Gemm))
        logits = max(
            (4.0 * op.m.evaluate(setup.micro_size) * op.n.evaluate(setup.micro_size) for op in heads), default=0.0
        )
        chunked = recipe.task == LANGUAGE_MODELING_TASK and logits > LARGE_LOGITS_BYTES
    optimizer = recipe.optimizer
    return TrainingOptions(
        optimizer.name,
        optimizer.state_dtype,
        optimizer.offload,
        "chunked" if chunked else "whole",
        optimizer.momentum,
    )


def describe_no_fit(
    recipe: Recipe, found: SearchResult, cluster: Cluster, num_devices: int, memory_limit: float
) -> str:
    """That nothing fits: by how much, and what would."""
    assert found.closest is not None
    smallest = found.closest
    excess_gib = (smallest.peak_bytes - memory_limit) / BYTES_PER_GIB
    device = cluster.node.accelerator
    summary = (
        f"nothing fits: of {found.num_valid:,} layouts for {num_devices:,} x {device.name} not even the smallest, "
        f"which is "
        f"{excess_gib:.1f} GiB above {USABLE_MEMORY_FRACTION:.0%} of a device's {device.memory_gib:g}"
    )
    fit = suggest_memory_changes(smallest.scenario, make_training_options(recipe, smallest.scenario), memory_limit)
    return f"{summary}. It {fit.description}"
