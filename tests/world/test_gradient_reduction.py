"""The exchange of gradients between processes, on 2 and 3 ranks, against a single process."""

import gc
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.train.distributed.process_group import clone_group
from phalanx.train.grad_sync import algorithms
from phalanx.train.grad_sync.algorithms import ALL_TO_ALL_TAG, CommContext, P2PScatterGather
from phalanx.train.grad_sync.bucketed_reducer import BucketedReducer
from process_worlds import ProcessWorlds

SHAPES = ((33, 7), (), (5,), (200,), (16, 16), (1,))
CAPACITY = 1000.0  # bytes: several buckets


def parameters(dtypes: Sequence[torch.dtype] = (torch.float32,)) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [
        nn.Parameter(torch.randn(shape, generator=generator).to(dtypes[i % len(dtypes)]))
        for i, shape in enumerate(SHAPES)
    ]


def loss_of(weights: Sequence[nn.Parameter], leaf: int, unused: Sequence[int] = ()) -> Tensor:
    """A loss of micro-batch `leaf` whose gradients are of very different sizes, so that the order of addition shows.
    Of `unused` parameters it knows nothing."""
    generator = torch.Generator().manual_seed(leaf)
    loss = torch.zeros((), dtype=torch.float64)
    for index, weight in enumerate(weights):
        factor = torch.randn(weight.shape, generator=generator) * 10.0 ** (leaf * 5 % 7 - 3)
        if index not in unused:
            loss = loss + (weight * factor.to(weight.dtype)).double().sum()
    return loss


def step(
    weights: Sequence[nn.Parameter], exchange: BucketedReducer, leaves: Sequence[int], unused: dict[int, Sequence[int]]
) -> None:
    """Own micro-batches of one step; `unused` tells for a micro-batch what it does not use."""
    for weight in weights:
        weight.grad = None
    for leaf in leaves:
        exchange.begin_backward(leaf)
        loss_of(weights, leaf, unused.get(leaf, ())).backward()
        exchange.end_backward()
    exchange.reduce_gradients()


def sums(
    rank: int,
    world: int,
    *,
    micro_batches: int,
    replicas: bool,
    unused: dict[int, Sequence[int]] | None = None,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    steps: int = 2,
) -> tuple[list[Tensor], Tensor]:
    """Gradients and their norm after the last of some equal steps, as this rank has them."""
    weights = parameters(dtypes)
    exchange = BucketedReducer(
        weights, rank=rank, world_size=world, micro_batches=micro_batches, is_elastic=replicas, bucket_bytes=CAPACITY
    )
    own = micro_batches // world
    for _ in range(steps):
        step(weights, exchange, range(rank * own, (rank + 1) * own), unused or {})
    return [weight.grad.clone() for weight in weights if weight.grad is not None], exchange.grad_norm()


def assert_equal(one: tuple[list[Tensor], Tensor], other: tuple[list[Tensor], Tensor]) -> None:
    for a, b in zip([*one[0], one[1]], [*other[0], other[1]], strict=True):
        assert a.dtype == b.dtype
        assert a.equal(b)


def assert_close(one: tuple[list[Tensor], Tensor], other: tuple[list[Tensor], Tensor], rtol: float = 1e-5) -> None:
    for a, b in zip([*one[0], one[1]], [*other[0], other[1]], strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=rtol * float(b.abs().max()))


@pytest.mark.parametrize("replicas", [False, True])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 6), (3, 3)])
def test_all_ranks_have_the_same_sums_and_those_of_a_single_process(
    world: ProcessWorlds, ranks: int, micro_batches: int, replicas: bool
) -> None:
    alone = sums(0, 1, micro_batches=micro_batches, replicas=replicas)
    found = world.run(ranks, sums, micro_batches=micro_batches, replicas=replicas)
    for one in found:
        assert_equal(one, found[0])
        assert_close(one, alone)


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 8), (2, 2), (2, 6), (3, 3), (3, 12)])
def test_under_replicas_the_bits_are_those_of_a_single_process(
    world: ProcessWorlds, ranks: int, micro_batches: int
) -> None:
    """With 2 ranks and 8 micro-batches a rank's share is a subtree; with 6, or with 3 ranks, it is cut across."""
    alone = sums(0, 1, micro_batches=micro_batches, replicas=True)
    for one in world.run(ranks, sums, micro_batches=micro_batches, replicas=True):
        assert_equal(one, alone)


UNUSED = {
    "by everyone": dict.fromkeys(range(6), (0, 3)),
    "by one rank": dict.fromkeys(range(2), (1, 4, 5)),
    "in the last micro-batch of each rank": dict.fromkeys((1, 2, 3, 5), (2, 3)),
    "but in one micro-batch": dict.fromkeys(range(1, 6), (0, 1, 2, 3, 4)),
}


@pytest.mark.parametrize("replicas", [False, True])
@pytest.mark.parametrize("unused", UNUSED.values(), ids=UNUSED.keys())
def test_parameters_that_are_not_used_count_as_zero_there(
    world: ProcessWorlds, unused: dict[int, Sequence[int]], replicas: bool
) -> None:
    alone = sums(0, 1, micro_batches=6, replicas=True, unused=unused)
    for one in world.run(3, sums, micro_batches=6, replicas=replicas, unused=unused):
        assert_close(one, alone)
        if replicas:
            assert_equal(one, alone)


@pytest.mark.parametrize("replicas", [False, True])
def test_several_dtypes_are_summed_each_in_its_own(world: ProcessWorlds, replicas: bool) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float64)
    alone = sums(0, 1, micro_batches=6, replicas=True, dtypes=dtypes)
    for one in world.run(3, sums, micro_batches=6, replicas=replicas, dtypes=dtypes):
        assert [gradient.dtype for gradient in one[0]] == [dtypes[i % 3] for i in range(len(SHAPES))]
        assert_close(one, alone, rtol=2e-2)
        if replicas:
            assert_equal(one, alone)


class Noting:
    """torch.distributed, of which these operations are noted: the lengths of what is summed, or sent to `reader` to be
    added, and of sums that are `handed` on to it."""

    def __init__(self, reader: int):
        self.lengths: list[int] = []
        self.handed: list[int] = []
        self._reader = reader

    def __getattr__(self, name: str) -> Any:
        operation = getattr(dist, name)
        return partial(self._note, operation) if name in ("all_reduce", "isend") else operation

    def _note(self, operation: Callable[..., Any], tensor: Tensor, *args: Any, **options: Any) -> Any:
        if options.get("group_dst") in (None, self._reader):
            is_handed = options.get("tag", ALL_TO_ALL_TAG) != ALL_TO_ALL_TAG
            (self.handed if is_handed else self.lengths).append(tensor.numel())
        return operation(tensor, *args, **options)


def order_of_operations(rank: int, world: int, *, replicas: bool) -> list[tuple[list[int], list[int]]]:
    """The lengths of what is summed, or sent to the next rank to be added, in order, and those of sums that are handed
    on to it, in two steps; each rank uses other parameters in another order."""
    weights = parameters()
    exchange = BucketedReducer(
        weights, rank=rank, world_size=world, micro_batches=2 * world, is_elastic=replicas, bucket_bytes=1.0
    )
    orders = []
    with pytest.MonkeyPatch.context() as patch:
        for again in range(2):
            noting = Noting((rank + 1) % world)
            patch.setattr(algorithms, "dist", noting)
            # The first step leaves out one parameter a rank, the second turns the order of use around.
            used = [w for i, w in enumerate(weights) if again or i % world != rank][:: -1 if again else 1]
            for leaf in (2 * rank, 2 * rank + 1):
                exchange.begin_backward(leaf)
                product = torch.ones(())
                for weight in used:
                    product = product * weight.sum()
                product.backward()
                exchange.end_backward()
            exchange.reduce_gradients()
            for weight in weights:
                weight.grad = None
            orders.append((noting.lengths, noting.handed))
    return orders


@pytest.mark.parametrize("replicas", [False, True])
def test_operations_start_in_bucket_order_on_all_ranks_whatever_they_use(world: ProcessWorlds, replicas: bool) -> None:
    ranks = 3
    found = world.run(ranks, order_of_operations, replicas=replicas)
    lengths = [
        bucket.num_elements
        for bucket in BucketedReducer(
            parameters(), rank=0, world_size=ranks, micro_batches=ranks, is_elastic=False, bucket_bytes=1.0
        ).buckets
    ]
    for orders in found:
        for summed, handed in orders:
            if replicas:  # a node of a part of every bucket; sums of all parts but one, as they come
                parts = [length // ranks for length in lengths]
                assert summed == parts
                assert sorted(handed) == sorted(parts * (ranks - 1))
            else:
                assert (summed, handed) == (lengths, [])


def moved(rank: int, world: int, *, device: str) -> tuple[list[int], list[int], list[int]]:
    """What has come when rank r gives each as many numbers as r, and when all give three to all; and what was there
    before from a message of others over the same group."""
    parts = P2PScatterGather(CommContext(rank, world, None, clone_group(None), torch.device(device)))
    other = torch.zeros(1, dtype=torch.int64)
    message = dist.irecv(other, src=rank - 1) if rank else dist.isend(torch.tensor([7]), dst=1)
    received, own = torch.zeros(sum(range(world)), dtype=torch.int64), torch.full((3,), rank)
    sent = torch.arange(rank * world) + 100 * rank
    spread = parts.all_to_all(sent, received, [rank] * world, range(world))
    whole = torch.zeros(3 * world, dtype=torch.int64)
    for pending in (spread, parts.all_gather(0, own, whole)):
        assert pending is not None
        pending.wait()
    if rank and rank < world - 1:
        dist.send(torch.tensor([7]), dst=rank + 1)
    assert message is not None
    message.wait()
    return received.tolist(), whole.tolist(), other.tolist()


@pytest.mark.parametrize("device", ["cpu", "cuda"])  # how it is done there: this is gloo
def test_parts_of_any_size_go_directly_to_whom_they_are_for(world: ProcessWorlds, device: str) -> None:
    for rank, (received, whole, other) in enumerate(world.run(3, moved, device=device)):
        assert received == [100 + rank, 200 + 2 * rank, 200 + 2 * rank + 1]
        assert whole == [0, 0, 0, 1, 1, 1, 2, 2, 2]
        assert other == ([7] if rank else [0])


def left_under_way(rank: int, world: int) -> float:
    """Processor time of half a second in which nothing is to be done, after an exchange was closed in the middle of a
    step; the other rank has sent what nobody waits for."""
    others = threading.enumerate()
    weights = [nn.Parameter(torch.ones(1 << 18)) for _ in range(4)]
    exchange = BucketedReducer(
        weights,
        rank=rank,
        world_size=world,
        micro_batches=world,
        is_elastic=False,
        algorithm="int8",
        bucket_bytes=float(1 << 20),
    )
    exchange.begin_backward(rank)
    torch.stack([weight.sum() for weight in weights]).sum().backward()
    exchange.end_backward()
    exchange.close()
    del exchange
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "exchange" and thread not in others:  # it ends when nothing is under way any more
            thread.join()
    dist.barrier()
    before = time.process_time()
    time.sleep(0.5)
    return time.process_time() - before


def test_an_exchange_that_is_closed_in_a_step_leaves_nobody_busy(world: ProcessWorlds) -> None:
    """gloo's thread looked for ever for messages whose place was gone."""
    assert max(world.run(2, left_under_way)) < 0.1
