"""Preference losses against their formulas for each pair alone, from logits and from the output layer's input."""

import math

import pytest
import torch
import torch.nn.functional as F

from phalanx.recipe.schema import PreferenceConfig
from phalanx.train.ops.linear_cross_entropy import IGNORED_TARGET
from phalanx.train.tasks.preference import Preference, SequenceLogProbs

VOCAB, WIDTH = 23, 8
LENGTHS = [[(6, 4), (5, 7)], [(3, 3), (9, 4)]]
"""Tokens of the chosen and the rejected sequence of each pair, by sample."""
PROMPT = 1


def make_batch(seed=0, lengths=LENGTHS, pad=3, is_rejected=lambda number: number % 2 == 1):
    """A batch of pairs, one after the other, and padding as a document of its own."""
    generator = torch.Generator().manual_seed(seed)
    size = max(sum(map(sum, pairs)) for pairs in lengths) + pad
    rows = {"tokens": [], "targets": [], "documents": [], "rejected": []}
    for pairs in lengths:
        tokens = torch.randint(0, VOCAB, (size + 1,), generator=generator)
        targets = torch.full((size,), IGNORED_TARGET)
        documents, rejected = torch.full((size,), 2 * len(pairs)), torch.zeros(size, dtype=torch.bool)
        at = 0
        for number, length in enumerate(n for pair in pairs for n in pair):
            targets[at + PROMPT : at + length - 1] = tokens[at + PROMPT + 1 : at + length]
            documents[at : at + length] = number
            rejected[at : at + length] = is_rejected(number)
            at += length
        for name, row in zip(rows, (tokens[:-1], targets, documents, rejected), strict=True):
            rows[name].append(row)
    return {name: torch.stack(values) for name, values in rows.items()} | {"sample_ids": torch.arange(len(lengths))}


def make_head(seed=1, batch=None):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*batch["tokens"].shape, WIDTH, generator=generator, requires_grad=True)
    weight = torch.randn(VOCAB, WIDTH, generator=generator, requires_grad=True)
    return hidden, weight


def sequences_alone(logits, batch):
    """The mean log-probability and the number of tokens of each sequence [samples][sequences]."""
    found = []
    for row_logits, targets, documents in zip(logits, batch["targets"], batch["documents"], strict=True):
        rows = []
        for number in range(int(documents.max())):
            chosen = (documents == number) & (targets != IGNORED_TARGET)
            log_probs = row_logits[chosen].log_softmax(-1).gather(1, targets[chosen][:, None])
            rows.append((log_probs.sum(), int(chosen.sum())))
        found.append(rows)
    return found


def expected_pair_loss(config, chosen, rejected, reference):
    (c, nc), (r, nr) = chosen, rejected
    ref_c, ref_r = reference
    beta = config.beta
    if config.loss == "dpo":
        margin = beta * ((c - ref_c) - (r - ref_r))
        return -(1 - config.label_smoothing) * F.logsigmoid(margin) - config.label_smoothing * F.logsigmoid(-margin)
    if config.loss == "ipo":
        return ((c - ref_c) / nc - (r - ref_r) / nr - 1 / (2 * beta)) ** 2
    if config.loss == "simpo":
        return -F.logsigmoid(beta * (c / nc - r / nr) - config.margin)
    p_c, p_r = (c / nc).exp(), (r / nr).exp()
    odds = (p_c / (1 - p_c)).log() - (p_r / (1 - p_r)).log()
    return -c / nc - beta * F.logsigmoid(odds)


@pytest.mark.parametrize(
    "config",
    [
        PreferenceConfig(loss="dpo", beta=0.3),
        PreferenceConfig(loss="dpo", beta=0.3, label_smoothing=0.1),
        PreferenceConfig(loss="ipo", beta=0.2),
        PreferenceConfig(loss="orpo", beta=0.4),
        PreferenceConfig(loss="simpo", beta=2.0, margin=0.7),
        PreferenceConfig(loss="dpo", chat_loss_weight=0.5),
    ],
    ids=["dpo", "cdpo", "ipo", "orpo", "simpo", "dpo-with-chat-loss"],
)
def test_loss_and_gradients_are_those_of_the_pairs_alone(config):
    batch = make_batch()
    hidden, weight = make_head(batch=batch)
    task = Preference(config)
    task.reference = -4 - torch.rand(2, 4, generator=torch.Generator().manual_seed(2))
    loss, num_terms = task.loss(hidden @ weight.T, batch)
    alone = sequences_alone(hidden @ weight.T, batch)
    expected = sum(
        expected_pair_loss(config, row[2 * k], row[2 * k + 1], reference[2 * k : 2 * k + 2])
        - config.chat_loss_weight * row[2 * k][0] / row[2 * k][1]
        for row, reference in zip(alone, task.reference, strict=True)
        for k in range(2)
    )
    assert int(num_terms) == 4
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    for found, wanted in zip(
        torch.autograd.grad(loss, [hidden, weight]), torch.autograd.grad(expected, [hidden, weight]), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_kto_weighs_answers_by_their_label():
    config = PreferenceConfig(loss="kto", beta=0.5, desirable_weight=2.0)
    batch = make_batch(is_rejected=lambda number: number == 1)
    hidden, weight = make_head(batch=batch)
    task = Preference(config)
    task.reference = torch.full((2, 4), -5.0)
    loss, num_terms = task.loss(hidden @ weight.T, batch)
    expected = sum(
        1 - torch.sigmoid(-0.5 * (log_prob + 5)) if number == 1 else 2 * (1 - torch.sigmoid(0.5 * (log_prob + 5)))
        for row in sequences_alone(hidden @ weight.T, batch)
        for number, (log_prob, _) in enumerate(row)
    )
    assert int(num_terms) == 8
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss", ["dpo", "orpo", "kto"])
def test_the_loss_from_the_output_layer_has_the_same_gradients(loss):
    batch = make_batch()
    hidden, weight = make_head(batch=batch)
    task = Preference(PreferenceConfig(loss=loss))
    whole, _ = task.loss(hidden @ weight.T, batch)
    chunked, _ = task.head_loss(hidden, weight, batch)
    torch.testing.assert_close(chunked, whole)
    for found, expected in zip(
        torch.autograd.grad(chunked, [hidden, weight]), torch.autograd.grad(whole, [hidden, weight]), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_model_that_is_its_own_reference_has_the_loss_of_chance():
    batch = make_batch()
    hidden, weight = make_head(batch=batch)
    task = Preference(PreferenceConfig())
    scores, _ = SequenceLogProbs(task.config).loss(hidden @ weight.T, batch)
    task.reference = scores.detach()
    loss, num_terms = task.loss(hidden @ weight.T, batch)
    assert float(loss.detach()) / int(num_terms) == pytest.approx(math.log(2))
    assert float(task.metrics(hidden @ weight.T, batch)["reward_margin"][0].detach()) == pytest.approx(0.0, abs=1e-6)


def test_the_reference_of_a_sample_is_found_by_its_id():
    batch = make_batch()
    hidden, weight = make_head(batch=batch)
    task = Preference(PreferenceConfig())
    task.reference = torch.randn(9, 6, generator=torch.Generator().manual_seed(3))
    ids = torch.tensor([7, 2])
    loss, _ = task.loss(hidden @ weight.T, {**batch, "sample_ids": ids})
    task.reference = task.reference[ids]
    assert torch.equal(loss, task.loss(hidden @ weight.T, batch)[0])
