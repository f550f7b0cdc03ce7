"""Predict and choose. So far: every `auto` of a recipe becomes a value, by rules over measured numbers.

Nothing is measured here: what trials and probes found comes in as plain numbers.
"""

from phalanx.plan.memory import (
    MemoryProfile,
    WorkerMemory,
    choose_memory,
    fits_unsharded,
    is_model_sharded,
    loss_modes_to_try,
    micro_batch_candidates,
    next_smaller_micro_size,
)
from phalanx.plan.resolve import (
    COMMON_WORLD_SIZES,
    AutoChoice,
    build_plan_json,
    choose_bucket_mib,
    choose_compile,
    choose_determinism,
    choose_num_threads,
    choose_precision,
    choose_warmup_steps,
    choose_without_trials,
    num_data_parallel_groups,
    precisions_to_time,
    predict_precision,
    resolve_recipe,
    resume_recipe,
)

__all__ = [
    "COMMON_WORLD_SIZES",
    "AutoChoice",
    "MemoryProfile",
    "WorkerMemory",
    "build_plan_json",
    "choose_bucket_mib",
    "choose_compile",
    "choose_determinism",
    "choose_memory",
    "choose_num_threads",
    "choose_precision",
    "choose_warmup_steps",
    "choose_without_trials",
    "fits_unsharded",
    "is_model_sharded",
    "loss_modes_to_try",
    "micro_batch_candidates",
    "next_smaller_micro_size",
    "num_data_parallel_groups",
    "precisions_to_time",
    "predict_precision",
    "resolve_recipe",
    "resume_recipe",
]
