"""Parameters on the meta device: build a model without memory for them, and allocate it once the model is divided.

Only for classes that compute nothing but buffers when they are built, as those of transformers: the code of a user may
read what it initializes, so `SkipInit` gives it real memory, and `compat.fake_tensor_mode` runs a model without
values, which meta tensors cannot where an operation asks for the device.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from phalanx.train.distributed.dtensor_utils import to_local


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Return a context in which parameters lose their memory as soon as a module registers them, before they are
    initialized; buffers are computed as usual. (With the meta device for the whole model, buffers that no file holds,
    such as rotary frequencies, would be lost.)"""

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return None
        return nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)

    hook: Callable[..., Any] = to_meta
    handle = register_module_parameter_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def allocate_meta_parameters(modules: Sequence[nn.Module], device: torch.device) -> None:
    """Allocate every parameter that is on the meta device on `device`, without values; of a sharded parameter, this
    worker's shard. Tied parameters stay tied. All other parameters, and all buffers, are moved to `device`."""
    named_params = [
        (module, name, p) for module in modules for name, p in module.named_parameters(remove_duplicate=False)
    ]
    allocated: dict[int, nn.Parameter] = {}
    for module, name, parameter in named_params:
        if parameter.is_meta:
            path, _, last = name.rpartition(".")
            if id(parameter) not in allocated:
                allocated[id(parameter)] = nn.Parameter(
                    _empty_like_local(parameter, device), requires_grad=parameter.requires_grad
                )
            # FSDP notices a parameter that `load_state_dict` replaces; `to_empty` would lose the buffers' values.
            module.get_submodule(path).load_state_dict({last: allocated[id(parameter)]}, strict=False, assign=True)
        elif parameter.device != device:
            parameter.data = parameter.data.to(device)
    for module in modules:
        for name, buffer in list(module.named_buffers(remove_duplicate=False)):
            path, _, last = name.rpartition(".")
            setattr(module.get_submodule(path), last, buffer.to(device))


def _empty_like_local(parameter: Tensor, device: torch.device) -> Tensor:
    if not isinstance(parameter, DTensor):
        return torch.empty_like(parameter, device=device)
    part = torch.empty_like(to_local(parameter), device=device)
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride())
