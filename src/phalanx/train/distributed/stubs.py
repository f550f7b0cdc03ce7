"""Modules that replace the parts of a model that a pipeline stage does not compute, so that its own forward still runs.

A stage keeps the module tree and its names. These stubs replace modules:

    ShapeStub     a part with a result that the stage does not use: right shapes and dtypes, no values
    Passthrough   a block of an earlier stage: returns its input
    StageInput    the block just before the stage's first: returns the activation that was received
    StageOutput   the blocks after the stage's last: the first one ends the forward, with its input

This module does not communicate. Values of a ShapeStub are NaN and not zero: if a model uses one, the loss shows it.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.compat import fake_tensor_mode
from phalanx.pytree import map_tensors


class StageEndSignal(BaseException):
    """Carries the activation out of the model's forward. A BaseException, so that models do not catch it."""

    def __init__(self, hidden: Tensor):
        super().__init__("the forward of this pipeline stage ends here")
        self.hidden = hidden


class ModuleStub(nn.Module):
    """Provides the attributes of the module that it replaces, from a copy of it without memory (on meta)."""

    def __init__(self, original: nn.Module):
        super().__init__()
        # In a tuple, so that modules and parameters of the replaced part do not count as the stage's.
        self.meta_copy = (copy_to_meta(original),)
        self.train(original.training)

    def __getattr__(self, name: str) -> Any:
        if "meta_copy" not in self.__dict__:
            return super().__getattr__(name)
        return getattr(self.meta_copy[0], name)


class ShapeStub(ModuleStub):
    """Returns what the replaced module would, but with NaN (0 for integers) as values and without memory for them.

    They come from running the replaced module on tensors without data, once for each input shape, so they follow the
    batch, and dtypes follow autocast. `device` is the device that the results claim to be on.
    """

    def __init__(self, original: nn.Module):
        super().__init__(original)
        self.device = torch.device("cpu")
        self._results: dict[Any, Any] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        kind, (original,) = self.device.type, self.meta_copy
        casts = kind != "meta" and torch.is_autocast_enabled(kind)
        autocast_dtype = torch.get_autocast_dtype(kind) if casts else None
        key = _input_signature((args, kwargs)), autocast_dtype
        if key not in self._results:
            with torch.no_grad(), fake_tensor_mode(symbols=False):
                state = {**dict(original.named_parameters()), **dict(original.named_buffers())}
                state, args, kwargs = map_tensors(
                    (state, args, kwargs), lambda x: torch.empty_like(x, device=self.device)
                )
                self._results[key] = torch.func.functional_call(original, state, args, kwargs)
        return map_tensors(self._results[key], lambda x: make_placeholder(x, self.device))


class Passthrough(ModuleStub):
    """Returns its first argument, in the form in which the replaced block returns its result."""

    def __init__(self, original: nn.Module, wrap_output: Callable[[Tensor], Any]):
        super().__init__(original)
        self._wrap_output = wrap_output

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._wrap_output(get_first_argument(args, kwargs))


class StageInput(Passthrough):
    """Returns `hidden`, which is set before each forward."""

    hidden: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        assert self.hidden is not None
        return self._wrap_output(self.hidden)


class StageOutput(ModuleStub):
    """Ends the forward: raises `StageEndSignal` with its first argument, the output of the stage's last block."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise StageEndSignal(get_first_argument(args, kwargs))


def get_first_argument(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the first argument of a call, by position or else by name; None if there is none."""
    return args[0] if args else next(iter(kwargs.values()), None)


def make_placeholder(like: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the shape and dtype of `like` without memory: one NaN (0 for integers), expanded."""
    value = float("nan") if like.dtype.is_floating_point or like.dtype.is_complex else 0
    return torch.full((), value, dtype=like.dtype, device=device).expand(like.shape)


def copy_to_meta(module: nn.Module) -> nn.Module:
    """Copy a module to the meta device, without copying its memory first."""
    copies: dict[int, Any] = {id(buffer): buffer.detach().to("meta") for buffer in module.buffers()}
    for parameter in module.parameters():
        copies[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
    return copy.deepcopy(module, copies)


def _input_signature(value: Any) -> Any:
    """Return, as a dictionary key, what the shapes of results depend on."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    if isinstance(value, Mapping):
        return tuple((key, _input_signature(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(_input_signature(item) for item in value)
    return value if isinstance(value, int | float | str | None) else id(value)
