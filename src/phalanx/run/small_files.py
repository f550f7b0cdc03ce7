"""Types of the values in the small JSON files of a run (plan.json, cluster.json, result.json), by key."""

from collections.abc import Mapping
from math import isfinite
from typing import Any

NUMBER_KEYS = frozenset(
    {"trainable_parameters", "flops_per_sample", "units_per_sample", "predicted_step_s", "calibrated_step_s"}
    | {"activation_bytes_per_sample", "frozen_parameters", "num_restarts"}
    | {"physical_cores", "device_count", "threads_per_worker", "steps"}
)
TEXT_KEYS = frozenset(
    {"unit", "data_summary", "flops_rule", "device", "device_name", "data_sheet_source", "host", "status", "digest"}
)
MAPPING_KEYS = frozenset({"measured_matmul_tflops", "data_sheet_tflops", "predicted_breakdown_s", "session", "git"})
LIST_KEYS = frozenset({"auto_choices"})
AUTO_CHOICE_KEYS = frozenset({"key", "value", "reason"})


def drop_malformed(value: Mapping[str, Any]) -> dict[str, Any]:
    """What a small JSON file of a run says, without what is not of its kind: it may be damaged."""
    return {key: each for key, each in value.items() if _has_expected_type(key, each)}


def _has_expected_type(key: str, value: Any) -> bool:
    if key in NUMBER_KEYS:
        return value is None or (is_number(value) and 0 <= value < 1e30)
    if key in TEXT_KEYS:
        return value is None or isinstance(value, str)
    if key in LIST_KEYS:
        return isinstance(value, list) and all(
            isinstance(each, dict) and each.keys() >= AUTO_CHOICE_KEYS for each in value
        )
    if key.endswith("_tflops"):
        return isinstance(value, dict) and all(is_number(each) and 0 <= each < 1e30 for each in value.values())
    if key == "session":
        return isinstance(value, dict) and isinstance(value.get("optimizer"), str)
    return isinstance(value, dict) if key in MAPPING_KEYS else True


def is_number(value: Any) -> bool:
    """Whether a JSON value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
