"""Hot copies: the state in the memory of the nodes every few steps, so that a loss costs steps and not a checkpoint's
interval.

Each worker copies, in the background, its share of what its node's workers hold into the node's folder (`run/hot.py`);
what only one node holds goes to the next node besides (`peers.py`). Any node may then vanish. The newest two copies
stay, and one of them while the next is written. How far a copy is travels as flags in the per-step agreement, as with
checkpoints (`saving.py`). Bringing copies back is `recall.py`.
"""

import math
import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from phalanx.errors import UsageError, storage_failed
from phalanx.recipe.schema import Parallelism
from phalanx.run import Run
from phalanx.run.event_types import InMemoryCheckpointSaved, InMemoryIntervalChosen, RunWarning
from phalanx.run.hot import begin_line, cut, forget, note_saved, open_folder, remove_copies
from phalanx.train.checkpoint import Phase, Piece, share_out
from phalanx.train.checkpoint.parts import TENSORS, PartSaver, copy_name, list_copies
from phalanx.train.interval import Tell, Times, largest
from phalanx.train.nodes import Nodes, exchanged, nodes_of, said_by_leader
from phalanx.train.parallel.divided import Held
from phalanx.train.parallel.mesh import Mesh, coordinates
from phalanx.train.peers import Keeper, Sender, local_address
from phalanx.train.place import Place
from phalanx.train.room import in_memory, no_room, room_in
from phalanx.train.state import Progress

HOT_FLAGS = ("copied", "copy_failed")
PAUSE = 1.0
"""Seconds of work that are not worth a copy: starting again takes as long."""
WARM_UP = 4
"""Steps of an attempt before anything is decided."""
RETRY = 500
"""Steps after which copies that seemed too dear are tried again, or more: a trial must not take more than its share."""
PREPARED = 1e9
"""Bytes a second of the buffer for copies from a GPU that are made ready in the background, or more."""
TRIAL = 3
"""Copies of a trial, and one for good measure."""


class HotCopies:
    """Hot copies of one worker. `wanted`: every so many steps, or at most such a share of the time ("1%"), or None.
    Every worker calls the same at the same step. `tell` reports what became of them on every worker alike."""

    def __init__(
        self,
        run: Run,
        place: Place,
        mesh: Mesh,
        wanted: int | str | None,
        begun: int,
        times: Times,
        durable: Callable[[], int | None],
        common: dict[str, Any],
        tell: Tell,
        flush: Callable[[], None],
        environment: Mapping[str, str] = os.environ,
    ):
        self._run, self._place, self._mesh, self._environment = run, place, mesh, environment
        self._times, self._durable, self._common = times, durable, common
        self._tell, self._flush = tell, flush
        self._share = share_of(wanted) if isinstance(wanted, str) else None
        self.every: int | None = wanted if isinstance(wanted, int) else None
        """Steps between two copies as things stand; None for none."""
        self._over = wanted is None
        self._start = self._last = self._decided = begun
        self._revise = self._share is not None
        self._retry = RETRY
        self._begun = self._measured = False
        self._nodes = Nodes((0,) * place.world)
        self._folder: Path | None = None
        self._saver: PartSaver | None = None
        self._keeper: Keeper | None = None
        self._sender: Sender | None = None
        self._token = ""
        self._whole: str | None = None  # the newest copy of this attempt that is whole
        self._sizes: dict[str, int] = {}
        self._own: list[str] = []
        self._tensors = 0  # of all workers together
        self._waiting_for_copy = False
        self._stall = 0.0
        self._bytes = self._largest = 0
        self._usual = 1.0  # seconds of a step, as all workers know it
        self.in_flight: int | None = None  # the step being copied, alike on all workers
        self.reason = ""

    def due(self, step: int, last: int) -> bool:
        """Whether to copy the state after this step of so many."""
        if self._over or self.in_flight is not None:
            return False
        if self._share is None:
            return self.every is not None and step % self.every == 0
        if self.every is None and step - self._decided >= self._retry:  # what it cost may have been an accident
            self._times.copying.forget()
            self._revise = True
        if self._revise and self._times.steps >= WARM_UP:
            self._revise, self._decided = False, step
            self._decide(step, last)
        return self.every is not None and step - self._last >= self.every

    def start(self, progress: Progress, state: Mapping[str, Held], eager: list[str]) -> None:
        """Begin to copy. Nothing may be in flight. The tensors must not change before `wait_copied`, except those named
        in `eager`."""
        step = self._last = progress.step
        sizes = {name: held.tensor.numel() * held.tensor.element_size() for name, held in state.items()}
        first = not self._begun
        if first and not self._begin(state, sizes):
            return
        begun = time.perf_counter()
        assert self._saver is not None
        if sizes != self._sizes:
            self._sizes, self._own = sizes, owned(state, sizes, self._mesh, self._nodes, self._place.rank)[0]
            self._count(state)
        pieces = [
            Piece(name, block.of(state[name].tensor), state[name].holding.shape, block.offset)
            for name in self._own
            for block in state[name].holding.blocks
        ]
        if first and self._share is not None and self.every and self._place.device.type != "cpu":
            self._saver.prepare(pieces)  # the first copy comes when its memory is there
            self._last = max(step, step - self.every + math.ceil(self._largest / PREPARED / self._usual))
            return
        self.in_flight = step
        self._times.copying.begins()
        self._flush()  # a run that goes on from this copy must find the steps before it in its events
        try:
            mine = set(self._own)
            self._saver.start(
                step,
                pieces,
                {**self._common, **asdict(progress), TENSORS: self._tensors},
                [n for n in eager if n in mine],
            )
            self._waiting_for_copy = True
        except UsageError as error:  # a tensor that no checkpoint can hold: training goes on
            self.reason = str(error)
        self._stall = time.perf_counter() - begun

    def wait_copied(self) -> None:
        """Call before tensors change."""
        if self._waiting_for_copy:
            assert self._saver is not None
            self._stall += self._saver.wait_copied()
            self._waiting_for_copy = False

    def flags(self) -> tuple[bool, bool]:
        """This worker's HOT_FLAGS now."""
        if self.in_flight is None or self._saver is None:
            return (False, False)
        state = self._saver.poll()
        if state.phase is Phase.FAILED:
            self.reason = state.reason
        return (state.phase is Phase.WRITTEN, bool(self.reason))

    def settle(self, flags: Mapping[str, int]) -> None:
        """Take the next turn, given the flags of all workers."""
        if self.in_flight is None:
            return
        if flags["copy_failed"]:
            self._give_up()
        elif flags["copied"] == self._place.world:
            self._complete(self.in_flight)

    def saved(self, step: int) -> None:
        """There is a checkpoint of this step."""
        if self._begun and not self._over and self._place.leads:
            note_saved(self._run, step)

    def roll_back(self, step: int) -> None:
        """The run goes back to a checkpoint of this step: copies of later ones belong to no history."""
        if self._place.leads:
            cut(self._run, step)
        if not self._begun or self._over:
            return
        assert self._saver is not None
        self._drop()
        self._start = self._last = step
        self._whole = None
        if self._new_line():
            self._saver.begin_line(self._token)
        if self._nodes.leads(self._place.rank):
            clear_copies(self._folder, ())

    def close(self) -> None:
        """The run ends with a checkpoint: nothing of the copies stays."""
        if self._begun and not self._over:
            self.abandon()
            exchanged(self._place, None)  # nobody writes any more
        if self._place.local_rank == 0 or (self._begun and self._nodes.leads(self._place.rank)):
            remove_copies(self._run, self._environment)
        if self._place.leads:
            try:
                forget(self._run)
            except OSError as error:  # the copies are gone, so what is written of them does no harm
                if not storage_failed(error):
                    raise
        self._over = True

    def abandon(self) -> None:
        """Leave what is in flight, waiting for nobody else: also when another worker is gone. Whole copies stay."""
        for peer in (self._sender, self._keeper):
            if peer is not None:
                peer.close()
        self._drop()
        if self._sender is not None:
            self._sender.release()
        self._sender = self._keeper = None

    def _drop(self) -> None:
        if self._saver is not None:
            self._saver.abandon()
            self._times.copying.failed()
        self.in_flight, self._waiting_for_copy, self._stall, self.reason = None, False, 0.0, ""

    def _complete(self, step: int) -> None:
        assert self._saver is not None
        seconds = self._saver.poll().seconds
        self._saver.keep()
        self._whole = copy_name(step, self._token)
        known = self._stall
        if self._place.device.type == "cpu":  # the thread that copies takes a core from those that train
            known += self._saver.cpu + (self._keeper.cpu if self._keeper is not None else 0.0)
        self._times.copying.done(known)
        if not self._measured:
            self._measured = True
            self._times.copying.forget()
        self._revise = self._share is not None and self._times.copying.count.bit_count() == 1
        event = InMemoryCheckpointSaved(step=step, size_bytes=self._bytes, duration_s=seconds, stall_s=self._stall)
        self.in_flight, self._stall = None, 0.0
        self._tell(event)

    def _decide(self, step: int, last: int) -> None:
        """How often to copy, from numbers of all workers."""
        assert self._share is not None
        usual = self._times.usual
        cost, usual = largest(self._place, [self._times.copying.cost(usual), usual])
        before, durable = self.every, self._durable()
        if usual <= 0:
            return
        self._usual = usual
        allowed = cost / (self._share * usual)
        self.every = math.ceil(max(allowed, PAUSE / usual, 1.0))
        self._retry = max(RETRY, TRIAL * math.ceil(allowed))
        # A copy must come well before the next checkpoint, and before the end, to be worth anything.
        if (durable is not None and 2 * self.every > durable) or step + self.every >= last:
            self.every = None
        if self.every != before:
            self._tell(InMemoryIntervalChosen(step=step, interval_steps=self.every, cost_s=cost))

    def _begin(self, state: Mapping[str, Held], sizes: dict[str, int]) -> bool:
        """Find out with all workers who copies what, where to, and whether there is room; whether there is."""
        place = self._place
        self._nodes = nodes = nodes_of(place, self._environment)
        self._own, exposed = owned(state, sizes, self._mesh, nodes, place.rank)
        self._sizes = sizes
        self._count(state)
        told: dict[str, Any] = {"bytes": sum(sizes[name] for name in self._own), "exposed": exposed, "wrong": ""}
        try:
            self._folder = open_folder(self._run, self._environment)
            told |= {"room": room_in(self._folder), "in_memory": in_memory(self._folder)}
        except (OSError, UsageError) as error:
            told["wrong"] = str(error)
        said = exchanged(place, told)
        wrong = next((each["wrong"] for each in said if each["wrong"]), "") or no_room(said, nodes)
        if wrong:
            self._turn_off(wrong)
            return False
        assert self._folder is not None
        self._bytes = sum(each["bytes"] for each in said)
        self._largest = max(each["bytes"] for each in said)
        senders = [rank for rank, each in enumerate(said) if each["exposed"]]
        if senders:
            self._connect(senders)
        self._begun = True
        if not self._new_line():
            return False
        deliver = None if self._sender is None else self._sender.deliver
        self._saver = PartSaver(self._folder, place.rank, self._token, self._tidy, deliver)
        return True

    def _count(self, state: Mapping[str, Held]) -> None:
        at = self._mesh.at
        own = [name for name, held in state.items() if held.begins and not any(at[axis] for axis in held.copies)]
        self._tensors = len(set().union(*exchanged(self._place, sorted(own))))

    def _new_line(self) -> bool:
        """A token that stands in the run's history before any copy bears it; whether there is room to say so."""
        told = [secrets.token_hex(8), ""]
        if self._place.leads:
            try:
                cut(self._run, self._start)
                begin_line(self._run, told[0])
            except OSError as error:
                told[1] = str(error)
        self._token, wrong = said_by_leader(self._place, told)
        if wrong:
            self._turn_off(wrong)
        return not wrong

    def _connect(self, senders: list[int]) -> None:
        """Meet the workers of other nodes with whom parts are exchanged. Where that fails copies stay on their node."""
        place, nodes = self._place, self._nodes
        kept = [rank for rank in senders if nodes.keeper(rank) == place.rank]
        assert self._folder is not None
        address, wrong = None, ""
        try:
            if kept:
                self._keeper = Keeper(self._folder)
                address = self._keeper.listen(local_address(self._environment))
        except OSError as error:
            wrong = str(error)
        addresses = exchanged(place, address)
        try:
            if place.rank in senders and addresses[nodes.keeper(place.rank)] is not None:
                host, port, secret = addresses[nodes.keeper(place.rank)]
                self._sender = Sender((host, port, secret))
            if self._keeper is not None and not wrong:
                self._keeper.accept(len(kept))
        except OSError as error:
            wrong = wrong or str(error)
        found = next((each for each in exchanged(place, wrong) if each), "")
        if found:
            self.abandon()
            text = f"hot copies stay on their own node, whose loss costs a checkpoint's interval: {found}"
            self._tell(RunWarning(text=text))

    def _tidy(self, step: int) -> None:
        """In the background, before a part is written: make room for it."""
        if self._whole is not None and self._nodes.leads(self._place.rank):
            clear_copies(self._folder, (self._whole, copy_name(step, self._token)))

    def _give_up(self) -> None:
        reason = self.reason
        self.abandon()
        found = next((each for each in exchanged(self._place, reason) if each), "")
        if self._nodes.leads(self._place.rank):
            remove_copies(self._run, self._environment)
        self._turn_off(found)

    def _turn_off(self, why: str) -> None:
        self._over = True
        if self._place.leads:
            forget(self._run)
        self._tell(RunWarning(text=f"no hot copies: {why}; training goes on, and a loss costs more of it"))


def share_of(text: str) -> float:
    """0.01 of "1%"."""
    return float(text.strip().removesuffix("%")) / 100.0


def holders(layout: Parallelism, rank: int, copies: tuple[str, ...]) -> list[int]:
    """The ranks that differ from this one along these axes only: they hold the same."""
    own = coordinates(layout, rank)
    fixed = [axis for axis in own if axis not in copies]
    every = ((other, coordinates(layout, other)) for other in range(layout.world))
    return [other for other, at in every if all(at[axis] == own[axis] for axis in fixed)]


def owned(
    state: Mapping[str, Held], sizes: Mapping[str, int], mesh: Mesh, nodes: Nodes, rank: int
) -> tuple[list[str], bool]:
    """What this worker copies so that its node keeps all that its workers hold, sorted; and whether the node is the
    only one to hold some of it."""
    own: list[str] = []
    exposed = False
    for copies in {held.copies for held in state.values()}:
        alike = {name: sizes[name] for name, held in state.items() if held.copies == copies}
        all_of_them = holders(mesh.layout, rank, copies)
        beside = [other for other in all_of_them if nodes.of[other] == nodes.of[rank]]
        own += share_out(alike, len(beside))[beside.index(rank)]
        exposed |= nodes.count > 1 and len(beside) == len(all_of_them)
    return sorted(own), exposed


def clear_copies(folder: Path | None, keep: tuple[str, ...]) -> None:
    """Remove a node's copies but those of these names."""
    for step, token in list_copies(folder) if folder is not None else ():
        name = copy_name(step, token)
        if name not in keep:
            assert folder is not None
            shutil.rmtree(folder / name, ignore_errors=True)  # a worker may be removing its part
