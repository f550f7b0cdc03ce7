"""A model that sees the tokens that it is to predict, or those of other documents, is refused; others are not."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from phalanx.autoconfig.causality_check import check_causal, check_document_masking, check_split
from phalanx.errors import RecipeError
from phalanx.models import moe, transformer
from phalanx.train.hf.inputs import install_input_adapter
from phalanx.train.tasks import LanguageModeling

TASK = LanguageModeling()


def batch(length: int = 8) -> dict[str, Tensor]:
    tokens = torch.randint(0, 16, (1, length + 1), generator=torch.Generator().manual_seed(0))
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


class Mixing(nn.Module):
    """Every position hears of all others; `noise` is drawn anew in each call."""

    def __init__(self, noise: float = 0.0):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head, self.noise = nn.Embedding(16, 8), nn.Linear(8, 16), noise

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        logits: Tensor = self.head(x + x.mean(1, keepdim=True))
        return logits + self.noise * torch.rand_like(logits)


def test_a_causal_model_passes_and_stays_in_training_mode() -> None:
    torch.manual_seed(0)
    model = transformer(vocab_size=16, seq_len=8, layers=1, hidden_size=16, num_heads=2).train()
    check_causal(model, TASK, batch())
    assert model.training


def test_a_model_that_hears_of_what_comes_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"model.build: Mixing sees the tokens that it is to.*mask its attent"):
        check_causal(Mixing(), TASK, batch())


@pytest.mark.parametrize(("model", "length"), [(Mixing(), 1), (Mixing(noise=1.0), 8)], ids=["one token", "noise"])
def test_what_cannot_be_judged_passes(model: nn.Module, length: int) -> None:
    check_causal(model, TASK, batch(length))


@pytest.mark.parametrize("decodes", [False, True])
def test_bert_is_refused_unless_it_decodes(decodes: bool) -> None:
    transformers: Any = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = transformers.BertConfig(**sizes, num_attention_heads=2, is_decoder=decodes, initializer_range=1.0)
    model = transformers.BertLMHeadModel(config)
    if decodes:
        check_causal(model, TASK, batch())
    else:
        with pytest.raises(RecipeError, match=r"BertLMHeadModel sees the tokens.*model.args.is_decoder=true makes one"):
            check_causal(model, TASK, batch())


# --- documents --------------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """Carries what it saw on; starts again at each document if it is to `follow` them, and counts positions."""

    def __init__(self, follow: bool, vocabulary: int = 16):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head, self.follow = nn.Embedding(vocabulary, 8), nn.Linear(8, vocabulary), follow

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> dict[str, Tensor]:
        x = self.embedding(tokens)
        sums = x.cumsum(1)
        if self.follow and documents is not None:
            same = (documents[:, :, None] == documents[:, None, :]).tril()
            sums = same.to(x.dtype) @ x
        return {"logits": self.head(sums)}


class Deaf(Recurrent):
    def forward(self, tokens: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return super().forward(tokens)


def packed(length: int = 8) -> dict[str, Tensor]:
    return {**batch(length), "documents": torch.zeros(1, length, dtype=torch.int32)}


@pytest.mark.parametrize("build", [transformer, moe])
def test_our_models_keep_documents_separate(build: Any) -> None:
    torch.manual_seed(0)
    check_document_masking(build(vocab_size=16, seq_len=8, layers=2, hidden_size=16, num_heads=2), TASK, packed())


def test_a_model_that_carries_on_from_document_to_document_is_refused() -> None:
    check_document_masking(Recurrent(follow=True), TASK, packed())
    with pytest.raises(
        RecipeError, match=r"data.document_masking: Recurrent does not keep documents separate: .* at 6 of 8"
    ):
        check_document_masking(Recurrent(follow=False), TASK, packed())


def test_a_model_that_takes_no_documents_is_refused_with_what_failed() -> None:
    with pytest.raises(
        RecipeError, match=r"data.document_masking: Deaf fails where it is to keep .*unexpected keyword"
    ):
        check_document_masking(Deaf(follow=False), TASK, packed())


def test_where_documents_are_joined_or_outputs_change_by_themselves_nothing_is_said() -> None:
    check_document_masking(Recurrent(follow=False), TASK, batch())

    class Noisy(Recurrent):
        def forward(self, tokens: Tensor, documents: Tensor | None = None) -> dict[str, Tensor]:
            logits = super().forward(tokens, documents)["logits"]
            return {"logits": logits + torch.rand_like(logits)}

    check_document_masking(Noisy(follow=False), TASK, packed())


def by_name(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def taken_before(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def by_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    return (q @ k.transpose(2, 3) / q.shape[3] ** 0.5).masked_fill(later, -torch.inf).softmax(-1) @ v


def by_name_after_a_shift(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return by_name(q, torch.cat([torch.zeros_like(k[:, :, :1]), k[:, :, :-1]], 2), v)


def by_sums(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q * (k * v).cumsum(2)


class Attending(nn.Module):
    """One layer of attention of two heads, as `attend` has it, and learned positions."""

    def __init__(self, attend: Any, length: int = 64):
        super().__init__()
        torch.manual_seed(0)
        self.attend, self.embedding, self.where = attend, nn.Embedding(16, 8), nn.Embedding(length, 8)
        self.qkv, self.head = nn.Linear(8, 24), nn.Linear(8, 16)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.where(positions)
        q, k, v = self.qkv(x).view(*tokens.shape, 3, 2, 4).permute(2, 0, 3, 1, 4)
        logits: Tensor = self.head(x + self.attend(q, k, v).transpose(1, 2).flatten(2))
        return logits


@pytest.mark.parametrize("attend", [taken_before, by_softmax, by_name_after_a_shift, by_sums])
def test_a_model_whose_sequences_cannot_be_split_is_refused(attend: Any) -> None:
    with pytest.raises(
        RecipeError, match=r"parallelism.context: Attending looks at other positions by something else than"
    ):
        check_split(Attending(attend), TASK, batch(32))


@pytest.mark.parametrize(
    "model",
    [
        Attending(by_name),
        transformer(vocab_size=16, seq_len=32, layers=2, hidden_size=16, num_heads=2, num_kv_heads=1),
        moe(vocab_size=16, seq_len=32, layers=2, hidden_size=16, num_heads=2, num_experts=4, top_k=2),
    ],
    ids=["of one's own", "transformer", "moe"],
)
def test_a_model_that_mixes_positions_in_attention_only_can_be_split(model: nn.Module) -> None:
    check_split(model, TASK, batch(32))
    assert nn.functional.scaled_dot_product_attention is scaled_dot_product_attention


def test_a_hugging_face_model_can_be_split() -> None:
    transformers: Any = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=1.0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    install_input_adapter(model)
    check_split(model, TASK, batch(32))
