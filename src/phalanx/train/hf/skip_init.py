"""Build a model without initializing its random weights, because they are restored anyway: random initialization takes
longer than reading a checkpoint.

This is only valid if random numbers go to the model's parameters and nowhere else. A builder must be run again with
initialization if it reads values that were skipped, for a mask or a buffer that no checkpoint holds; if it draws other
random numbers, since they would differ; or if it keeps a module in a plain list, since its parameters are not the
model's.
"""

import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import init
from torch.overrides import TorchFunctionMode

from phalanx.pytree import iterate_tensors

INIT_FUNCTIONS: frozenset[Callable[..., Any]] = frozenset(
    (
        Tensor.normal_,
        Tensor.uniform_,
        init.normal_,
        init.uniform_,
        init.trunc_normal_,
        init.xavier_normal_,
        init.xavier_uniform_,
        init.kaiming_normal_,
        init.kaiming_uniform_,
    )
)
"""Functions that only fill a tensor with random numbers and return it."""
RANDOM_FUNCTIONS = INIT_FUNCTIONS | {
    torch.randn,
    torch.rand,
    torch.normal,
    torch.randint,
    torch.randperm,
    torch.randn_like,
    torch.rand_like,
}
"""Other common functions that draw random numbers; the generator's state shows at the end whether there were more."""
METADATA_ATTRIBUTES = frozenset(
    [
        "shape",
        "dtype",
        "device",
        "layout",
        "ndim",
        "requires_grad",
        "is_leaf",
        "grad_fn",
        "size",
        "dim",
        "numel",
        "stride",
        "__hash__",
    ],
)
"""Methods and attributes that do not depend on a tensor's values."""


class InitValueNeeded(BaseException):
    """A builder reads skipped values, or draws numbers that may be needed. A BaseException, to not be caught."""


class SkipInit(TorchFunctionMode):
    """While this mode is active, no random numbers are drawn into parameters, which keep uninitialized memory. Raises
    InitValueNeeded as soon as this is known to be invalid."""

    def __init__(self) -> None:
        super().__init__()
        self._rng_state_before = torch.default_generator.get_state()
        self._uninitialized: dict[int, nn.Parameter] = {}  # by address; referenced, so that addresses stay unique
        self._value_needed = False

    @property
    def only_parameters_differ(self) -> bool:
        """Whether everything but parameters is as with initialization."""
        return not self._value_needed and torch.default_generator.get_state().equal(self._rng_state_before)

    def only_of(self, model: nn.Module) -> bool:
        """Return whether all uninitialized tensors that still exist are parameters of the model. No checkpoint holds
        others, such as those of a frozen model in a list."""
        undrawn = [weakref.ref(parameter) for parameter in self._uninitialized.values()]
        self._uninitialized.clear()
        held = {_storage_address(parameter) for parameter in model.parameters()}
        there = [parameter for reference in undrawn if (parameter := reference()) is not None]
        return all(_storage_address(parameter) in held for parameter in there)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else kwargs.get("tensor")
        if function in INIT_FUNCTIONS and isinstance(first, nn.Parameter):
            self._uninitialized[_storage_address(first)] = first
            return first
        if function in RANDOM_FUNCTIONS:
            self._fail()
        touched = [
            tensor for tensor in iterate_tensors((args, kwargs)) if _storage_address(tensor) in self._uninitialized
        ]
        result = function(*args, **kwargs)
        is_in_place = result is first and all(tensor is first for tensor in touched)
        if touched and not is_in_place and _attribute_name(function) not in METADATA_ATTRIBUTES:
            self._fail()
        return result

    def _fail(self) -> NoReturn:
        self._value_needed = True
        raise InitValueNeeded


def _attribute_name(function: Any) -> str:
    """Return the name of a method, or of the attribute that a getter or setter belongs to."""
    name: str = getattr(function, "__name__", "")
    return getattr(function.__self__, "__name__", "") if name in ("__get__", "__set__") else name


def _storage_address(tensor: Tensor) -> int:
    """Return the address of a tensor's memory; -1 if it is not plain memory on this host."""
    return tensor.untyped_storage().data_ptr() if type(tensor) in (Tensor, nn.Parameter) and tensor.is_cpu else -1
