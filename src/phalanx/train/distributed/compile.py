"""Compile the repeated blocks of a model one by one. Equal blocks share a compilation, so it takes the time of one.

Shapes are static: all micro-batches of a recipe have the same shape, and kernels for one shape are faster than dynamic
ones. For when compilation happens see `train/compile_warmup.py`.
"""

from typing import Any, Literal

import torch
from torch import nn

from phalanx.compat import raise_recompile_limit

CompileMode = bool | Literal["cuda-graphs"]
BLOCKS_COMPILED_ATTR = "blocks_are_compiled"
"""Attribute that is set on a model that has it, when its blocks are compiled but the model is not. Such a model may
pass its blocks inputs (rotations, masks) in a form that compiles better."""


def compile_blocks(model: nn.Module, blocks: list[nn.Module], graphs: bool = False) -> None:
    """Compile each repeated block in place; a model without blocks as a whole. Names and parameters do not change.

    `graphs` also records each block as a CUDA graph, which launches all its kernels at once. The graphs of a forward
    share memory that the next forward overwrites, so results must not be kept across two forwards of the model.
    """
    if hasattr(model, BLOCKS_COMPILED_ATTR):
        setattr(model, BLOCKS_COMPILED_ATTR, True)
    parts = blocks or [model]
    raise_recompile_limit(len(parts))
    options: dict[str, Any] = {"mode": "reduce-overhead"} if graphs else {}
    for module in parts:
        module.compile(dynamic=False, **options)
    if graphs:
        model.register_forward_pre_hook(_mark_cudagraph_step)


def _mark_cudagraph_step(module: nn.Module, args: Any) -> None:
    torch.compiler.cudagraph_mark_step_begin()
