"""Workers that train apart for rounds of steps, on gloo: what outer steps make of their weights, and what travels."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.recipe import Recipe
from phalanx.train.builder import make_accumulator
from phalanx.train.distributed.environment import DistEnv
from phalanx.train.distributed.mesh import build_mesh
from phalanx.train.distributed.parallel_model import ParallelModel
from phalanx.train.local_sgd.local_sgd import LocalSGD, SyncSchedule
from phalanx.train.local_sgd.step import OuterSteps
from phalanx.train.ops.random_draws import MicroBatchSeeds
from phalanx.train.optim.container import OptimizerContainer
from phalanx.train.precision import GradScaler
from phalanx.train.step_timer import HostStepTimer
from phalanx.train.train_step import TrainStep
from process_worlds import ProcessWorlds

SHAPES = ((33, 7), (), (5,), (200,), (16, 16), (1,), (3, 3, 3))
STEPS = 6
SGD = {"name": "sgd", "lr": 0.02, "momentum": 0.0, "weight_decay": 0.0, "max_grad_norm": None}
ADAMW = {"name": "adamw", "lr": 0.02, "max_grad_norm": 0.5}
NEVER = 1000
COLLECTIVES = ("all_reduce", "isend", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast")
Weights = list[Tensor]


class Toy(nn.Module):
    """Weights that are pulled towards what each micro-batch wants them to be."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.weights = nn.ParameterList(torch.randn(shape, generator=generator) for shape in SHAPES)

    def forward(self, step: int, leaf: int) -> Tensor:
        wish = torch.Generator().manual_seed(100 * step + leaf)
        return torch.stack([(w - torch.randn(w.shape, generator=wish)).square().sum() for w in self.weights]).sum()


@contextmanager
def counted(sizes: list[int]) -> Iterator[None]:
    """Notes how many elements each collective has that is begun meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        for name in COLLECTIVES:

            def begun(tensor: Tensor, *args: Any, original: Callable[..., Any], **options: Any) -> Any:
                sizes.append(tensor.numel())
                return original(tensor, *args, **options)

            original = getattr(dist, name)
            patch.setattr(dist, name, lambda *a, original=original, begun=begun, **o: begun(*a, original=original, **o))
        yield


def train(
    rank: int, world: int, *, how: dict[str, Any], optim: dict[str, Any]
) -> tuple[list[Weights], list[list[int]]]:
    """The weights after each step of this worker, and how many elements each collective had in it."""
    values = {
        "batch": {"global_size": 2 * world, "micro_size": 1},
        "steps": STEPS,
        "optimizer": optim,
        "precision": "fp32",
    }
    grad_sync: dict[str, Any] = {"bucket_mib": 400 / 2**20}
    sync = {"grad_sync": grad_sync, "local_sgd": {"warmup_steps": 0, **how}}
    if "algorithm" in how:
        sync = {"grad_sync": {**grad_sync, **how}}
    recipe = Recipe.model_validate({**values, "parallelism": {"replicate": world}, "determinism": "off", **sync})
    place, model = DistEnv(rank, world), Toy()
    assert not isinstance(recipe.parallelism, str)
    divided = ParallelModel(build_mesh(recipe.parallelism, place, recipe), (model,))
    optimizer = OptimizerContainer(model, recipe.optimizer)
    stepper = make_accumulator(recipe, place, divided, optimizer, GradScaler(), MicroBatchSeeds(0, place.device))
    watch, found, sent = HostStepTimer(), [], []
    watch.start()
    outer = [] if divided.local_sgd is None else [OuterSteps(divided.local_sgd.local_sgd, watch)]
    clip = recipe.optimizer.max_grad_norm
    train_step = TrainStep(stepper, optimizer, None, lambda batch: batch, clip, watch, outer)
    for step in range(1, STEPS + 1):
        sizes: list[int] = []
        with counted(sizes):
            train_step.zero_grad(step)
            for leaf in divided.mesh.own_micro_batches(2 * world):
                train_step.backward(model(step, leaf), 1)
            result = train_step.apply(train_step.reduce(), recipe.optimizer.lr)
            assert result.skip_reason is None
            train_step.finish(result)
        found.append([weight.detach().clone() for weight in model.weights])
        sent.append(sizes)
    stepper.reducer.close()
    return found, sent


def trained(world: ProcessWorlds, ranks: int, optim: dict[str, Any], **how: Any) -> list[list[Weights]]:
    """Of each rank the weights after each step."""
    return [found for found, _ in world.run_once(ranks, train, how=how, optim=optim)]


def assert_close(some: Weights, others: Weights, tolerance: float = 1e-5) -> None:
    for one, other in zip(some, others, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def mean(ranks: list[Weights]) -> Weights:
    return [torch.stack(each).mean(0) for each in zip(*ranks, strict=True)]


RANKS = pytest.mark.parametrize("ranks", [2, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 8))])
KINDS = pytest.mark.parametrize("method", ["average", "diloco"])


@RANKS
@pytest.mark.parametrize(("wire", "tolerance"), [("fp32", 1e-5), ("bf16", 5e-3), ("int8", 5e-3)])
def test_after_a_round_all_have_the_mean_of_what_each_reached_alone(
    world: ProcessWorlds, ranks: int, wire: str, tolerance: float
) -> None:
    apart = trained(world, ranks, ADAMW, method="average", sync_every=NEVER)
    assert not apart[0][2][0].equal(apart[1][2][0])
    for found in trained(world, ranks, ADAMW, method="average", sync_every=3, sync_dtype=wire):
        assert_close(found[2], mean([alone[2] for alone in apart]), tolerance)


@RANKS
@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8"])
@KINDS
def test_after_a_round_all_have_the_same_bits(world: ProcessWorlds, ranks: int, method: str, wire: str) -> None:
    first, *others = trained(world, ranks, ADAMW, method=method, sync_every=4, sync_dtype=wire)
    for other in others:
        same = [all(a.equal(b) for a, b in zip(*pair, strict=True)) for pair in zip(first, other, strict=True)]
        assert same == [False, False, False, True, False, True]  # the last step ends a round, too


@RANKS
def test_diloco_follows_the_mean_as_sgd_with_nesterov_momentum_does(world: ProcessWorlds, ranks: int) -> None:
    """Two rounds: what workers reached in each is taken from them, the outer steps are torch's."""
    found = trained(world, ranks, SGD, method="diloco", sync_every=3, outer_optimizer={"lr": 0.6, "momentum": 0.8})
    weights = [nn.Parameter(weight.detach().clone()) for weight in Toy().weights]
    outer = torch.optim.SGD(weights, lr=0.6, momentum=0.8, nesterov=True)
    for end in (3, 6):
        reached = []
        for rank in range(ranks):
            model = Toy()
            with torch.no_grad():
                for own, weight in zip(model.weights, weights, strict=True):
                    own.copy_(weight)
            own_steps(model, rank, range(end - 2, end + 1))
            reached.append([weight.detach() for weight in model.weights])
        for weight, now in zip(weights, mean(reached), strict=True):
            weight.grad = weight.detach() - now
        outer.step()
        for rank in range(ranks):
            assert_close(found[rank][end - 1], [weight.detach() for weight in weights])


def own_steps(model: Toy, rank: int, steps: range) -> None:
    """Plain SGD on the mean of a worker's own two micro-batches."""
    inner = torch.optim.SGD(model.parameters(), lr=SGD["lr"])  # type: ignore[arg-type]
    for step in steps:
        inner.zero_grad()
        (torch.stack([model(step, leaf) for leaf in (2 * rank, 2 * rank + 1)]).sum() / 2).backward()
        inner.step()


@RANKS
@pytest.mark.parametrize("how", [{"sync_every": 2}, {"sync_every": 4, "num_fragments": 2, "sync_delay": 1}], ids=str)
def test_in_the_first_steps_all_take_the_mean_after_each(world: ProcessWorlds, ranks: int, how: dict[str, int]) -> None:
    """Without an outer optimizer, which is for longer ways."""
    together = trained(world, ranks, SGD, algorithm="all-reduce")
    for found in trained(world, ranks, SGD, method="diloco", warmup_steps=3, **how):
        for step in range(3):
            assert_close(found[step], together[0][step])
    first, *others = trained(world, ranks, SGD, method="diloco", warmup_steps=3, **how)
    for other in others:
        agreed = [all(a.equal(b) for a, b in zip(*pair, strict=True)) for pair in zip(first, other, strict=True)]
        assert agreed == [True, True, True, "num_fragments" not in how, False, True]


@RANKS
def test_fragments_are_agreed_on_by_turns(world: ProcessWorlds, ranks: int) -> None:
    """Half of the buckets after step 2, the others after step 4, and all after the last."""
    apart = trained(world, ranks, SGD, method="average", sync_every=NEVER)
    first, *others = trained(world, ranks, SGD, method="average", sync_every=4, num_fragments=2)
    turns = fragments_of_weights(ranks)
    for other in others:
        for step, agreed in ((1, ()), (2, (1,)), (4, (0,)), (6, (0, 1))):
            same = [a.equal(b) for a, b in zip(first[step - 1], other[step - 1], strict=True)]
            assert same == [turn in agreed for turn in turns], step
    for turn, found, alone in zip(turns, first[1], mean([each[1] for each in apart]), strict=True):
        if turn == 1:
            torch.testing.assert_close(found, alone)


def fragments_of_weights(ranks: int) -> list[int]:
    """The fragment of each weight, of two."""
    weights = list(Toy().parameters())
    rounds = LocalSGD(weights, rank=0, world_size=ranks, schedule=SyncSchedule(4, STEPS, 2), bucket_bytes=400)
    found = {p: number % 2 for number, bucket in enumerate(rounds.buckets) for p in bucket.parameters}
    assert {0, 1} == set(found.values())
    return [found[weight] for weight in weights]


@RANKS
@pytest.mark.parametrize("outer", [{"lr": 0.6, "momentum": 0.8}, {"lr": 0.6, "momentum": 0.0}], ids=str)
def test_what_lands_late_is_mixed_with_what_a_worker_has_become(
    world: ProcessWorlds, ranks: int, outer: dict[str, float]
) -> None:
    """Streaming DiLoCo by hand: one half leaves after step 2 and lands after 3, the other after 4 and 5."""
    found = trained(
        world, ranks, SGD, method="diloco", sync_every=4, num_fragments=2, sync_delay=1, outer_optimizer=outer
    )
    turns, models = fragments_of_weights(ranks), [Toy() for _ in range(ranks)]
    agreed = [nn.Parameter(weight.detach().clone()) for weight in Toy().weights]
    optimizers = [torch.optim.SGD([each], **outer, nesterov=bool(outer["momentum"])) for each in agreed]
    moved: dict[int, Tensor] = {}

    def leave(turn: int) -> None:
        for number in (number for number, each in enumerate(turns) if each == turn):
            reached = torch.stack([model.weights[number].detach() for model in models]).mean(0)
            moved[number] = agreed[number].detach() - reached

    def land(turn: int, own: float) -> None:
        for number in (number for number, each in enumerate(turns) if each == turn):
            agreed[number].grad = moved.pop(number)
            optimizers[number].step()
            for model in models:
                model.weights[number].data.mul_(own).add_(agreed[number].detach(), alpha=1 - own)

    for step in range(1, STEPS + 1):
        for rank, model in enumerate(models):
            own_steps(model, rank, range(step, step + 1))
        if step in (3, 5):
            land(1 if step == 3 else 0, 0.5)
        if step in (2, 4):
            leave(1 if step == 2 else 0)
        if step == STEPS:
            for turn in (0, 1):
                leave(turn)
                land(turn, 0.0)
        for rank, model in enumerate(models):
            assert_close(found[rank][step - 1], [weight.detach() for weight in model.weights])


@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8"])
@KINDS
def test_nothing_of_the_size_of_gradients_travels_within_a_round(world: ProcessWorlds, method: str, wire: str) -> None:
    size = sum(weight.numel() for weight in Toy().weights)
    for _, sent in world.run_once(2, train, how={"method": method, "sync_every": 3, "sync_dtype": wire}, optim=ADAMW):
        for step, sizes in enumerate(sent, start=1):
            if step % 3:
                assert len(sizes) == 1  # what all agree on
                assert sizes[0] < 32 < size
            else:
                assert sum(sizes) >= size


def test_each_worker_clips_by_its_own_norm(world: ProcessWorlds) -> None:
    """Every step is as long as the clip allows, on each worker, though their gradients differ."""
    clip = {**SGD, "max_grad_norm": 0.5}
    for found in trained(world, 2, clip, method="average", sync_every=NEVER):
        for before, after in pairwise(found[:5]):
            moved = torch.cat([(b - a).reshape(-1) for a, b in zip(before, after, strict=True)])
            assert float(moved.norm()) == pytest.approx(0.5 * 0.02, rel=1e-3)
