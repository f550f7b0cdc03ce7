"""Nested values with tensors in them: seen, changed, outlined, and filled in again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class TensorSpec:
    """What stands for a tensor in an outline."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def map_tensors(value: Any, transform: Callable[[Tensor], Any]) -> Any:
    """Lists, tuples and mappings with their tensors changed."""
    if isinstance(value, Tensor):
        return transform(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(each, transform) for each in value))
    if isinstance(value, tuple | list):
        return type(value)(map_tensors(each, transform) for each in value)
    if isinstance(value, dict):
        return {key: map_tensors(each, transform) for key, each in value.items()}
    return value


def to_specs(value: Any) -> Any:
    return map_tensors(value, lambda each: TensorSpec(tuple(each.shape), each.dtype))


def list_specs(outline: Any) -> list[TensorSpec]:
    if isinstance(outline, TensorSpec):
        return [outline]
    if isinstance(outline, tuple | list):
        return [spec for each in outline for spec in list_specs(each)]
    return [spec for each in outline.values() for spec in list_specs(each)] if isinstance(outline, dict) else []


def fill_specs(outline: Any, replacements: Iterator[Tensor]) -> Any:
    """An outline with tensors in the place of what stands for them."""
    if isinstance(outline, TensorSpec):
        return next(replacements)
    if isinstance(outline, tuple) and hasattr(outline, "_fields"):
        return type(outline)(*(fill_specs(each, replacements) for each in outline))
    if isinstance(outline, tuple | list):
        return type(outline)(fill_specs(each, replacements) for each in outline)
    if isinstance(outline, dict):
        return {key: fill_specs(each, replacements) for key, each in outline.items()}
    return outline


def list_tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(value, found.append)
    return found


def tensor_read_bytes(tensor: Tensor) -> float:
    """What reading a tensor moves: of one that repeats itself, its storage."""
    return float(min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()))


def op_name(operation: Any) -> str:
    """`mm` of `aten.mm.default`."""
    return str(operation).split(".")[1]


def module_device(module: nn.Module) -> torch.device:
    """Where a module's weights are, or pretend to be."""
    return next(module.parameters()).device
