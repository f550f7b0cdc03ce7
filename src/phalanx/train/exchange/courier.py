"""Who carries buckets through the stages of a strategy while backward goes on.

On a CPU the second stage is begun by a thread: when the first has arrived does not depend on when backward makes the
next gradient. On a GPU waiting costs the host nothing, and the second stage follows after backward.
"""

import contextlib
import threading
from dataclasses import dataclass, field
from queue import SimpleQueue

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


class Courier:
    """`send` for every bucket of a step in turn, then `finish`. What goes wrong anywhere is raised by `finish`."""

    def __init__(self, strategy: Strategy, beside: bool):
        self._strategy = strategy
        self._under_way: list[Parcel] = []
        self._queue: SimpleQueue[Parcel | list[Parcel]] | None = None
        if beside and strategy.answers:
            self._queue = SimpleQueue()
            # A daemon: a worker whose peers are gone must be able to end while this still waits for them.
            threading.Thread(target=_carry, args=(strategy, self._queue), name="exchange", daemon=True).start()

    def send(self, number: int, bucket: Bucket) -> None:
        """A bucket is full."""
        parcel = Parcel(number, bucket, self._strategy.send(number, bucket))
        self._under_way.append(parcel)
        if self._queue is not None:
            self._queue.put(parcel)

    def finish(self) -> None:
        """Leave all sums in their buckets."""
        for parcel in self._under_way:
            if self._queue is None:
                _answer(self._strategy, parcel)
            else:
                parcel.answered.wait()
        parcels, self._under_way = self._under_way, []
        for parcel in parcels:
            if parcel.error is not None:
                raise parcel.error
            if parcel.pending is not None:
                parcel.pending.wait()
            self._strategy.take(parcel.number, parcel.bucket)

    def close(self) -> None:
        """Let the thread end; it is not waited for, since what it waits for may never come. It takes in what is still
        under way: for a message that nobody wants any more gloo's own thread would look without a pause."""
        under_way, self._under_way = self._under_way, []
        if self._queue is not None:
            self._queue.put(under_way)


def _answer(strategy: Strategy, parcel: Parcel) -> None:
    if parcel.pending is not None:
        parcel.pending.wait()
    parcel.pending = strategy.answer(parcel.number, parcel.bucket) if strategy.answers else None


def _carry(strategy: Strategy, queue: "SimpleQueue[Parcel | list[Parcel]]") -> None:
    """The thread, until the last parcels come. After an error nothing is sent any more: others would wait for another
    bucket."""
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
