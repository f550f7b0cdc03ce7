"""Linear layers in fp8: what they compute, what it costs in digits, and which layers a run chooses."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from phalanx.models import moe, transformer
from phalanx.train.distributed.activation_checkpoint import ActivationCheckpointing, apply_activation_checkpointing
from phalanx.train.distributed.parallelize import compile_blocks
from phalanx.train.ops.blocks import find_blocks
from phalanx.train.ops.float8 import (
    BACKWARD_DTYPE,
    FORWARD_DTYPE,
    Float8Linear,
    Float8Weight,
    can_use_float8,
    convert_to_float8,
    find_float8_layers,
    float8_linear,
    quantize_to_float8,
    quantize_weights_once,
)
from phalanx.train.precision import autocast_context

CPU = torch.device("cpu")


def compiling(test: Any) -> Any:
    """Without the warnings that torch's compiler gives about its own doings."""
    for said in (".*should not be instantiated:DeprecationWarning", "The .grad attribute of a Tensor:UserWarning"):
        test = pytest.mark.filterwarnings(f"ignore:{said}")(test)
    return test


def off(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def tensors(rows: int = 48, inputs: int = 64, outputs: int = 32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    shapes = ((rows, inputs), (outputs, inputs), (outputs,))
    x, weight, bias = (torch.randn(shape, requires_grad=True) for shape in shapes)
    return x, weight, bias


def results(product: Any, *given: Tensor) -> list[Tensor]:
    """The product and its gradients, of a loss that is not linear in it."""
    out = product(*given)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), given)]


@pytest.mark.parametrize(("kind", "digits"), [(FORWARD_DTYPE, 3), (BACKWARD_DTYPE, 2)])
def test_values_are_rounded_to_the_digits_of_the_format(kind: torch.dtype, digits: int) -> None:
    x = torch.linspace(0.1, 100, 1000)
    values, scale = quantize_to_float8(x, kind)
    assert values.float().max() == torch.finfo(kind).max
    assert ((values.float() * scale / x - 1).abs() <= 2.0 ** -(digits + 1) * 1.001).all()


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_is_not_hidden(bad: float) -> None:
    x, weight, _ = tensors()
    spoilt = x.detach().clone()
    spoilt[3, 5] = bad
    assert not float8_linear(spoilt, weight).isfinite().all()


@pytest.mark.parametrize("rows", [1, 40, 48])
def test_product_and_gradients_agree_with_fp32_within_the_digits_of_fp8(rows: int) -> None:
    given = tensors(rows)
    for found, expected in zip(results(float8_linear, *given), results(F.linear, *given), strict=True):
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        assert off(found, expected) < 0.08  # e5m2 has 2 digits: up to 12%, 6% in the mean


def test_under_autocast_the_result_has_its_dtype_and_the_weight_keeps_its_own() -> None:
    x, weight, bias = tensors()
    with autocast_context("fp8", CPU):
        out = float8_linear(x, weight, bias)
    out.float().sum().backward()
    assert out.dtype == torch.bfloat16
    assert weight.grad is not None
    assert (weight.grad.dtype, x.grad is not None and x.grad.dtype) == (torch.float32, torch.float32)


def test_an_input_with_more_dimensions_or_nothing_in_it_is_as_for_a_linear_layer() -> None:
    x, weight, bias = tensors(48)
    whole = float8_linear(x, weight, bias)
    assert torch.equal(float8_linear(x.view(2, 3, 8, 64), weight, bias), whole.view(2, 3, 8, 32))
    assert float8_linear(x[:0], weight, bias).shape == (0, 32)


def test_only_one_byte_a_value_is_kept_of_the_input() -> None:
    x, weight, _ = tensors(64)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        float8_linear(x, weight)
    assert sum(t.nbytes for t in kept if t is not weight) == x.numel() + 4


def test_a_layer_stays_the_same_object_with_the_same_state() -> None:
    layer = nn.Linear(32, 16)
    before = dict(layer.named_parameters())
    convert_to_float8(layer)
    assert dict(layer.named_parameters()) == before
    assert isinstance(layer, Float8Linear)
    assert isinstance(copy.deepcopy(layer), Float8Linear)


def test_layers_with_other_sizes_or_forwards_of_their_own_do_not_fit() -> None:
    class Own(nn.Linear):
        pass

    assert can_use_float8(nn.Linear(32, 16))
    assert not any(
        can_use_float8(layer) for layer in (nn.Linear(32, 24), nn.Linear(24, 32), Own(32, 16), nn.Embedding(16, 16))
    )


def test_candidates_lie_in_blocks_and_are_not_the_head() -> None:
    model = transformer(vocab_size=64, seq_len=8, layers=2, hidden_size=32, num_heads=2)
    names = {f"attention.{part}" for part in ("query", "key", "value", "out")} | {"ffn.gate", "ffn.up", "ffn.down"}
    assert set(find_float8_layers(model, find_blocks(model), min_size=False)) == {
        f"blocks.{i}.{name}" for i in range(2) for name in names
    }


def test_layers_with_few_inputs_and_outputs_stay_in_16_bits() -> None:
    with torch.device("meta"):
        layers = [nn.Linear(4096, 1024), nn.Linear(4096, 2048), nn.Linear(8192, 1024)]
        model = nn.Sequential(*(nn.Sequential(layer) for layer in layers))
    assert list(find_float8_layers(model, ["0", "1", "2"])) == ["1.0", "2.0"]


def test_a_router_keeps_its_digits() -> None:
    model = moe(
        vocab_size=64, seq_len=8, layers=2, hidden_size=32, num_heads=2, num_experts=16, shared_expert_hidden_size=32
    )
    names = find_float8_layers(model, find_blocks(model), min_size=False)
    assert any("ffn.shared" in name for name in names)
    assert not any("router" in name for name in names)


def tiny() -> nn.Module:
    torch.manual_seed(0)
    return transformer(vocab_size=32, seq_len=16, layers=2, hidden_size=32, num_heads=2, ffn_hidden_size=64)


def in_fp8(model: nn.Module) -> nn.Module:
    for layer in find_float8_layers(model, find_blocks(model), min_size=False).values():
        convert_to_float8(layer)
    return model


def gradients(model: nn.Module) -> list[Tensor]:
    tokens = torch.randint(32, (4, 16), generator=torch.Generator().manual_seed(1))
    with autocast_context("fp8", CPU):
        loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.roll(-1, 1).flatten())
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("how", ["selective", "full"])
def test_recomputation_changes_no_bit(how: ActivationCheckpointing) -> None:
    model, plain = in_fp8(tiny()), in_fp8(tiny())
    apply_activation_checkpointing(model, find_blocks(model), how)
    for found, expected in zip(gradients(model), gradients(plain), strict=True):
        assert torch.equal(found, expected)


@compiling
@pytest.mark.parametrize("how", ["none", "selective", "full"])
def test_compiled_blocks_agree_with_eager(how: ActivationCheckpointing, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    model, plain = in_fp8(tiny()), in_fp8(tiny())
    blocks = find_blocks(model)
    apply_activation_checkpointing(model, blocks, how)
    real = nn.Module.compile
    # code is not generated: that takes half a minute, and its rounding is its own
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: real(self, backend="aot_eager", **options))
    compile_blocks(model, [model.get_submodule(name) for name in blocks])
    for found, expected in zip(gradients(model), gradients(plain), strict=True):
        assert off(found, expected) < 0.05  # a value that rounds otherwise in bf16 may round otherwise in fp8
    torch.compiler.reset()


def test_weights_are_quantised_once_a_step_and_in_each_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    model = in_fp8(tiny())
    layers = [module for module in model.modules() if isinstance(module, Float8Linear)]
    quantize_weights_once(model)
    filled: list[Tensor] = []
    fill = Float8Weight.quantize_from
    monkeypatch.setattr(
        Float8Weight, "quantize_from", lambda known, weight: (filled.append(weight), fill(known, weight))
    )
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    for step in range(1, 3):
        for layer in layers:
            layer.before_step()
        for _ in range(3):
            model(tokens).sum().backward()
        optimizer.step()
        assert len(filled) == step * len(layers)
    model.eval()
    model(tokens)
    assert len(filled) == 3 * len(layers)
    known = layers[0].float8_weight
    assert known is not None
    assert torch.equal(known.rows, quantize_to_float8(layers[0].weight, FORWARD_DTYPE)[0])
    assert torch.equal(known.transposed, known.rows.t())
    assert not any("quantised" in name for name in model.state_dict())


def test_a_quantised_weight_gives_the_same_product_and_gradients() -> None:
    x, weight, _ = tensors(48)
    known = Float8Weight.allocate_for(weight)
    known.quantize_from(weight)

    def both(quantised_weight: Float8Weight | None) -> list[Tensor]:
        out = float8_linear(x, weight, float8_weight=quantised_weight)
        return [out, *torch.autograd.grad(out.square().sum(), (x, weight))]

    assert all(torch.equal(a, b) for a, b in zip(both(known), both(None), strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_a_gpu_the_product_is_the_cpus() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU does not multiply in fp8")
    given = tensors(48)
    on_gpu = [each.detach().cuda().requires_grad_() for each in given]
    for found, expected in zip(results(float8_linear, *on_gpu), results(float8_linear, *given), strict=True):
        assert off(found.cpu(), expected) < 1e-2
