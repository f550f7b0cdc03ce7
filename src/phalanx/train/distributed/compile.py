"""Compilation of a model's repeated blocks, each for itself: they are alike, so it takes the time of one.

Shapes are static: a recipe's micro-batches all have the same, and kernels for one shape are faster than for any. Not
about when compiling happens: see `train/compile_warmup.py`.
"""

from typing import Any, Literal

import torch
from torch import nn

from phalanx.compat import raise_recompile_limit

CompileMode = bool | Literal["cuda-graphs"]
BLOCKS_COMPILED_ATTR = "blocks_are_compiled"
"""Attribute of a model that wants to know whether its blocks are compiled while it is not itself: what it hands them
(rotations, masks) may have a form that compilers like better."""


def compile_blocks(model: nn.Module, blocks: list[nn.Module], graphs: bool = False) -> None:
    """Compile each repeated block in place; a model without blocks as a whole. Names and parameters stay.

    `graphs` also records each as a CUDA graph, so that one launch stands for all its kernels. The graphs of a forward
    share memory that the next forward writes over, so results must not be kept across two forwards of the model.
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
