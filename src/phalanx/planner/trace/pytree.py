"""Nested values with tensors in them: seen, changed, outlined, and filled in again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.pytree import map_tensors


@dataclass(frozen=True)
class TensorSpec:
    """What stands for a tensor in an outline."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def to_specs(value: Any) -> Any:
    return map_tensors(value, lambda each: TensorSpec(tuple(each.shape), each.dtype))


def tensor_read_bytes(tensor: Tensor) -> float:
    """What reading a tensor moves: of one that repeats itself, its storage."""
    return float(min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()))


def op_name(operation: Any) -> str:
    """`mm` of `aten.mm.default`."""
    return str(operation).split(".")[1]


def module_device(module: nn.Module) -> torch.device:
    """Where a module's weights are, or pretend to be."""
    return next(module.parameters()).device
