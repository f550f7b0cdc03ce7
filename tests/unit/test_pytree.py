"""Walks over nested containers of tensors."""

from collections import UserDict, namedtuple
from typing import Any

import torch

from phalanx.pytree import iterate_tensors, map_tensors

Pair = namedtuple("Pair", "image label")


def test_map_keeps_classes_and_other_values() -> None:
    class Output(dict[str, Any]):
        note = "kept"

    output = Output(logits=torch.ones(1, dtype=torch.bfloat16), parts=(torch.ones(1), Pair(torch.ones(1), "x")), n=3)
    doubled = map_tensors(output, lambda tensor: 2 * tensor)
    assert type(doubled) is Output
    assert doubled.note == "kept"
    assert doubled["n"] == 3
    assert doubled["logits"].item() == 2
    assert doubled["parts"][1] == Pair(2, "x")
    assert output["logits"].item() == 1


def test_iteration_and_map_have_the_same_order() -> None:
    value = ([torch.tensor(0)], {"b": torch.tensor(1), "a": Pair(torch.tensor(2), "x")}, UserDict(c=torch.tensor(3)))
    mapped: list[int] = []
    map_tensors(value, lambda tensor: mapped.append(int(tensor)))
    assert mapped == [int(tensor) for tensor in iterate_tensors(value)] == [0, 1, 2, 3]


def test_leaves_may_have_another_type() -> None:
    outline = {"a": (torch.Size([2]), "x"), "b": [torch.Size([3])]}
    assert list(iterate_tensors(outline, torch.Size)) == [(2,), (3,)]
    assert map_tensors(outline, len, torch.Size) == {"a": (1, "x"), "b": [1]}
