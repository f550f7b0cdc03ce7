"""Gradients as thin matrices: what these cannot say is kept, and nothing that is not finite stays."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.train.grad_sync.algorithms import CommContext
from phalanx.train.grad_sync.bucketed_reducer import BucketedReducer
from phalanx.train.grad_sync.buckets import Bucket
from phalanx.train.grad_sync.compression import PowerSGDCompression, matrix_shape


class Counted:
    """All-reduces in a world of one, which are done at once; `sizes` are the numbers that they moved."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, tensor: Tensor, **_: Any) -> "Counted":
        self.sizes.append(tensor.numel())
        return self

    def wait(self) -> None:
        pass


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Counted:
    counted = Counted()
    monkeypatch.setattr(dist, "all_reduce", counted)
    return counted


def exchange_of(*weights: nn.Parameter, **options: int) -> tuple[Bucket, BucketedReducer, PowerSGDCompression]:
    options = {"powersgd_rank": 2, **options}
    exchange = BucketedReducer(
        weights, rank=0, world_size=1, micro_batches=1, is_elastic=False, algorithm="powersgd", **options
    )
    (bucket,) = exchange.buckets
    return bucket, exchange, PowerSGDCompression(CommContext(0, 1, None, None, torch.device("cpu")), [bucket])


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape))


def summed(strategy: PowerSGDCompression, bucket: Bucket, *gradients: Tensor) -> list[Tensor]:
    """What becomes of gradients, given in the order of the bucket."""
    for parameter, gradient in zip(bucket.parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    bucket.take_grads()
    bucket.copy_grads_in()
    strategy.start(0, bucket)
    strategy.start_second_phase(0, bucket)
    strategy.finish(0, bucket)
    return [view.clone() for view in bucket.buffer.views]


@pytest.mark.usefixtures("alone")
def test_in_the_first_steps_gradients_travel_whole() -> None:
    bucket, exchange, strategy = exchange_of(weight(30, 20), powersgd_rank=1, warmup_steps=3)
    for step in range(1, 6):
        gradient = of_rank(10, 30, 20, seed=step)
        exchange.start_step(step)
        (found,) = summed(strategy, bucket, gradient)
        assert found.equal(gradient) == (step <= 3)
        assert bucket.residual is not None
        assert bool(bucket.residual.any()) == (step > 3)


def of_rank(rank: int, rows: int, columns: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, rank, generator=generator) @ torch.randn(rank, columns, generator=generator)


def test_a_gradient_of_low_rank_arrives_whole(alone: Counted) -> None:
    bucket, _, strategy = exchange_of(weight(30, 20))
    gradient = of_rank(2, 30, 20, seed=1)
    torch.testing.assert_close(summed(strategy, bucket, gradient), [gradient], rtol=1e-4, atol=1e-4)
    assert bucket.residual is not None
    assert bucket.residual.abs().max() < 1e-4


def test_only_thin_matrices_and_what_is_small_travel(alone: Counted) -> None:
    bucket, _, strategy = exchange_of(weight(30, 20), weight(7), weight(3, 3))
    summed(strategy, bucket, *[torch.ones(view.shape) for view in bucket.buffer.views])
    assert alone.sizes == [2 * 30 + 7 + 9, 2 * 20]


def test_what_the_thin_matrices_lack_is_sent_later(alone: Counted) -> None:
    bucket, _, strategy = exchange_of(weight(30, 20))
    gradient, total, sent = of_rank(8, 30, 20, seed=2), torch.zeros(30, 20), torch.zeros(30, 20)
    lacking = []
    for _ in range(40):
        total += gradient
        sent += summed(strategy, bucket, gradient)[0]
        assert bucket.residual is not None
        torch.testing.assert_close(sent + bucket.residual[:600].view(30, 20), total, rtol=1e-4, atol=1e-3)
        lacking.append(float((total - sent).norm() / total.norm()))
    assert lacking[-1] < 0.2 * lacking[0]


def test_a_step_goes_on_from_where_the_last_one_ended(alone: Counted) -> None:
    bucket, _, strategy = exchange_of(weight(30, 20))
    strong, weak = of_rank(2, 30, 20, seed=3), of_rank(20, 30, 20, seed=4) / 20
    errors = []
    for _ in range(3):
        assert bucket.residual is not None
        bucket.residual.zero_()
        errors.append(float((summed(strategy, bucket, strong + weak)[0] - strong - weak).norm()))
    assert errors[1] < 0.9 * errors[0]
    best = float(torch.linalg.svdvals(strong + weak)[2:].norm())  # Eckart and Young 1936
    assert errors[2] < 1.1 * best


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_of_gradients_that_are_not_finite_nothing_is_kept(alone: Counted, value: float) -> None:
    bucket, _, strategy = exchange_of(weight(30, 20), weight(5))
    good = [torch.ones(5), of_rank(2, 30, 20, seed=5)]
    for bad in range(2):
        gradients = [each.clone() for each in good]
        gradients[bad].view(-1)[3] = value
        assert not summed(strategy, bucket, *gradients)[bad].isfinite().all()
        assert bucket.residual is not None
        bucket.residual.zero_()  # the other one may keep something
    torch.testing.assert_close(summed(strategy, bucket, *good), good, rtol=1e-4, atol=1e-4)


def test_rows_of_a_matrix_are_outermost_in_memory() -> None:
    kernel = nn.Parameter(torch.zeros(8, 6, 3, 3).to(memory_format=torch.channels_last))
    assert matrix_shape(kernel) == (8, 54)
    assert matrix_shape(nn.Parameter(torch.zeros(5, 9).T)) == (5, 9)
    assert matrix_shape(weight(7)) == (7, 1)


def test_kernels_whose_channels_come_last_arrive_whole(alone: Counted) -> None:
    kernel = nn.Parameter(torch.zeros(8, 6, 3, 3).to(memory_format=torch.channels_last))
    bucket, _, strategy = exchange_of(kernel)
    gradient = (torch.arange(8.0)[:, None] * torch.arange(54.0)).view(8, 6, 3, 3)
    torch.testing.assert_close(summed(strategy, bucket, gradient), [gradient], rtol=1e-4, atol=1e-3)
