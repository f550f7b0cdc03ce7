"""Distillation: divergences against their definitions, and a loss over targets only."""

import pytest
import torch
from torch import nn

from phalanx.recipe.schema import DistillationConfig
from phalanx.train.tasks.distillation import Distillation, compute_divergence


def distributions(temperature):
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 5, 11, generator=generator)
    return student, teacher, (student / temperature).softmax(-1), (teacher / temperature).softmax(-1)


def kl(p, q):
    return (p * (p / q).log()).sum(-1)


@pytest.mark.parametrize("divergence", ["forward", "reverse", "jsd"])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_divergences_are_those_of_their_definitions(divergence, temperature):
    student, teacher, q, p = distributions(temperature)
    config = DistillationConfig(teacher="x", divergence=divergence, temperature=temperature, jsd_beta=0.3)
    mixture = 0.3 * p + 0.7 * q
    expected = {"forward": kl(p, q), "reverse": kl(q, p), "jsd": 0.3 * kl(p, mixture) + 0.7 * kl(q, mixture)}
    found = compute_divergence(student, teacher, config)
    torch.testing.assert_close(found, expected[divergence] * temperature**2, rtol=1e-5, atol=1e-6)


def test_the_loss_is_a_sum_over_targets_and_trains_the_student_only():
    torch.manual_seed(0)
    student, teacher = (nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7)) for _ in range(2))
    batch = {"tokens": torch.randint(0, 7, (2, 5)), "targets": torch.randint(0, 7, (2, 5))}
    batch["targets"][0, :3] = -100
    task = Distillation(DistillationConfig(teacher="x", data_loss_weight=0.25), teacher)
    logits = student(batch["tokens"])
    loss, num_terms = task.loss(logits, batch)
    is_target = batch["targets"] != -100
    q, p = logits[is_target].softmax(-1), teacher(batch["tokens"])[is_target].softmax(-1)
    cross_entropy = -q.gather(1, batch["targets"][is_target][:, None]).log().sum()
    assert int(num_terms) == 7
    torch.testing.assert_close(loss, 0.75 * kl(p, q).sum() + 0.25 * cross_entropy, rtol=1e-5, atol=1e-6)
    loss.backward()
    assert all(parameter.grad is not None for parameter in student.parameters())
    assert all(parameter.grad is None for parameter in teacher.parameters())


def test_a_student_like_its_teacher_has_no_loss():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7))
    batch = {"tokens": torch.arange(6)[None], "targets": torch.arange(1, 7)[None]}
    for divergence in ("forward", "reverse", "jsd"):
        task = Distillation(DistillationConfig(teacher="x", divergence=divergence), model)
        assert float(task.loss(model(batch["tokens"]), batch)[0]) == pytest.approx(0.0, abs=1e-6)
