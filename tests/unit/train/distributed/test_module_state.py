"""What of a model can be saved and trained: odd tensors get memory of their own, others are refused by name."""

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
    ensure_own_memory,
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
    "without values": (lambda: with_buffer(torch.ones(2, device="meta")), "buffer 'odd' has no values"),
    "parameter without values": (lambda: with_parameter(torch.ones(2, device="meta")), "parameter 'odd' has no values"),
    "lazy": (lazy, "parameter '0.weight' has no shape yet"),
    "sparse gradients": (sparse_gradients, "'0' makes sparse gradients"),
    "extra state": (lambda: nn.Sequential(Extra(object())), "get_extra_state of '0' holds object"),
    "extra state of sets": (lambda: Extra({"a": {1, 2}}), "get_extra_state of Extra holds set"),
    "extra state of bytes": (lambda: Extra(b"pickle"), "holds bytes"),
    "half a character": (
        lambda: nn.ModuleDict({"b\udce9": nn.Linear(1, 1)}),
        r"'b\\udce9.weight' is a name of no text",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_saved_or_trained_is_refused_by_name(name: str) -> None:
    build, said = REFUSED[name]
    model = build()
    ensure_own_memory(model)
    with pytest.raises(RecipeError, match=said):
        check_model_can_be_saved(model)


@pytest.mark.parametrize("kind", ["parameter 'weight'", "buffer 'odd'"])
def test_what_was_built_in_inference_mode_is_refused(kind: str) -> None:
    with torch.inference_mode():
        model, value = nn.Linear(2, 2), torch.ones(2)
    if kind != "parameter 'weight'":
        model = with_buffer(value, persistent=False)
    ensure_own_memory(model)
    with pytest.raises(RecipeError, match=rf"^model.build: {kind} was made in torch.inference_mode\(\), so nothing"):
        check_model_can_be_saved(model)


class Failing(nn.Linear):
    def get_extra_state(self) -> object:
        raise RuntimeError("not here")


def returns_tensor() -> nn.Module:
    model = nn.BatchNorm1d(2)
    model._register_state_dict_hook(lambda *_: torch.ones(2))
    return model


@pytest.mark.parametrize("step", [ensure_own_memory, check_model_can_be_saved])
@pytest.mark.parametrize("build", [lambda: Failing(2, 2), returns_tensor])
def test_a_state_dict_that_fails_is_named_with_its_line(
    build: Callable[[], nn.Module], step: Callable[[nn.Module], None]
) -> None:
    with pytest.raises(RecipeError, match=r"^model.build: state_dict\(\) of the model failed: \w+Error: .*\.py:\d+"):
        step(build())


def test_a_buffer_that_is_not_saved_may_be_anything() -> None:
    check_model_can_be_saved(with_buffer(torch.eye(2, dtype=torch.complex128).to_sparse(), persistent=False))


SHARING: dict[str, Callable[[], Tensor]] = {
    "expanded": lambda: torch.ones(1, 3).expand(2, 3),
    "windows": lambda: torch.arange(6.0).as_strided((4, 3), (1, 1)),
    "conjugate": lambda: torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "negative": lambda: torch.tensor([1 + 2j]).conj().imag,
}


@pytest.mark.parametrize("name", SHARING)
def test_elements_that_share_memory_get_their_own_with_the_same_values(name: str) -> None:
    model = with_buffer(SHARING[name]())
    ensure_own_memory(model)
    found = model.get_buffer("odd")
    assert found.equal(SHARING[name]().clone())
    assert found.is_contiguous()
    assert (found.is_conj(), found.is_neg()) == (False, False)
    found.copy_(torch.zeros_like(found))


def test_what_is_tied_stays_tied() -> None:
    one, other = nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False)
    one.weight = other.weight = nn.Parameter(torch.ones(1, 3).expand(2, 3))
    buffer = torch.ones(1).expand(3)
    for module in (one, other):
        module.register_buffer("scale", buffer)
    ensure_own_memory(nn.Sequential(one, other))
    assert one.weight is other.weight
    assert one.scale is other.scale
    assert one.weight.stride() == (3, 1)
    assert one.scale.stride() == (1,)


def test_a_transposed_weight_and_a_plain_buffer_stay_as_they_are() -> None:
    model = with_parameter(torch.ones(2, 3).t())
    buffer = torch.ones(0, 4)
    model.register_buffer("plain", buffer)
    ensure_own_memory(model)
    assert model.get_parameter("odd").stride() == (1, 3)
    assert model.get_buffer("plain") is buffer


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
