"""From an `nn.Module` to its `ModelProfile`, without memory and without time; see trace_model.py."""

from phalanx.planner.trace.blocks import find_repeated_blocks
from phalanx.planner.trace.trace_model import (
    build_on_meta,
    image_classification_forward,
    language_modeling_forward,
    profile_autocast,
    profile_fake_tensors,
    profile_model,
)

__all__ = [
    "build_on_meta",
    "find_repeated_blocks",
    "image_classification_forward",
    "language_modeling_forward",
    "profile_autocast",
    "profile_fake_tensors",
    "profile_model",
]
