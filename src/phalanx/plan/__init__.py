"""Predict and choose. So far: every `auto` of a recipe becomes a value, by rules over measured numbers.

Nothing is measured here: what trials and probes found comes in as plain numbers.
"""

from phalanx.plan.resolve import (
    COMMON_WORLDS,
    Choice,
    check_memory,
    choose_micro,
    choose_precision,
    choose_threads,
    go_on,
    plan_of,
    resolve,
)

__all__ = [
    "COMMON_WORLDS",
    "Choice",
    "check_memory",
    "choose_micro",
    "choose_precision",
    "choose_threads",
    "go_on",
    "plan_of",
    "resolve",
]
