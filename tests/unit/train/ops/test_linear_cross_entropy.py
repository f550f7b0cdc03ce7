"""Cross-entropy from hidden states in chunks: that of whole logits, in value and gradient, without whole logits."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.models import transformer
from phalanx.train.ops.linear_cross_entropy import linear_cross_entropy
from phalanx.train.tasks import LanguageModeling

N, V, W = 41, 97, 16


def case(
    dtype: torch.dtype = torch.float32, *, ignored: float = 0.2, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weight and targets, of which some are ignored."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, W, generator=generator, dtype=dtype) * scale
    weight = torch.randn(V, W, generator=generator, dtype=dtype)
    targets = torch.randint(0, V, (N,), generator=generator)
    targets[torch.rand(N, generator=generator) < ignored] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def whole(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = F.linear(hidden, weight)
    return F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), targets, reduction="sum")


def gradients(loss: Tensor, *leaves: Tensor | None) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [leaf for leaf in leaves if leaf is not None]))


def assert_near(found: list[Tensor], expected: list[Tensor], rtol: float = 1e-5) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert float((one - other).abs().max()) <= rtol * float(other.abs().max())


@pytest.mark.parametrize(
    ("chunk", "scale"), [(None, 1.0), (1, 1.0), (7, 1.0), (N, 1.0), (1000, 1.0), pytest.param(8, 1e4, id="very large")]
)
def test_value_and_gradients_are_those_of_whole_logits(chunk: int | None, scale: float) -> None:
    hidden, weight, targets = case(scale=scale)
    expected = whole(hidden, weight, targets)
    found = linear_cross_entropy(hidden, weight, targets, chunk_rows=chunk)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0)
    assert_near(gradients(3 * found, hidden, weight), gradients(3 * expected, hidden, weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_products_are_low_and_the_result_as_near_to_fp32_as_that_of_whole_logits(
    dtype: torch.dtype,
) -> None:
    hidden, weight, targets = case()
    exact = whole(hidden, weight, targets)
    with torch.autocast("cpu", dtype):
        plain = whole(hidden, weight, targets)
        found = linear_cross_entropy(hidden, weight, targets, chunk_rows=10)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, plain, rtol=1e-6, atol=0.0)
    reference = gradients(exact, hidden, weight)
    for one, other, true in zip(
        gradients(found, hidden, weight), gradients(plain, hidden, weight), reference, strict=True
    ):
        assert one.dtype == torch.float32
        assert float((one - true).norm()) <= 1.05 * float((other - true).norm()) <= 0.02 * float(true.norm())


def test_parameters_in_bf16_get_gradients_in_bf16() -> None:
    hidden, weight, targets = case(torch.bfloat16)
    found = linear_cross_entropy(hidden, weight, targets, chunk_rows=10)
    assert [gradient.dtype for gradient in gradients(found, hidden, weight)] == [torch.bfloat16] * 2
    assert found.dtype == torch.float32


def test_in_fp16_the_small_probabilities_of_a_large_vocabulary_are_not_lost() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(4, 8, generator=generator).requires_grad_()
    weight = (torch.randn(40_000, 8, generator=generator) * 0.02).requires_grad_()
    targets = torch.arange(4)
    (exact,) = gradients(whole(hidden, weight, targets), weight)
    with torch.autocast("cpu", torch.float16):
        (found,) = gradients(linear_cross_entropy(hidden, weight, targets), weight)
    others = slice(4, None)  # rows that are no target have nothing but small probabilities
    assert float((found - exact)[others].norm()) <= 2e-3 * float(exact[others].norm())


def test_ignored_rows_count_nothing_even_if_all_are_ignored() -> None:
    hidden, weight, _ = case()
    loss = linear_cross_entropy(hidden, weight, torch.full((N,), -100), chunk_rows=10)
    assert float(loss.detach()) == 0.0
    assert all(not gradient.any() for gradient in gradients(loss, hidden, weight))


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation gives."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def test_no_tensor_is_ever_as_large_as_the_logits() -> None:
    n, v, w = 500, 4000, 8
    hidden, weight = torch.randn(n, w, requires_grad=True), torch.randn(v, w, requires_grad=True)
    with Largest() as chunked, torch.autocast("cpu", torch.bfloat16):
        linear_cross_entropy(hidden, weight, torch.zeros(n, dtype=torch.int64), chunk_rows=25).backward()
    with Largest() as plain:
        whole(hidden, weight, torch.zeros(n, dtype=torch.int64)).backward()
    assert plain.elements == n * v
    assert chunked.elements == 25 * v


def test_a_chunk_takes_32_megabytes_by_default() -> None:
    n, v = 700, 40_000
    with Largest() as largest, torch.no_grad():
        linear_cross_entropy(torch.ones(n, 2), torch.ones(v, 2), torch.zeros(n, dtype=torch.int64))
    assert 31 * 2**20 < 4 * largest.elements <= 32 * 2**20


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_what_needs_no_gradient_gets_none_and_the_other_its_own(frozen: str) -> None:
    hidden, weight, targets = case()
    (hidden if frozen == "hidden" else weight).requires_grad_(False)
    leaf = weight if frozen == "hidden" else hidden
    found = gradients(linear_cross_entropy(hidden, weight, targets, chunk_rows=9), leaf)
    assert_near(found, gradients(whole(hidden, weight, targets), leaf))


def products(*, gradients: bool) -> int:
    class Products(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += "mm" in str(func)
            return func(*args, **(kwargs or {}))

    hidden, weight, targets = case()
    with Products() as found, torch.set_grad_enabled(gradients):
        linear_cross_entropy(hidden, weight, targets, chunk_rows=N)
    return found.count


def test_without_gradients_only_the_loss_is_computed() -> None:
    assert (products(gradients=False), products(gradients=True)) == (1, 3)


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_a_backward_in_parts_scales_each_gradient_once(scale: float) -> None:
    hidden, weight, targets = case()
    expected = gradients(scale * linear_cross_entropy(hidden, weight, targets), hidden, weight)
    loss = scale * linear_cross_entropy(hidden, weight, targets)
    (first,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    sent = first.clone()
    found = (first, *torch.autograd.grad(loss, weight))
    assert torch.equal(first, sent)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("target", [V, -1])
def test_a_target_that_is_no_token_is_an_error(target: int) -> None:
    hidden, weight, targets = case()
    targets[3] = target
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        linear_cross_entropy(hidden, weight, targets)


def test_it_runs_on_the_meta_device() -> None:
    hidden = torch.empty(8, 4, device="meta", requires_grad=True)
    weight = torch.empty(11, 4, device="meta", requires_grad=True)
    linear_cross_entropy(hidden, weight, torch.empty(8, dtype=torch.int64, device="meta")).backward()
    assert weight.grad is not None
    assert weight.grad.shape == (11, 4)


def test_the_tasks_loss_from_hidden_states_is_that_from_logits_also_for_a_tied_weight() -> None:
    torch.manual_seed(0)
    model = transformer(vocab_size=V, seq_len=8, layers=1, hidden_size=W, num_heads=2)
    batch = {"tokens": torch.randint(0, V, (2, 8)), "targets": torch.randint(0, V, (2, 8))}
    batch["targets"][0, :3] = -100
    task = LanguageModeling()
    expected, terms = task.loss(model(batch["tokens"]), batch)
    reference = gradients(expected, *model.parameters())
    head = model.head
    model.head = nn.Identity()
    hidden = model(batch["tokens"])
    model.head = head
    found, same = task.head_loss(hidden, head.weight, batch)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0)
    assert int(terms) == int(same) == 13
    assert_near(gradients(found, *model.parameters()), reference)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu_the_weights_gradient_is_added_up_in_fp32(dtype: torch.dtype) -> None:
    hidden, weight, targets = (x.detach().cuda() for x in case())
    hidden.requires_grad_()
    weight.requires_grad_()
    expected = gradients(whole(hidden, weight, targets), hidden, weight)
    with torch.autocast("cuda", dtype):
        found = linear_cross_entropy(hidden, weight, targets, chunk_rows=10)
    for one, other in zip(gradients(found, hidden, weight), expected, strict=True):
        assert one.dtype == torch.float32
        assert float((one - other).norm()) <= 0.02 * float(other.norm())
