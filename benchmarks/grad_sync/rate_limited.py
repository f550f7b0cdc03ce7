"""A model whose computing takes a given time and none of the machine: several nodes can share two cores, and computing
takes as long with an exchange of gradients as without.

`measure_timing` measures a real model alone: how long forward takes, and when in backward each parameter's gradient is
there. `RateLimitedModel` has the same parameters in the same order. Its forward sleeps; its backward is one node of
autograd for each moment at which the real one had gradients, sleeps as long, and hands out gradients that were drawn
before. What hangs on them (post-accumulation hooks, DDP's reducer, FSDP) cannot tell it from the real one.

What a hook does on the thread of backward comes on top of the sleeping, as it does in a real backward.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

SAME_MOMENT_S = 2e-4
"""Seconds between two gradients that count as one moment: a bias and its weight, for one."""
MEASURE_TIMEOUT_S = 60.0
"""Seconds after which measuring stops though fewer repeats are done."""


@dataclass(frozen=True)
class GradientArrival:
    """Some parameters whose gradients backward hands out together, so many seconds after the moment before."""

    names: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class ComputeTiming:
    """How long a model's forward takes, in seconds, and its backward, moment by moment."""

    forward: float
    backward: tuple[GradientArrival, ...]

    @property
    def backward_seconds(self) -> float:
        return sum(moment.seconds for moment in self.backward)

    @property
    def seconds(self) -> float:
        return self.forward + self.backward_seconds

    def as_dict(self) -> dict[str, Any]:
        return {"forward": self.forward, "backward": [[list(m.names), m.seconds] for m in self.backward]}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "ComputeTiming":
        moments = tuple(GradientArrival(tuple(names), float(seconds)) for names, seconds in fields["backward"])
        return cls(float(fields["forward"]), moments)


# ---- measured on the real model


def measure_timing(model: nn.Module, loss: Callable[[], Tensor], repeats: int = 5) -> ComputeTiming:
    """The pace of a model on this thread: medians of some forwards (`loss`) and backwards after one for warm-up."""
    arrivals: dict[str, list[float]] = {name: [] for name, p in model.named_parameters() if p.requires_grad}
    clock, begun = time.perf_counter, 0.0

    def arrived(name: str, _: Tensor) -> None:
        arrivals[name].append(clock() - begun)

    hooks = [
        parameter.register_post_accumulate_grad_hook(partial(arrived, name))
        for name, parameter in model.named_parameters()
        if name in arrivals
    ]
    forwards: list[float] = []
    end = clock() + MEASURE_TIMEOUT_S
    try:
        for repeat in range(repeats + 1):
            begun = clock()
            result = loss()
            forwards.append(clock() - begun)
            begun = clock()
            result.backward()
            model.zero_grad()
            if repeat and clock() > end:
                break
    finally:
        for hook in hooks:
            hook.remove()
    unused = [name for name, times in arrivals.items() if not times]
    if unused:
        raise ValueError(f"backward makes no gradient of {', '.join(unused)}")
    medians = {name: statistics.median(times[1:]) for name, times in arrivals.items()}
    return ComputeTiming(statistics.median(forwards[1:]), group_arrivals(medians))


def group_arrivals(arrivals: Mapping[str, float]) -> tuple[GradientArrival, ...]:
    """Moments of backward from the time at which each parameter's gradient came. A moment ends when its last gradient
    is there."""
    groups: list[list[str]] = []
    for name in sorted(arrivals, key=lambda name: arrivals[name]):
        if not groups or arrivals[name] - arrivals[groups[-1][-1]] > SAME_MOMENT_S:
            groups.append([])
        groups[-1].append(name)
    moments, before = [], 0.0
    for group in groups:
        moments.append(GradientArrival(tuple(group), arrivals[group[-1]] - before))
        before = arrivals[group[-1]]
    return tuple(moments)


# ---- paced


class DeadlineSleeper:
    """Waits to a monotonic deadline. What one wait was late, because the core was not there at once, the next is
    shorter: the sum is right. `hurries`: it does not wait, as in steps for warm-up."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self.late = 0.0
        self.hurries = False

    def wait(self, seconds: float, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Take so many seconds, among them what is done meanwhile."""
        deadline = self._clock() + seconds - self.late
        meanwhile()
        if self.hurries:
            return
        while (left := deadline - self._clock()) > 0:
            self._sleep(left)
        self.late = self._clock() - deadline


class _RateLimitedFunction(torch.autograd.Function):
    """Hands its input on; backward waits, and then has the gradients of some parameters."""

    @staticmethod
    def forward(
        ctx: Any, carry: Tensor, wait: Callable[..., None], drawn: Sequence[Tensor], *parameters: Tensor
    ) -> Tensor:
        ctx.wait, ctx.drawn = wait, drawn
        return carry.clone()

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> Any:
        gradients: list[Tensor] = []
        # new tensors, as a real backward makes: autograd keeps them as `.grad` without a copy
        ctx.wait(lambda: gradients.extend([each.clone() for each in ctx.drawn]))
        return (outputs[0], None, None, *gradients)


class RateLimitedModel(nn.Module):
    """Has parameters of these shapes, in this order, all zero, and the pace. `forward()` gives a loss (0-d, zero).
    Gradients are normal with deviation 1, another draw for each seed, the same in every step."""

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int]],
        pace: ComputeTiming,
        seed: int = 0,
        pacer: DeadlineSleeper | None = None,
    ):
        super().__init__()
        paced = sorted(name for moment in pace.backward for name in moment.names)
        if paced != sorted(shapes):
            raise ValueError("the pace is of another model: " + ", ".join(sorted({*paced} ^ {*shapes})))
        generator = torch.Generator().manual_seed(seed)
        for name, shape in shapes.items():
            self.register_parameter(slashed(name), nn.Parameter(torch.zeros(tuple(shape))))
        self.pace = pace
        self.pacer = pacer or DeadlineSleeper()
        drawn = {name: torch.randn(tuple(shape), generator=generator) for name, shape in shapes.items()}
        self.drawn = [drawn[name] for name in shapes]
        self._moments = [
            (
                partial(self.pacer.wait, moment.seconds),
                [drawn[name] for name in moment.names],
                [self.get_parameter(slashed(name)) for name in moment.names],
            )
            for moment in pace.backward
        ]

    def forward(self) -> Tensor:
        carry = torch.zeros(())

        def compute() -> None:
            nonlocal carry
            for wait, drawn, parameters in reversed(self._moments):
                carry = _RateLimitedFunction.apply(carry, wait, drawn, *parameters)

        self.pacer.wait(self.pace.forward, compute)
        return carry


def slashed(name: str) -> str:
    """A parameter's name as one that `register_parameter` takes."""
    return name.replace(".", "/")


def list_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes of a model's parameters, in its order; the model may be on the meta device."""
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters() if parameter.requires_grad}
