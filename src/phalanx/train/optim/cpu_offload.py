"""CPU offload of the optimizer: the update runs on the CPU, and the GPU holds no optimizer state.

Parameters are processed one after another, and three stages overlap: gradient and value are copied to the host, the CPU
updates the previous parameter, and the one before is copied back (Ren et al. 2021, ZeRO-Offload). The value is copied
to the host too, so that other changes of weights (a restore, a callback) are not lost. Only for element-wise
optimizers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.recipe.devices import device_kind_of
from phalanx.train.distributed.dtensor_utils import to_local

ParamGroup = dict[str, Any]


@dataclass(frozen=True)
class _HostCopy:
    """A parameter, its copy on the host, and the optimizer of that copy."""

    parameter: Tensor
    host: nn.Parameter
    optimizer: torch.optim.Optimizer


class OffloadedOptimizer(torch.optim.Optimizer):
    """An optimizer over `groups` with its state on the CPU.

    `make(groups, of)` builds the optimizer of some host copies; `of` maps these to their parameters. The state of a
    DTensor parameter is that of its local part, as plain tensors. Transfer buffers are pinned; the state never is.
    """

    def __init__(
        self,
        groups: list[ParamGroup],
        make: Callable[[list[ParamGroup], Mapping[Tensor, Tensor]], torch.optim.Optimizer],
    ):
        super().__init__(groups, {"lr": 0.0})
        self._host_copies: list[tuple[ParamGroup, list[_HostCopy]]] = []
        for group in self.param_groups:
            host_copies = []
            for parameter in group["params"]:
                host = nn.Parameter(_copy_to_pinned_host(to_local(parameter)))
                host.grad = _copy_to_pinned_host(to_local(parameter))
                optimizer = make([{**group, "params": [host]}], {host: parameter})
                host_copies.append(_HostCopy(parameter, host, optimizer))
                self.state[parameter] = optimizer.state[host]  # the same dict object
            self._host_copies.append((group, host_copies))
        self.optimizer_type = type(self._host_copies[0][1][0].optimizer)
        self.host_by_parameter = {
            host_copy.parameter: host_copy.host for _, host_copies in self._host_copies for host_copy in host_copies
        }
        """The host copy of each parameter, which its state belongs to."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # closures are not supported
        """Update every parameter that has a gradient. Returns when the last copy to the device was started; the device
        waits for it."""
        work = [
            (group, host_copy)
            for group, host_copies in self._host_copies
            for host_copy in host_copies
            if host_copy.parameter.grad is not None
        ]
        if not work:
            return
        streams = _CopyStreams(work[0][1].parameter.device)
        arrivals = [streams.copy_to_host(host_copy) for _, host_copy in work]
        for (group, host_copy), arrived in zip(work, arrivals, strict=True):
            for own in host_copy.optimizer.param_groups:
                own["lr"] = group["lr"]
            if arrived is not None:
                arrived.synchronize()
            host_copy.optimizer.step()
            streams.copy_to_device(host_copy)
        streams.finish()


class _CopyStreams:
    """Copies between device and host: on separate streams on a GPU, immediately elsewhere."""

    def __init__(self, device: torch.device):
        self._device = device
        self._gpu = torch.get_device_module(device) if device_kind_of(device.type).is_gpu else None
        if self._gpu is not None:
            current = self._gpu.current_stream(device)
            self._to_host_stream, self._to_device_stream = self._gpu.Stream(device), self._gpu.Stream(device)
            self._to_host_stream.wait_stream(current)
            self._to_device_stream.wait_stream(current)

    def copy_to_host(self, host_copy: _HostCopy) -> torch.Event | None:
        """Copy gradient and value to the host; return the event of their arrival."""
        assert host_copy.parameter.grad is not None
        assert host_copy.host.grad is not None
        if self._gpu is None:
            host_copy.host.grad.copy_(to_local(host_copy.parameter.grad))
            host_copy.host.copy_(to_local(host_copy.parameter))
            return None
        with self._gpu.stream(self._to_host_stream):
            host_copy.host.grad.copy_(to_local(host_copy.parameter.grad), non_blocking=True)
            host_copy.host.copy_(to_local(host_copy.parameter), non_blocking=True)
            event: torch.Event = self._gpu.Event()
            event.record()
        return event

    def copy_to_device(self, host_copy: _HostCopy) -> None:
        """Copy the value back."""
        if self._gpu is None:
            to_local(host_copy.parameter).copy_(host_copy.host)
            return
        with self._gpu.stream(self._to_device_stream):
            to_local(host_copy.parameter).copy_(host_copy.host, non_blocking=True)

    def finish(self) -> None:
        """Make the device's current stream wait for the values."""
        if self._gpu is not None:
            self._gpu.current_stream(self._device).wait_stream(self._to_device_stream)


def _copy_to_pinned_host(part: Tensor) -> Tensor:
    """Copy values to the host with the same strides, pinned if they come from a GPU."""
    return torch.empty_like(part, device="cpu", pin_memory=device_kind_of(part.device.type).is_gpu).copy_(part)
