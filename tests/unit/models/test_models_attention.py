"""The seam through which our models attend: every kernel gives the same, and each is taken where it should be."""

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask
from torch.overrides import TorchFunctionMode

from phalanx.models import attention, transformer
from phalanx.models.attention import AttentionKernel, DocumentMask, attend, make_document_mask, plan_attention

DOCUMENTS = torch.tensor([[0] * 5 + [1] * 11, [0] * 16])
unfused = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")


@contextlib.contextmanager
def force_kernel(kernel: AttentionKernel) -> Iterator[None]:
    """Within it, attention is planned for this kernel on any device."""
    with (
        mock.patch.object(attention, "_choose_on_device", return_value=kernel),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(attention.HOPPER_MAJOR_CAPABILITY, 0)),
    ):
        yield


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


@pytest.fixture
def flash3(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Something in the place of the package, which gives what it would; the list has the options of each call."""
    calls: list[dict[str, Any]] = []

    def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        calls.append(options)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2)

    package = ModuleType("flash_attn_interface")
    package.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn_interface", package)
    attention._find_flash3.cache_clear()
    yield calls
    attention._find_flash3.cache_clear()


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@unfused
def test_all_kernels_keep_to_documents_alike(kv_heads: int) -> None:
    query, key, value = inputs(kv_heads=kv_heads)
    expected = by_hand(query, key, value, make_document_mask(DOCUMENTS))
    for kernel in ("sdpa", "flex"):
        with force_kernel(kernel):  # type: ignore[arg-type]
            how = plan_attention(DOCUMENTS, DOCUMENTS, False)
            torch.testing.assert_close(attend(query, key, value, how), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("kernel", ["sdpa", "flash3"])
def test_without_documents_all_kernels_see_what_came_before(
    kernel: Any, kv_heads: int, flash3: list[dict[str, Any]]
) -> None:
    query, key, value = inputs(kv_heads=kv_heads, dtype=torch.bfloat16)
    with force_kernel(kernel):
        found = attend(query, key, value, plan_attention(DOCUMENTS, None, False))
    past = torch.ones(16, 16, dtype=torch.bool).tril()
    expected = by_hand(query.float(), key.float(), value.float(), past)
    torch.testing.assert_close(found.float(), expected, rtol=0.02, atol=0.02)
    assert flash3 == ([{"causal": True, "deterministic": False}] if kernel == "flash3" else [])


def test_flash3_is_not_for_fp32(flash3: list[dict[str, Any]]) -> None:
    with force_kernel("flash3"):
        attend(*inputs(), plan_attention(DOCUMENTS, None, False))
    assert flash3 == []


def test_an_amd_gpu_of_hoppers_number_has_no_flash3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 4))
    monkeypatch.setitem(sys.modules, "flash_attn_interface", SimpleNamespace(flash_attn_func=len))
    attention._find_flash3.cache_clear()
    assert attention._find_flash3() is None
    monkeypatch.setattr(torch.version, "hip", None)
    attention._find_flash3.cache_clear()
    assert attention._find_flash3() is len
    attention._find_flash3.cache_clear()


def test_flash3_is_asked_for_the_same_bits_again_where_torch_is(flash3: list[dict[str, Any]]) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        with force_kernel("flash3"):
            attend(*inputs(dtype=torch.bfloat16), "flash3")
    finally:
        torch.use_deterministic_algorithms(False)
    assert flash3 == [{"causal": True, "deterministic": True}]


def test_without_the_package_there_is_no_flash3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    attention._find_flash3.cache_clear()
    with force_kernel("flash3"):
        assert attention._find_flash3() is None
    attention._find_flash3.cache_clear()


@pytest.mark.parametrize("compiled", [False, True])
def test_on_a_cpu_it_is_sdpa(compiled: bool) -> None:
    assert plan_attention(DOCUMENTS, None, compiled) is None
    assert isinstance(plan_attention(DOCUMENTS, DOCUMENTS, compiled), Tensor)


@pytest.mark.parametrize(
    ("documents", "compiled", "package", "expected"),
    [
        (False, False, True, "flash3"),
        (False, True, True, "flash3"),
        (False, True, False, "sdpa"),
        (True, True, True, "flex"),
        (True, False, True, "sdpa"),
    ],
)
def test_on_a_gpu_it_is_what_suits_mask_and_compilation(
    documents: bool, compiled: bool, package: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_find_flash3", lambda: (lambda: None) if package else None)
    assert attention._choose_kernel(torch.device("cuda"), documents, compiled) == expected


@pytest.mark.parametrize("kernel", ["flex", "flash3"])
def test_while_a_mode_watches_it_sees_every_attention(kernel: Any) -> None:
    model = transformer(vocab_size=11, seq_len=16, layers=2, hidden_size=16, num_heads=2)
    with force_kernel(kernel), Watching() as watching:
        model(torch.zeros(2, 16, dtype=torch.int64), DOCUMENTS)
    assert watching.seen.count(F.scaled_dot_product_attention) == 2


def test_a_compiler_that_follows_the_whole_model_finds_sdpa() -> None:
    def model(tokens: Tensor) -> bool:
        return plan_attention(tokens, None, False) is None

    with force_kernel("flash3"):
        assert torch.compile(model, backend="eager", fullgraph=True)(DOCUMENTS)
    torch.compiler.reset()


@unfused
def test_our_transformer_takes_a_block_mask_through_all_its_layers() -> None:
    torch.manual_seed(0)
    model = transformer(vocab_size=11, seq_len=16, layers=2, hidden_size=16, num_heads=2, num_kv_heads=1)
    tokens = torch.randint(11, (2, 16))
    with torch.no_grad():
        expected = model(tokens, DOCUMENTS)
        with force_kernel("flex"):
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

    with force_kernel("sdpa"):
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
