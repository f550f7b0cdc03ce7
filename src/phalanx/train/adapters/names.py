"""The names of an adapter's parameters, which are next to the weight that they belong to."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

LORA_A_NAME, LORA_B_NAME, MAGNITUDE_NAME = ADAPTER_NAMES = ("lora_a", "lora_b", "lora_magnitude")

SCALE_NAME = "weight_block_scale"
"""The attribute of a layer that holds the scales of its weight, if that is quantized (`quantized_base.py`)."""


def adapter_names(weight_name: str) -> tuple[str, str, str]:
    """Return the names of A, B and the magnitudes of a weight."""
    path, dot, last = weight_name.rpartition(".")
    prefix = path + dot + ("" if last == "weight" else f"{last}_")
    return prefix + LORA_A_NAME, prefix + LORA_B_NAME, prefix + MAGNITUDE_NAME


def is_adapter_name(name: str) -> bool:
    """Return whether a parameter of this name is part of an adapter."""
    last = name.rpartition(".")[2]
    return last in ADAPTER_NAMES or last.endswith(tuple(f"_{part}" for part in ADAPTER_NAMES))


def is_added_name(name: str) -> bool:
    """Return whether a parameter of this name is not one of the base model: of an adapter, or scales."""
    return is_adapter_name(name) or name.endswith(f".{SCALE_NAME}")


def scale_name(weight_name: str) -> str:
    """Return the name of the scales of a weight."""
    return f"{weight_name}_block_scale"


def get_whole_shape(name: str, tensors: Mapping[str, Tensor]) -> tuple[int, ...]:
    """Return the shape of the weight that a tensor of a model stands for: in NF4 a byte has two numbers of a row."""
    shape = tuple(tensors[name].shape)
    is_packed = tensors[name].dtype == torch.uint8 and scale_name(name) in tensors
    return (shape[0], 2 * shape[1]) if is_packed else shape


def adapted_weight_name(name: str) -> str:
    """Return the name of the weight that a parameter of an adapter belongs to."""
    path = next(name.removesuffix(part) for part in ADAPTER_NAMES if name.endswith(part))
    return path.removesuffix("_") if path.endswith("_") else f"{path}weight"


def has_adapter(module: nn.Module) -> bool:
    """Return whether a layer has an adapter."""
    return isinstance(getattr(module, LORA_A_NAME, None), Tensor)
