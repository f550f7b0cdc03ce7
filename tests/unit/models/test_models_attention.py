"""The seam through which our models attend: every kernel gives the same, and each is taken where it should be."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask
from torch.overrides import TorchFunctionMode

from phalanx.models import attention, transformer
from phalanx.models.attention import DocumentMask, attend, make_document_mask, plan_attention

DOCUMENTS = torch.tensor([[0] * 5 + [1] * 11, [0] * 16])
unfused = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")


def force_flex(is_used: bool) -> Any:
    """Within it, attention to documents is planned for flex, or for sdpa, on any device."""
    return mock.patch.object(attention, "_can_use_flex", return_value=is_used)


class Watching(TorchFunctionMode):
    """Notes which functions of torch are called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def inputs(heads: int = 4, kv_heads: int = 4, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    shapes = ((2, 16, count, 8) for count in (heads, kv_heads, kv_heads))
    query, key, value = (torch.randn(shape).to(dtype) for shape in shapes)
    return query, key, value


def by_hand(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
    key, value = (x.repeat_interleave(query.shape[2] // x.shape[2], dim=2) for x in (key, value))
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / query.shape[-1] ** 0.5
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~allowed, -torch.inf).softmax(-1), value)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@unfused
def test_all_kernels_keep_to_documents_alike(kv_heads: int) -> None:
    query, key, value = inputs(kv_heads=kv_heads)
    expected = by_hand(query, key, value, make_document_mask(DOCUMENTS))
    for is_flex in (False, True):
        with force_flex(is_flex):
            how = plan_attention(DOCUMENTS, DOCUMENTS, False)
            torch.testing.assert_close(attend(query, key, value, how), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("compiled", [False, True])
def test_on_a_cpu_it_is_sdpa(compiled: bool) -> None:
    assert plan_attention(DOCUMENTS, None, compiled) is None
    assert isinstance(plan_attention(DOCUMENTS, DOCUMENTS, compiled), Tensor)


def test_flex_is_for_compiled_blocks_on_a_gpu_where_no_mode_watches() -> None:
    gpu = torch.device("cuda")
    assert attention._can_use_flex(gpu, True)
    assert not attention._can_use_flex(gpu, False)
    assert not attention._can_use_flex(torch.device("cpu"), True)
    with Watching():
        assert not attention._can_use_flex(gpu, True)


def test_a_mode_that_watches_sees_every_attention() -> None:
    model = transformer(vocab_size=11, seq_len=16, layers=2, hidden_size=16, num_heads=2)
    with Watching() as watching:
        model(torch.zeros(2, 16, dtype=torch.int64), DOCUMENTS)
    assert watching.seen.count(F.scaled_dot_product_attention) == 2


@unfused
def test_our_transformer_takes_a_block_mask_through_all_its_layers() -> None:
    torch.manual_seed(0)
    model = transformer(vocab_size=11, seq_len=16, layers=2, hidden_size=16, num_heads=2, num_kv_heads=1)
    tokens = torch.randint(11, (2, 16))
    with torch.no_grad():
        expected = model(tokens, DOCUMENTS)
        with force_flex(True):
            assert isinstance(plan_attention(tokens, DOCUMENTS, False), BlockMask)
            torch.testing.assert_close(model(tokens, DOCUMENTS), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # by inductor of torch 2.11
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("packed", [False, True])
def test_on_a_gpu_the_chosen_kernel_has_the_gradients_of_sdpa(packed: bool) -> None:
    documents = DOCUMENTS.repeat_interleave(16, 1).cuda() if packed else None  # [2, 256]
    tokens = torch.zeros(2, 256, dtype=torch.int64, device="cuda")
    torch.manual_seed(0)
    given = [torch.randn(2, 256, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]

    def results(how: Any, compiled: bool) -> list[Tensor]:
        out = (torch.compile(attend, dynamic=False) if compiled else attend)(*given, how)
        return [out, *torch.autograd.grad(out.float().square().sum(), given)]

    with force_flex(False):
        expected = results(plan_attention(tokens, documents, True), compiled=False)
    for found, reference in zip(results(plan_attention(tokens, documents, True), compiled=True), expected, strict=True):
        assert (found - reference).float().norm() / reference.float().norm() < 0.02


def test_documents_are_attended_one_by_one_as_with_a_dense_mask():
    generator = torch.Generator().manual_seed(0)
    documents = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 1, 1, 1, 1, 1]])
    query, key, value = (torch.randn(2, 6, heads, 8, generator=generator, requires_grad=True) for heads in (4, 2, 2))
    lazy, dense = DocumentMask(documents), make_document_mask(documents)
    assert lazy.shape == dense.shape
    with mock.patch.object(attention, "make_document_mask", side_effect=AssertionError("made")):
        found = attend(query, key, value, lazy)
    expected = attend(query, key, value, dense)
    torch.testing.assert_close(found, expected)
    upstream = torch.randn(found.shape, generator=generator)
    for ours, theirs in zip(
        *(torch.autograd.grad(out, (query, key, value), upstream) for out in (found, expected)), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_a_document_mask_is_dense_for_what_asks_for_its_values():
    documents = torch.tensor([[0, 0, 1]])
    lazy, dense = DocumentMask(documents), make_document_mask(documents)
    for use in (lambda mask: mask & True, lambda mask: mask[:, :, :, :2], lambda mask: torch.cat([mask, mask])):
        assert torch.equal(use(lazy), use(dense))
        assert type(use(lazy)) is torch.Tensor
