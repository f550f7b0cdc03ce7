"""The state of a run as named tensors: what is in it, and how it comes back."""

import pytest
import torch
from torch import Tensor, nn

from phalanx.compat import scale_in_place
from phalanx.errors import DataError
from phalanx.train.checkpoint.load_plan import (
    find_unused_entries,
    get_state_tensors,
    load_model_tensors,
)
from phalanx.train.distributed.module_state import get_model_tensors
from phalanx.train.distributed.parallel_model import ParallelModel
from phalanx.train.optim.container import OptimizerContainer
from phalanx.train.precision import GradScaler
from small_train import TinyLM, make_stepper, mean_gradients, mesh_of, tiny_lm, token_batch


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("counted", torch.tensor(0, dtype=torch.int64))
        self.register_buffer("table", torch.zeros(3), persistent=False)


def trained() -> tuple[TinyLM, OptimizerContainer, GradScaler]:
    model = tiny_lm()
    scale = GradScaler(4.0, good_steps=3, dynamic=True)
    stepper = make_stepper(model, 1, scale=scale)
    mean_gradients(stepper, [token_batch(4)])
    scale_in_place(stepper.reducer.grad_tensors(), 0.1)
    stepper.optimizer.step(1e-2)
    return model, stepper.optimizer, scale


def test_parameters_and_persistent_buffers_make_a_model() -> None:
    assert list(get_model_tensors(Buffered())) == ["weight", "counted"]
    assert list(ParallelModel(mesh_of(), (Buffered(),)).owned_buffers()) == ["counted"]


def test_tied_weights_appear_once() -> None:
    model = tiny_lm()
    model.head.weight = model.embedding.weight
    assert "embedding.weight" in get_model_tensors(model)
    assert "head.weight" not in get_model_tensors(model)


def test_the_whole_state_holds_model_optimizer_and_scale() -> None:
    names = set(get_state_tensors(*trained()))
    assert {"hidden.weight", "optimizer/hidden.weight/exp_avg", "optimizer/norm.bias/step", "scaler/scale"} <= names


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm.bias": None}, "has no tensor 'norm.bias', which the model needs"),
        ({"gate.weight": torch.zeros(3)}, "holds 'gate.weight', which the model does not have"),
        ({"hidden.bias": torch.zeros(3)}, r"hidden.bias has shape \[3\], the model's has \[8\]"),
    ],
    ids=["missing", "unknown", "another shape"],
)
def test_tensors_that_do_not_fit_are_named_with_where_they_were_looked_for(
    changes: dict[str, Tensor | None], message: str
) -> None:
    tensors = {**get_model_tensors(tiny_lm()), **changes}
    with pytest.raises(DataError, match=f"checkpoints/step-9: {message}"):
        load_model_tensors(
            tiny_lm(), {name: tensor for name, tensor in tensors.items() if tensor is not None}, "checkpoints/step-9"
        )


def test_saved_state_without_a_place_in_the_model_is_found() -> None:
    model, optimizer, scale = trained()
    names = get_state_tensors(model, optimizer, scale)
    assert find_unused_entries(model, names) == []
    lost = ["gate.weight", "extra/gate", "optimizer/gate.weight/step", "optimizer/norm.bias/step"]
    model.norm.bias.requires_grad_(False)
    found = find_unused_entries(model, [*lost, "grad_sync/residual/gate.weight", "norm.bias"])
    assert found == lost


def test_weights_load_into_a_model_whatever_else_there_is() -> None:
    state = {name: tensor.clone() for name, tensor in get_state_tensors(*trained()).items()}
    model = tiny_lm(seed=5)
    with torch.no_grad():
        load_model_tensors(model, state, "here")
    assert all(tensor.equal(state[name]) for name, tensor in get_model_tensors(model).items())
