"""The trials of a recipe, by the function that a process of its own calls, and what each does in words."""

from collections.abc import Mapping
from typing import Any

PROFILE_TRIAL = "phalanx.autoconfig.profile_trial:profile_model"
META_PROFILE_TRIAL = "phalanx.autoconfig.profile_trial:profile_model_meta"
TIMING_TRIAL = "phalanx.autoconfig.timing_trial:time_precisions"
MATMUL_TRIAL = "phalanx.autoconfig.trials:measure_matmul_rate"
TRACE_TRIAL = "phalanx.autoconfig.model_profile:cache_profile"
PARALLELISM_TRIAL = "phalanx.autoconfig.trials:check_parallelism"
MEMORY_FILLING_TRIALS = (PROFILE_TRIAL, TIMING_TRIAL)
"""Trials that may run out of memory."""
OUT_OF_MEMORY_KEY = "out_of_memory"
"""Key of what a trial returns that ran out of memory."""
OTHER_LOAD_KEY = "other_busy_cores"
"""Key of what a trial returns that measured time on a CPU: the cores that other processes used meanwhile."""
MAX_OTHER_LOAD = 0.3
"""Cores that other processes may use in a trial of which the times are kept for later starts."""
PACKING_KEY = "packing"
"""Key of a model's profile: how far a packed sample is from its documents alone, in words."""
ADAPTERS_KEY, UNCALLED_ADAPTERS_KEY = "adapters", "uncalled_adapters"
"""Keys of a model's profile: how many matrices have adapters, in words, and layers with one that are never called."""


def describe_trial(function: str, payload: Mapping[str, Any]) -> str:
    """Describe what a trial does."""
    if function == TIMING_TRIAL:
        compiled_text = ", compiled" if payload["compile"] else ""
        return f"timing micro-batches of {payload['micro']} in {', '.join(payload['precisions'])}{compiled_text}"
    return {
        PROFILE_TRIAL: "measuring memory and FLOPs of a sample",
        META_PROFILE_TRIAL: "estimating memory and FLOPs of a sample",
        MATMUL_TRIAL: "measuring the matmul rate",
        TRACE_TRIAL: "tracing the model",
        "phalanx.autoconfig.trials:check_imports": "checking what the recipe names",
        "phalanx.autoconfig.trials:begins": "checking the weights of init_from",
        "phalanx.autoconfig.trials:profile_recipe_steps": "profiling a few steps",
        PARALLELISM_TRIAL: "checking that the parallelism divides the model",
    }.get(function, function)
