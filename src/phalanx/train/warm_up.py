"""Compiling before the first step, so that it shows as what it is and not as one very slow step.

torch.compile works when a function is called. So the first micro-batches that this worker is going to train on run
forward and backward once, and leave no trace: gradients are dropped, buffers (running statistics, what a router counts)
and random numbers are put back. Held-out data are scored by other code, which is compiled when it first runs; so is a
loop of the user's own, whose loss nobody else knows.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from phalanx.compat import graph_breaks, is_compiled
from phalanx.recipe.devices import kind_of
from phalanx.run.event_types import Compiled
from phalanx.train.objective import Objective
from phalanx.train.parallel.divided import Divided
from phalanx.train.parallel.staging import Staged
from phalanx.train.parts import Parts
from phalanx.train.savable import extra_state, load_extra_state
from phalanx.train.state import Progress

RUNS = {"cuda-graphs": 3}
"""By `compile`: runs until nothing is left to do. The first compiles, a CUDA graph is recorded by the second."""


def warm_up(
    parts: Parts, objective: Objective | Staged, progress: Progress, clock: Callable[[], float] = time.perf_counter
) -> None:
    """Compile what training needs, and report how long it took. Every worker calls it, since divided models talk."""
    begun, breaks = clock(), graph_breaks()
    batches = _first_batches(parts, progress)
    with _leaving_no_trace(parts.divided, parts.place.device):
        for _ in range(RUNS.get(str(parts.recipe.compile), 1)):
            parts.stepper.begin(progress.step + 1)
            if isinstance(objective, Staged):
                objective.step(batches)
            else:
                parts.stepper.seed()
                _forward_and_backward(objective, batches[0], parts.divided)
        if kind_of(parts.place.device.type).is_gpu:
            torch.accelerator.synchronize(parts.place.device)
    parts.stepper.begin(progress.step + 1)  # drops what gradients there are
    if parts.place.leads:
        compiled = sum(is_compiled(part) for module in parts.divided.modules for part in module.modules())
        seconds, breaks = clock() - begun, graph_breaks() - breaks
        parts.reporter.event(Compiled(duration_s=seconds, num_blocks=compiled, num_graph_breaks=breaks))


def _first_batches(parts: Parts, progress: Progress) -> list[Any]:
    """This worker's micro-batches of the next step."""
    recipe, mesh = parts.recipe, parts.divided.mesh
    micro = recipe.batch.micro_size
    assert isinstance(micro, int)
    own = mesh.own(recipe.batch.global_size // micro)
    return [parts.convert(parts.data.train(progress.samples + index * micro, micro)) for index in own]


def _forward_and_backward(objective: Objective, batch: Any, divided: Divided) -> None:
    ((_, loss, _),) = objective(batch)
    if divided.mesh.fsdp is not None:  # it works through the hooks of an ordinary backward
        loss.backward()
    else:  # past the hooks of an exchange, which expects a whole step
        torch.autograd.grad(loss, list(divided.trainable().values()), allow_unused=True)


@contextmanager
def _leaving_no_trace(divided: Divided, device: torch.device) -> Iterator[None]:
    """Put buffers, extra state and random numbers back."""
    before = [
        (part, name, buffer, buffer.clone())
        for module in divided.modules
        for part in module.modules()
        for name, buffer in part.named_buffers(recurse=False)
    ]
    extra = [(module, extra_state(module)) for module in divided.modules]
    with torch.random.fork_rng([device] if kind_of(device.type).is_gpu else [], device_type=device.type):
        yield
    with torch.no_grad():
        for part, name, buffer, value in before:
            buffer.copy_(value)
            setattr(part, name, buffer)  # the forward may have replaced it
    for module, said in extra:
        load_extra_state(module, said, "memory")
