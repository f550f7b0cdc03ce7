"""Context parallelism as far as one process can show it; what ranks compute together is in tests/world."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from phalanx.compat import fake_tensor_mode
from phalanx.errors import RecipeError
from phalanx.models import transformer
from phalanx.train.distributed import context_parallel
from phalanx.train.distributed.context_attention import (
    ContextMethod,
    choose_context_method,
    make_document_masks,
)
from phalanx.train.distributed.context_parallel import (
    ContextParallel,
    check_context_parallel,
    current_context_parallel,
    find_position_argument,
    shard_batch,
)
from phalanx.train.loss import ContextSplit, LossFn
from phalanx.train.ops.collectives import Group


class Ranks:
    """A group of which only its size and this process's place in it are asked."""

    def __init__(self, rank: int, size: int):
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def ranks(rank: int, size: int) -> Group:
    return cast(Group, Ranks(rank, size))


def batch_of(length: int) -> dict[str, Tensor]:
    tokens = torch.arange(2 * length).view(2, length)
    return {"tokens": tokens, "targets": tokens + 1, "weights": torch.ones(2)}


@pytest.mark.parametrize(
    ("heads", "kv_heads", "n", "way"),
    [
        (8, 8, 2, "alltoall"),
        (32, 8, 4, "alltoall"),
        (6, 6, 4, "gather"),  # heads do not divide
        (32, 2, 4, "gather"),  # repeated key-value heads would be more than all of them gathered
        (12, 6, 4, "alltoall"),  # repeated, and still less
    ],
)
def test_the_way_is_all_to_all_where_heads_divide(heads: int, kv_heads: int, n: int, way: str) -> None:
    assert choose_context_method(heads, kv_heads, n) == way


def test_gather_pairs_early_chunks_with_late_ones() -> None:
    parts = [shard_batch(batch_of(8), ranks(rank, 2), "gather") for rank in range(2)]
    assert parts[0]["positions"].tolist() == [[0, 1, 6, 7]] * 2
    assert parts[1]["tokens"].tolist() == [[2, 3, 4, 5], [10, 11, 12, 13]]
    assert parts[1]["targets"].equal(parts[1]["tokens"] + 1)


def test_alltoall_cuts_contiguous_parts() -> None:
    parts = [shard_batch(batch_of(6), ranks(rank, 3), "alltoall")["positions"][0].tolist() for rank in range(3)]
    assert parts == [[0, 1], [2, 3], [4, 5]]


def test_positions_of_the_batch_itself_are_kept() -> None:
    batch = batch_of(8) | {"positions": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]] * 2)}
    assert shard_batch(batch, ranks(1, 2), "alltoall")["positions"].tolist() == [[1, 2, 3, 4]] * 2


@pytest.mark.parametrize(("way", "length", "fitting"), [("gather", 10, 12), ("alltoall", 9, 10), ("alltoall", 2, 4)])
def test_a_sequence_that_does_not_divide_is_refused_with_one_that_does(
    way: ContextMethod, length: int, fitting: int
) -> None:
    with pytest.raises(RecipeError, match=rf"^parallelism.context: .*data.seq_len={fitting} would do"):
        shard_batch(batch_of(length), ranks(0, 2), way)


def test_document_masks_are_the_rows_of_the_whole_mask() -> None:
    documents = torch.tensor([[0, 0, 1, 1, 1, 2, 2, 2]])
    places = torch.arange(8)
    whole = (documents[:, :, None] == documents[:, None, :])[:, None] & (places[:, None] >= places)
    early, late = make_document_masks(documents, "gather", ranks(0, 2))
    assert early.equal(whole[..., 0:2, :2])
    assert late.equal(whole[..., 6:8, :])
    (all_of_it,) = make_document_masks(documents, "alltoall", ranks(0, 2))
    assert all_of_it.equal(whole)


def attention(**options: Any) -> Tensor:
    x = torch.ones(1, 2, 4, 2)
    return F.scaled_dot_product_attention(x, x, x, **options)


def test_a_mask_without_data_stands_for_causal_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def attend(query: Tensor, *args: Any, causal: bool, **options: Any) -> Tensor:
        seen.append(causal)
        return query

    monkeypatch.setattr(context_parallel, "attention_over_context", attend)
    with ContextParallel(ranks(0, 2), "alltoall"), fake_tensor_mode():  # as transformers makes one for a traced model
        attention(attn_mask=torch.ones(4, 4, dtype=torch.bool))
    assert seen == [True]


def test_positions_restart_in_each_document_of_a_split_sequence_for_a_model_that_has_them_so() -> None:
    loss_fn = LossFn(cast(Any, None), "fp32", torch.device("cpu"))
    batch = {"tokens": torch.arange(8)[None], "documents": torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2]])}
    for restarts, first in ((True, [0, 1, 2, 0, 1, 0, 1, 2]), (False, list(range(8)))):
        loss_fn.context_split = ContextSplit(None, "alltoall", "positions", restarts)
        with loss_fn._split_sequences(batch) as mine:
            attention()
        assert mine["positions"].tolist() == [first]


def test_attention_to_another_sequence_is_refused() -> None:
    x = torch.ones(1, 2, 4, 2)
    with ContextParallel(ranks(0, 2), "gather"), pytest.raises(RecipeError, match=r"^parallelism.context: only self-"):
        F.scaled_dot_product_attention(x, x[:, :, :3], x[:, :, :3])


def test_all_to_all_refuses_heads_that_do_not_divide() -> None:
    with ContextParallel(ranks(0, 3), "alltoall"), pytest.raises(RecipeError, match=r"2 heads .* do not divide by 3"):
        attention(is_causal=True)


def test_the_innermost_acts_and_none_after_all_are_left() -> None:
    ordinary = F.scaled_dot_product_attention
    outer, inner = ContextParallel(None, "gather"), ContextParallel(None, "alltoall")
    with outer, inner, inner:
        assert current_context_parallel() is inner
        attention()
    assert inner.attention_seen
    assert not outer.attention_seen
    assert current_context_parallel() is None
    assert F.scaled_dot_product_attention is ordinary


def test_a_mask_is_refused_and_leaves_the_ordinary_attention_behind() -> None:
    ordinary = F.scaled_dot_product_attention
    refused = pytest.raises(RecipeError, match=r"^parallelism.context: .*a mask of its own")
    with refused, ContextParallel(ranks(0, 2), "alltoall"):
        attention(attn_mask=torch.ones(4, 4, dtype=torch.bool))
    assert F.scaled_dot_product_attention is ordinary


class Positioned(nn.Module):
    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return input_ids


class Unpositioned(nn.Module):
    def forward(self, tokens: Tensor) -> Tensor:
        return tokens


def small_transformer() -> nn.Module:
    torch.manual_seed(0)
    return transformer(vocab_size=17, seq_len=16, layers=2, hidden_size=16, num_heads=2)


def test_the_argument_for_positions_is_found() -> None:
    found = [find_position_argument(model) for model in (small_transformer(), Positioned(), Unpositioned())]
    assert found == ["positions", "position_ids", None]


def test_a_model_that_takes_no_positions_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"^parallelism.context: Unpositioned .* neither positions nor position_ids"):
        check_context_parallel(Unpositioned(), 8)


CONFIGS: dict[str, tuple[dict[str, Any], str | None]] = {
    "full attention": ({"sliding_window": None, "layer_types": ["full_attention"]}, None),
    "a window": ({"sliding_window": 4}, "sliding_attention"),
    "a window as wide as the sequence": ({"sliding_window": 8}, None),
    "layers with a window": ({"sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]}, "sliding"),
    "layers with a wide window": ({"sliding_window": 8, "layer_types": ["sliding_attention"]}, None),
    "no layer with the window": ({"sliding_window": 4, "layer_types": ["full_attention"]}, None),
    "linear attention": ({"layer_types": ["linear_attention"]}, "linear_attention"),
    "another kernel": ({"_attn_implementation": "eager"}, "eager"),
}


@pytest.mark.parametrize(("config", "refused"), CONFIGS.values(), ids=CONFIGS.keys())
def test_only_full_attention_of_hugging_face_is_accepted(config: dict[str, Any], refused: str | None) -> None:
    model = Positioned()
    cast(Any, model).config = SimpleNamespace(**{"_attn_implementation": "sdpa"} | config)
    if refused is None:
        assert check_context_parallel(model, 8) == "position_ids"
    else:
        with pytest.raises(RecipeError, match=rf"^parallelism.context: Positioned .*{refused}"):
            check_context_parallel(model, 8)


def test_the_transformer_turns_tokens_by_the_positions_given() -> None:
    model, tokens = small_transformer(), torch.arange(24).view(2, 12) % 17
    moved = model(tokens, positions=torch.arange(12) + 100)  # rotary attention sees differences only
    torch.testing.assert_close(moved, model(tokens), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(model(tokens, positions=torch.arange(12) * 2), model(tokens), atol=1e-5)
