"""Find the parameters of which a forward under autocast reads nothing but a copy in 16 bits.

Sharded ones may be gathered as that copy, with half the bytes, and the computation stays the same as on one process.
Autocast leaves all other parameters in fp32: those of norms, embeddings, and whatever a module reads itself.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from phalanx.train.ops.float8 import Float8Linear
from phalanx.train.ops.lora import is_lora_name
from phalanx.train.ops.weight_matrices import is_conv1d

CASTING_MODULES = frozenset(
    {
        nn.Linear,
        nn.modules.linear.NonDynamicallyQuantizableLinear,  # the output layer of nn.MultiheadAttention
        nn.MultiheadAttention,
        nn.Conv1d,
        nn.Conv2d,
        nn.Conv3d,
        nn.ConvTranspose1d,
        nn.ConvTranspose2d,
        nn.ConvTranspose3d,
        Float8Linear,
    }
)
"""Modules that pass the parameters of `CAST_NAMES` to operations that autocast runs in 16 bits, and to nothing else. A
subclass may do otherwise."""
CAST_NAMES = frozenset(
    {"weight", "bias", "in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight"}
)


def is_cast(module: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    """Return whether a module's own parameter is read in 16 bits only. `casts_parameters = True` on a module says so of
    all its own, as on `phalanx.models.moe.GroupedExperts`."""
    if parameter.dtype != torch.float32:
        return False
    if getattr(module, "casts_parameters", False):
        return True
    return (type(module) in CASTING_MODULES or is_conv1d(module)) and (name in CAST_NAMES or is_lora_name(name))


def iterate_uncast_parameters(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, nn.Parameter]]:
    """Yield the own parameters of modules, with the module, that are not read in 16 bits only."""
    for module in modules:
        for name, parameter in module.named_parameters(recurse=False):
            if not is_cast(module, name, parameter):
                yield module, parameter
