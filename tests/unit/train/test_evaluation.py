"""Scores on held-out data."""

import math

import pytest
import torch
from torch import Tensor

from phalanx.data.reader import ValidationPart
from phalanx.train.distributed.environment import DistEnv
from phalanx.train.evaluation import EvaluationResult, evaluate
from phalanx.train.tasks import LanguageModeling, TensorBatch
from small_train import Clock, Samples, TinyLM, mesh_of, objective_of, tiny_lm, token_batch


class Scored(LanguageModeling):
    """Counts hits besides."""

    def metrics(self, output: Tensor, batch: TensorBatch) -> dict[str, tuple[Tensor, Tensor]]:
        counted = batch["targets"] != -100
        hits = (output.argmax(-1) == batch["targets"]) & counted
        return {"hits": (hits.sum(), counted.sum()), "misses": (counted.sum() - hits.sum(), counted.sum())}


def data(held_out: int = 13, ignored: float = 0.3) -> Samples:
    return Samples(token_batch(4), token_batch(held_out, seed=1, ignored=ignored))


def score(
    model: TinyLM, samples: int = 100, micro: int = 4, of: Samples | None = None, **options: object
) -> EvaluationResult:
    objective = objective_of(model, Scored())
    scores = evaluate(
        objective, of or data(), dist_env=DistEnv(), mesh=mesh_of(), max_samples=samples, micro_size=micro, **options
    )
    assert scores is not None
    return scores


def test_the_loss_is_the_mean_over_all_terms_that_count() -> None:
    model, held_out = tiny_lm(), data().read_validation(0, 13)
    with torch.no_grad():
        logits = model(torch.from_numpy(held_out["tokens"]))
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(held_out["targets"]).flatten())
    assert score(model).loss == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("micro", [1, 2, 5, 13, 50])
def test_scores_are_the_same_for_every_micro_batch(micro: int) -> None:
    expected, scores = score(tiny_lm(), micro=4), score(tiny_lm(), micro=micro)
    assert scores.loss == pytest.approx(expected.loss, rel=1e-6)
    assert scores.metrics == expected.metrics
    assert scores.num_samples == expected.num_samples == 13


def test_no_more_samples_are_scored_than_asked() -> None:
    assert score(tiny_lm(), samples=5).num_samples == 5
    assert score(tiny_lm(), samples=5) != score(tiny_lm(), samples=13)


def test_a_model_that_draws_random_numbers_does_not_while_it_is_scored() -> None:
    model = tiny_lm(dropout=0.5).train()
    assert score(model).loss == score(model).loss == score(tiny_lm()).loss


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_in_the_mode_it_was_in(training: bool) -> None:
    model = tiny_lm().train(training)
    score(model)
    assert model.training is training


class TwoSources(Samples):
    """The first samples are of one source, the last 3 of another of three times its weight."""

    def choose_validation_parts(self, max_samples: int) -> list[ValidationPart]:
        return [ValidationPart(0, 10, 1.0), ValidationPart(10, 3, 3.0)]


@pytest.mark.parametrize("micro", [1, 4, 50])
def test_sources_are_scored_one_by_one_and_their_mean_is_weighted(micro: int) -> None:
    of = TwoSources(token_batch(4), token_batch(13, seed=1, ignored=0.3))
    both = score(tiny_lm(), micro=micro, of=of)
    parts = [of.read_validation(0, 10), of.read_validation(10, 3)]
    first, second = (score(tiny_lm(), of=Samples(token_batch(4), part)) for part in parts)
    assert both.loss == pytest.approx((first.loss + 3 * second.loss) / 4, rel=1e-6)
    assert both.metrics["hits"] == pytest.approx((first.metrics["hits"] + 3 * second.metrics["hits"]) / 4)
    assert both.metrics["source_0_loss"] == pytest.approx(first.loss, rel=1e-6)
    assert both.metrics["source_1_loss"] == pytest.approx(second.loss, rel=1e-6)
    assert both.num_samples == 13


def test_a_loss_that_is_no_number_is_not_hidden_by_another_source() -> None:
    model = tiny_lm()
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    assert math.isnan(score(model, of=TwoSources(token_batch(4), token_batch(13))).loss)


def test_a_wish_to_stop_ends_it_without_scores_and_with_the_model_as_it_was() -> None:
    model = tiny_lm().train()
    asked: list[int] = []

    def stop() -> bool:
        asked.append(1)
        return len(asked) == 2

    objective = objective_of(model, Scored())
    scores = evaluate(
        objective, data(), dist_env=DistEnv(), mesh=mesh_of(), max_samples=100, micro_size=2, stop_requested=stop
    )
    assert scores is None
    assert len(asked) == 2
    assert model.training


def test_the_seconds_are_those_that_pass_meanwhile() -> None:
    clock = Clock()
    model = tiny_lm()
    model.register_forward_hook(lambda *_: clock.tick(2.0))
    assert score(model, micro=4, clock=clock).duration_s == 8.0


def test_an_evaluation_reports_its_progress_every_ten_seconds() -> None:
    model, clock, reports = tiny_lm(), Clock(), []
    model.register_forward_hook(lambda *_: clock.tick(6.0))
    score(model, micro=4, clock=clock, report_progress=lambda *numbers: reports.append(numbers))
    assert reports == [(8, 13), (13, 13)]


def test_held_out_data_without_a_single_term_score_zero() -> None:
    assert score(tiny_lm(), of=data(ignored=1.1)).loss == 0.0
