"""Modules that stand where a pipeline stage has no part of the model, so that the model's own forward still runs there.

A stage keeps the module tree and its names. What it does not compute is replaced:

    Ghost      a part whose result the stage does not use: right shapes and dtypes, no values
    Passage    a block of an earlier stage: hands on what it gets
    Inlet      the block just before the stage's first: returns the activation that was received
    Outlet     the blocks after the stage's last: the first one ends the forward, with what it was given

Nothing here knows of processes. Values of ghosts are NaN, not zero: if a model uses one after all, the loss says so.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn


class StageEnd(BaseException):
    """Carries the activation out of the model's forward. Not an Exception, so that no model takes it for an error."""

    def __init__(self, hidden: Tensor):
        super().__init__("the forward of this pipeline stage ends here")
        self.hidden = hidden


class StandIn(nn.Module):
    """Answers for the attributes of the module that it replaces, by a copy of it without memory (on meta)."""

    def __init__(self, original: nn.Module):
        super().__init__()
        # In a tuple, since a module or parameter of a replaced part must not count as the stage's.
        self.shadow = (on_meta(original),)
        self.train(original.training)

    def __getattr__(self, name: str) -> Any:
        if "shadow" not in self.__dict__:
            return super().__getattr__(name)
        return getattr(self.shadow[0], name)


class Ghost(StandIn):
    """Returns what the replaced module would, but with the values NaN (0 for integers) and without memory for them.

    Shapes come from running the replaced module on the meta device, once for each shape of its inputs, so they follow
    the batch. dtypes are those outside autocast. `device` is where the results are said to be.
    """

    def __init__(self, original: nn.Module):
        super().__init__(original)
        self.device = torch.device("cpu")
        self._results: dict[Any, Any] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        key = _signature((args, kwargs))
        if key not in self._results:
            args, kwargs = map_tensors((args, kwargs), lambda x: x.detach().to("meta"))
            with torch.no_grad():
                self._results[key] = self.shadow[0](*args, **kwargs)
        return map_tensors(self._results[key], lambda x: hollow(x, self.device))


class Passage(StandIn):
    """Returns its first argument, in the form in which the replaced block returns its own result."""

    def __init__(self, original: nn.Module, form: Callable[[Tensor], Any]):
        super().__init__(original)
        self._form = form

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._form(first_argument(args, kwargs))


class Inlet(StandIn):
    """Returns `hidden`, which the stage sets before each forward."""

    def __init__(self, original: nn.Module, form: Callable[[Tensor], Any]):
        super().__init__(original)
        self._form = form
        self.hidden: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        assert self.hidden is not None
        return self._form(self.hidden)


class Outlet(StandIn):
    """Ends the forward: raises `StageEnd` with its first argument, which is what the stage's last block returned."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise StageEnd(first_argument(args, kwargs))


def first_argument(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The first argument of a call, given by position or else by name; None where there is none."""
    return args[0] if args else next(iter(kwargs.values()), None)


def hollow(like: Tensor, device: torch.device) -> Tensor:
    """A tensor of the shape and dtype of `like` that takes no memory: one NaN (0 for integers), expanded."""
    value = float("nan") if like.dtype.is_floating_point or like.dtype.is_complex else 0
    return torch.full((), value, dtype=like.dtype, device=device).expand(like.shape)


def on_meta(module: nn.Module) -> nn.Module:
    """A copy of the module on the meta device, made without copying its memory first."""
    held: dict[int, Any] = {}
    for parameter in module.parameters():
        held[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
    for buffer in module.buffers():
        held[id(buffer)] = buffer.detach().to("meta")
    return copy.deepcopy(module, held)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in nested sequences and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same nested sequences and mappings with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        changed = copy.copy(value)  # keeps classes such as the outputs of Hugging Face models
        for key, item in value.items():
            changed[key] = map_tensors(item, change)  # type: ignore[index]
        return changed
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, change) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(item, change) for item in value)
    return value


def _signature(value: Any) -> Any:
    """What the shapes of results depend on, as a key of a dictionary."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    if isinstance(value, Mapping):
        return tuple((key, _signature(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(_signature(item) for item in value)
    return value if isinstance(value, int | float | str | None) else id(value)
