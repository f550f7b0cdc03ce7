"""Losses of whole texts against a loop over texts alone, transformers' own loss, and formulas of a few lines."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.errors import RecipeError
from phalanx.recipe.schema import EmbeddingConfig, RewardConfig, TextClassificationConfig
from phalanx.train.hf.inputs import install_input_adapter
from phalanx.train.loss import LossFn
from phalanx.train.tasks import check_model_config, load_task

transformers: Any = pytest.importorskip("transformers")
CPU, VOCAB, PAD, LAYERS = torch.device("cpu"), 50, 1, {"num_hidden_layers": 2, "num_attention_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {"hidden_size": 16, "intermediate_size": 24, "hidden_dropout_prob": 0.0, **LAYERS},
    "distilbert": {"dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 2, "seq_classif_dropout": 0.0},
    "llama": {"hidden_size": 16, "intermediate_size": 24, **LAYERS},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2},
}
DROPOUTS = ("attention_probs_dropout_prob", "attention_dropout", "dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop")
TEXTS = [[[5, 6, 7], [8, 9]], [[10, 11, 12, 13, 14], [15]], [[16, 17], [18, 19, 20, 21]]]
"""Tokens of the texts of three samples."""


def build(family: str, kind: str = "AutoModelForSequenceClassification", **more: Any) -> nn.Module:
    values = {"vocab_size": VOCAB, "pad_token_id": PAD, **FAMILIES[family], **more}
    config = transformers.AutoConfig.for_model(family, **values)
    for name in DROPOUTS:
        if hasattr(config, name):
            setattr(config, name, 0.0)
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, kind).from_config(config).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


def make_batch(samples: list[list[list[int]]], length: int = 12, **more: Tensor) -> dict[str, Tensor]:
    tokens, sequences = torch.zeros(len(samples), length, dtype=torch.int64), torch.full((len(samples), length), -1)
    for row, texts in enumerate(samples):
        at = 0
        for number, text in enumerate(texts):
            tokens[row, at : at + len(text)], sequences[row, at : at + len(text)] = torch.tensor(text), number
            at += len(text)
    return {"tokens": tokens, "sequences": sequences.int(), **more}


def loss_and_gradients(model: nn.Module, config: Any, batch: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The mean loss by our task, for which alone the model has our hook."""
    install_input_adapter(model)
    (_, total, count), *_ = LossFn(load_task(config, None), "fp32", CPU)(model, batch)
    model._forward_pre_hooks.clear()
    return find_gradients(model, total / count)


def find_gradients(model: nn.Module, loss: Tensor) -> tuple[Tensor, list[Tensor]]:
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return loss.detach(), [gradient for gradient in found if gradient is not None]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("centering", [0.0, 0.3])
def test_the_reward_loss_and_its_gradients_are_those_of_a_loop_over_texts_alone(family: str, centering: float) -> None:
    model, margins = build(family, num_labels=1), torch.tensor([0.0, 0.5, -0.25])
    batch = make_batch(TEXTS, margins=margins)
    found = loss_and_gradients(model, RewardConfig(center_rewards_coefficient=centering), batch)
    losses = []
    for (chosen, rejected), margin in zip(TEXTS, margins, strict=True):
        r_c, r_r = (model(input_ids=torch.tensor([text])).logits[0, 0] for text in (chosen, rejected))
        losses.append(-F.logsigmoid(r_c - r_r - margin) + centering * (r_c + r_r) ** 2)
    torch.testing.assert_close(found, find_gradients(model, torch.stack(losses).mean()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_of_classes_is_transformers_own_on_the_same_texts(family: str) -> None:
    model, labels, texts = build(family, num_labels=3), torch.tensor([2, 0, 1]), [sample[:1] for sample in TEXTS]
    found = loss_and_gradients(
        model, TextClassificationConfig(classes=["a", "b", "c"]), make_batch(texts, labels=labels)
    )
    rows = [torch.tensor(text) for (text,) in texts]
    tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
    loss = model(input_ids=tokens, attention_mask=(tokens != PAD).long(), labels=labels).loss
    torch.testing.assert_close(found, find_gradients(model, loss), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_the_embedding_loss_is_that_of_texts_alone_with_the_negatives_of_the_micro_batch(pooling: str) -> None:
    samples, model = [TEXTS[0], [*TEXTS[1], [30, 31]], TEXTS[2]], build("llama", "AutoModel")
    batch = make_batch(samples, labels=torch.zeros(3))
    found = loss_and_gradients(model, EmbeddingConfig(pooling=pooling, scale=20.0), batch)

    def embed(text: list[int]) -> Tensor:
        hidden = model(input_ids=torch.tensor([text])).last_hidden_state[0]
        return {"mean": hidden.mean(0), "cls": hidden[0], "last": hidden[-1]}[pooling]

    anchors = torch.stack([embed(texts[0]) for texts in samples])
    others = torch.stack([*(embed(texts[1]) for texts in samples), embed([30, 31])])
    cosines = F.cosine_similarity(anchors[:, None], others[None], dim=-1)
    loss = F.cross_entropy(20.0 * cosines, torch.arange(3))
    torch.testing.assert_close(found, find_gradients(model, loss), rtol=1e-5, atol=1e-5)


def test_rewards_are_measured_by_pairs() -> None:
    task, batch = load_task(RewardConfig(), None), make_batch(TEXTS, margins=torch.zeros(3))
    scores = torch.tensor([[3.0], [1.0], [0.0], [2.0], [5.0], [4.0]])
    measured = {name: float(total) / count for name, (total, count) in task.metrics({"logits": scores}, batch).items()}  # type: ignore[attr-defined]
    assert measured == pytest.approx(
        {"reward_accuracy": 2 / 3, "reward_margin": 1 / 3, "reward_chosen": 8 / 3, "reward_rejected": 7 / 3}
    )


def test_a_model_with_other_scores_is_refused_with_the_number_to_give() -> None:
    task, batch = load_task(TextClassificationConfig(classes=["a", "b"]), None), make_batch(TEXTS)
    with pytest.raises(RecipeError, match=r"shape \[3, 5\], expected 2 for each text; .*num_labels=2"):
        task.loss({"logits": torch.zeros(3, 5)}, batch)
    with pytest.raises(RecipeError, match=r"task: embedding needs hidden states"):
        load_task(EmbeddingConfig(), None).loss({"logits": torch.zeros(3, 5)}, batch)


def test_a_model_without_a_padding_token_is_refused() -> None:
    model = build("llama", num_labels=1, pad_token_id=None)
    with pytest.raises(RecipeError, match=r"^model\.args\.pad_token_id: the model's config has none"):
        check_model_config(load_task(RewardConfig(), None), model)
