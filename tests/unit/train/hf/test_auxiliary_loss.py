"""The auxiliary loss that a config asks for, or that a model of one's own returns, enters the loss of training."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx.data import DataInfo
from phalanx.errors import RecipeError
from phalanx.recipe.schema import Parallelism, PreferenceConfig
from phalanx.train.hf import model as hf_model
from phalanx.train.hf.inputs import check_auxiliary_loss
from phalanx.train.loss import LMHead, LossFn
from phalanx.train.tasks import LanguageModeling, load_task

tiny: Any = pytest.importorskip("tiny_huggingface")
transformers: Any = pytest.importorskip("transformers")

CPU = torch.device("cpu")
ON = {"output_router_logits": True}


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("auxiliary") / "mixtral"
    tiny.build_random_model("mixtral").save_pretrained(folder)
    return folder


def build(folder: Path, **args: Any) -> nn.Module:
    return hf_model.build_with_weights(folder, {"sliding_window": None, **args}, None, CPU).train()


def make_batch(**more: Tensor) -> dict[str, Tensor]:
    tokens = tiny.random_tokens()
    return {"tokens": tokens, "targets": tokens.roll(-1, 1), **more}


def mean_loss(model: nn.Module, batch: dict[str, Tensor] | None = None, head: str | None = None) -> float:
    task, loss_fn = LanguageModeling(), LossFn(LanguageModeling(), "fp32", CPU)
    loss_fn.lm_head = None if head is None else LMHead(head, task.head_loss, tiny.VOCAB)
    (_, total, count), *_ = loss_fn(model, batch or make_batch())
    return float(total.detach() / count)


def test_the_term_is_the_models_times_its_coefficient_and_for_training_only(mixtral: Path) -> None:
    model, plain = build(mixtral, **ON, router_aux_loss_coef=3.0), build(mixtral)
    tokens = tiny.random_tokens()
    with torch.no_grad():
        reference = transformers.AutoModelForCausalLM.from_pretrained(mixtral, sliding_window=None, **ON)
        expected = 3.0 * float(reference(input_ids=tokens).aux_loss)
    assert mean_loss(model) - mean_loss(plain) == pytest.approx(expected, rel=1e-5)
    assert mean_loss(model, head="lm_head") == pytest.approx(mean_loss(model), rel=1e-6)
    with torch.no_grad():
        assert mean_loss(model.eval()) == pytest.approx(mean_loss(plain.eval()), rel=1e-6)


@pytest.mark.parametrize("loss", ["dpo", "orpo"])
def test_preferences_have_the_term_from_logits_and_from_the_output_layer(mixtral: Path, loss: str) -> None:
    tokens, sequences = tiny.random_tokens(), (torch.arange(16) >= 8).int().expand(2, -1)
    batch = make_batch(documents=sequences, rejected=sequences.bool(), sample_ids=torch.arange(2))
    batch["targets"] = torch.where(sequences.roll(-1, 1) == sequences, tokens.roll(-1, 1), -100)
    task, means = load_task(PreferenceConfig(loss=loss), None), []
    for args, head in (
        ({}, None),
        ({**ON, "router_aux_loss_coef": 3.0}, None),
        (ON | {"router_aux_loss_coef": 3.0}, 1),
    ):
        loss_fn = LossFn(task, "fp32", CPU)
        loss_fn.lm_head = None if head is None else LMHead("lm_head", task.head_loss, tiny.VOCAB)  # type: ignore[attr-defined]
        (_, total, count), *_ = loss_fn(build(mixtral, **args), batch)
        means.append(float(total.detach() / count))
    assert means[1] - means[0] > 3.0
    assert means[2] == pytest.approx(means[1], rel=1e-6)


@pytest.mark.parametrize("head", [None, "lm_head"])
def test_an_evaluation_reports_the_term_apart_from_the_loss(mixtral: Path, head: str | None) -> None:
    model = build(mixtral, **ON, router_aux_loss_coef=3.0)
    expected = mean_loss(model) - mean_loss(build(mixtral))
    loss_fn = LossFn(LanguageModeling(), "fp32", CPU)
    loss_fn.lm_head = None if head is None else LMHead(head, LanguageModeling().head_loss, tiny.VOCAB)
    with torch.no_grad():
        (_, loss, count), (name, term, num_terms) = loss_fn(model.eval(), make_batch(), metrics=True)
    assert (name, float(term / num_terms)) == ("aux_loss", pytest.approx(expected, rel=1e-5))
    assert float(loss / count) == pytest.approx(mean_loss(build(mixtral)), rel=1e-6)


def test_documents_in_one_sample_do_not_change_what_the_term_counts(mixtral: Path) -> None:
    documents = (torch.arange(16) >= 7).int().expand(2, -1)
    batch = make_batch(documents=documents)
    with_term, without = build(mixtral, **ON, router_aux_loss_coef=3.0), build(mixtral)
    assert mean_loss(with_term, batch) - mean_loss(without, batch) > 3.0
    with torch.no_grad():
        outputs = [model(batch["tokens"], documents=documents).logits for model in (with_term, without)]
    torch.testing.assert_close(*outputs)


@pytest.mark.parametrize("dimension", ["tensor", "pipeline", "context"])
def test_parallelism_that_cannot_compute_the_term_is_refused(mixtral: Path, dimension: str) -> None:
    parallelism = Parallelism(**{dimension: 2})
    check_auxiliary_loss(hf_model.build_on_meta(mixtral, {}), parallelism)
    with pytest.raises(
        RecipeError, match=rf"^parallelism\.{dimension}: found 2, expected 1: .*output_router_logits=false"
    ):
        check_auxiliary_loss(hf_model.build_on_meta(mixtral, ON), parallelism)
    check_auxiliary_loss(hf_model.build_on_meta(mixtral, ON), Parallelism(shard=2, replicate=2))


def test_a_mixture_that_adds_no_term_is_refused_where_its_config_asks_for_one(tmp_path: Path) -> None:
    tiny.build_random_model("deepseek-v3").save_pretrained(tmp_path)
    model = hf_model.build_with_weights(tmp_path, ON, None, CPU).train()
    with pytest.raises(RecipeError, match="DeepseekV3ForCausalLM adds no auxiliary loss"):
        mean_loss(model)


def test_a_call_with_labels_returns_the_models_own_loss(mixtral: Path) -> None:
    model, tokens = build(mixtral, **ON, router_aux_loss_coef=3.0), tiny.random_tokens()
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        mixtral, sliding_window=None, router_aux_loss_coef=3.0, **ON
    ).train()
    with torch.no_grad():
        mean_loss(model)
        found, expected = (each(input_ids=tokens, labels=tokens).loss for each in (model, reference))
    torch.testing.assert_close(found, expected)


class Own(nn.Module):
    """A model of one's own with an auxiliary loss."""

    def __init__(self, term: Any):
        super().__init__()
        self.embedding = nn.Embedding(tiny.VOCAB, tiny.VOCAB)
        self.term = term

    def forward(self, tokens: Tensor) -> dict[str, Any]:
        return {"logits": self.embedding(tokens), "aux_loss": self.term}


def test_the_aux_loss_in_a_dict_is_added_to_the_mean_loss() -> None:
    torch.manual_seed(0)
    model = Own(torch.tensor(0.0))
    before = mean_loss(model)
    model.term = torch.tensor(2.5)
    assert mean_loss(model) == pytest.approx(before + 2.5, rel=1e-6)


def test_an_aux_loss_of_several_numbers_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"aux_loss is a tensor of shape \[3\], expected a tensor with one element"):
        mean_loss(Own(torch.ones(3)))


def test_an_aux_loss_of_transformers_without_its_coefficient_is_refused(mixtral: Path) -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = transformers.AutoModelForCausalLM.from_pretrained(mixtral, **ON)

        def forward(self, tokens: Tensor) -> Any:
            return self.inner(input_ids=tokens)

    with pytest.raises(RecipeError, match="lacks its coefficient"):
        mean_loss(Wrapped())


def test_a_model_of_transformers_by_import_path_has_its_term(mixtral: Path, tmp_path: Path) -> None:
    from phalanx.recipe.schema import ModelConfig
    from phalanx.train.model_builder import build_model

    (tmp_path / "own_mixture.py").write_text(
        "import transformers\n"
        "def build():\n"
        f"    return transformers.AutoModelForCausalLM.from_pretrained({str(mixtral)!r}, output_router_logits=True,"
        " router_aux_loss_coef=3.0, sliding_window=None)\n"
    )
    facts = DataInfo("tokens", tiny.VOCAB, None, 16, None)
    model = build_model(ModelConfig(build="own_mixture:build", args={}), facts, tmp_path, 0, CPU).train()
    assert mean_loss(model) == pytest.approx(mean_loss(build(mixtral, **ON, router_aux_loss_coef=3.0)), rel=1e-6)
