"""Sharded replicas that go on from memory: the model is built once more in the other world, without weights, and takes
over what this worker holds. (FSDP keeps the groups of the world in which it sharded a model.)

The same number of workers shards a replica before and after, so each finds its own part in its own memory; a worker
that has just come gets it from the one in the same position of another replica. Who is a step behind gets it from
nobody: those ahead may all be in other positions. But a step is agreed only when every worker has its part of the
summed gradients (`step.Stepper.finish`), so whoever is behind has them, and does what the others did with theirs.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from phalanx.compat import forget_meshes, scale_in_place
from phalanx.train.callbacks import Callbacks
from phalanx.train.optimizers.local import like
from phalanx.train.parallel.divided import local
from phalanx.train.parts import Parts
from phalanx.train.place import Place
from phalanx.train.regroup import NOTHING, Built, Found, broadcast
from phalanx.train.state import Last, Progress
from phalanx.train.warm_up import warm_up

Build = Callable[[Place, Callbacks | None], Built]
"""Builds and divides the model for a place, without weights; with callbacks that there are already."""
PREFIX = "model/"


class Sharded:
    """One worker's way from world to world, in a replica of `size` workers; `first` is what it trains at first."""

    def __init__(self, size: int, build: Build, first: Built | None):
        self._size, self._build = size, build
        # While FSDP gathers parameters, others stand in the places of those that it keeps.
        self._parameters = {} if first is None else first.parts.divided.parameters()

    def renew(self, before: Built | None, place: Place) -> Built:
        """The model and everything around it, built in another world."""
        forget_meshes()
        built = self._build(place, None if before is None else before.parts.callbacks)
        built.parts.callbacks.view.model = built.parts.model
        return built

    def share(self, before: Built | None, now: Built, found: Found) -> None:
        """Fill it. RuntimeError on all workers when those behind have not what it takes."""
        steps, rank, parts = max(found.reached), now.parts.place.rank, now.parts
        behind = [rank for rank, step in enumerate(found.reached) if NOTHING < step < steps]
        if any(found.reached[rank] < steps - 1 or not found.summed[rank] for rank in behind):
            raise RuntimeError(f"workers {behind} are behind step {steps}, and cannot do it without the others")
        if before is not None:
            self._take_over(before.parts, parts)
        parts.scale.load(found.scale)
        if rank in behind:
            assert before is not None
            assert found.standing.last is not None
            self._catch_up(before.parts, parts, found.standing.last, steps)
        if NOTHING in found.reached:
            self._hand_on(parts, found)
        if not found.alike:
            _broadcast_buffers(parts, found)
        self._parameters = parts.divided.parameters()

    def warm_up(self, now: Built, progress: Progress) -> None:
        """Compile what was built anew."""
        if now.parts.recipe.compile:
            warm_up(now.parts, now.objective, progress)

    @torch.no_grad()
    def _take_over(self, before: Parts, now: Parts) -> None:
        """What this worker holds, in the new model."""
        for name, parameter in now.divided.parameters().items():
            local(parameter).copy_(local(self._parameters[name]))
        old = before.divided.buffers()
        for name, buffer in now.divided.buffers().items():
            buffer.copy_(old[name])
        now.optimizer.load(before.optimizer.state(), "memory")

    def _catch_up(self, before: Parts, now: Parts, last: Last, step: int) -> None:
        """Do the step of which this worker has the summed gradients."""
        if last.change is not None:
            factor, lr = last.change
            scale_in_place(before.stepper.summed.tensors(), factor)
            for name, parameter in now.divided.trainable().items():
                gradient = self._parameters[name].grad
                assert gradient is not None
                parameter.grad = like(parameter, local(gradient))
            now.optimizer.step(lr)
        now.callbacks.view.step = step
        for event in last.told:
            now.callbacks.call(event)

    @torch.no_grad()
    def _hand_on(self, parts: Parts, found: Found) -> None:
        """To those who have just come: from the same position in the replica of the first who is farthest."""
        group, position = parts.divided.mesh.replicate, parts.place.rank % self._size
        assert group is not None
        source = found.source - found.source % self._size + position
        parameters = parts.divided.parameters()
        own = {PREFIX + name: local(parameter) for name, parameter in parameters.items()}
        state = {key: local(value) for key, value in parts.optimizer.state().items()}
        received = broadcast(own | state if parts.place.rank == source else None, source, group)
        if found.reached[parts.place.rank] != NOTHING:
            return
        for name, parameter in parameters.items():
            local(parameter).copy_(received.pop(PREFIX + name))
        parts.optimizer.load(received, "the other workers")


@torch.no_grad()
def _broadcast_buffers(parts: Parts, found: Found) -> None:
    """What forwards and callbacks left in buffers, which all hold alike."""
    buffers: dict[str, Tensor] = parts.divided.buffers()
    here = parts.place.rank == found.source
    received = broadcast({name: buffer.detach() for name, buffer in buffers.items()} if here else None, found.source)
    for name, buffer in buffers.items():
        buffer.copy_(received[name])
