"""Distillation: divergences against their definitions, and a loss over targets only."""

import pytest
import torch
from torch import nn

from phalanx.errors import RecipeError
from phalanx.recipe.schema import DistillationConfig
from phalanx.train.tasks.distillation import Distillation, StoredTeacher, compute_divergence


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
    found = compute_divergence(*((x / temperature).log_softmax(-1) for x in (student, teacher)), config)
    torch.testing.assert_close(found, expected[divergence] * temperature**2, rtol=1e-5, atol=1e-6)


def test_the_loss_is_a_sum_over_targets_and_trains_the_student_only():
    torch.manual_seed(0)
    student, teacher = (nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7)) for _ in range(2))
    batch = {"tokens": torch.randint(0, 7, (2, 5)), "targets": torch.randint(0, 7, (2, 5))}
    batch["targets"][0, :3] = -100
    task = Distillation(DistillationConfig(teacher="x", data_loss_weight=0.25), lambda: teacher)
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


def make_on_policy(share):
    torch.manual_seed(0)
    student, teacher = (nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7)) for _ in range(2))
    config = DistillationConfig(teacher="x", on_policy=share, max_new_tokens=4)
    batch = {"tokens": torch.randint(1, 7, (2, 6)), "targets": torch.full((2, 6), -100)}
    batch["targets"][0, 2:] = batch["targets"][1, 3:] = 5
    return student, teacher, Distillation(config, lambda: teacher, [0]), batch


def test_without_answers_of_its_own_the_batch_and_random_numbers_are_those_of_before():
    student, _, task, batch = make_on_policy(0.0)
    state = torch.get_rng_state()
    assert task.roll_out(student, batch) is batch
    assert torch.equal(torch.get_rng_state(), state)


def test_the_student_answers_the_prompts_the_same_with_the_same_seed():
    student, _, task, batch = make_on_policy(1.0)
    torch.manual_seed(3)
    rolled, other = task.roll_out(student, batch), task.roll_out(student, batch)
    torch.manual_seed(3)
    again = task.roll_out(student, batch)
    assert torch.equal(rolled["targets"], again["targets"])
    assert not torch.equal(rolled["targets"], other["targets"])
    for row, length in enumerate((3, 4)):
        assert torch.equal(rolled["tokens"][row, :length], batch["tokens"][row, :length])
        assert (rolled["targets"][row, : length - 1] == -100).all()
        answer = rolled["targets"][row][rolled["targets"][row] != -100]
        assert torch.equal(rolled["tokens"][row, length : length + len(answer)], answer)
        assert 0 not in answer[:-1]
        assert len(answer) == 4 or answer[-1] == 0


def test_the_loss_of_own_answers_is_the_divergence_from_the_teacher_there():
    student, teacher, task, batch = make_on_policy(1.0)
    rolled = task.roll_out(student, batch)
    loss, num_terms = task.loss(student(rolled["tokens"]), rolled)
    is_target = rolled["targets"] != -100
    q, p = (model(rolled["tokens"])[is_target].softmax(-1) for model in (student, teacher))
    assert int(num_terms) == int(is_target.sum())
    torch.testing.assert_close(loss, kl(p, q).sum(), rtol=1e-5, atol=1e-6)


def test_an_evaluation_is_of_the_answers_of_the_data():
    student, _, task, batch = make_on_policy(1.0)
    with torch.no_grad():
        assert task.roll_out(student, batch) is batch


def make_stored(top_k, divergence="forward", num_student_tokens=7):
    """A student, a task whose teacher is stored, and a batch of two samples in the order 1, 0."""
    torch.manual_seed(0)
    student = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, num_student_tokens))
    teacher = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7))
    task = Distillation(
        DistillationConfig(teacher="x", teacher_top_k=top_k, divergence=divergence, temperature=2.0), lambda: teacher
    )
    batch = {"tokens": torch.randint(0, 7, (2, 5)), "targets": torch.randint(0, 7, (2, 5))}
    batch["targets"][0, :3] = -100
    log_probs, tokens = task.score(teacher, {name: values.flip(0) for name, values in batch.items()}, top_k)
    stored = StoredTeacher(log_probs, tokens.int(), torch.tensor([0, 5, 7]))
    task.set_reference(stored.tensors(), torch.device("cpu"))
    return student, teacher, task, {**batch, "sample_ids": torch.tensor([1, 0])}


@pytest.mark.parametrize("divergence", ["forward", "reverse", "jsd"])
def test_tokens_that_are_not_stored_are_one_class(divergence):
    student, teacher, task, batch = make_stored(3, divergence)
    is_target = batch["targets"] != -100
    q, p = ((model(batch["tokens"])[is_target] / 2.0).softmax(-1) for model in (student, teacher))
    top = p.topk(3).indices
    p, q = (torch.cat([x.gather(1, top), 1 - x.gather(1, top).sum(1, keepdim=True)], 1) for x in (p, q))
    mixture = (p + q) / 2
    expected = {"forward": kl(p, q), "reverse": kl(q, p), "jsd": (kl(p, mixture) + kl(q, mixture)) / 2}[divergence]
    loss, num_terms = task.loss(student(batch["tokens"]), batch)
    assert int(num_terms) == 7
    torch.testing.assert_close(loss, expected.sum() * 4.0, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("divergence", ["forward", "reverse", "jsd"])
def test_all_tokens_stored_have_the_loss_and_gradients_of_the_teacher(divergence):
    student, teacher, stored, batch = make_stored(7, divergence)
    online = Distillation(stored.config.model_copy(update={"teacher_top_k": None}), lambda: teacher)
    weights = list(student.parameters())
    losses = [task.loss(student(batch["tokens"]), batch)[0] for task in (stored, online)]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-6)
    gradients = [torch.autograd.grad(loss, weights) for loss in losses]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-6)


def test_more_tokens_than_the_teacher_has_are_refused():
    with pytest.raises(RecipeError, match=r"task\.teacher_top_k: found 8, expected at most the 7 tokens"):
        make_stored(8)


def test_a_teacher_with_other_tokens_is_refused():
    student, _, stored, batch = make_stored(3, num_student_tokens=5)
    online = Distillation(DistillationConfig(teacher="x"), stored.load_teacher)
    with pytest.raises(RecipeError, match=r"task\.teacher: has 7 tokens, and the model 5"):
        online.loss(student(batch["tokens"]), batch)
    with pytest.raises(RecipeError, match=r"task\.teacher: has a token 6, and the model 5 tokens"):
        stored.loss(student(batch["tokens"]), batch)
