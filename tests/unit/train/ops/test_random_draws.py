"""Random draws of slices: parts of the draw for the whole tensor, found from shapes and places."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from phalanx.errors import RecipeError
from phalanx.train.ops import random_draws
from phalanx.train.ops.random_draws import (
    HeldSlices,
    MicroBatchSeeds,
    Runs,
    enter_columns,
    leave_columns,
    leave_rows,
    refuse_draws,
    seed_after_blocks,
)

CPU = torch.device("cpu")
BATCH, LENGTH, WIDTH, HEADS = 2, 8, 6, 4
CONTEXT: tuple[Runs, ...] = (((0, 2), (6, 8)), ((2, 6),))  # what two ranks hold of a sequence
WHOLE: Runs = ((0, LENGTH),)


@pytest.fixture(scope="module", autouse=True)
def _restore_torch() -> Iterator[None]:
    """Other tests of this process find torch's functions and methods as they were: a worker replaces them for good."""
    owners = [*random_draws._FUNCTION_REPLACEMENTS, (F, random_draws.SDPA_NAME)]
    functions = {(owner, name): getattr(owner, name) for owner, name in owners}
    methods = {name: getattr(Tensor, name) for name in random_draws._METHOD_REPLACEMENTS}
    yield
    random_draws._replace_everywhere(functions)
    for name, method in methods.items():
        setattr(Tensor, name, method)
    random_draws._replace_functions.cache_clear()
    random_draws._replace_for_slices.cache_clear()


def drawn(draw: Callable[[], Any], slices: HeldSlices | None = None, micro_batch: int = 0) -> Any:
    """What `draw` gives in the forward of a micro-batch on a rank with these slices."""
    seeds = MicroBatchSeeds(1, CPU)
    seeds.slices = slices
    seeds.start_step(1, range(4))
    seeds.seed_micro_batch(micro_batch)
    try:
        return draw()
    finally:
        seeds.end_step()


DRAWS: dict[str, Callable[[int], Tensor]] = {
    "dropout": lambda n: F.dropout(torch.ones(BATCH, n, WIDTH), 0.3),
    "dropout in place": lambda n: F.dropout(torch.ones(BATCH, n, WIDTH), 0.3, inplace=True),
    "torch.dropout": lambda n: torch.dropout(torch.ones(BATCH, n, WIDTH), 0.3, True),
    "module": lambda n: nn.Dropout(0.3)(torch.ones(BATCH, n, WIDTH)),
    "dropout of folded rows": lambda n: F.dropout(torch.ones(BATCH * n, WIDTH), 0.3),
    "dropout of a transposed tensor": lambda n: F.dropout(torch.ones(BATCH, WIDTH, n).mT, 0.3),
    "dropout of positions": lambda n: F.dropout1d(torch.ones(BATCH, n, WIDTH), 0.3),
    "alpha dropout": lambda n: F.alpha_dropout(torch.ones(BATCH, n, WIDTH), 0.3, True),
    "feature alpha dropout": lambda n: F.feature_alpha_dropout(torch.ones(BATCH, n, WIDTH), 0.3, True),
    "rand": lambda n: torch.rand(BATCH, n, WIDTH),
    "rand of a shape": lambda n: torch.rand((BATCH, n, WIDTH)),
    "rand by name": lambda n: torch.rand(size=(BATCH, n, WIDTH)),
    "randn": lambda n: torch.randn(BATCH, n, WIDTH),
    "randint": lambda n: torch.randint(0, 9, (BATCH, n, WIDTH)),
    "rand_like": lambda n: torch.rand_like(torch.ones(BATCH, WIDTH, n).mT),
    "randint_like": lambda n: torch.randint_like(torch.ones(BATCH, n, WIDTH), 0, 9),
    "normal": lambda n: torch.normal(0.0, 0.5, (BATCH, n, WIDTH)),
    "normal of means": lambda n: torch.normal(torch.ones(BATCH, n, WIDTH), 0.5),
    "bernoulli": lambda n: torch.bernoulli(torch.full((BATCH, n, WIDTH), 0.4)),
    "bernoulli method": lambda n: torch.full((BATCH, n, WIDTH), 0.4).bernoulli(),
    "bernoulli_": lambda n: torch.empty(BATCH, n, 1).bernoulli_(0.4),
    "bernoulli_ of probabilities": lambda n: torch.empty(BATCH, n, WIDTH).bernoulli_(
        torch.full((BATCH, n, WIDTH), 0.4)
    ),
    "gumbel_softmax": lambda n: F.gumbel_softmax(torch.ones(BATCH, n, WIDTH)),
    "uniform_": lambda n: torch.empty(BATCH, 3, n, 5).uniform_(-1, 1),
    "by position": lambda n: torch.rand(n),
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_draws_its_positions_of_the_whole(name: str, rank: int) -> None:
    whole = drawn(lambda: DRAWS[name](LENGTH))
    part = drawn(lambda: DRAWS[name](LENGTH // 2), HeldSlices(BATCH, LENGTH, CONTEXT[rank]))
    if name == "dropout of folded rows":
        whole, part = whole.unflatten(0, (BATCH, -1)), part.unflatten(0, (BATCH, -1))
    dim = next(dim for dim in range(whole.dim()) if whole.shape[dim] != part.shape[dim])
    positions = [position for start, end in CONTEXT[rank] for position in range(start, end)]
    torch.testing.assert_close(part, whole.index_select(dim, torch.tensor(positions)))


@pytest.mark.parametrize("rank", [0, 1])
def test_tensor_ranks_share_the_positions_of_a_context_rank(rank: int) -> None:
    whole = drawn(lambda: torch.rand(BATCH, LENGTH, WIDTH))
    slices = HeldSlices(BATCH, LENGTH, CONTEXT[0], rank, 2)
    part = drawn(lambda: torch.rand(BATCH, LENGTH // 4, WIDTH), slices)
    start = (0, 6)[rank]
    assert part.equal(whole[:, start : start + 2])


def cut_columns(width: int) -> None:
    """A layer cut by columns that gives `width` features here."""
    enter_columns()
    leave_columns(width, 1)


BETWEEN: dict[str, tuple[Callable[[int], Tensor], int]] = {
    "features": (lambda n: torch.rand(BATCH, LENGTH, WIDTH // n), 2),
    "rows of features": (lambda n: torch.rand(BATCH * LENGTH, WIDTH // n), 1),
    "scores": (lambda n: torch.rand(BATCH, HEADS // n, LENGTH, LENGTH), 1),
    "heads": (lambda n: torch.rand(BATCH, HEADS // n, LENGTH, 5), 1),
    "heads after positions": (lambda n: torch.rand(BATCH, LENGTH, HEADS // n, 5), 2),
    "whole heads": (lambda n: torch.rand(BATCH, HEADS // n, 1, 1), 1),
}


@pytest.mark.parametrize("name", BETWEEN)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_draws_its_features_between_columns_and_rows(name: str, rank: int) -> None:
    draw, dim = BETWEEN[name]

    def between() -> Tensor:
        cut_columns(WIDTH // 2)
        found = draw(2)
        leave_rows()
        return found

    part = drawn(between, HeldSlices(BATCH, LENGTH, WHOLE, rank, 2))
    assert part.equal(drawn(lambda: draw(1)).chunk(2, dim)[rank])


def test_folded_heads_are_those_of_the_whole() -> None:
    def between() -> Tensor:
        cut_columns(WIDTH // 2)
        return torch.rand(BATCH * HEADS // 2, LENGTH, LENGTH)

    whole = drawn(lambda: torch.rand(BATCH, HEADS, LENGTH, LENGTH))
    part = drawn(between, HeldSlices(BATCH, LENGTH, WHOLE, 1, 2))
    assert part.equal(whole[:, HEADS // 2 :].flatten(0, 1))


@pytest.mark.parametrize("shape", [(BATCH,), (BATCH, 1, 1), (1, 1, WIDTH), (WIDTH,), (1,), (BATCH, WIDTH)])
def test_what_has_no_positions_is_equal_on_all_ranks(shape: tuple[int, ...]) -> None:
    whole = drawn(lambda: torch.rand(shape))
    assert all(drawn(lambda: torch.rand(shape), HeldSlices(BATCH, LENGTH, runs)).equal(whole) for runs in CONTEXT)


def test_whole_tensors_between_tensor_parallel_regions_are_equal() -> None:
    def after_a_region() -> Tensor:
        cut_columns(LENGTH)
        leave_rows()
        return torch.rand(BATCH, LENGTH, WIDTH)

    parts = [drawn(after_a_region, HeldSlices(BATCH, LENGTH, WHOLE, rank, 2)) for rank in (0, 1)]
    assert parts[0].equal(parts[1])


def test_the_input_of_a_layer_cut_by_columns_is_whole() -> None:
    def of_the_second() -> Tensor:
        cut_columns(WIDTH)
        enter_columns()
        return F.dropout(torch.ones(BATCH, LENGTH, WIDTH), 0.3)

    parts = [drawn(of_the_second, HeldSlices(BATCH, LENGTH, WHOLE, rank, 2)) for rank in (0, 1)]
    assert parts[0].equal(parts[1])


@pytest.mark.parametrize("kind", ["causal", "masked", "full"])
def test_attention_drops_out_the_scores_of_its_heads(kind: str) -> None:
    torch.manual_seed(0)
    query = torch.randn(BATCH, HEADS, LENGTH, 5)
    key, value = (torch.randn(BATCH, HEADS // 2, LENGTH, 5) for _ in range(2))
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril() if kind == "masked" else None
    options: dict[str, Any] = {"attn_mask": mask, "is_causal": kind == "causal", "dropout_p": 0.3, "enable_gqa": True}
    whole = drawn(lambda: F.scaled_dot_product_attention(query, key, value, **options))

    def between() -> Tensor:
        cut_columns(HEADS * 5 // 2)
        return F.scaled_dot_product_attention(query[:, 2:], key[:, 1:], value[:, 1:], **options)

    torch.testing.assert_close(drawn(between, HeldSlices(BATCH, LENGTH, WHOLE, 1, 2)), whole[:, 2:])


def test_a_draw_for_rows_of_unknown_positions_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"shape \[5, 6\].*unknown"):
        drawn(lambda: torch.rand(5, WIDTH), HeldSlices(BATCH, LENGTH, CONTEXT[0]))


def test_a_function_that_cannot_draw_for_the_whole_is_refused_for_slices_only() -> None:
    def draw() -> Tensor:
        return torch.multinomial(torch.ones(BATCH * LENGTH // 2, WIDTH), 1)

    drawn(draw)
    with pytest.raises(RecipeError, match="multinomial"):
        drawn(draw, HeldSlices(BATCH, LENGTH, CONTEXT[0]))


def test_draws_of_experts_are_refused() -> None:
    forward = refuse_draws("moe.experts", lambda x: F.dropout(x, 0.5))
    with pytest.raises(RecipeError, match=r"moe\.experts draws random numbers"):
        drawn(lambda: forward(torch.ones(5, WIDTH)), HeldSlices(BATCH))
    drawn(lambda: F.dropout(torch.ones(BATCH, WIDTH), 0.5))


def test_slices_matter_in_steps_only() -> None:
    drawn(lambda: None, HeldSlices(BATCH, LENGTH, CONTEXT[0]))
    torch.manual_seed(0)
    after = torch.rand(5, WIDTH)
    assert after.equal(torch.rand(5, WIDTH, generator=torch.Generator().manual_seed(0)))


def test_draws_from_a_generator_of_its_own_and_of_a_thread_that_reads_data_are_left_alone() -> None:
    slices = HeldSlices(BATCH, LENGTH, ((0, 4),))

    def sample() -> Tensor:
        return torch.randn(BATCH, 4, WIDTH, generator=torch.Generator().manual_seed(7))

    def read_in_thread() -> Any:
        with ThreadPoolExecutor(1) as pool:
            torch.manual_seed(7)
            return pool.submit(torch.randn, BATCH, 4, WIDTH).result()

    expected = sample()
    assert torch.equal(drawn(sample, slices), expected)
    assert torch.equal(drawn(read_in_thread, slices), expected)


def test_what_a_block_draws_does_not_depend_on_how_much_the_one_before_drew() -> None:
    def second(shape: tuple[int, ...], micro_batch: int = 0) -> Tensor:
        blocks = [nn.Identity(), nn.Identity()]
        seed_after_blocks(blocks)

        def forward() -> Tensor:
            torch.rand(shape)
            blocks[0](torch.ones(1))
            return torch.rand(9)

        return drawn(forward, micro_batch=micro_batch)

    assert second((1, 2)).equal(second((1, 5)))
    assert not second((1, 2)).equal(second((1, 2), micro_batch=1))


def test_blocks_draw_different_numbers_and_a_recomputation_the_same() -> None:
    blocks = nn.ModuleList(nn.Dropout(0.5) for _ in range(3))
    seed_after_blocks(blocks)
    seen: list[Tensor] = []

    def forward(x: Tensor) -> Tensor:
        for block in blocks:
            x = block(x)
            seen.append((x.detach() == 0).clone())
        return x.sin()

    def step() -> None:
        checkpoint(forward, torch.ones(64, requires_grad=True), use_reentrant=False).sum().backward()

    drawn(step)
    assert len(seen) == 6
    assert all(first.equal(again) for first, again in zip(seen[:3], seen[3:], strict=True))
    assert not seen[0].equal(seen[1])


def test_compiled_code_draws_the_same_parts() -> None:
    def between(x: Tensor) -> Tensor:
        enter_columns()
        x = F.dropout(x, 0.3) * 2
        leave_columns(WIDTH // 2, 1)
        x = F.dropout(x[..., : WIDTH // 2], 0.3)
        leave_rows()
        return x[:, : LENGTH // 4] + torch.rand(BATCH, LENGTH // 4, WIDTH // 2)

    compiled = torch.compile(between, backend="eager", dynamic=False, fullgraph=True)
    slices = HeldSlices(BATCH, LENGTH, CONTEXT[1], 1, 2)
    x = torch.ones(BATCH, LENGTH // 2, WIDTH)
    for micro_batch in (0, 1):
        parts = [drawn(lambda f=f: f(x), slices, micro_batch) for f in (between, compiled)]
        assert parts[0].equal(parts[1])


def test_a_causal_bias_of_torch_is_a_mask_also_where_ranks_hold_slices() -> None:
    query, key = torch.randn(1, 1, 3, 8), torch.randn(1, 1, 6, 8)
    mask = torch.ones(3, 6, dtype=torch.bool).tril(3)
    random_draws._replace_for_slices()
    expected = F.scaled_dot_product_attention(query, key, key, attn_mask=mask)
    for attend in (F.scaled_dot_product_attention, scaled_dot_product_attention):
        assert torch.allclose(attend(query, key, key, attn_mask=causal_lower_right(3, 6)), expected)
