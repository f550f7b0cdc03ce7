"""Calling a Hugging Face model with what our tasks give."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from phalanx.errors import RecipeError
from phalanx.train.hf.inputs import adapt_inputs, compute_positions, get_logits
from tiny_huggingface import random_tokens

DOCUMENTS = torch.tensor([[7] * 5 + [8] * 11, [3] * 16])


class Plain(nn.Module):
    """Takes what most models of Hugging Face take."""

    def __init__(self, attention: str = "sdpa"):
        super().__init__()
        self.config = SimpleNamespace(_attn_implementation=attention)
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, use_cache=None):  # type: ignore[no-untyped-def]
        return input_ids


def test_tokens_become_input_ids_without_a_cache() -> None:
    args, kwargs = adapt_inputs(Plain(), (random_tokens(),), {})
    assert args == ()
    assert kwargs.keys() == {"input_ids", "use_cache"}
    assert kwargs["use_cache"] is False


def test_positions_begin_anew_in_each_document() -> None:
    assert compute_positions(torch.tensor([[4, 4, 9, 9, 9, 4], [0, 1, 1, 2, 2, 2]])).tolist() == [
        [0, 1, 0, 1, 2, 0],
        [0, 0, 1, 0, 1, 2],
    ]


def test_other_kinds_of_attention_get_numbers_to_add() -> None:
    _, kwargs = adapt_inputs(Plain("eager"), (random_tokens(),), {"documents": DOCUMENTS})
    mask = kwargs["attention_mask"]
    assert mask.shape == (2, 1, 16, 16)
    assert mask[0, 0, 5, 4] == torch.finfo(torch.float32).min
    assert mask[0, 0, 6].tolist()[5:7] == [0, 0]


def test_a_window_is_kept_within_documents_in_the_layers_that_have_one() -> None:
    model = Plain()
    model.config.sliding_window = 3
    whole = adapt_inputs(model, (random_tokens(),), {"documents": DOCUMENTS})[1]["attention_mask"]
    assert whole[0, 0, 4].nonzero().flatten().tolist() == [2, 3, 4]
    assert whole[0, 0, 6].nonzero().flatten().tolist() == [5, 6]
    model.config.layer_types = ["full_attention", "sliding_attention", "full_attention"]
    each = adapt_inputs(model, (random_tokens(),), {"documents": DOCUMENTS})[1]["attention_mask"]
    assert each.keys() == {"full_attention", "sliding_attention"}
    assert torch.equal(each["sliding_attention"], whole)
    assert each["full_attention"][0, 0, 4].nonzero().flatten().tolist() == [0, 1, 2, 3, 4]


def test_chunks_are_counted_from_the_beginning_of_a_document() -> None:
    model = Plain("eager")
    model.config.attention_chunk_size, model.config.layer_types = 4, ["chunked_attention"]
    mask = adapt_inputs(model, (random_tokens(),), {"documents": DOCUMENTS})[1]["attention_mask"]
    assert (mask[0, 0, 10] == 0).nonzero().flatten().tolist() == [9, 10]


def test_layers_that_carry_a_state_cannot_keep_documents_separate() -> None:
    model = Plain()
    model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(RecipeError, match=r"data.document_masking: Plain has layers of linear_attention"):
        adapt_inputs(model, (random_tokens(),), {"documents": DOCUMENTS})


def test_documents_need_a_model_that_takes_a_mask() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(RecipeError, match=r"data.document_masking: Linear takes no attention_mask"):
        adapt_inputs(model, (random_tokens(),), {"documents": DOCUMENTS})


def test_logits_may_be_in_a_dict() -> None:
    logits = torch.randn(2, 5, 7)
    assert get_logits({"logits": logits, "loss": None}) is logits
    with pytest.raises(RecipeError, match="task: the model returned dict, which has no logits"):
        get_logits({"loss": logits})
