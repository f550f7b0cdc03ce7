"""The output layer is found in any module, and bypassed."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx.models import transformer
from phalanx.models.convnets import resnet
from phalanx.train.loss import LMHead, LossFn, bypass_lm_head, find_lm_head
from phalanx.train.tasks import LanguageModeling

TOKENS = torch.arange(6).view(2, 3)


def language_model(tie: bool = True, dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    return transformer(
        vocab_size=11, seq_len=4, layers=2, hidden_size=8, num_heads=2, tie_embeddings=tie, dropout=dropout
    )


class Scored(nn.Module):
    """An output layer `score`, whose logits `give` makes an output of."""

    def __init__(self, give: Any, bias: bool = True):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.score = nn.Linear(4, 7, bias=bias)
        self.give = give

    def forward(self, x: Tensor) -> Any:
        return self.give(self, self.score(torch.relu(self.inner(x))))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("tie", [False, True])
def test_the_transformers_head_is_found_tied_or_not(tie: bool, device: str) -> None:
    with torch.device(device):
        model = language_model(tie)
    assert find_lm_head(model, (TOKENS.to(device),), {"documents": None}) == "head"


@pytest.mark.parametrize(
    "give",
    [lambda _, y: y, lambda _, y: SimpleNamespace(logits=y, loss=None), lambda _, y: {"logits": y}],
    ids=["a tensor", "an output with logits", "a mapping with logits"],
)
@pytest.mark.parametrize("bias", [False, True])
def test_the_output_may_be_a_tensor_or_hold_logits(give: Any, bias: bool) -> None:
    assert find_lm_head(Scored(give, bias), (torch.ones(2, 4),), {}) == "score"


@pytest.mark.parametrize(
    "give",
    [
        lambda _, y: y * 2.0,
        lambda _, y: y[:1],
        lambda _, y: (y, None),
        lambda _, y: None,
        lambda model, y: model.score(torch.relu(y[:, :4])),
    ],
    ids=["scaled", "sliced", "a tuple", "nothing", "called twice"],
)
def test_where_no_layer_gives_the_output_there_is_none(give: Any) -> None:
    assert find_lm_head(Scored(give), (torch.ones(2, 4),), {}) is None


def test_a_classifier_at_the_end_of_a_sequential_is_a_head() -> None:
    model = resnet(base_channels=8, blocks=(1,))
    name = find_lm_head(model, (torch.ones(1, 3, 16, 16),), {})
    assert name is not None
    assert model.get_submodule(name) is model[-1]


def test_the_search_leaves_no_trace() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    model[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    assert find_lm_head(model, (torch.randn(3, 4, generator=torch.Generator().manual_seed(0)),), {}) == "3"
    assert torch.get_rng_state().equal(state)
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == [True, True, False, True, True]
    assert not any(module._forward_hooks for module in model.modules())


def test_a_model_that_fails_keeps_no_hooks_and_its_mode() -> None:
    model = language_model()
    with pytest.raises(ValueError, match="9 tokens in a row"):
        find_lm_head(model, (torch.zeros(1, 9, dtype=torch.int64),), {})
    assert model.training
    assert not model.head._forward_hooks


def test_bypassed_the_model_gives_what_enters_the_head_and_afterwards_logits_again() -> None:
    model = language_model()
    logits = model(TOKENS)
    with bypass_lm_head(model.head):
        hidden = model(TOKENS)
    assert hidden.shape == (2, 3, 8)
    assert model.head(hidden).equal(logits)
    assert model(TOKENS).equal(logits)
    with pytest.raises(KeyError), bypass_lm_head(model.head):
        raise KeyError
    assert model(TOKENS).equal(logits)
    assert "forward" not in vars(model.head)


@pytest.mark.parametrize("give", [lambda y: y, lambda y: SimpleNamespace(logits=y), lambda y: {"logits": y}])
def test_the_loss_in_chunks_is_that_of_all_logits_whatever_holds_them(give: Any) -> None:
    class Holding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = language_model(tie=False)

        def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Any:
            return give(self.inner(tokens, documents=documents))

    scoring, batch = LossFn(LanguageModeling(), "fp32", torch.device("cpu")), {"tokens": TOKENS, "targets": TOKENS}
    model = Holding()
    ((_, whole, _),) = scoring(model, batch)
    scoring.lm_head = LMHead("inner.head", LanguageModeling().head_loss, 11)
    ((_, chunked, _),) = scoring(model, batch)
    torch.testing.assert_close(chunked, whole)


def test_heads_of_hugging_face_models_are_found_and_bypassed() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "vocab_size": 11, "max_position_embeddings": 8}
    llama = transformers.LlamaConfig(**sizes, num_key_value_heads=1, num_hidden_layers=1, intermediate_size=32)
    gpt2 = transformers.GPT2Config(n_embd=16, n_head=2, n_layer=1, vocab_size=11, n_positions=8)
    for model in (transformers.LlamaForCausalLM(llama), transformers.GPT2LMHeadModel(gpt2)):
        assert find_lm_head(model, (), {"input_ids": TOKENS}) == "lm_head"
        with bypass_lm_head(model.lm_head):
            assert model(input_ids=TOKENS).logits.shape == (2, 3, 16)
