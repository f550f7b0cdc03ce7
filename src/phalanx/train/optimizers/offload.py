"""Optimizer state in host memory: the update runs on the CPU, and the GPU holds no state at all.

Per parameter, one after the other, three things overlap: its gradient and value travel to the host, the CPU updates the
one before, and the one before that travels back (Ren et al. 2021, ZeRO-Offload). The value travels down, too, so that
what else changes weights (a checkpoint, a callback) counts. Only for optimizers that go element by element.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.recipe.devices import kind_of
from phalanx.train.optimizers.local import local

Group = dict[str, Any]


@dataclass(frozen=True)
class _Twin:
    """A parameter, its copy on the host, and the optimizer of that copy alone."""

    parameter: Tensor
    host: nn.Parameter
    optimizer: torch.optim.Optimizer


class Offloaded(torch.optim.Optimizer):
    """An optimizer over `groups` whose state stays on the CPU.

    `make(groups, of)` builds the optimizer of some host copies, `of` telling whose copies they are. The state of a
    DTensor parameter is that of its local part, as plain tensors. What travels is pinned; the state never does.
    """

    def __init__(
        self,
        groups: list[Group],
        make: Callable[[list[Group], Mapping[Tensor, Tensor]], torch.optim.Optimizer],
    ):
        super().__init__(groups, {"lr": 0.0})
        self._twins: list[tuple[Group, list[_Twin]]] = []
        for group in self.param_groups:
            twins = []
            for parameter in group["params"]:
                host = nn.Parameter(_host_copy(local(parameter)))
                host.grad = _host_copy(local(parameter))
                optimizer = make([{**group, "params": [host]}], {host: parameter})
                twins.append(_Twin(parameter, host, optimizer))
                self.state[parameter] = optimizer.state[host]  # one and the same dict
            self._twins.append((group, twins))
        self.kind = type(self._twins[0][1][0].optimizer)
        self._hosts = {twin.parameter: twin.host for _, twins in self._twins for twin in twins}

    def host(self, parameter: Tensor) -> Tensor:
        """The copy of a parameter with which its state goes."""
        return self._hosts[parameter]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # nobody evaluates the loss again
        """Update every parameter that has a gradient. Returns when the last of them is on its way back; the device
        goes on when it has arrived."""
        work = [(group, twin) for group, twins in self._twins for twin in twins if twin.parameter.grad is not None]
        if not work:
            return
        road = _Road(work[0][1].parameter.device)
        arrivals = [road.down(twin) for _, twin in work]
        for (group, twin), arrived in zip(work, arrivals, strict=True):
            for own in twin.optimizer.param_groups:
                own["lr"] = group["lr"]
            if arrived is not None:
                arrived.synchronize()
            twin.optimizer.step()
            road.up(twin)
        road.close()


class _Road:
    """Copies between device and host: on streams of their own on a GPU, at once elsewhere."""

    def __init__(self, device: torch.device):
        self._device = device
        self._gpu = torch.get_device_module(device) if kind_of(device.type).is_gpu else None
        if self._gpu is not None:
            current = self._gpu.current_stream(device)
            self._down, self._up = self._gpu.Stream(device), self._gpu.Stream(device)
            self._down.wait_stream(current)
            self._up.wait_stream(current)

    def down(self, twin: _Twin) -> torch.Event | None:
        """Send gradient and value to the host; the event of their arrival."""
        assert twin.parameter.grad is not None
        assert twin.host.grad is not None
        if self._gpu is None:
            twin.host.grad.copy_(local(twin.parameter.grad))
            twin.host.copy_(local(twin.parameter))
            return None
        with self._gpu.stream(self._down):
            twin.host.grad.copy_(local(twin.parameter.grad), non_blocking=True)
            twin.host.copy_(local(twin.parameter), non_blocking=True)
            event: torch.Event = self._gpu.Event()
            event.record()
        return event

    def up(self, twin: _Twin) -> None:
        """Send the value back."""
        if self._gpu is None:
            local(twin.parameter).copy_(twin.host)
            return
        with self._gpu.stream(self._up):
            local(twin.parameter).copy_(twin.host, non_blocking=True)

    def close(self) -> None:
        """Let the device's own work wait for the values."""
        if self._gpu is not None:
            self._gpu.current_stream(self._device).wait_stream(self._up)


def _host_copy(part: Tensor) -> Tensor:
    """The values on the host, in the same memory layout, pinned where they come from a GPU."""
    return torch.empty_like(part, device="cpu", pin_memory=kind_of(part.device.type).is_gpu).copy_(part)
