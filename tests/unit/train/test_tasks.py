"""Tasks, and the contract on losses: the cut into micro-batches never changes the gradient beyond rounding."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from phalanx.data import Batch
from phalanx.errors import RecipeError
from phalanx.models import transformer
from phalanx.train.grad_sync.bucketed_reducer import BucketedReducer
from phalanx.train.tasks import Classification, LanguageModeling, Task, TensorBatch, load_task
from small_train import SEQUENCE, VOCAB, cut, make_stepper, mean_gradients, tiny_lm, token_batch


class Regression:
    """A user's own task: a sum of squares, with a number of terms that differs from sample to sample."""

    def inputs(self, batch: TensorBatch) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (batch["x"],), {}

    def loss(self, output: Tensor, batch: TensorBatch) -> tuple[Tensor, Tensor]:
        weights = batch["weights"]
        return ((output - batch["y"]).square() * weights).sum(), weights.sum()


def assert_alike(one: tuple[float, list[Tensor]], other: tuple[float, list[Tensor]]) -> None:
    assert one[0] == pytest.approx(other[0], rel=1e-5, abs=1e-7)
    scale = max(float(gradient.abs().max()) for gradient in one[1]) + 1e-12
    for a, b in zip(one[1], other[1], strict=True):
        assert float((a - b).abs().max()) <= 2e-5 * scale


def assert_cut_alike(model: nn.Module, batch: Batch, task: Task, micros: list[int]) -> None:
    """Every cut of the batch, plain and in the tree of `replicas`, gives the gradient of the whole batch."""
    whole = mean_gradients(make_stepper(model, 1, task), [batch])
    for micro in micros:
        batches = cut(batch, micro)
        for replicas in (False, True):
            stepper = make_stepper(model, len(batches), task, replicas=replicas)
            assert_alike(whole, mean_gradients(stepper, batches))
            if isinstance(stepper.reducer, BucketedReducer):
                stepper.reducer.close()


@settings(derandomize=True, deadline=None, max_examples=15)
@given(seed=st.integers(0, 10_000), ignored=st.floats(0, 1), micro=st.sampled_from([1, 2, 3, 4, 6]))
def test_language_modeling_does_not_depend_on_the_cut_however_targets_are_ignored(
    seed: int, ignored: float, micro: int
) -> None:
    assert_cut_alike(tiny_lm(seed), token_batch(12, seed, ignored), LanguageModeling(), [micro])


def test_a_batch_without_any_target_gives_a_zero_gradient() -> None:
    loss, gradients = mean_gradients(make_stepper(tiny_lm(), 2), cut(token_batch(4, ignored=1.1), 2))
    assert loss == 0.0
    assert all(not gradient.any() for gradient in gradients)


def test_documents_packed_into_one_sequence_do_not_depend_on_the_cut() -> None:
    torch.manual_seed(0)
    model = transformer(vocab_size=VOCAB, seq_len=SEQUENCE, layers=1, hidden_size=16, num_heads=2)
    batch = token_batch(6, seed=5)
    begins = np.random.default_rng(0).random((6, SEQUENCE)) < 0.3
    begins[:, 0] = False
    batch["documents"] = np.cumsum(begins, axis=1, dtype=np.int32)
    batch["targets"][:, :-1][begins[:, 1:]] = -100
    assert_cut_alike(model, batch, LanguageModeling(), [1, 2, 3])


def test_documents_packed_together_give_the_gradient_of_the_documents_alone() -> None:
    torch.manual_seed(0)
    model = transformer(vocab_size=VOCAB, seq_len=8, layers=1, hidden_size=16, num_heads=2)
    one, two = token_batch(1, seed=1, sequence=4), token_batch(1, seed=2, sequence=4)
    packed = {name: np.concatenate([one[name], two[name]], axis=1) for name in one}
    packed["documents"] = np.array([[0] * 4 + [1] * 4], np.int32)
    apart = mean_gradients(make_stepper(model, 2), [one, two])
    together = mean_gradients(make_stepper(model, 1), [packed])
    assert_alike(apart, together)


def test_a_users_task_of_sums_does_not_depend_on_the_cut() -> None:
    random = np.random.default_rng(0)
    torch.manual_seed(0)
    batch = {
        "x": random.standard_normal((12, 5)).astype(np.float32),
        "y": random.standard_normal((12, 3)).astype(np.float32),
        "weights": random.integers(0, 4, (12, 3)).astype(np.float32),
    }
    assert_cut_alike(nn.Linear(5, 3), batch, Regression(), [1, 2, 4, 6])


def test_classification_does_not_depend_on_the_cut() -> None:
    random = np.random.default_rng(0)
    torch.manual_seed(0)
    batch = {"images": random.integers(0, 256, (8, 4, 4, 3), dtype=np.uint8), "labels": random.integers(0, 5, 8)}
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 5))
    assert_cut_alike(model, batch, Classification(), [1, 2, 4])


def test_documents_reach_the_model_only_where_there_are_any() -> None:
    tokens, documents = torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, 3, dtype=torch.int32)
    assert LanguageModeling().inputs({"tokens": tokens}) == ((tokens,), {})
    args, kwargs = LanguageModeling().inputs({"tokens": tokens, "documents": documents})
    assert args == (tokens,)
    assert kwargs == {"documents": documents}


def test_images_come_in_as_floats_from_minus_one_to_one_with_channels_first() -> None:
    images = torch.zeros(2, 4, 5, 3, dtype=torch.uint8)
    images[0, 1, 2, 0] = 255
    (x,), _ = Classification().inputs({"images": images})
    assert x.shape == (2, 3, 4, 5)
    assert x.dtype == torch.float32
    assert (float(x.min()), float(x.max()), float(x[0, 0, 1, 2])) == (-1.0, 1.0, 1.0)


def test_accuracy_counts_hits_among_the_samples() -> None:
    logits = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    hits, count = Classification().metrics(logits, {"labels": torch.tensor([0, 1, 1])})["accuracy"]
    assert (int(hits), count) == (2, 3)


def test_a_task_is_known_by_name_or_import_path(tmp_path: Path) -> None:
    assert isinstance(load_task("language-modeling", None), LanguageModeling)
    assert isinstance(load_task("classification", None), Classification)
    source = "class Mine:\n    def inputs(self, batch): return (), {}\n    def loss(self, output, batch): return 0, 1\n"
    (tmp_path / "own_task_good.py").write_text(source)
    assert type(load_task("own_task_good:Mine", tmp_path)).__name__ == "Mine"


@pytest.mark.parametrize(
    ("name", "body", "message"),
    [
        ("translation", "", "no task 'translation'; expected language-modeling, chat, classification or mod"),
        (
            "own_half:Mine",
            "inputs(self, batch): return (), {}",
            "own_half:Mine has no method loss; a task needs inputs",
        ),
        (
            "own_bad:Mine",
            "__init__(self): raise KeyError('vocab')",
            r"Mine\(\) failed: KeyError: 'vocab' .*own_bad.py:2",
        ),
    ],
)
def test_a_task_that_cannot_be_is_refused(tmp_path: Path, name: str, body: str, message: str) -> None:
    (tmp_path / f"{name.partition(':')[0]}.py").write_text(f"class Mine:\n    def {body}\n")
    with pytest.raises(RecipeError, match=message):
        load_task(name, tmp_path)
