"""Attention of our models, through one seam that hides which kernel computes it. No import of the rest of Phalanx.

    sdpa    torch's scaled_dot_product_attention, which itself chooses among kernels: everywhere, and always on a CPU
    flex    torch's flex_attention, which leaves out the parts of a document mask that are empty: where documents are
            separate on a GPU and blocks are compiled (not compiled it is slow, and it has no backward on a CPU)
    flash3  FlashAttention 3 (Shah et al. 2024), about twice as fast as sdpa on Hopper: there, in bf16 or fp16, where
            the package `flash_attn_interface` is installed and there is no document mask

What a kernel needs is made once for a forward (`plan_attention`), and each layer then calls `attend`. While a mode
watches torch's functions, as context parallelism does to find attention, it is sdpa: nothing else would be seen.

Shapes: b batch, s sequence, h heads of queries, g heads of keys and values, d features of a head.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.overrides import has_torch_function

AttentionKernel = Literal["sdpa", "flex", "flash3"]
AttentionPlan = Tensor | BlockMask | Literal["flash3"] | None
"""What a query may see, in the form that the chosen kernel wants: a dense mask [b, 1, s, s] for sdpa, a block mask for
flex; None for sdpa, and "flash3", see what came earlier."""

HOPPER_MAJOR_CAPABILITY = 9  # major compute capability


@dataclass
class KeyValueCache:
    """Keys and values [b, t, g, d] of the t tokens that a layer has seen, while a text is generated."""

    key: Tensor | None = None
    value: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return 0 if self.key is None else self.key.shape[1]

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values [b, s, g, d]; return those of all tokens."""
        if self.key is not None and self.value is not None:
            key, value = torch.cat((self.key, key), 1), torch.cat((self.value, value), 1)
        self.key, self.value = key, value
        return key, value


def make_continuation_mask(num_cached: int, tokens: Tensor) -> Tensor:
    """tokens [b, s] behind cached ones -> [1, 1, s, num_cached + s]: True where a token may see another."""
    size = tokens.shape[1]
    return torch.ones(size, num_cached + size, dtype=torch.bool, device=tokens.device).tril(num_cached)[None, None]


def make_document_mask(document_ids: Tensor) -> Tensor:
    """documents [b, s] -> [b, 1, s, s]: True where a query (row) may see a key (column): earlier, in its document."""
    return (document_ids[:, :, None] == document_ids[:, None, :]).tril()[:, None]


def plan_attention(tokens: Tensor, document_ids: Tensor | None, blocks_are_compiled: bool) -> AttentionPlan:
    """How the layers of one forward attend, causally, to tokens [b, s], within documents [b, s] where these are given:
    a number for the document of each token."""
    kernel = _choose_kernel(tokens.device, document_ids is not None, blocks_are_compiled)
    if kernel == "flash3" and document_ids is None:
        return "flash3"
    if document_ids is None:
        return None
    return make_block_mask(document_ids) if kernel == "flex" else make_document_mask(document_ids)


def attend(query: Tensor, key: Tensor, value: Tensor, attention_plan: AttentionPlan) -> Tensor:
    """query [b, s, h, d], key and value [b, s, g, d], where g divides h -> [b, s, h, d]."""
    if isinstance(attention_plan, str) and value.dtype in (torch.bfloat16, torch.float16):
        return _flash3_attend(query, key, value)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))  # [b, h or g, s, d]
    grouped = query.shape[1] != key.shape[1]
    if isinstance(attention_plan, BlockMask):
        attended = flex_attention(query, key, value, block_mask=attention_plan, enable_gqa=grouped)
        assert isinstance(attended, Tensor)
        return attended.transpose(1, 2)
    mask = attention_plan if isinstance(attention_plan, Tensor) else None
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
    ).transpose(1, 2)


def make_block_mask(document_ids: Tensor) -> BlockMask:
    """`make_document_mask` in the form of flex_attention, which knows which blocks of it are empty."""
    batch, length = document_ids.shape

    def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (document_ids[b, query] == document_ids[b, key]) & (query >= key)

    made: BlockMask = _block_mask_factory(document_ids.device.type)(
        visible, batch, None, length, length, device=document_ids.device
    )
    return made


def _choose_kernel(device: torch.device, has_documents: bool, blocks_are_compiled: bool) -> AttentionKernel:
    # A compiler that follows the whole model does not see whether a mode watches.
    if torch.compiler.is_compiling() or has_torch_function((None,)):
        return "sdpa"
    return _choose_on_device(device, has_documents, blocks_are_compiled)


def _choose_on_device(device: torch.device, has_documents: bool, blocks_are_compiled: bool) -> AttentionKernel:
    if device.type != "cuda":
        return "sdpa"
    if has_documents:
        return "flex" if blocks_are_compiled else "sdpa"
    return "flash3" if _find_flash3() is not None else "sdpa"


@functools.cache
def _block_mask_factory(kind: str) -> Callable[..., Any]:
    """create_block_mask; on a GPU compiled, or it would make the dense mask first."""
    return torch.compile(create_block_mask, dynamic=False) if kind == "cuda" else create_block_mask


@functools.cache
def _find_flash3() -> Callable[..., Any] | None:
    """FlashAttention 3, if it is installed and made for this device; found out once."""
    if torch.version.hip or torch.cuda.get_device_capability()[0] != HOPPER_MAJOR_CAPABILITY:
        return None  # an AMD MI300X has the capability 9.4
    try:
        from flash_attn_interface import flash_attn_func
    except ImportError:
        return None
    found: Callable[..., Any] = flash_attn_func
    return found


def _flash3_attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    kernel = _find_flash3()
    assert kernel is not None
    deterministic = torch.are_deterministic_algorithms_enabled()
    out = kernel(query, key, value, causal=True, deterministic=deterministic)
    mixed: Tensor = out[0] if isinstance(out, tuple) else out  # earlier ones give the sums of the softmax, too
    return mixed
