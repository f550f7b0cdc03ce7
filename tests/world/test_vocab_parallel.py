"""Cross-entropy over a vocabulary that is cut between ranks, on 2 and 3 processes, against a single process."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from phalanx.train.ops.linear_cross_entropy import VocabShard, linear_cross_entropy, vocab_parallel
from phalanx.train.tasks import LanguageModeling
from process_worlds import ProcessWorlds

N, W = 29, 8
EVEN, UNEVEN = 36, 35


def numbers(vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weight and targets (some ignored), alike in every process."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(shape, generator=generator) for shape in ((N, W), (vocab, W)))
    targets = torch.randint(0, vocab, (N,), generator=generator)
    targets[::5] = -100
    return hidden, weight * 3, targets


def rows_of(rank: int, world: int, vocab: int) -> slice:
    part = -(-vocab // world)
    return slice(rank * part, min((rank + 1) * part, vocab))


Parts = tuple[Tensor, Tensor, Tensor]


def alone(vocab: int) -> Parts:
    """Loss and gradients by hidden and weight, from whole logits in one process."""
    hidden, weight, targets = numbers(vocab)
    leaves = [x.requires_grad_() for x in (hidden, weight)]
    loss = F.cross_entropy(F.linear(*leaves), targets, reduction="sum")
    return loss.detach(), *torch.autograd.grad(2 * loss, leaves)  # type: ignore[return-value]


def chunked(rank: int, world: int, *, vocab: int, chunk: int | None = None, low: bool = False) -> Parts:
    hidden, weight, targets = numbers(vocab)
    rows = rows_of(rank, world, vocab)
    leaves = [x.clone().requires_grad_() for x in (hidden, weight[rows])]
    given = vocab if vocab % world else None
    with torch.autocast("cpu", torch.bfloat16, enabled=low):
        loss = linear_cross_entropy(leaves[0], leaves[1], targets, VocabShard(dist.group.WORLD, given), chunk)
    return loss.detach(), *torch.autograd.grad(2 * loss, leaves)  # type: ignore[return-value]


def assert_parts(found: list[Parts], expected: Parts, rtol: float = 1e-5, loss_rtol: float = 1e-6) -> None:
    """Loss and the gradient of hidden are whole and the same bits on each rank; that of weight its rows."""
    for loss, by_hidden, _ in found:
        assert loss.equal(found[0][0])
        assert by_hidden.equal(found[0][1])
    torch.testing.assert_close(found[0][0], expected[0], rtol=loss_rtol, atol=0.0)
    gradients = [found[0][1], torch.cat([part[2] for part in found])]
    for one, other in zip(gradients, expected[1:], strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=rtol * float(other.abs().max()))


@pytest.mark.parametrize("chunk", [None, 1, 10])
@pytest.mark.parametrize("vocab", [EVEN, UNEVEN])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_cut_vocabulary_gives_the_loss_and_gradients_of_a_whole_one(
    world: ProcessWorlds, ranks: int, vocab: int, chunk: int | None
) -> None:
    assert_parts(world.run(ranks, chunked, vocab=vocab, chunk=chunk), alone(vocab))


def test_a_cut_vocabulary_under_autocast_agrees_to_the_precision_of_bf16(world: ProcessWorlds) -> None:
    assert_parts(world.run(3, chunked, vocab=EVEN, low=True), alone(EVEN), rtol=4e-2, loss_rtol=1e-2)


def by_the_task(rank: int, world: int) -> tuple[Tensor, int]:
    hidden, weight, targets = numbers(UNEVEN)
    batch = {"targets": targets[None]}
    with vocab_parallel(dist.group.WORLD, UNEVEN):
        loss, terms = LanguageModeling().head_loss(hidden[None], weight[rows_of(rank, world, UNEVEN)], batch)
    return loss, int(terms)


def test_the_task_takes_the_cut_from_the_engine(world: ProcessWorlds) -> None:
    hidden, weight, targets = numbers(UNEVEN)
    expected = F.cross_entropy(hidden @ weight.T, targets, reduction="sum")
    for loss, terms in world.run(2, by_the_task):
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0.0)
        assert terms == int((targets != -100).sum())


def cut_wrong(rank: int, world: int, *, vocab: int, rows: int) -> str:
    """What the error says."""
    numbers = torch.ones(2, W), torch.ones(rows, W), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="vocabulary of") as caught:
        linear_cross_entropy(*numbers, VocabShard(dist.group.WORLD, vocab))
    return str(caught.value)


def test_rows_that_are_not_this_ranks_part_are_refused(world: ProcessWorlds) -> None:
    first, second = world.run(2, cut_wrong, vocab=35, rows=19)
    assert first == "rank 0 of 2 holds 19 rows of a vocabulary of 35, expected 18"
    assert second == "rank 1 of 2 holds 19 rows of a vocabulary of 35, expected 17"


def test_a_vocabulary_that_leaves_a_rank_without_rows_is_refused(world: ProcessWorlds) -> None:
    for error in world.run(3, cut_wrong, vocab=4, rows=2):
        assert error == "a vocabulary of 4 cut over 3 ranks leaves one of them without a row"
