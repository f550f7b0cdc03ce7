"""Attention of our models, through one seam that hides which kernel computes it. No import of the rest of Phalanx.

    sdpa    torch's scaled_dot_product_attention, which itself chooses among kernels: everywhere, and always on a CPU
    flex    torch's flex_attention, which leaves out the parts of a document mask that are empty: where documents are
            kept apart on a GPU and blocks are compiled (not compiled it is slow, and it has no backward on a CPU)
    flash3  FlashAttention 3 (Shah et al. 2024), about twice as fast as sdpa on Hopper: there, in bf16 or fp16, where
            the package `flash_attn_interface` is installed and there is no document mask

What a kernel needs is made once for a forward (`plan`), and each layer then calls `attend`. While a mode watches
torch's functions, as context parallelism does to find attention, it is sdpa: nothing else would be seen.

Shapes: b batch, s sequence, h heads of queries, g heads of keys and values, d features of a head.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.overrides import has_torch_function

Kernel = Literal["sdpa", "flex", "flash3"]
Plan = Tensor | BlockMask | Literal["flash3"] | None
"""What a query may see, in the form that the chosen kernel wants: a dense mask [b, 1, s, s] for sdpa, a block mask for
flex; None for sdpa, and "flash3", see what came earlier."""

HOPPER = 9  # major compute capability
_forced: Kernel | None = None


@contextlib.contextmanager
def forced(kernel: Kernel) -> Iterator[None]:
    """Within it, attention is planned for this kernel on any device. For tests and comparisons."""
    global _forced
    before, _forced = _forced, kernel
    try:
        yield
    finally:
        _forced = before


def document_mask(documents: Tensor) -> Tensor:
    """documents [b, s] -> [b, 1, s, s]: True where a query (row) may see a key (column): earlier, in its document."""
    return (documents[:, :, None] == documents[:, None, :]).tril()[:, None]


def plan(tokens: Tensor, documents: Tensor | None, blocks_are_compiled: bool) -> Plan:
    """How the layers of one forward attend, causally, to tokens [b, s], within documents [b, s] where these are given:
    a number for the document of each token."""
    kernel = _kernel(tokens.device, documents is not None, blocks_are_compiled)
    if kernel == "flash3" and documents is None:
        return "flash3"
    if documents is None:
        return None
    return block_mask(documents) if kernel == "flex" else document_mask(documents)


def attend(query: Tensor, key: Tensor, value: Tensor, how: Plan) -> Tensor:
    """query [b, s, h, d], key and value [b, s, g, d], where g divides h -> [b, s, h, d]."""
    if isinstance(how, str) and value.dtype in (torch.bfloat16, torch.float16):
        return _flash3_attend(query, key, value)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))  # [b, h or g, s, d]
    grouped = query.shape[1] != key.shape[1]
    if isinstance(how, BlockMask):
        mixed = flex_attention(query, key, value, block_mask=how, enable_gqa=grouped)
        assert isinstance(mixed, Tensor)
        return mixed.transpose(1, 2)
    mask = how if isinstance(how, Tensor) else None
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
    ).transpose(1, 2)


def block_mask(documents: Tensor) -> BlockMask:
    """`document_mask` in the form of flex_attention, which knows which blocks of it are empty."""
    batch, length = documents.shape

    def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (documents[b, query] == documents[b, key]) & (query >= key)

    made: BlockMask = _make(documents.device.type)(visible, batch, None, length, length, device=documents.device)
    return made


def _kernel(device: torch.device, documents: bool, blocks_are_compiled: bool) -> Kernel:
    # A compiler that follows the whole model does not see whether a mode watches.
    if torch.compiler.is_compiling() or has_torch_function((None,)):
        return "sdpa"
    if _forced is not None:
        return _forced
    if device.type != "cuda":
        return "sdpa"
    if documents:
        return "flex" if blocks_are_compiled else "sdpa"
    return "flash3" if _flash3() is not None else "sdpa"


@functools.cache
def _make(kind: str) -> Callable[..., Any]:
    """create_block_mask; on a GPU compiled, or it would make the dense mask first."""
    return torch.compile(create_block_mask, dynamic=False) if kind == "cuda" else create_block_mask


@functools.cache
def _flash3() -> Callable[..., Any] | None:
    """FlashAttention 3, if it is installed and made for this device; found out once."""
    if _forced is None and (torch.version.hip or torch.cuda.get_device_capability()[0] != HOPPER):
        return None  # an AMD MI300X has the capability 9.4
    try:
        from flash_attn_interface import flash_attn_func
    except ImportError:
        return None
    found: Callable[..., Any] = flash_attn_func
    return found


def _flash3_attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    kernel = _flash3()
    assert kernel is not None
    exact = torch.are_deterministic_algorithms_enabled()
    out = kernel(query, key, value, causal=True, deterministic=exact)
    mixed: Tensor = out[0] if isinstance(out, tuple) else out  # earlier ones give the sums of the softmax, too
    return mixed
