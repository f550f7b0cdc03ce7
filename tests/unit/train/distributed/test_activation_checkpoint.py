"""Recomputation changes memory and time, and not a bit of the results."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import is_available as distributed_is_available
from torch.profiler import ProfilerActivity, profile

from phalanx.models import transformer
from phalanx.train.distributed.activation_checkpoint import (
    SAVED_OPS,
    ActivationCheckpointing,
    apply_activation_checkpointing,
    get_op_name,
    has_mutable_state,
)
from phalanx.train.ops.blocks import find_blocks

WAYS: tuple[ActivationCheckpointing, ...] = ("selective", "full")
VOCAB, SEQUENCE = 23, 16


def model_of(how: ActivationCheckpointing = "none", dropout: float = 0.0, layers: int = 3) -> nn.Module:
    torch.manual_seed(0)
    model = transformer(vocab_size=VOCAB, seq_len=SEQUENCE, layers=layers, hidden_size=32, num_heads=2, dropout=dropout)
    apply_activation_checkpointing(model, find_blocks(model), how)
    return model


def tokens(batch: int = 2) -> Tensor:
    return torch.randint(0, VOCAB, (batch, SEQUENCE), generator=torch.Generator().manual_seed(1))


def step(model: nn.Module, run: Callable[[nn.Module], Tensor] | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients by name, of random numbers that are always the same."""
    torch.manual_seed(5)
    loss = model(tokens()).float().square().sum() if run is None else run(model)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_bits(one: tuple[Tensor, dict[str, Tensor]], other: tuple[Tensor, dict[str, Tensor]]) -> None:
    assert one[0].equal(other[0])
    assert one[1].keys() == other[1].keys()
    assert all(gradient.equal(other[1][name]) for name, gradient in one[1].items())


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize(("dropout", "bf16"), [(0.0, False), (0.3, False), (0.2, True)])
def test_loss_and_gradients_are_the_same_bits_with_dropout_and_under_autocast(
    how: ActivationCheckpointing, dropout: float, bf16: bool
) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        assert_same_bits(step(model_of(how, dropout)), step(model_of(dropout=dropout)))


class Moving(nn.Module):
    """A block whose forward uses and changes state of one kind."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind, self.layer = kind, nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("spread", torch.ones(8))
        self.register_buffer("constant", torch.full((8,), 0.5))
        self.norm = nn.BatchNorm1d(8) if kind == "batch norm" else nn.Identity()
        if kind == "spectral norm":
            self.layer = nn.utils.parametrizations.spectral_norm(self.layer)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.layer(x))
        if self.kind == "functional":
            h = nn.functional.batch_norm(h, self.mean, self.spread, training=True) * self.mean.clone()
        if self.kind == "average":
            self.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        if self.kind == "replaced":
            self.mean = self.mean * 0.9 + h.detach().mean(0) * 0.1
        return x + torch.tanh(h * self.constant * (1 + self.mean.clone()))


def moved(kind: str, how: ActivationCheckpointing) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients and buffers after two rounds of two forwards and their backwards, the last first."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), *(Moving(kind) for _ in range(2)))
    apply_activation_checkpointing(model, ["1", "2"], how)
    for turn in range(2):
        losses = [model(torch.randn(5, 8)).square().sum() for _ in range(2)]
        for loss in reversed(losses):
            (loss * (turn + 1)).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return gradients, dict(model.named_buffers())


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("kind", ["batch norm", "functional", "spectral norm", "average", "replaced"])
def test_state_that_a_forward_changes_is_used_as_it_was_and_changed_once(
    kind: str, how: ActivationCheckpointing
) -> None:
    expected, found = moved(kind, "none"), moved(kind, how)
    for one, other in zip(expected, found, strict=True):
        assert one.keys() == other.keys()
        assert [name for name, tensor in one.items() if not tensor.equal(other[name])] == []


def test_a_compiler_recomputes_blocks_whose_state_stays() -> None:
    masked, average = nn.Linear(2, 2), nn.Linear(2, 2)
    masked.register_buffer("mask", torch.ones(2, dtype=torch.bool))
    masked.register_buffer("cache", torch.ones(2), persistent=False)
    average.register_buffer("mean", torch.ones(2))
    blocks = [masked, nn.BatchNorm1d(2), nn.Sequential(average)]
    assert [has_mutable_state(block) for block in blocks] == [False, False, True]


@pytest.mark.parametrize("how", WAYS)
def test_frozen_parameters_get_no_gradient_and_the_others_the_same_bits(how: ActivationCheckpointing) -> None:
    results = []
    for model in (model_of(how), model_of()):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("ffn" in name or "blocks.2" in name)
        results.append(step(model))
    assert_same_bits(*results)
    assert len(results[0][1]) < len(list(model_of().parameters()))


class Picky(nn.Module):
    """A block whose arguments are not all tensors, and whose result is no tensor either."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, power: int, *, scale: Tensor, names: dict[str, Any], add: Tensor | None = None) -> Any:
        y = torch.tanh(self.linear(x)) ** power * scale * names["times"]
        return {"y": y if add is None else y + add, "names": names}


class PickyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Picky() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        scale = x.mean()
        for layer in self.layers:
            x = layer(x, 3, scale=scale, names={"times": 2.0}, add=x)["y"]
        return x


@pytest.mark.parametrize("how", WAYS)
def test_blocks_may_take_and_give_what_they_like(how: ActivationCheckpointing) -> None:
    def run(model: nn.Module) -> Tensor:
        return model(torch.linspace(-1, 1, 12).view(3, 4)).square().sum()

    results = []
    for way in (how, "none"):
        torch.manual_seed(0)
        model = PickyModel()
        apply_activation_checkpointing(model, find_blocks(model), way)  # type: ignore[arg-type]
        results.append(step(model, run))
    assert_same_bits(*results)


def bytes_kept(model: nn.Module) -> int:
    """What forward leaves allocated for backward."""
    batch = tokens(8)
    model(batch).sum().backward()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        loss = model(batch).sum()
    del loss
    return sum(event.self_cpu_memory_usage for event in profiler.key_averages())


def test_full_keeps_less_than_selective_and_selective_less_than_none() -> None:
    none, selective, full = (bytes_kept(model_of(how, layers=6)) for how in ("none", "selective", "full"))
    assert none > 1.5 * selective
    assert selective > full
    assert none > 4 * full


class Counter(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = get_op_name(func)
        self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def counts(how: ActivationCheckpointing) -> dict[str, int]:
    model = model_of(how, layers=2)
    with Counter() as counter:
        step(model)
    return counter.counts


def test_selective_makes_no_matmul_or_attention_again_but_all_that_is_cheap() -> None:
    none, selective, full = counts("none"), counts("selective"), counts("full")
    attention = "aten._scaled_dot_product_flash_attention_for_cpu"
    assert none["aten.mm"] == selective["aten.mm"] < full["aten.mm"]
    assert none[attention] == selective[attention] < full[attention]
    assert none["aten.silu"] < selective["aten.silu"] == full["aten.silu"]


@pytest.mark.parametrize("how", WAYS)
def test_parameters_and_classes_keep_their_names(how: ActivationCheckpointing) -> None:
    one, other = model_of(how), model_of()
    assert list(one.state_dict()) == list(other.state_dict())
    assert [type(module) for module in one.modules()] == [type(module) for module in other.modules()]
    assert find_blocks(one) == find_blocks(other)


@pytest.mark.parametrize("how", WAYS)
def test_a_deep_copy_recomputes_with_its_own_parameters(how: ActivationCheckpointing) -> None:
    model = model_of(how)
    copied = copy.deepcopy(model)
    loss, gradients = step(copied)
    assert_same_bits((loss, gradients), step(model_of()))
    assert all(parameter.grad is None for parameter in model.parameters())


class Dense(nn.Module):
    """A block with a norm, matmuls and something between them."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up = nn.Linear(width, 3 * width), nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * torch.sin(self.up(y)))


def compiled(how: ActivationCheckpointing, backend: str) -> nn.Sequential:
    """Blocks that recompute, each compiled afterwards; with the backend "none", not compiled."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = nn.Sequential(Dense(16), Dense(16))
    apply_activation_checkpointing(model, find_blocks(model), how)
    for block in model if backend != "none" else []:
        block.compile(backend=backend, fullgraph=True)
    return model


def on_numbers(model: nn.Module) -> Tensor:
    loss: Tensor = model(torch.linspace(-1, 1, 64).view(4, 16)).square().sum()
    return loss


# torch's compiler asks an activation for its gradient, which it means to do without a warning.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("how", WAYS)
def test_compiled_afterwards_it_agrees_with_eager(how: ActivationCheckpointing) -> None:
    (loss, gradients), (expected, reference) = (
        step(compiled(how, "aot_eager"), on_numbers),
        step(compiled("none", "none"), on_numbers),
    )
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0.0)
    assert gradients.keys() == reference.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, reference[name], rtol=1e-5, atol=1e-5 * float(reference[name].abs().max()))


def kept_when_compiled(how: ActivationCheckpointing) -> int:
    """Bytes that the compiled forward hands to its backward."""
    model = compiled(how, "aot_eager")
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        found[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        on_numbers(model)
    parameters = {parameter.data_ptr() for parameter in model.parameters()}
    return sum(size for place, size in found.items() if place not in parameters)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiler_keeps_what_each_way_says() -> None:
    assert kept_when_compiled("none") > kept_when_compiled("selective") > kept_when_compiled("full")


@pytest.mark.skipif(not distributed_is_available(), reason="torch without distributed")
@pytest.mark.parametrize("name", [name for name in SAVED_OPS if "." in name])
def test_every_kept_operation_exists_under_its_name(name: str) -> None:
    namespace, operation = name.split(".")
    packet = getattr(getattr(torch.ops, namespace), operation)
    assert {get_op_name(getattr(packet, overload)) for overload in packet.overloads()} == {name}


def test_higher_order_operations_have_a_name_without_a_namespace() -> None:
    from torch.nn.attention.flex_attention import flex_attention  # noqa: F401 (it registers the operation)

    assert get_op_name(torch.ops.higher_order.flex_attention) in SAVED_OPS
