"""Who carries buckets through the stages of a strategy while backward goes on.

On a CPU a thread sends buckets, another answers them and a third takes them: backward does not wait while numbers are
rounded and given to sockets, and when they have arrived does not depend on when it makes the next gradient. Each lane
of a strategy has an answering and a taking thread of its own. On a GPU waiting costs the host nothing, and everything
after the first stage follows after backward.
"""

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue

import torch

from phalanx.train.exchange.buckets import Bucket
from phalanx.train.exchange.strategy import Pending, Strategy


@dataclass
class Parcel:
    """A bucket on its way. `taken` is set when its sum is in it, or cannot be."""

    number: int
    bucket: Bucket
    pending: Pending | None
    taken: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None


Queue = SimpleQueue[Parcel | list[Parcel]]
"""Parcels, and at the end a list of those that are still under way."""


@dataclass(frozen=True)
class _Sent:
    """What another thread sends."""

    begun: Future[Pending | None]

    def wait(self) -> None:
        pending = self.begun.result()
        if pending is not None:
            pending.wait()


class Courier:
    """`send` for every bucket of a step in turn, then `finish`. What goes wrong anywhere is raised by `finish`."""

    def __init__(self, strategy: Strategy, beside: bool):
        self._strategy = strategy
        self._under_way: list[Parcel] = []
        self._queues: list[Queue] = []  # of each lane
        self._sender: ThreadPoolExecutor | None = None
        if beside and strategy.answers:
            self._sender = ThreadPoolExecutor(1, thread_name_prefix="send", initializer=_keep_to_own_cores)
            for _ in range(strategy.lanes):
                queue, answered = Queue(), Queue()
                # Daemons: a worker whose peers are gone must be able to end while these still wait for them.
                for step, source, target in ((_answer, queue, answered), (_take, answered, None)):
                    work = (strategy, step, source, target)
                    threading.Thread(target=_carry, args=work, daemon=True, name="exchange").start()
                self._queues.append(queue)

    def send(self, number: int, bucket: Bucket, fill: Callable[[Bucket], None] = lambda _: None) -> None:
        """All of a bucket is there, and in it after `fill`. Until `finish` it is the courier's."""

        def begin() -> Pending | None:
            fill(bucket)
            return self._strategy.send(number, bucket)

        pending = begin() if self._sender is None else _Sent(self._sender.submit(begin))
        parcel = Parcel(number, bucket, pending)
        self._under_way.append(parcel)
        if self._queues:
            self._queues[number % len(self._queues)].put(parcel)

    def finish(self) -> None:
        """Leave all sums in their buckets."""
        if not self._queues:
            for parcel in self._under_way:
                _answer(self._strategy, parcel)
        while self._under_way:
            parcel = self._under_way[0]
            if self._queues:
                parcel.taken.wait()
            del self._under_way[0]
            if parcel.error is not None:
                raise parcel.error
            if not self._queues:
                _take(self._strategy, parcel)

    def close(self) -> None:
        """Let the threads end; they are not waited for, since what they wait for may never come. They take in what is
        still under way: for a message that nobody wants any more gloo's own thread would look without a pause."""
        under_way, self._under_way = self._under_way, []
        for lane, queue in enumerate(self._queues):
            queue.put([parcel for parcel in under_way if parcel.number % len(self._queues) == lane])
        if self._sender is not None:
            self._sender.shutdown(wait=False)


def _keep_to_own_cores() -> None:
    """Have a new thread compute with as many threads as torch was told. Most operations see to that by themselves, but
    a product of matrices, if it comes first, takes all cores of the machine."""
    torch.set_num_threads(torch.get_num_threads())


def _answer(strategy: Strategy, parcel: Parcel) -> None:
    if parcel.pending is not None:
        parcel.pending.wait()
    parcel.pending = strategy.answer(parcel.number, parcel.bucket) if strategy.answers else None


def _take(strategy: Strategy, parcel: Parcel) -> None:
    pending, parcel.pending = parcel.pending, None  # what has arrived may be waited for only once
    if pending is not None:
        pending.wait()
    strategy.take(parcel.number, parcel.bucket)


def _carry(strategy: Strategy, step: Callable[[Strategy, Parcel], None], source: Queue, target: Queue | None) -> None:
    """A thread that does a step with each parcel and hands it on. After an error nothing is sent any more: others would
    wait for another bucket."""
    _keep_to_own_cores()
    failed: BaseException | None = None
    while isinstance(parcel := source.get(), Parcel):
        failed = failed or parcel.error
        try:
            if failed is None:
                step(strategy, parcel)
        except BaseException as error:  # noqa: BLE001 - whatever it is, `finish` raises it
            failed = error
        parcel.error = failed
        if target is None:
            parcel.taken.set()
        else:
            target.put(parcel)
        del parcel  # or the last one, with the model's gradients, would live as long as the thread
    if target is not None:
        target.put(parcel)
        return
    for last in parcel:
        with contextlib.suppress(RuntimeError):  # of a peer that is gone, which nobody waits for any more
            if last.pending is not None and last.error is None:
                last.pending.wait()
