"""Gradients of one worker, and of one that holds a part, without any process group."""

import math

import pytest
from torch import nn

from phalanx.compat import scale_in_place
from phalanx.train.distributed.parallel_model import ParallelModel
from phalanx.train.grad_sync.reducer import GradReducer, LocalReducer, ParallelReducer
from small_train import mesh_of, tiny_lm


def made(kind: type, model: nn.Module) -> GradReducer:
    divided = ParallelModel(mesh_of(), (model,))
    return (
        LocalReducer(list(divided.trainable_parameters().values()))
        if kind is LocalReducer
        else ParallelReducer(divided, None)
    )


KINDS = pytest.mark.parametrize("kind", [LocalReducer, ParallelReducer])


def backward(gradients: GradReducer, model: nn.Module, micro_batches: int) -> None:
    for leaf in range(micro_batches):
        gradients.begin_backward(leaf)
        sum((leaf + 1) * p.sum() for name, p in model.named_parameters() if "norm" not in name).backward()
        gradients.end_backward()
    gradients.reduce_gradients()


@KINDS
def test_micro_batches_add_up_where_the_optimizer_reads_them_and_what_is_unused_has_zeros(kind: type) -> None:
    model = tiny_lm()
    gradients = made(kind, model)
    backward(gradients, model, 3)
    scale_in_place(gradients.grad_tensors(), 0.5)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert (parameter.grad == (0.0 if "norm" in name else 3.0)).all()


@KINDS
def test_a_frozen_parameter_gets_none(kind: type) -> None:
    model = tiny_lm()
    model.norm.requires_grad_(False)
    gradients = made(kind, model)
    backward(gradients, model, 1)
    assert model.norm.weight.grad is None
    assert len(gradients.grad_tensors()) == len([p for p in model.parameters() if p.requires_grad])


@KINDS
def test_the_norm_is_that_of_all_gradients_together(kind: type) -> None:
    model = tiny_lm()
    gradients = made(kind, model)
    backward(gradients, model, 2)
    used = sum(p.numel() for name, p in model.named_parameters() if "norm" not in name)
    assert float(gradients.grad_norm()) == pytest.approx(3.0 * math.sqrt(used), rel=1e-6)
