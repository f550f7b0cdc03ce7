"""8 bits on the wire: what is lost is kept, and nothing that is not finite stays."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx.train.grad_sync.algorithms import CommContext
from phalanx.train.grad_sync.bucketed_reducer import BucketedReducer
from phalanx.train.grad_sync.buckets import QUANT_BLOCK_ELEMENTS
from phalanx.train.grad_sync.compression import Int8Compression, Int8Encoder, sum_dequantized


def exchange_of(*shapes: tuple[int, ...]) -> tuple[list[nn.Parameter], Any, Int8Compression]:
    weights = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    exchange = BucketedReducer(weights, rank=0, world_size=1, micro_batches=1, is_elastic=False, algorithm="int8")
    (bucket,) = exchange.buckets
    return weights, bucket, Int8Compression(CommContext(0, 1, None, None, torch.device("cpu")), [bucket])


def summed(strategy: Int8Compression, bucket: Any, gradient: Tensor) -> Tensor:
    (parameter,) = bucket.parameters
    parameter.grad = gradient.clone().view_as(parameter)
    bucket.take_grads()
    bucket.copy_grads_in()
    for under_way in (strategy.start, strategy.start_second_phase):
        pending = under_way(0, bucket)
        assert pending is not None
        pending.wait()
    strategy.finish(0, bucket)
    result: Tensor = bucket.buffer.flat[: gradient.numel()].clone()
    return result


SIZES = pytest.mark.parametrize(
    "size", [3 * QUANT_BLOCK_ELEMENTS + 5, 40 * QUANT_BLOCK_ELEMENTS + 5], ids=["parts of blocks", "whole blocks"]
)


@SIZES
def test_what_was_not_sent_is_sent_later(size: int) -> None:
    _, bucket, strategy = exchange_of((size,))
    assert (bucket.num_elements % QUANT_BLOCK_ELEMENTS == 0) == (size > 16 * QUANT_BLOCK_ELEMENTS)
    generator = torch.Generator().manual_seed(1)
    total, sent = torch.zeros(size), torch.zeros(size)
    for _ in range(20):
        gradient = torch.randn(size, generator=generator)
        total += gradient
        sent += summed(strategy, bucket, gradient)
        assert bucket.residual is not None
        torch.testing.assert_close(sent + bucket.residual[: len(sent)], total, rtol=1e-5, atol=1e-5)
    assert (total - sent).abs().max() < 0.1


@SIZES
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_of_gradients_that_are_not_finite_nothing_is_kept(value: float, size: int) -> None:
    _, bucket, strategy = exchange_of((size,))
    gradient = torch.ones(size)
    gradient[7] = value
    assert not summed(strategy, bucket, gradient).isfinite().all()
    assert bucket.residual is not None
    assert bucket.residual.isfinite().all()
    torch.testing.assert_close(summed(strategy, bucket, torch.ones(size)), torch.ones(size))


def test_a_worker_that_is_left_alone_uses_up_what_was_held_back() -> None:
    weights = [nn.Parameter(torch.zeros(4))]
    exchange = BucketedReducer(weights, rank=0, world_size=1, micro_batches=1, is_elastic=False, algorithm="int8")
    exchange.residuals()[weights[0]].fill_(2.0)
    for expected in (3.0, 1.0):
        weights[0].grad = None
        exchange.begin_backward(0)
        weights[0].sum().backward()
        exchange.end_backward()
        exchange.reduce_gradients()
        assert weights[0].grad is not None
        assert weights[0].grad.tolist() == [expected] * 4


@SIZES
def test_of_gradients_that_stay_away_nothing_is_held_back_for_good(size: int) -> None:
    """Each step leaves less; what is left of it at last must not be numbers that processors are slow with."""
    _, bucket, strategy = exchange_of((size,))
    summed(strategy, bucket, torch.randn(size, generator=torch.Generator().manual_seed(3)))
    for _ in range(20):
        left = bucket.residual.abs()
        assert bool(((left == 0) | (left > torch.finfo(torch.float32).tiny)).all())
        summed(strategy, bucket, torch.zeros(size))
    assert not bucket.residual.any()


@pytest.mark.parametrize("piece", [1, 3, 7, 40])
def test_pieces_have_the_bits_of_the_whole(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    generator = torch.Generator().manual_seed(4)
    parts = torch.randn(3, 10 * QUANT_BLOCK_ELEMENTS, generator=generator)

    def encoded(most: int) -> list[Tensor]:
        monkeypatch.setattr("phalanx.train.grad_sync.compression.CPU_ENCODE_BLOCKS", most)
        left, numbers = parts.clone(), torch.zeros(3, 10, QUANT_BLOCK_ELEMENTS, dtype=torch.int8)
        scales = torch.zeros(3, 10, 1)
        Int8Encoder(left, numbers, scales, torch.zeros(parts.numel())).encode()
        return [left, numbers, scales]

    assert all(a.equal(b) for a, b in zip(encoded(piece), encoded(1000), strict=True))


def test_parts_of_all_workers_are_added_up_by_their_scales() -> None:
    generator = torch.Generator().manual_seed(5)
    numbers = torch.randint(-127, 128, (5, 7, QUANT_BLOCK_ELEMENTS), dtype=torch.int8, generator=generator)
    scales, total = torch.rand(5, 7, 1, generator=generator), torch.zeros(7, QUANT_BLOCK_ELEMENTS)
    sum_dequantized(list(zip(numbers, scales, strict=True)), total, torch.zeros(numbers.numel()))
    torch.testing.assert_close(total.double(), (numbers.double() * scales.double()).sum(0), rtol=1e-5, atol=1e-4)
