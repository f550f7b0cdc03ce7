"""Going on from memory: workers that hold the same state meet in another number, and go on where they are.

When one of several replicas is lost, the others need nothing that it had. A worker knows that a step is done only when
all have sent their part of it, so survivors are at the same step or one apart; who is behind, and who has just come,
gets the state from one that is not. Under `exact: replicas` nothing else depends on how many they are.
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.errors import DataError
from phalanx.recipe.schema import Layout
from phalanx.train.checkpoint import clean
from phalanx.train.ends import make_stepper, tell_start
from phalanx.train.evaluation import Scores
from phalanx.train.gang import Gang, Parts, Summoned
from phalanx.train.model import Seeds
from phalanx.train.orders import Connections, Orders
from phalanx.train.parallel.mesh import Mesh, build_mesh
from phalanx.train.place import Place, join, lost_peer, part
from phalanx.train.state import Progress, Standing, load_state, state_tensors

Scorer = Callable[[Place, Mesh], Callable[[], Scores | None]]
"""Makes what evaluates in a world of another size."""


class Regrouping:
    """One worker's part in it, for as long as it lives. `number` is the worker's own, whatever its rank."""

    def __init__(self, orders: Orders, connections: Connections, number: int, scorer: Scorer, fingerprint: str):
        self.orders, self._connections, self._number = orders, connections, number
        self._scorer, self._fingerprint = scorer, fingerprint

    def listen(self, parameters: Iterable[nn.Parameter]) -> None:
        """Look for orders whenever backward has made a gradient of these: who has a long step would else learn only in
        the exchange that it is in vain."""
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._heed)

    def _heed(self, parameter: Tensor) -> None:
        if self.orders.urgent:
            raise Summoned

    def leave(self, gang: Gang) -> Standing:
        """Leave a group of which somebody may be gone, and undo what was begun."""
        gang.parts.reporter.say("adrift", self._number)
        standing = gang.abandon()
        self._connections.cut()  # or those who have not noticed yet would wait for us
        part()
        return standing

    def meet(self, parts: Parts, standing: Standing | None, samples: int) -> tuple[Parts, Progress, int]:
        """Wait for the agent's word, meet, and share the state; None as standing for one that has none yet. DataError
        when this worker has other data than the others."""
        order = self.orders.take()
        rank, world = order.workers.index(self._number), len(order.workers)
        place = Place(rank, world, parts.place.local_rank, order.attempt, parts.place.device)
        join(place, connections=self._connections)
        led = parts.place.leads and standing is not None
        parts = self._anew(parts, place)
        standing = self._shared(parts, standing)
        parts.pulse.restart()
        if place.leads:
            clean(parts.run.checkpoints)
            tell_start(parts, samples, standing.progress, grown=not order.lost)
            if not led:
                parts.reporter.recall(order.told)
        return parts, standing.progress, standing.settled

    def _anew(self, parts: Parts, place: Place) -> Parts:
        """The same model and optimizer in another world."""
        parts.stepper.summed.close()
        mesh = build_mesh(Layout(replicate=place.world), place)
        divided = replace(parts.divided, mesh=mesh)
        seeds = Seeds(parts.recipe.seed, place.device)
        stepper = make_stepper(parts.recipe, place, divided, parts.optimizer, parts.scale, seeds)
        parts.callbacks.view.rank, parts.callbacks.view.world = place.rank, place.world
        return replace(parts, place=place, divided=divided, stepper=stepper, score=self._scorer(place, mesh))

    def _shared(self, parts: Parts, standing: Standing | None) -> Standing:
        """Everybody's standing and state, which are those of the first that is farthest."""
        place = parts.place
        if place.world == 1:
            assert standing is not None
            return standing
        mine = torch.tensor([-1 if standing is None else standing.progress.step])
        steps = [torch.empty_like(mine) for _ in range(place.world)]
        dist.all_gather(steps, mine)
        reached = [int(step) for step in steps]
        source = reached.index(max(reached))
        tensors = state_tensors(parts.model, parts.optimizer, parts.scale)
        forms = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
        box: list[Any] = [None]
        if place.rank == source:
            assert standing is not None
            box = [(asdict(standing.progress), standing.settled, self._fingerprint, forms)]
        dist.broadcast_object_list(box, src=source)
        values, settled, fingerprint, forms = box[0]
        if fingerprint != self._fingerprint:
            raise DataError(
                f"the data of worker {self._number} are not those of the others: all nodes must read the same"
            )
        if min(reached) < max(reached):
            received = _broadcast(forms, tensors if place.rank == source else None, source)
            if reached[place.rank] < max(reached):
                load_state(parts.divided.modules[0], parts.optimizer, parts.scale, received, "the other workers")
        return Standing(Progress.from_meta(values), settled)


def _broadcast(
    forms: list[tuple[str, tuple[int, ...], torch.dtype]], own: dict[str, Tensor] | None, source: int
) -> dict[str, Tensor]:
    """The state of the worker that gives its `own`, on all."""
    found = {}
    for name, shape, dtype in forms:
        tensor = torch.empty(shape, dtype=dtype) if own is None else own[name].contiguous()
        dist.broadcast(tensor, src=source)
        found[name] = tensor
    return found


def calls_for(error: BaseException) -> bool:
    """Whether this ends a group, and not the run."""
    return isinstance(error, Summoned) or lost_peer(error)
