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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
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


class DocumentMask(Tensor):
    """`make_document_mask` of documents [b, s] on a CPU, without its [b, 1, s, s] values: attention with it is computed
    document by document, in linear memory. For anything else it becomes the dense mask.

    With documents of 100 tokens, forward and backward of a layer (8 heads of 32) take 0.5 of the CPU time of the dense
    mask at s = 512, 0.8 at 2,048 and 0.4 at 4,096.
    """

    _bounds: tuple[tuple[int, int, int], ...]
    _documents: Tensor

    @staticmethod
    def __new__(cls, documents: Tensor) -> "DocumentMask":
        batch, length = documents.shape
        return torch.zeros(1, dtype=torch.bool).expand(batch, 1, length, length).as_subclass(cls)

    def __init__(self, documents: Tensor):
        self._documents = documents
        self._bounds = tuple(_iterate_bounds(documents))

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # Dropout draws from the whole matrix of scores, of which a tensor-parallel rank takes its part.
        has_dropout = kwargs.get("dropout_p", 0.0) > 0
        mask = kwargs.get("attn_mask")
        if func is F.scaled_dot_product_attention and isinstance(mask, cls) and not has_dropout:
            rest = {name: value for name, value in kwargs.items() if name not in ("attn_mask", "is_causal")}
            return _attend_by_document(mask._bounds, *args, **rest)
        if getattr(func, "__name__", "") in _DESCRIBING_FUNCTIONS:
            return super().__torch_function__(func, types, args, kwargs)
        return func(*map(_to_dense, args), **{name: _to_dense(value) for name, value in kwargs.items()})


_DESCRIBING_FUNCTIONS = ("__get__", "size", "dim", "numel", "is_floating_point", "is_complex", "__len__")
"""What may be asked of a DocumentMask without its values."""


def _to_dense(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_to_dense, value))
    return make_document_mask(value._documents) if isinstance(value, DocumentMask) else value


def _iterate_bounds(documents: Tensor) -> Iterator[tuple[int, int, int]]:
    """Each document's row, and its tokens start .. stop - 1 there."""
    length = documents.shape[1]
    for row, numbers in enumerate(documents):
        edges = [0, *(numbers.diff().nonzero()[:, 0] + 1).tolist(), length]
        yield from ((row, start, stop) for start, stop in pairwise(edges))


def _attend_by_document(
    bounds: tuple[tuple[int, int, int], ...], query: Tensor, key: Tensor, value: Tensor, **options: Any
) -> Tensor:
    """query [b, h, s, d], key and value [b, g, s, d] -> [b, h, s, d]."""
    attended: list[Tensor] = []
    for row, start, stop in bounds:
        q, k, v = (x[row : row + 1, :, start:stop] for x in (query, key, value))
        attended.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, **options))
    joined = torch.cat(attended, 2)  # [1, h, b s, d]
    return joined.view(query.shape[1], *query.shape[::2], query.shape[3]).transpose(0, 1)


def can_attend_by_document(documents: Tensor, blocks_are_compiled: bool) -> bool:
    """Return whether a DocumentMask may stand for the mask of documents [b, s]: on a CPU where nothing follows or
    replaces torch's functions."""
    is_followed = torch.compiler.is_compiling() or has_torch_function((None,)) or type(documents) is not Tensor
    return documents.device.type == "cpu" and not (blocks_are_compiled or is_followed)


def plan_attention(tokens: Tensor, document_ids: Tensor | None, blocks_are_compiled: bool) -> AttentionPlan:
    """How the layers of one forward attend, causally, to tokens [b, s], within documents [b, s] where these are given:
    a number for the document of each token."""
    kernel = _choose_kernel(tokens.device, document_ids is not None, blocks_are_compiled)
    if kernel == "flash3" and document_ids is None:
        return "flash3"
    if document_ids is None:
        return None
    if kernel == "sdpa" and can_attend_by_document(document_ids, blocks_are_compiled):
        return DocumentMask(document_ids)
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
