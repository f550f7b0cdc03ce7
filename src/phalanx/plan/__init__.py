"""Predict and choose. So far: every `auto` of a recipe becomes a value, by rules over measured numbers.

Nothing is measured here: what trials and probes found comes in as plain numbers.
"""

from phalanx.plan.memory import (
    Needs,
    Room,
    choose_memory,
    divides_state,
    fits_whole,
    losses_to_try,
    sizes,
    smaller_micro,
)
from phalanx.plan.resolve import (
    COMMON_WORLDS,
    Choice,
    choices_untried,
    choose_bucket,
    choose_compile,
    choose_exact,
    choose_precision,
    choose_start,
    choose_threads,
    go_on,
    likely_precision,
    parts_of,
    plan_of,
    precisions_to_time,
    resolve,
)

__all__ = [
    "COMMON_WORLDS",
    "Choice",
    "Needs",
    "Room",
    "choices_untried",
    "choose_bucket",
    "choose_compile",
    "choose_exact",
    "choose_memory",
    "choose_precision",
    "choose_start",
    "choose_threads",
    "divides_state",
    "fits_whole",
    "go_on",
    "likely_precision",
    "losses_to_try",
    "parts_of",
    "plan_of",
    "precisions_to_time",
    "resolve",
    "sizes",
    "smaller_micro",
]
