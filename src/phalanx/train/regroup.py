"""Going on from memory: workers that hold the same state meet in another number, and go on where they are.

When one of several replicas is lost, the others need nothing that it had. A worker knows that a step is done only when
all have sent their part of it, so survivors are at the same step or one apart; who is behind, and who has just come,
gets the state from one that is not. Under `determinism: elastic` nothing else depends on how many they are. Here are
the meeting and replicas that are whole; those that are sharded are `rebuild.py`'s. A checkpoint that is being written
goes along (`saving.py`).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from phalanx.errors import DataError
from phalanx.recipe.schema import Parallelism
from phalanx.run.event_types import CheckpointFailed
from phalanx.run.messages import JoinedGroup, LeftGroup, MembershipUpdate
from phalanx.run.pulse import Pulse, Silent
from phalanx.train.checkpoint import clean
from phalanx.train.ends import make_stepper, tell_start
from phalanx.train.evaluation import Scores
from phalanx.train.gang import Gang, Summoned
from phalanx.train.model import Seeds
from phalanx.train.nodes import dtype_name, dtype_named, exchanged, said_by
from phalanx.train.objective import Objective
from phalanx.train.orders import Connections, Orders
from phalanx.train.parallel.mesh import Mesh, build_mesh
from phalanx.train.parallel.staging import Staged
from phalanx.train.parts import Parts
from phalanx.train.place import Place, join, lost_peer, part, store_of
from phalanx.train.reporter import Reporter
from phalanx.train.state import Progress, Standing, Unfinished, load_state, state_tensors

Scorer = Callable[[Place, Mesh], Callable[[], Scores | None]]
"""Makes what evaluates in a world of another size."""
SOON, LONGER, SELDOM = 0.001, 1.2, 0.05
"""Seconds between two looks whether all have come: at first, by how much longer each time, and at most, since many may
wait long for a few."""
NOTHING = -1
"""Instead of a step: a worker that has no state yet."""


@dataclass(frozen=True)
class Built:
    """What a worker trains, and with what."""

    parts: Parts
    objective: Objective | Staged


@dataclass(frozen=True)
class Found:
    """What those who met have: the step that each rank has `reached`, and which of them have `summed` the gradients of
    the one after, and are `saving` the state after which; the `standing` of the first that is farthest, `source`, and
    its loss `scale`. `own`: this worker's standing before."""

    reached: list[int]
    summed: list[bool]
    saving: list[int]
    source: int
    standing: Standing
    scale: dict[str, Tensor]
    own: Standing | None

    @property
    def alike(self) -> bool:
        """Whether all are at the same step."""
        return min(self.reached) == max(self.reached)

    @property
    def at_odds(self) -> bool:
        """Whether a save ended or began for some of them only: they were torn out of the step that it happened in."""
        saving = zip(self.reached, self.saving, strict=True)
        return len({step for reached, step in saving if reached != NOTHING}) > 1


class Way(Protocol):
    """How a worker comes by what it needs in another world."""

    def renew(self, before: Built | None, place: Place) -> Built:
        """What it trains there, from what it trained before; None for one that has just come."""

    def share(self, before: Built | None, now: Built, found: Found) -> None:
        """Bring all to the state of those who are farthest."""

    def warm_up(self, now: Built, progress: Progress) -> None:
        """What is left to do before the next step."""


class Regrouping:
    """One worker's part in it, for as long as it lives. `number` is the worker's own, whatever its rank; `between` and
    `within` are its connections to other replicas and to the workers of its own."""

    def __init__(
        self,
        orders: Orders,
        between: Connections,
        within: Connections,
        number: int,
        place: Place,
        reporter: Reporter,
        pulse: Pulse | Silent,
        way: Way,
        fingerprint: str,
    ):
        self.orders, self._between, self._within = orders, between, within
        self._number, self._place = number, place
        self._reporter, self._pulse, self._way, self._fingerprint = reporter, pulse, way, fingerprint
        self._hooks: list[RemovableHandle] = []

    def listen(self, modules: Iterable[nn.Module], compiled: bool) -> None:
        """Look for orders whenever a forward comes to parameters of these, unless they are compiled, and whenever
        backward has made a gradient: who has a long step would else learn only in the exchange that it is in vain."""
        for hook in self._hooks:
            hook.remove()
        parts = {part: list(part.parameters(recurse=False)) for module in modules for part in module.modules()}
        trained = {parameter for own in parts.values() for parameter in own if parameter.requires_grad}
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._heed) for parameter in trained]
        if not compiled:
            self._hooks += [part.register_forward_pre_hook(self._heed_forward) for part, own in parts.items() if own]

    def heed(self) -> None:
        """Summoned where somebody is gone, so that what is going on now cannot end."""
        if self.orders.urgent:
            raise Summoned

    def _heed(self, parameter: Tensor) -> None:
        self.heed()

    def _heed_forward(self, module: nn.Module, arguments: Any) -> None:
        if module.training:
            self.heed()

    def leave(self, gang: Gang) -> Standing:
        """Leave a group of which somebody may be gone, and undo what was begun."""
        self._reporter.say(LeftGroup(rank=self._number))
        standing = gang.abandon()
        for connections in (self._between, self._within):
            connections.cut()  # or those who have not noticed yet would wait for us
        part()
        return standing

    def meet(self, before: Built | None, standing: Standing | None, samples: int) -> tuple[Built, Standing]:
        """Wait for the agent's word, meet, and share the state; None as standing for one that has none yet. Returns how
        all stand now. DataError when this worker has other data than the others."""
        led = self._place.leads and standing is not None
        order = self._gather()
        place, rank, world = self._place, self._place.rank, self._place.world
        join(place, connections=self._between)
        found = self._find(before, standing)
        built = self._way.renew(before, place)
        if before is not None:
            before.parts.callbacks.view.rank, before.parts.callbacks.view.world = rank, world
        self._way.share(before, built, found)
        self._pulse.restart()
        unfinished = None if standing is None else standing.unfinished
        if found.at_odds:
            self._give_up(unfinished, found)
            unfinished = None
        reached, last = found.reached[rank], found.standing.last
        if NOTHING < reached < max(found.reached) and last is not None:
            for event in last.told:
                self._reporter.keep(event)
        if place.leads:
            # Also what the lost ones left of a save that was given up; but others still write what goes along.
            clean(built.parts.run.checkpoints, spare=None if unfinished is None else unfinished.step)
            tell_start(built.parts, samples, found.standing.progress, grown=not order.worker_lost)
            self._reporter.recall(reached if led else order.last_reported_step)
        exchanged(place, None)  # before that nobody may begin a save, which may be the first that is due
        self._way.warm_up(built, found.standing.progress)
        return built, replace(found.standing, unfinished=unfinished)

    def _gather(self) -> MembershipUpdate:
        """Wait for the agent's word, and until all have come whom it names: a process group that begins to meet waits
        for ever for one who does not. If one is lost before, the agent says who meets instead."""
        while True:
            order = self.orders.take()
            rank, world = order.active_ranks.index(self._number), len(order.active_ranks)
            self._place = replace(self._place, rank=rank, world=world, attempt=order.attempt)
            if world == 1 or self._all_come(order):
                self._reporter.say(JoinedGroup(rank=self._number, attempt=order.attempt))
                return order

    def _all_come(self, order: MembershipUpdate) -> bool:
        """False when another order comes first."""
        store, patience = store_of(self._place), SOON
        if store.add("come", 1) == len(order.active_ranks):
            store.set("all", "1")
        while not store.check(["all"]):
            self.orders.wait(patience)
            if self.orders.waiting:
                return False
            patience = min(LONGER * patience, SELDOM)
        return True

    def _give_up(self, unfinished: Unfinished | None, found: Found) -> None:
        """Drop the save that only some have in flight. If it was to come, it is missing; one that had ended at those
        who are farthest is a checkpoint, or had failed."""
        if unfinished is not None:
            unfinished.saver.abandon()
        exchanged(self._place, None)  # nobody writes any more
        progress, step = found.standing.progress, found.saving[found.source]
        if step != NOTHING:
            progress.missed = progress.missed or step
            if self._place.leads:
                reason = "workers were lost when only some had begun with it"
                self._reporter.event(CheckpointFailed(step=step, reason=reason))

    def _find(self, before: Built | None, standing: Standing | None) -> Found:
        """Learn what the others have."""
        place = self._place
        step, summed = (NOTHING, False) if standing is None else (standing.progress.step, standing.summed)
        saving = NOTHING if standing is None or standing.unfinished is None else standing.unfinished.step
        scale = {} if before is None else before.parts.scale.state()
        if place.world == 1:
            assert standing is not None
            return Found([step], [summed], [saving], 0, standing, scale, standing)
        mine = torch.tensor([step, int(summed), saving])
        all_of_them = [torch.empty_like(mine) for _ in range(place.world)]
        dist.all_gather(all_of_them, mine)
        reached = [int(each[0]) for each in all_of_them]
        source = reached.index(max(reached))
        own: list[Any] = []
        if place.rank == source:
            assert standing is not None
            own = [standing.words(), self._fingerprint, {name: float(value) for name, value in scale.items()}]
        words, fingerprint, scales = said_by(source, own)
        farthest = Standing.from_words(words)
        scale = {name: torch.tensor(value, dtype=torch.float64) for name, value in scales.items()}
        if fingerprint != self._fingerprint:
            raise DataError(
                f"the data of worker {self._number} are not those of the others: all nodes must read the same"
            )
        of_sums, of_saves = [bool(each[1]) for each in all_of_them], [int(each[2]) for each in all_of_them]
        return Found(reached, of_sums, of_saves, source, farthest, scale, standing)


class Whole:
    """Workers each of which holds the whole state: the model stays, and who is behind gets all of it."""

    def __init__(self, scorer: Scorer):
        self._scorer = scorer

    def renew(self, before: Built | None, place: Place) -> Built:
        """The same model and optimizer in another world."""
        assert before is not None
        parts = before.parts
        parts.stepper.summed.close()
        mesh = build_mesh(Parallelism(replicate=place.world), place)
        divided = replace(parts.divided, mesh=mesh)
        seeds = Seeds(parts.recipe.seed, place.device)
        stepper = make_stepper(parts.recipe, place, divided, parts.optimizer, parts.scale, seeds)
        score = self._scorer(place, mesh)
        return replace(before, parts=replace(parts, place=place, divided=divided, stepper=stepper, score=score))

    def share(self, before: Built | None, now: Built, found: Found) -> None:
        if found.alike:
            return
        parts = now.parts
        behind = found.reached[parts.place.rank] < max(found.reached)
        own = None if behind else state_tensors(parts.model, parts.optimizer, parts.scale)
        received = broadcast(own if parts.place.rank == found.source else None, found.source)
        if behind:
            load_state(parts.divided.modules[0], parts.optimizer, parts.scale, received, "the other workers")

    def warm_up(self, now: Built, progress: Progress) -> None:
        """Nothing: the model is the one that was there."""


def broadcast(own: dict[str, Tensor] | None, source: int, group: dist.ProcessGroup | None = None) -> dict[str, Tensor]:
    """The tensors of the worker `source` of this group, which gives its `own`, on all of it."""
    words = [[name, list(tensor.shape), dtype_name(tensor.dtype)] for name, tensor in (own or {}).items()]
    found = {}
    for name, shape, dtype in said_by(source, words, group):
        tensor = torch.empty(shape, dtype=dtype_named(dtype)) if own is None else own[name].contiguous()
        if tensor.numel():  # a shard may have no row of it
            dist.broadcast(tensor, src=source, group=group)
        found[name] = tensor
    return found


def calls_for(error: BaseException) -> bool:
    """Whether this ends a group, and not the run."""
    return isinstance(error, Summoned) or lost_peer(error)
