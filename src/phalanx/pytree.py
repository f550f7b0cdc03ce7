"""Walk nested containers of tensors: mappings, lists and tuples, such as the inputs and outputs of a module."""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor


def map_tensors(value: Any, function: Callable[[Any], Any], leaf_type: type = Tensor) -> Any:
    """Apply `function` to each `leaf_type` in nested mappings, lists and tuples; other values are kept."""
    if isinstance(value, leaf_type):
        return function(value)
    if isinstance(value, Mapping):
        changed = {name: map_tensors(part, function, leaf_type) for name, part in value.items()}
        if type(value) is dict or not hasattr(value, "__setitem__"):
            return changed
        # A custom class, such as the outputs of Hugging Face models, keeps its other attributes.
        copied: Any = copy.copy(value)
        for name, part in changed.items():
            copied[name] = part
        return copied
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(map_tensors(part, function, leaf_type) for part in value)
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(part, function, leaf_type) for part in value)
    return value


def iterate_tensors(value: Any, leaf_type: type = Tensor) -> Iterator[Any]:
    """Yield each `leaf_type` in nested mappings, lists and tuples, in the order of `map_tensors`."""
    if isinstance(value, leaf_type):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from iterate_tensors(part, leaf_type)
