"""The exchange of gradients within one process: buckets, the tree of `replicas`, gradients that do not come. How it
works between processes is in tests/world/test_gradient_reduction.py."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from phalanx.errors import RecipeError
from phalanx.recipe.schema import OptimizerConfig
from phalanx.train.grad_sync.bucketed_reducer import BucketedReducer
from phalanx.train.grad_sync.buckets import GRAD_ALIGNMENT_ELEMENTS, make_buckets
from phalanx.train.optim.container import OptimizerContainer


def parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def run(exchange: BucketedReducer, weights: Sequence[nn.Parameter], losses: Sequence[Callable[[], Tensor]]) -> None:
    """One step of a single process: every micro-batch's loss backward, then the sums."""
    for weight in weights:
        weight.grad = None
    for leaf, loss in enumerate(losses):
        exchange.begin_backward(leaf)
        loss().backward()
        exchange.end_backward()
    exchange.reduce_gradients()


def alone(weights: Sequence[nn.Parameter], *, micro_batches: int, replicas: bool, capacity: float = 200) -> Any:
    return BucketedReducer(
        weights, rank=0, world_size=1, micro_batches=micro_batches, is_elastic=replicas, bucket_bytes=capacity
    )


def wild_losses(weights: Sequence[nn.Parameter], count: int, seed: int = 0) -> list[Callable[[], Tensor]]:
    """Losses whose gradients are of very different sizes, so that the order of addition shows in the bits."""
    generator = torch.Generator().manual_seed(seed)
    factors = [
        [torch.randn(w.shape, generator=generator) * 10.0 ** (i * 5 % 7 - 3) for w in weights] for i in range(count)
    ]
    return [lambda row=row: sum((w * f).sum() for w, f in zip(weights, row, strict=True)) for row in factors]


def naive_tree(gradients: list[Tensor]) -> Tensor:
    if len(gradients) == 1:
        return gradients[0]
    left = 1
    while 2 * left < len(gradients):
        left *= 2
    return naive_tree(gradients[:left]) + naive_tree(gradients[left:])


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 5, 6, 8, 12])
def test_replicas_adds_micro_batches_in_the_tree(micro_batches: int) -> None:
    weights = parameters((5, 3), (7,), (40,), ())
    losses = wild_losses(weights, micro_batches)
    expected = [naive_tree(list(g)) for g in zip(*(torch.autograd.grad(f(), weights) for f in losses), strict=True)]
    run(alone(weights, micro_batches=micro_batches, replicas=True), weights, losses)
    for weight, gradient in zip(weights, expected, strict=True):
        assert weight.grad is not None
        assert weight.grad.equal(gradient)


def test_a_step_needs_no_more_buffers_than_the_first() -> None:
    weights = parameters((5, 3))
    exchange = alone(weights, micro_batches=8, replicas=True)
    (bucket,) = exchange.buckets
    counts = []
    for seed in range(3):
        run(exchange, weights, wild_losses(weights, 8, seed))
        counts.append(1 + len(bucket.free_buffers) + len(bucket.tree_nodes))
    assert counts == [counts[0]] * 3


def test_buffers_that_are_used_again_hold_nothing_of_the_step_before() -> None:
    weights = parameters((5, 3), (7,))
    exchange = alone(weights, micro_batches=6, replicas=True)
    run(exchange, weights, wild_losses(weights, 6, seed=1))
    run(exchange, weights, wild_losses(weights, 6, seed=2))
    again = [w.grad.clone() for w in weights if w.grad is not None]
    exchange.close()
    run(alone(weights, micro_batches=6, replicas=True), weights, wild_losses(weights, 6, seed=2))
    assert all(w.grad is not None and w.grad.equal(g) for w, g in zip(weights, again, strict=True))


@pytest.mark.parametrize("replicas", [True, False])
@pytest.mark.parametrize("used_in", [0, 1])
def test_a_parameter_that_only_one_micro_batch_uses_keeps_its_gradient(replicas: bool, used_in: int) -> None:
    weights = parameters((3,), (4,))
    losses = [lambda: weights[0].sum(), lambda: weights[0].sum()]
    losses[used_in] = lambda: weights[0].sum() + 5 * weights[1].sum()
    run(alone(weights, micro_batches=2, replicas=replicas), weights, losses)
    assert weights[1].grad is not None
    assert weights[1].grad.tolist() == [5.0] * 4


def test_an_unused_parameter_leaves_nothing_of_the_step_before() -> None:
    weights = parameters((3,), (4,))
    exchange = alone(weights, micro_batches=2, replicas=True)
    run(exchange, weights, [lambda: weights[0].sum() + weights[1].sum()] * 2)
    run(exchange, weights, [lambda: weights[0].sum()] * 2)
    assert weights[1].grad is not None
    assert weights[1].grad.tolist() == [0.0] * 4


@pytest.mark.parametrize("world", [2, 3, 5])
def test_the_norm_does_not_depend_on_the_padding_for_a_world(world: int) -> None:
    weights = parameters((3, 5), (7,), (100,))
    generator = torch.Generator().manual_seed(0)
    single = BucketedReducer(weights, rank=0, world_size=1, micro_batches=world, is_elastic=True, bucket_bytes=200)
    several = BucketedReducer(weights, rank=0, world_size=world, micro_batches=world, is_elastic=True, bucket_bytes=200)
    for one, other in zip(single.buckets, several.buckets, strict=True):
        assert one.num_used == other.num_used
        one.buffer.flat[: one.num_used] = torch.randn(one.num_used, generator=generator)
        other.buffer.flat.fill_(torch.nan)
        other.buffer.flat[: one.num_used] = one.buffer.flat[: one.num_used]
    assert several.grad_norm().equal(single.grad_norm())


@pytest.mark.parametrize(
    ("sizes", "capacity", "options", "expected"),
    [
        ((10, 20, 30, 1000, 5), 50, {}, [[5], [1000], [30, 20], [10]]),
        ((2, 4, 90, 100, 100), 100, {"overlaps_backward": True}, [[100], [100], [90], [4, 2]]),
        ((60, 20, 100), 100, {"overlaps_backward": True}, [[100], [20, 60]]),
        ((2, 90), 100, {"overlaps_backward": True}, [[90, 2]]),
    ],
    ids=["last parameters first", "what comes last is small", "mostly one parameter stays whole", "a single bucket"],
)
def test_buckets_are_filled_in_the_order_of_backward_up_to_their_capacity(
    sizes: tuple[int, ...], capacity: int, options: dict[str, bool], expected: list[list[int]]
) -> None:
    weights = parameters(*((size,) for size in sizes))
    buckets = make_buckets(weights, bucket_bytes=4 * capacity, world_size=1, **options)
    assert [[p.numel() for p in bucket.parameters] for bucket in buckets] == expected


def test_a_bucket_has_one_dtype() -> None:
    weights = [*parameters((3,), (3,)), *parameters((3,), dtype=torch.bfloat16), *parameters((3,))]
    buckets = make_buckets(weights, bucket_bytes=1e6, world_size=1)
    assert [bucket.buffer.flat.dtype for bucket in buckets] == [torch.float32, torch.bfloat16, torch.float32]
    assert [len(bucket.parameters) for bucket in buckets] == [1, 1, 2]


def test_a_bucket_of_which_this_rank_has_no_rows_travels_all_the_same() -> None:
    weights = parameters((0, 4), (3,))
    assert [bucket.num_elements for bucket in make_buckets(weights, bucket_bytes=1, world_size=3)] == [
        3 * GRAD_ALIGNMENT_ELEMENTS
    ] * 2
    exchange = alone(weights, micro_batches=2, replicas=True, capacity=1)
    run(exchange, weights, wild_losses(weights, 2))
    assert weights[0].grad is not None
    assert weights[0].grad.shape == (0, 4)
    assert weights[1].grad is not None
    assert exchange.grad_norm().item() == pytest.approx(weights[1].grad.norm().item())


@pytest.mark.parametrize("world", [1, 3, 4])
def test_gradients_are_aligned_and_equal_parts_fill_a_bucket(world: int) -> None:
    (bucket,) = make_buckets(parameters((3,), (17,), (5, 5)), bucket_bytes=1e6, world_size=world)
    assert all(start % GRAD_ALIGNMENT_ELEMENTS == 0 for start in bucket.offsets)
    assert bucket.num_elements % (world * GRAD_ALIGNMENT_ELEMENTS) == 0
    assert bucket.num_elements - bucket.num_used < world * GRAD_ALIGNMENT_ELEMENTS


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_weights_that_are_not_contiguous_are_updated_as_without_an_exchange(optimizer: str) -> None:
    def trained(exchanged: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2)).to(memory_format=torch.channels_last)
        weights = list(model.parameters())
        images = torch.randn(2, 3, 4, 4)
        optim = OptimizerContainer(model, OptimizerConfig.model_validate({"name": optimizer}))
        exchange = alone(weights, micro_batches=2, replicas=True) if exchanged else None
        for _ in range(3):
            losses = [lambda i=i: model(images[i : i + 1]).square().sum() for i in range(2)]
            if exchange is not None:
                run(exchange, weights, losses)
            else:
                for weight in weights:
                    weight.grad = None
                for loss in losses:
                    loss().backward()
            optim.step(1e-2)
        return [weight.detach() for weight in weights]

    for plain, exchanged in zip(trained(False), trained(True), strict=True):
        assert exchanged.equal(plain)


def test_a_gradient_that_one_backward_makes_twice_is_refused() -> None:
    weights = parameters((3,))
    exchange = alone(weights, micro_batches=2, replicas=True)
    x = torch.ones(3, requires_grad=True)

    def scale(value: Tensor) -> Tensor:
        return value * weights[0]

    once: Any = checkpoint(scale, x, use_reentrant=True)
    twice: Any = checkpoint(scale, once, use_reentrant=True)
    exchange.begin_backward(0)
    with pytest.raises(RecipeError, match=r"shape \[3\] twice; checkpoint activations with use_reentrant=False"):
        twice.sum().backward()


def test_after_close_gradients_stay_where_backward_puts_them() -> None:
    weights = parameters((3,))
    exchange = alone(weights, micro_batches=1, replicas=True)
    exchange.begin_backward(0)
    exchange.close()
    weights[0].sum().backward()
    assert weights[0].grad is not None
    assert weights[0].grad.tolist() == [1.0] * 3
