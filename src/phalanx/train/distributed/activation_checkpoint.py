"""Activation checkpointing: recompute the activations of a block in backward, to save memory at the cost of time.

    none       keep every activation
    selective  keep the results of the operations in SAVED_OPS and recompute all others, mostly cheap pointwise ones
    full       keep only the inputs of a block: one more forward of each block, about a third more time

(Chen et al. 2016; Korthikanti et al. 2022 for selective.) The numbers do not change: dropout uses the same random
numbers, and loss and gradients are bit-identical. A recomputation starts with the block's buffers as they were before
the forward, and its own changes to them are discarded: persistent buffers (BatchNorm's statistics, moving averages),
and all buffers of modules with an `after_step`, such as routers, but no masks.

Parameters keep their names: a block's `forward` is wrapped, no module is put around it. Apply it after tensor and
expert parallelism and before compilation: `block.compile()` then sees the wrapped forward, and the compiler keeps what
SAVED_OPS says.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from phalanx.train.distributed.buffer_sync import NORM_LAYER_TYPES
from phalanx.train.distributed.context_parallel import make_checkpoint_contexts
from phalanx.train.distributed.module_state import get_persistent_buffers
from phalanx.train.ops.random_draws import WholeFeatures

ActivationCheckpointing = Literal["none", "selective", "full"]

MATMUL_OPS = (
    # FLOPs grow with the third power of the width, results only with the second: the most FLOPs per kept byte.
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
    # Attention: FLOPs grow with the square of the sequence length, its result only linearly. The kernel depends on
    # device, dtype and mask; if none fits, attention is made of bmm.
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_fused_attention_overrideable",
    "aten._flash_attention_forward",
    "aten._efficient_attention_forward",
    "flex_attention",
    # Collectives: the network is the slowest part, and all ranks wait for it. Only those that return their result can
    # be kept; `torch.distributed.all_reduce` and other in-place ones are issued again, by all ranks in the same order.
    "_c10d_functional.all_gather_into_tensor",
    "_c10d_functional.reduce_scatter_tensor",
    "_c10d_functional.all_reduce",
    "_c10d_functional.all_to_all_single",
    # Routing decisions: they must be the same in the recomputation, even if equal scores have no fixed order.
    "aten.topk",
    "aten.sort",
)
"""Operations of which selective activation checkpointing keeps the results, in all overloads, grouped by reason."""

BufferNames = list[tuple[nn.Module, str]]
"""Owner and name of buffers."""
BufferValues = list[tuple[nn.Module, str, Tensor]]
"""Owner, name and value of buffers."""
_ContextPair = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def apply_activation_checkpointing(model: nn.Module, blocks: Iterable[str], mode: ActivationCheckpointing) -> None:
    """Make the named blocks of the model recompute their activations in backward.

    A block that runs without gradients recomputes nothing. A compiled block keeps its activations if its
    forward may change its state (`has_mutable_state`).

    Selective cannot keep a result that the model then changes in place (`relu_` on the output of a Linear): torch
    raises in backward and says so. Use full for such a model.
    """
    if mode == "none":
        return
    contexts = _make_selective_contexts if mode == "selective" else None
    for name in blocks:
        block = model.get_submodule(name)
        vars(block)["forward"] = _CheckpointedForward(block, block.forward, contexts)


class _CheckpointedForward:
    """A block's checkpointed forward. An object, not a closure, so that a deep copy of the block has its own."""

    def __init__(self, block: nn.Module, forward: Callable[..., Any], contexts: Callable[[], _ContextPair] | None):
        self.forward = forward
        self.contexts = contexts
        self.buffers = find_mutable_buffers(block)
        # In a compiled graph, every run of the forward would write to the block's state.
        self.supports_compile = not has_mutable_state(block)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        if not torch.compiler.is_compiling():
            contexts = functools.partial(_nest_contexts, self.buffers, self.contexts)
            return checkpoint(self.forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)
        if not self.supports_compile:
            return self.forward(*args, **kwargs)
        # A compiler reads from the contexts what to keep, and runs no Python in backward, so these two are enough.
        if self.contexts is None:
            return checkpoint(self.forward, *args, use_reentrant=False, **kwargs)
        return checkpoint(self.forward, *args, use_reentrant=False, context_fn=self.contexts, **kwargs)


class _ReentrantContext(AbstractContextManager[None]):
    """A new context of `make` at each entry: it can be entered twice, as when a graph is retained for a second
    backward."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]):
        self._make = make
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        context = self._make()
        context.__enter__()
        self._entered.append(context)

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)


def _nest_contexts(buffers: BufferNames, selective: Callable[[], _ContextPair] | None) -> _ContextPair:
    """Return the contexts of forward and recomputation: those of selective checkpointing, nested in those of the
    block's state and of context parallelism. The forward keeps copies of the buffers; the recomputation works on copies
    of these."""
    outer = make_checkpoint_contexts()
    inner = (contextlib.nullcontext(), contextlib.nullcontext()) if selective is None else selective()
    before: BufferValues = []

    @contextlib.contextmanager
    def forward() -> Iterator[None]:
        with outer[0]:
            before[:] = [(module, name, getattr(module, name).detach().clone()) for module, name in buffers]
            with inner[0]:
                yield

    @contextlib.contextmanager
    def recompute() -> Iterator[None]:
        with outer[1], WholeFeatures():  # a recomputation may have ended before the block's last layer
            current = [(module, name, getattr(module, name)) for module, name in buffers]
            _set_buffers([(module, name, value.clone()) for module, name, value in before])
            try:
                with inner[1]:
                    yield
            finally:
                _set_buffers(current)

    return _ReentrantContext(forward), _ReentrantContext(recompute)


def _set_buffers(values: BufferValues) -> None:
    for module, name, value in values:
        setattr(module, name, value)


def _make_selective_contexts() -> _ContextPair:
    def policy(context: Any, operation: Callable[..., Any], *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = get_op_name(operation)
        return CheckpointPolicy.MUST_SAVE if name in SAVED_OPS else CheckpointPolicy.PREFER_RECOMPUTE

    contexts: _ContextPair = create_selective_checkpoint_contexts(policy)
    return contexts


def get_op_name(operation: Callable[..., Any]) -> str:
    """Return an operation's name as in SAVED_OPS: namespace and name without the overload."""
    return ".".join(str(operation).split(".")[:2])


def find_mutable_buffers(block: nn.Module) -> BufferNames:
    """Return the buffers that a forward of the block may change."""
    found = []
    for module in block.modules():
        names = dict(module.named_buffers(recurse=False))
        if not hasattr(module, "after_step"):
            names = get_persistent_buffers(module, recurse=False)
        found += [(module, name) for name, buffer in names.items() if buffer.dtype != torch.bool]
    return found


def has_mutable_state(block: nn.Module) -> bool:
    """Return whether running a block's forward twice may give a different state than running it once. Exempt are
    torch's normalization layers, which a compiler updates only once, and modules with an `after_step`, the state of
    which is completed at the end of each step."""
    owners = [module for module, _ in find_mutable_buffers(block)]
    return not all(isinstance(module, NORM_LAYER_TYPES) or hasattr(module, "after_step") for module in owners)
