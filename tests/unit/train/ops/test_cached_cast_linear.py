"""Linear layers that keep their weight in autocast's dtype for a step, and add up its gradient by their products."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from phalanx.compat import scale_in_place
from phalanx.recipe.schema import OptimizerConfig
from phalanx.train.grad_sync.reducer import LocalReducer
from phalanx.train.ops.cached_cast_linear import CachedCastLinear, linear_names_in_blocks, use_cached_casts
from phalanx.train.optim.container import OptimizerContainer
from phalanx.train.step_metrics import NUM_FLAG_SLOTS, StepMetrics
from phalanx.train.train_step import compute_divisor_and_skip
from small_train import make_stepper

BF16 = torch.bfloat16


class Two(nn.Module):
    """Two blocks of two layers, the first with a bias."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8, bias=False)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


NAMES = ["blocks.0.0", "blocks.0.1", "blocks.1.0", "blocks.1.1"]


def batches(count: int = 3) -> list[Tensor]:
    return [torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(i)) for i in range(count)]


def step(
    model: nn.Module, layers: list[CachedCastLinear], loss: Callable[[Tensor], Tensor] | None = None
) -> dict[str, Tensor]:
    """Gradients of a step of three micro-batches."""
    gradients = LocalReducer(list(model.parameters()), layers)
    model.zero_grad()
    for layer in layers:
        layer.before_step()
    for leaf, x in enumerate(batches()):
        gradients.begin_backward(leaf)
        with torch.autocast("cpu", dtype=BF16):
            out = (loss or (lambda x: model(x).float().square().sum()))(x)
        out.backward()
        gradients.end_backward()
    gradients.reduce_gradients()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def adding(model: nn.Module, names: list[str]) -> list[CachedCastLinear]:
    layers = use_cached_casts(model, names, BF16)
    for layer in layers:
        layer.set_accumulate_in_matmul(True)
        layer.weight_grad_sum.fill_(torch.nan)  # what it held before counts nothing
    return layers


def test_without_a_total_gradients_are_those_of_autocast_bit_for_bit() -> None:
    expected = step(Two(), [])
    model = Two()
    found = step(model, use_cached_casts(model, NAMES, BF16))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_total_is_the_sum_of_products_in_fp32_that_nothing_has_rounded() -> None:
    model, exact = Two(), Two()
    found = step(model, adding(model, NAMES))
    layer, inputs, slopes = exact.blocks[1][1], [], []
    layer.register_forward_hook(lambda _, args, out: (inputs.append(args[0]), out.register_hook(slopes.append))[0])
    rounded = step(exact, [])["blocks.1.1.weight"]
    pairs = zip(slopes, inputs, strict=True)
    fp32 = sum(g.flatten(0, 1).float().t() @ x.flatten(0, 1).to(BF16).float() for g, x in pairs)
    name = "blocks.1.1.weight"
    assert torch.allclose(found[name], fp32, rtol=1e-6, atol=1e-6)
    assert (found[name] - fp32).norm() < 0.01 * (rounded - fp32).norm()


def test_a_layer_that_is_called_twice_adds_up_both() -> None:
    model, expected = Two(), Two()

    def loss(model: nn.Module) -> Callable[[Tensor], Tensor]:
        return lambda x: model(model(x)).float().square().sum()

    found, wanted = step(model, adding(model, NAMES), loss(model)), step(expected, [], loss(expected))
    assert all(torch.allclose(found[name], wanted[name], rtol=0.02, atol=0.5) for name in wanted)


def test_what_others_do_with_the_weight_adds_to_its_gradient_in_every_micro_batch() -> None:
    model = Two()
    layers = adding(model, NAMES)
    weight = model.blocks[0][0].weight
    alone = step(model, layers)
    both = step(model, layers, lambda x: model(x).float().square().sum() + 2.0 * weight.sum())
    assert torch.allclose(both["blocks.0.0.weight"], alone["blocks.0.0.weight"] + 3 * 2.0, atol=1e-4)


def test_a_layer_that_is_not_used_has_a_gradient_of_zeros() -> None:
    model = Two()
    layers = adding(model, NAMES)
    step(model, layers)
    found = step(model, layers, lambda x: model.blocks[0](x).float().square().sum())
    assert not found["blocks.1.0.weight"].any()
    assert found["blocks.0.0.weight"].any()


def test_frozen_shared_and_hooked_weights_and_other_kinds_of_layers_stay_as_they_are() -> None:
    class Other(nn.Linear):
        pass

    model = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("plain", "frozen", "hooked", "first", "second")})
    model["frozen"].weight.requires_grad_(False)
    model["hooked"].weight.register_hook(lambda grad: grad)
    model["second"].weight = model["first"].weight
    model["other"] = Other(8, 8)
    assert use_cached_casts(model, list(model), BF16) == [model["plain"]]


def test_only_layers_in_blocks_are_named() -> None:
    model = nn.ModuleDict({"blocks": Two().blocks, "head": nn.Linear(8, 3)})
    assert linear_names_in_blocks(model, ["blocks.0", "blocks.1"]) == NAMES


def test_outside_autocast_a_layer_computes_in_its_own_precision() -> None:
    model = Two()
    use_cached_casts(model, NAMES, BF16)
    x = batches(1)[0]
    assert torch.equal(model(x), Two()(x))


def test_an_evaluation_sees_the_weights_as_they_are() -> None:
    model = Two()
    step(model, use_cached_casts(model, NAMES, BF16))
    with torch.no_grad(), torch.autocast("cpu", dtype=BF16):
        x = batches(1)[0]
        before = model.eval()(x)
        for parameter in model.parameters():
            parameter.mul_(2.0)
        after = model(x)
        assert not torch.equal(before, after)
        fresh = Two().eval()
        for parameter in fresh.parameters():
            parameter.mul_(2.0)
        assert torch.equal(after, fresh(x))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_blocks_add_up_without_a_graph_break() -> None:
    model, eager = Two(), Two()
    layers = adding(model, NAMES)
    expected = step(eager, adding(eager, NAMES))
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    step(model, layers)
    found = step(model, layers)
    off = {name: float((found[name] - value).norm() / value.norm()) for name, value in expected.items()}
    assert max(off.values()) < 0.01, off  # a compiler rounds less often


@pytest.mark.parametrize("clip", [None, 1e-3, 1e3])
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_a_step_judged_on_the_device_changes_weights_as_one_judged_by_the_host(clip: float | None, kind: str) -> None:
    weights = []
    for early in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(6, 4)
        stepper = make_stepper(model, 2, clip=clip, optim=OptimizerConfig(name=kind, lr=0.1))
        agreement = torch.zeros(2 * 2 + NUM_FLAG_SLOTS + 1, dtype=torch.float64)
        for seed in range(3):
            x = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))
            model.zero_grad()
            F.mse_loss(model(x), torch.ones(5, 4), reduction="sum").backward()
            agreement[:4] = torch.tensor([3.0, 4.0, 10.0, 7.0])
            if early:
                numbers = torch.cat([agreement, stepper.reducer.grad_norm().view(1)])
                stepper.optimizer.step_scaled(0.1, *compute_divisor_and_skip(numbers, 2, 1.0, clip))
            else:
                stepper.metrics = StepMetrics(2, torch.device("cpu"))
                stepper.metrics.values = agreement
                scale_in_place(stepper.reducer.grad_tensors(), stepper.divided()[1])
                stepper.optimizer.step(0.1)
        weights.append(model.weight.detach().clone())
    assert torch.allclose(*weights, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_leaves_weights_and_state_as_they_were(where: str, bad: float) -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    optimizer = OptimizerContainer(model, OptimizerConfig(name="adamw", lr=0.1))
    model(torch.ones(1, 6)).sum().backward()
    one, zero = torch.ones(()), torch.zeros(())
    optimizer.step_scaled(0.1, one, zero)
    before = {name: value.clone() for name, value in optimizer.state().items()}
    weight = model.weight.detach().clone()
    numbers = torch.tensor([bad if where == "loss" else 1.0, 1.0, 0.0, bad if where == "gradient" else 1.0])
    optimizer.step_scaled(0.1, *compute_divisor_and_skip(numbers.double(), 1, 1.0, 1.0))
    assert torch.equal(model.weight, weight)
    assert all(torch.equal(value, before[name]) for name, value in optimizer.state().items())
    optimizer.step(0.1)  # what was set for one step is gone
    assert not torch.equal(model.weight, weight)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_a_gpu_products_add_up_in_fp32_too() -> None:
    model = Two().cuda()
    layers = adding(model, NAMES)
    inputs: list[Tensor] = []
    slopes: list[Tensor] = []
    model.blocks[1][1].register_forward_hook(
        lambda _, args, out: (inputs.append(args[0]), out.register_hook(slopes.append))[0]
    )
    gradients = LocalReducer(list(model.parameters()), layers)
    for layer in layers:
        layer.before_step()
    for x in batches():
        with torch.autocast("cuda", dtype=BF16):
            model(x.cuda()).float().square().sum().backward()
        gradients.end_backward()
    pairs = zip(slopes, inputs, strict=True)
    expected = sum(g.flatten(0, 1).double().t() @ x.flatten(0, 1).to(BF16).double() for g, x in pairs)
    found = model.blocks[1][1].weight.grad
    assert found is not None
    assert float((found - expected).norm() / expected.norm()) < 1e-5
