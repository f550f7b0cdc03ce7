"""Who carries buckets through the stages of a strategy while backward goes on.

On a CPU each stage is begun by a thread of its own: backward does not wait while numbers are rounded and given to
sockets, and when they have arrived does not depend on when it makes the next gradient. On a GPU waiting costs the host
nothing, and the second stage follows after backward.
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
    """A bucket on its way. `answered` is set when its second stage has begun, or cannot."""

    number: int
    bucket: Bucket
    pending: Pending | None
    answered: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None


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
        self._queue: SimpleQueue[Parcel | list[Parcel]] | None = None
        self._sender: ThreadPoolExecutor | None = None
        if beside and strategy.answers:
            self._sender = ThreadPoolExecutor(1, thread_name_prefix="send", initializer=_keep_to_own_cores)
            self._queue = SimpleQueue()
            # A daemon: a worker whose peers are gone must be able to end while this still waits for them.
            threading.Thread(target=_carry, args=(strategy, self._queue), name="exchange", daemon=True).start()

    def send(self, number: int, bucket: Bucket, fill: Callable[[Bucket], None] = lambda _: None) -> None:
        """All of a bucket is there, and in it after `fill`. Until `finish` it is the courier's."""

        def begin() -> Pending | None:
            fill(bucket)
            return self._strategy.send(number, bucket)

        pending = begin() if self._sender is None else _Sent(self._sender.submit(begin))
        parcel = Parcel(number, bucket, pending)
        self._under_way.append(parcel)
        if self._queue is not None:
            self._queue.put(parcel)

    def finish(self) -> None:
        """Leave all sums in their buckets: each is taken as soon as it is there, while later ones are still coming."""
        if self._queue is None:
            for parcel in self._under_way:
                _answer(self._strategy, parcel)
        while self._under_way:
            parcel = self._under_way[0]
            if self._queue is not None:
                parcel.answered.wait()
            del self._under_way[0]  # what has arrived may be waited for only once
            if parcel.error is not None:
                raise parcel.error
            if parcel.pending is not None:
                parcel.pending.wait()
            self._strategy.take(parcel.number, parcel.bucket)

    def close(self) -> None:
        """Let the thread end; it is not waited for, since what it waits for may never come. It takes in what is still
        under way: for a message that nobody wants any more gloo's own thread would look without a pause."""
        under_way, self._under_way = self._under_way, []
        if self._queue is not None and self._sender is not None:
            self._queue.put(under_way)
            self._sender.shutdown(wait=False)


def _keep_to_own_cores() -> None:
    """Have a new thread compute with as many threads as torch was told. Most operations see to that by themselves, but
    a product of matrices, if it comes first, takes all cores of the machine."""
    torch.set_num_threads(torch.get_num_threads())


def _answer(strategy: Strategy, parcel: Parcel) -> None:
    if parcel.pending is not None:
        parcel.pending.wait()
    parcel.pending = strategy.answer(parcel.number, parcel.bucket) if strategy.answers else None


def _carry(strategy: Strategy, queue: "SimpleQueue[Parcel | list[Parcel]]") -> None:
    """The thread, until the last parcels come. After an error nothing is sent any more: others would wait for another
    bucket."""
    _keep_to_own_cores()
    failed: BaseException | None = None
    while isinstance(parcel := queue.get(), Parcel):
        try:
            if failed is None:
                _answer(strategy, parcel)
        except BaseException as error:  # noqa: BLE001 - whatever it is, `finish` raises it
            failed = error
        parcel.error = failed
        parcel.answered.set()
        del parcel  # or the last one, with the model's gradients, would live as long as the thread
    for last in parcel:
        with contextlib.suppress(RuntimeError):  # of a peer that is gone, which nobody waits for any more
            if last.pending is not None and last.error is None:
                last.pending.wait()
