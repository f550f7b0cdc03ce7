"""Recomputation: activations of a block that are not kept but made again in backward, to spend time and save memory.

    none       every activation is kept
    selective  results of the operations in KEPT are kept, all others are made again: cheap, since those are pointwise
    full       only what enters a block is kept: one more forward of each block, about a third more time

(Chen et al. 2016; Korthikanti et al. 2022 for the selective kind.) The numbers do not change: dropout draws the same
again, state of the block is what it was (`block_state.py`), and loss and gradients are the same bits as without.

Parameters keep their names: a block's `forward` is wrapped, no module is put around it. In the order of things it comes
after tensor and expert parallel and before compilation: `block.compile()` then sees the wrapped forward and lets the
compiler keep what KEPT says.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from phalanx.train.distributed.block_state import BlockState, has_mutable_state
from phalanx.train.distributed.context_parallel import make_checkpoint_contexts

ActivationCheckpointing = Literal["none", "selective", "full"]

MATMUL_OPS = (
    # Work grows with the third power of the width, results only with the second: the most work for a byte kept.
    "aten.mm",
    "aten.addmm",
    "aten.bmm",
    "aten.baddbmm",
    "aten._scaled_mm",  # fp8
    "aten._scaled_mm_v2",
    "aten._grouped_mm",  # experts
    "aten._scaled_grouped_mm",
)

SAVED_OPS = (
    *MATMUL_OPS,
    # A convolution is a matmul too.
    "aten.convolution",
    # Attention: work grows with the square of the sequence, its result only with the sequence. Which kernel runs is
    # for device, dtype and mask to say; where none fits, attention is made of bmm.
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_fused_attention_overrideable",
    "aten._flash_attention_forward",
    "aten._efficient_attention_forward",
    "flex_attention",
    # Collectives: the network is the slowest part, and all wait for it. Only those that return their result can be
    # kept; `torch.distributed.all_reduce` and its like write into a tensor given to them, and are issued again, by all
    # ranks alike and in the same order.
    "_c10d_functional.all_gather_into_tensor",
    "_c10d_functional.reduce_scatter_tensor",
    "_c10d_functional.all_reduce",
    "_c10d_functional.all_to_all_single",
    # What a router chooses: the choice must be the same again even where equal scores stand in no fixed order.
    "aten.topk",
    "aten.sort",
)
"""Operations whose results selective recomputation keeps, all overloads of each, by group with the reason."""

_ContextPair = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def apply_activation_checkpointing(
    model: nn.Module,
    blocks: Iterable[str],
    mode: ActivationCheckpointing,
    *,
    every_second_matmul: bool = False,
) -> None:
    """Have the named blocks of the model recompute their activations in backward.

    `every_second_matmul` lets selective recomputation keep only every second of a block's matmuls, for nearly the
    memory of full at half its price. A block that runs without gradients recomputes nothing. Raises ValueError for an
    unknown way, and for a block that already recomputes. A compiled block whose state forwards may change
    (`block_state.has_mutable_state`) keeps its activations.

    Selective cannot keep what the model then changes in place (`relu_` on what a Linear gave): torch raises in backward
    and says so; full can.
    """
    if mode not in ("none", "selective", "full"):
        raise ValueError(f"recompute {mode!r} must be 'none', 'selective' or 'full'")
    if mode == "none":
        return
    contexts = functools.partial(_make_selective_contexts, every_second_matmul) if mode == "selective" else None
    for name in blocks:
        block = model.get_submodule(name)
        if isinstance(vars(block).get("forward"), _CheckpointedForward):
            raise ValueError(f"block {name} recomputes already")
        vars(block)["forward"] = _CheckpointedForward(block, block.forward, contexts)


class _CheckpointedForward:
    """A block's forward under a checkpoint. An object, not a closure, so that a deep copy of the block has its own."""

    def __init__(self, block: nn.Module, forward: Callable[..., Any], contexts: Callable[[], _ContextPair] | None):
        self.forward = forward
        self.contexts = contexts
        self.block_state = BlockState(block)
        # A compiler has the graph write to a block's state each time that it runs the forward.
        self.supports_compile = not has_mutable_state(block)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        if not torch.compiler.is_compiling():
            contexts = functools.partial(_nest_contexts, self.block_state.checkpoint_contexts, self.contexts)
            return checkpoint(self.forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)
        if not self.supports_compile:
            return self.forward(*args, **kwargs)
        # A compiler reads from the contexts what to keep, and runs no Python in backward that would need more of them.
        if self.contexts is None:
            return checkpoint(self.forward, *args, use_reentrant=False, **kwargs)
        return checkpoint(self.forward, *args, use_reentrant=False, context_fn=self.contexts, **kwargs)


def _nest_contexts(state: Callable[[], _ContextPair], selective: Callable[[], _ContextPair] | None) -> _ContextPair:
    """Contexts of forward and recomputation: those of selective recomputation, within those of the block's state and of
    context parallel."""
    found = make_checkpoint_contexts()
    for inner in (state, selective):
        if inner is not None:
            forward, backward_context = inner()
            found = _NestedContext(found[0], forward), _NestedContext(found[1], backward_context)
    return found


class _NestedContext(AbstractContextManager[None]):
    """One context within another. It can be entered again, as it is when a graph is kept for a second backward."""

    def __init__(self, outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]):
        self.outer, self.inner = outer, inner
        self._entered: list[contextlib.ExitStack] = []

    def __enter__(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.outer)
            stack.enter_context(self.inner)
            self._entered.append(stack.pop_all())

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)


def _make_selective_contexts(every_second_matmul: bool) -> _ContextPair:
    seen = {False: 0, True: 0}

    def policy(context: Any, operation: Callable[..., Any], *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = get_op_name(operation)
        if name not in SAVED_OPS:
            return CheckpointPolicy.PREFER_RECOMPUTE
        if every_second_matmul and name in MATMUL_OPS:
            # Some releases of torch ask again during recomputation: the count then begins anew.
            seen[context.is_recompute] += 1
            if seen[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE

    contexts: _ContextPair = create_selective_checkpoint_contexts(policy)
    return contexts


def get_op_name(operation: Callable[..., Any]) -> str:
    """An operation's name as in KEPT: namespace and name without the overload."""
    return ".".join(str(operation).split(".")[:2])
