"""The exchange between replicas that FSDP shards, on 2 replicas of 2 ranks, against a single process."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from phalanx.train.distributed.fsdp import apply_fsdp, reduce_unused_parameters, sort_in_reduction_order
from phalanx.train.grad_sync.bucketed_reducer import BucketedReducer
from phalanx.train.grad_sync.comm_queue import CommQueue
from process_worlds import ProcessWorlds

WIDTH, BLOCKS, STEPS = 24, 3, 3
CAPACITY = 4.0 * (WIDTH * WIDTH + WIDTH) / 2  # bytes: the half of a block that a rank holds


class Network(nn.Module):
    """Blocks between two layers of the root's; with `again` one block is used twice."""

    def __init__(self, again: bool):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)])
        self.last = nn.Linear(WIDTH, 1)
        self.again = again
        self.reached: list[int] = []

    def forward(self, x: Tensor, sent: list[int]) -> Tensor:
        x = self.first(x)
        if x.requires_grad:
            x.register_hook(lambda gradient: self.reached.append(len(sent)))
        for block in [*self.blocks, *(self.blocks[:1] if self.again else [])]:
            x = torch.tanh(block(x))
        total: Tensor = self.last(x).square().sum()
        return total


def samples(leaf: int) -> Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(leaf))


def summed(
    rank: int, world: int, *, strategy: str = "all-reduce", replicas: bool = False, again: bool = False
) -> tuple[dict[str, Tensor], list[int]]:
    """The whole gradients of four micro-batches after the last of some equal steps; and how many buckets were under way
    in each step when backward was through with the blocks."""
    model = Network(again)
    sent: list[int] = []
    if world == 1:
        torch.stack([model(samples(leaf), sent) for leaf in range(4)]).sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}, []
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    apply_fsdp(model, list(model.blocks), mesh["shard"])
    reduce_unused_parameters(model, hooked=True)
    exchange = BucketedReducer(
        sort_in_reduction_order([model], model.parameters()),
        rank=mesh["replicate"].get_local_rank(),
        world_size=2,
        micro_batches=2,
        is_elastic=replicas,
        bucket_bytes=CAPACITY,
        group=mesh["replicate"].get_group(),
        algorithm=strategy,
    )
    send = CommQueue.submit

    def noting(courier: CommQueue, number: int, *arguments: Any) -> None:
        sent.append(number)
        send(courier, number, *arguments)

    CommQueue.submit = noting  # type: ignore[assignment, method-assign]
    try:
        for _ in range(STEPS):
            sent.clear()
            for parameter in model.parameters():
                parameter.grad = None
            exchange.begin_backward(rank // 2)
            model(samples(rank), sent).backward()
            exchange.end_backward()
            exchange.reduce_gradients()
    finally:
        CommQueue.submit = send  # type: ignore[method-assign]
    gradients = {name: whole(p) for name, p in model.named_parameters()}
    exchange.close()
    return gradients, model.reached


def whole(parameter: nn.Parameter) -> Tensor:
    assert isinstance(parameter.grad, DTensor)
    return parameter.grad.full_tensor()


@pytest.mark.parametrize(
    ("strategy", "replicas", "tolerance"),
    [("all-reduce", False, 1e-5), ("all-reduce", True, 1e-5), ("bf16", False, 1e-2), ("int8", False, 3e-2)],
    ids=["all-reduce", "fixed tree", "bf16", "int8"],
)
def test_gradients_of_shards_are_sent_while_backward_goes_on(
    world: ProcessWorlds, strategy: str, replicas: bool, tolerance: float
) -> None:
    expected, _ = summed(0, 1)
    largest = max(float(gradient.abs().max()) for gradient in expected.values())  # int8 shares scales among many
    for gradients, reached in world.run(4, summed, strategy=strategy, replicas=replicas):
        assert min(reached) >= BLOCKS - 1
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], rtol=0, atol=tolerance * largest)


def test_gradients_of_a_block_that_is_used_twice_are_sent_when_they_are_whole(world: ProcessWorlds) -> None:
    expected, _ = summed(0, 1, again=True)
    for gradients, _ in world.run(4, summed, again=True):
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-5)
