"""What of a model can be saved and trained: what cannot is refused by name."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx.errors import DataError, RecipeError
from phalanx.recipe.schema import Parallelism
from phalanx.train.distributed.fsdp import check_fsdp_groups
from phalanx.train.distributed.module_state import (
    check_model_can_be_saved,
    get_extra_state,
    load_extra_state,
    pack_value,
    unpack_value,
)
from phalanx.train.distributed.parallelize import ParallelConfig, plan_model


def with_buffer(value: Tensor, persistent: bool = True) -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer("odd", value, persistent=persistent)
    return model


def with_parameter(value: Tensor) -> nn.Module:
    model = nn.Linear(2, 2)
    model.odd = nn.Parameter(value)
    return model


def sparse_gradients() -> nn.Module:
    return nn.Sequential(nn.EmbeddingBag(3, 2, sparse=True))


def quantized() -> nn.Module:
    with warnings.catch_warnings(action="ignore"):
        return with_buffer(torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8))


def nested() -> nn.Module:
    return with_buffer(torch.nested.as_nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged))


def lazy() -> nn.Module:
    with warnings.catch_warnings(action="ignore"):
        return nn.Sequential(nn.LazyLinear(2))


class Extra(nn.Linear):
    def __init__(self, value: Any):
        super().__init__(2, 2)
        self.value = value

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "complex128": (lambda: with_buffer(torch.ones(2, dtype=torch.complex128)), "buffer 'odd' is complex128"),
    "float8_e8m0fnu": (lambda: with_buffer(torch.ones(2).to(torch.float8_e8m0fnu)), "buffer 'odd' is float8_e8m0fnu"),
    "quantized": (quantized, "buffer 'odd' is qint8"),
    "sparse buffer": (lambda: with_buffer(torch.eye(2).to_sparse()), "buffer 'odd' is a tensor of layout sparse_coo"),
    "sparse parameter": (lambda: with_parameter(torch.eye(2).to_sparse()), "parameter 'odd' .* sparse_coo"),
    "nested": (nested, "buffer 'odd' is a tensor of layout nested"),
    "complex parameter": (lambda: with_parameter(torch.ones(2, dtype=torch.complex64)), "'odd' is complex64.*trained"),
    "float8 parameter": (lambda: with_parameter(torch.ones(2).to(torch.float8_e5m2)), "'odd' is float8_e5m2.*trained"),
    "expanded": (lambda: with_parameter(torch.ones(1).expand(3)), r"parameter 'odd' is a view \(expand, conj\)"),
    "conjugate": (lambda: with_buffer(torch.ones(1, dtype=torch.complex64).conj()), "buffer 'odd' is a view"),
    "without values": (lambda: with_buffer(torch.ones(2, device="meta")), "buffer 'odd' has no values"),
    "parameter without values": (lambda: with_parameter(torch.ones(2, device="meta")), "parameter 'odd' has no values"),
    "lazy": (lazy, "parameter '0.weight' has no shape yet"),
    "sparse gradients": (sparse_gradients, "'0' makes sparse gradients"),
    "extra state": (lambda: nn.Sequential(Extra(object())), "get_extra_state of '0' holds object"),
    "extra state of sets": (lambda: Extra({"a": {1, 2}}), "get_extra_state of Extra holds set"),
    "extra state of bytes": (lambda: Extra(b"pickle"), "holds bytes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_saved_or_trained_is_refused_by_name(name: str) -> None:
    build, said = REFUSED[name]
    model = build()
    with pytest.raises(RecipeError, match=said):
        check_model_can_be_saved(model)


class Failing(nn.Linear):
    def get_extra_state(self) -> object:
        raise RuntimeError("not here")


def returns_tensor() -> nn.Module:
    model = nn.BatchNorm1d(2)
    model._register_state_dict_hook(lambda *_: torch.ones(2))
    return model


@pytest.mark.parametrize("build", [lambda: Failing(2, 2), returns_tensor])
def test_a_state_dict_that_fails_is_named_with_its_line(build: Callable[[], nn.Module]) -> None:
    with pytest.raises(RecipeError, match=r"^model.build: state_dict\(\) of the model failed: \w+Error: .*\.py:\d+"):
        check_model_can_be_saved(build())


def test_a_buffer_that_is_not_saved_may_be_anything() -> None:
    check_model_can_be_saved(with_buffer(torch.eye(2, dtype=torch.complex128).to_sparse(), persistent=False))


VALUES = [None, 1.1, float("nan"), {"a": [1, (True, 7.5)], "b": {"t": torch.arange(3)}}, torch.ones(2, 1).bfloat16()]


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_extra_state_comes_back_as_it_was(value: Any) -> None:
    model, other = nn.Sequential(Extra(value)), nn.Sequential(Extra("other"))
    check_model_can_be_saved(model)
    load_extra_state(other, get_extra_state(model), "here")
    torch.testing.assert_close(other[0].value, value, rtol=0, atol=0, equal_nan=True)
    assert type(other[0].value) is type(value)


def test_a_checkpoint_without_extra_state_that_the_model_needs_is_told() -> None:
    with pytest.raises(DataError, match="here: has no extra state of '0', which the model needs"):
        load_extra_state(nn.Sequential(Extra(1)), {}, "here")


@pytest.mark.parametrize("harm", [lambda c: c[:5], lambda c: c[1:], lambda c: c * 0])
def test_damaged_extra_state_is_told(harm: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(DataError, match="here: extra state that is not what was saved"):
        unpack_value(harm(pack_value({"a": 1}, "it")), "here")


UNSHARDABLE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "scalar": (lambda: with_parameter(torch.tensor(1.0)), "'odd' has no dimension"),
    "empty": (lambda: with_parameter(torch.ones(3, 0)), r"'odd' of shape \[3, 0\] has nothing to shard"),
    "two dtypes": (lambda: with_parameter(torch.ones(2).double()), r"'odd' \(float64\) .*different dtypes"),
}


@pytest.mark.parametrize("name", UNSHARDABLE)
def test_what_fsdp_cannot_shard_is_refused_by_name(name: str) -> None:
    build, said = UNSHARDABLE[name]
    with pytest.raises(RecipeError, match="parallelism.shard: .*" + said):
        check_fsdp_groups(build(), [])


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_parameters_with_hooks_are_refused_where_others_take_their_place(hook: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    removable = getattr(model[1].weight, hook)(lambda gradient: None)
    for layout in ({"shard": 2}, {"pipeline": 2}, {"replicate": 2, "shard": 2}):
        with pytest.raises(RecipeError, match=r"parallelism: parameter '1.weight' has a hook \(register_hook\)"):
            plan_model(model, Parallelism(**layout), ParallelConfig(seq_len=8))
    plan_model(model, Parallelism(replicate=2), ParallelConfig())
    removable.remove()
    plan_model(model, Parallelism(shard=2), ParallelConfig())


def test_blocks_may_have_dtypes_of_their_own_and_what_is_frozen_any() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double(), nn.Linear(2, 2).half().requires_grad_(False))
    check_fsdp_groups(model, [model[1]])
