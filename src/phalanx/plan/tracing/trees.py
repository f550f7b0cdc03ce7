"""Nested values with tensors in them: seen, changed, outlined, and filled in again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Spec:
    """What stands for a tensor in an outline."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Lists, tuples and mappings with their tensors changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(each, change) for each in value))
    if isinstance(value, tuple | list):
        return type(value)(mapped(each, change) for each in value)
    if isinstance(value, dict):
        return {key: mapped(each, change) for key, each in value.items()}
    return value


def outline(value: Any) -> Any:
    return mapped(value, lambda each: Spec(tuple(each.shape), each.dtype))


def specs(outline: Any) -> list[Spec]:
    if isinstance(outline, Spec):
        return [outline]
    if isinstance(outline, tuple | list):
        return [spec for each in outline for spec in specs(each)]
    return [spec for each in outline.values() for spec in specs(each)] if isinstance(outline, dict) else []


def filled(outline: Any, made: Iterator[Tensor]) -> Any:
    """An outline with tensors in the place of what stands for them."""
    if isinstance(outline, Spec):
        return next(made)
    if isinstance(outline, tuple) and hasattr(outline, "_fields"):
        return type(outline)(*(filled(each, made) for each in outline))
    if isinstance(outline, tuple | list):
        return type(outline)(filled(each, made) for each in outline)
    if isinstance(outline, dict):
        return {key: filled(each, made) for key, each in outline.items()}
    return outline


def tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    mapped(value, found.append)
    return found


def bytes_of(tensor: Tensor) -> float:
    """What reading a tensor moves: of one that repeats itself, its storage."""
    return float(min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()))


def name_of(operation: Any) -> str:
    """`mm` of `aten.mm.default`."""
    return str(operation).split(".")[1]


def device_of(module: nn.Module) -> torch.device:
    """Where a module's weights are, or pretend to be."""
    return next(module.parameters()).device
