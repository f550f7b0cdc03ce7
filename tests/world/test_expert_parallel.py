"""Experts divided over 2 and 4 ranks, against one process that has them all."""

import warnings
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from phalanx.errors import RecipeError
from phalanx.models import moe, transformer
from phalanx.models.moe import GroupedExperts, MoETransformer, TopKRouter
from phalanx.train.distributed.expert_parallel import apply_expert_parallel
from process_worlds import ProcessWorlds

EXPERTS, WIDTH, FFN = 8, 16, 24


def assert_near(found: Tensor, expected: Tensor, name: str = "") -> None:
    """Within 1e-6 of the largest."""
    assert found.shape == expected.shape, name
    torch.testing.assert_close(
        found, expected, rtol=1e-6, atol=1e-6 * float(expected.abs().max()) if expected.numel() else 0, msg=name
    )


def experts() -> GroupedExperts:
    torch.manual_seed(0)
    module = GroupedExperts(EXPERTS, WIDTH, FFN)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module


def rows_of(counts: Sequence[Sequence[int]], rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """A rank's rows, how many there are for each expert, and the gradients of what becomes of them."""
    generator = torch.Generator().manual_seed(rank + 1)
    length = sum(counts[rank])
    x = torch.randn(length, WIDTH, generator=generator).requires_grad_()
    return x, torch.tensor(counts[rank]), torch.randn(length, WIDTH, generator=generator)


def divided(rank: int, world: int, *, counts: Sequence[Sequence[int]]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Outputs and gradients of rows, and gradients of the rank's experts."""
    module = experts()
    apply_expert_parallel(module, dist.group.WORLD)
    x, number, grad = rows_of(counts, rank)
    out = module(x, number)
    out.backward(grad)
    assert x.grad is not None
    return [out.detach(), x.grad], {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def random_counts(world: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(0, 9, (world, EXPERTS), generator=generator).tolist()  # type: ignore[no-any-return]


NONE = [0] * EXPERTS
ROUTINGS: dict[str, Callable[[int], list[list[int]]]] = {
    "random": random_counts,
    "a rank sends nothing": lambda world: [NONE, *random_counts(world)[1:]],
    "a rank gets nothing": lambda world: [
        [*row[: -EXPERTS // world], *NONE[-EXPERTS // world :]] for row in random_counts(world)
    ],
    "all rows for one expert": lambda world: [[0, 0, 0, 5 + rank, 0, 0, 0, 0] for rank in range(world)],
    "no rows at all": lambda world: [NONE] * world,
}


@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS.keys())
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_outputs_and_gradients_are_those_of_one_process(
    world: ProcessWorlds, ranks: int, routing: Callable[[int], list[list[int]]]
) -> None:
    counts = routing(ranks)
    alone = experts()
    expected = []
    for rank in range(ranks):
        x, number, grad = rows_of(counts, rank)
        out = alone(x, number)
        out.backward(grad)
        assert x.grad is not None
        expected.append([out.detach(), x.grad])
    found = world.run(ranks, divided, counts=counts)
    for (of_rows, _), of_rows_alone in zip(found, expected, strict=True):
        for one, other in zip(of_rows, of_rows_alone, strict=True):
            assert_near(one, other)
    for name, parameter in alone.named_parameters():
        assert parameter.grad is not None
        assert_near(torch.cat([gradients[name] for _, gradients in found]), parameter.grad, name)


def model() -> MoETransformer:
    """A model of which some blocks have experts, with enough balance to show."""
    torch.manual_seed(0)
    built = moe(
        61,
        12,
        3,
        16,
        2,
        num_experts=8,
        top_k=2,
        expert_hidden_size=24,
        shared_expert_hidden_size=16,
        dense_layers=1,
        aux_loss_coef=1.0,
    )
    for module in built.modules():
        if isinstance(module, TopKRouter):
            nn.init.normal_(module.score.weight, std=0.5)  # decided, so that rounding turns no choice
            module.load.copy_(torch.arange(1, 9) / 36)
    return built.train()


def loss_of(model: nn.Module, ranks: Sequence[int], world: int) -> Tensor:
    """The sum of losses over the sequences of some ranks; all have eight."""
    generator = torch.Generator().manual_seed(5)
    tokens, targets = torch.randint(61, (2, world, 8 // world, 12), generator=generator)
    logits = model(tokens[ranks].flatten(0, 1))
    return F.cross_entropy(logits.flatten(0, 1), targets[ranks].flatten(), reduction="sum")


def training(rank: int, world: int, *, way: str) -> tuple[float, dict[str, Tensor], list[Tensor]]:
    """The loss of the rank's sequences, gradients after the sum over ranks where parameters are whole, and the load
    after the step."""
    module = model()
    cuts = apply_expert_parallel(module, dist.group.WORLD)
    for block in module.blocks:
        if way == "recomputed":
            forward = block.forward
            block.forward = lambda *args, forward=forward: checkpoint(forward, *args, use_reentrant=False)
        if way == "compiled":
            block.compile(backend="aot_eager")
    with warnings.catch_warnings():
        if way == "compiled":  # torch.compile's own doings
            warnings.simplefilter("ignore")
        loss = loss_of(module, [rank], world)
        loss.backward()
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    for name, gradient in gradients.items():
        if name not in cuts:
            dist.all_reduce(gradient)

    def add(x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    routers = [m for m in module.modules() if isinstance(m, TopKRouter)]
    for router in routers:
        router.after_step(add)
    return loss.item(), gradients, [router.load for router in routers]


@pytest.mark.parametrize(("ranks", "way"), [(4, "recomputed"), (2, "compiled")])
def test_a_model_trains_as_in_one_process(world: ProcessWorlds, ranks: int, way: str) -> None:
    alone = model()
    loss = loss_of(alone, range(ranks), ranks)
    loss.backward()
    found = world.run(ranks, training, way=way)
    assert sum(one for one, _, _ in found) == pytest.approx(loss.item(), rel=1e-6)
    for name, parameter in alone.named_parameters():
        assert parameter.grad is not None
        parts = [gradients[name] for _, gradients, _ in found]
        assert_near(torch.cat(parts) if ".experts." in name else parts[0], parameter.grad, name)
    routers = [m for m in alone.modules() if isinstance(m, TopKRouter)]
    for index, router in enumerate(routers):
        router.after_step(lambda counts: counts)
        for _, _, loads in found:
            assert torch.equal(loads[index], router.load)


def shared_weights(rank: int, world: int) -> tuple[list[str], list[str]]:
    twins = nn.ModuleDict({"first": experts(), "second": experts()})
    for name, parameter in twins["first"].named_parameters():
        setattr(twins["second"], name, parameter)
    cuts = apply_expert_parallel(twins, dist.group.WORLD)
    return list(cuts), [name for name, _ in twins.named_parameters()]


def test_weights_that_two_modules_share_stay_shared(world: ProcessWorlds) -> None:
    names = ["first.gate", "first.up", "first.down"]
    for cuts, parameters in world.run(2, shared_weights):
        assert cuts == parameters == names


class Lopsided(nn.Module):
    """Says that it may be divided, but has a parameter that may not."""

    expert_parallel = True

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.bias = nn.Parameter(torch.zeros(8, 4)), nn.Parameter(torch.zeros(4))


def refused(rank: int, world: int, *, what: str) -> str:
    module: nn.Module = {
        "no experts": lambda: transformer(61, 12, 1, 16, 2),
        "three experts": lambda: moe(61, 12, 1, 16, 2, num_experts=3),
        "lopsided": Lopsided,
    }[what]()
    try:
        apply_expert_parallel(module, dist.group.WORLD)
    except RecipeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("no experts", "parallelism.expert: found 2, but the model has no experts to divide"),
        (
            "three experts",
            "parallelism.expert: 2 ranks cannot share the 3 experts of blocks.0.ffn.experts evenly; expected one of "
            "1, 3",
        ),
        (
            "lopsided",
            "parallelism.expert: the model says expert_parallel, so all its parameters must have the expert as",
        ),
    ],
)
def test_experts_that_cannot_be_divided_are_refused(world: ProcessWorlds, what: str, text: str) -> None:
    for message in world.run(2, refused, what=what):
        assert text in message
