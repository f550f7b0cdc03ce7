"""Feed: a background thread that has the next steps' batches ready before they are asked for.

It divides the work and nothing else: which samples a step has is `Data`'s to say, so the same steps come out for any
number of ranks, only in other hands.
"""

from collections import deque
from collections.abc import Iterator
from threading import Condition, Thread
from typing import Protocol, Self

from phalanx.data.reader import Batch

AHEAD_BYTES = 1 << 26
"""About so much may lie read ahead, but always two steps."""


def share(count: int, rank: int, world: int, turns: int = 1) -> range:
    """Which of `count` micro-batches are this rank's: consecutive ones, as evenly as it goes.

    With `turns`, so many neighbours take a micro-batch each in a round, and consecutive rounds are theirs: which
    micro-batches make a round, and who of the neighbours has which, does not depend on `world`.
    """
    rounds, group, groups = count // turns, rank // turns, world // turns
    return range(rounds * group // groups * turns + rank % turns, rounds * (group + 1) // groups * turns, turns)


class Samples(Protocol):
    """What a feed needs of `Data`."""

    def train(self, consumed: int, count: int) -> Batch: ...


class Feed(Iterator[list[Batch]]):
    """An endless iterator over steps; each is the list of this rank's micro-batches.

    Sample i of a step belongs to micro-batch i // micro; a rank owns its `share` of them, with `turns`. Up to `depth`
    steps are read ahead, fewer where they are large. An error in the thread is raised here, when its step is asked for.
    `close` ends the thread; so does leaving a `with`.

    The thread fills the store, then sleeps until half of it is used up: waking it for every step would cost several
    times what reading a small step does.
    """

    def __init__(
        self,
        data: Samples,
        *,
        global_batch: int,
        micro: int,
        rank: int,
        world: int,
        consumed: int,
        turns: int = 1,
        depth: int = 16,
    ):
        if global_batch % (micro * turns) or global_batch < micro * world:
            raise ValueError(f"a global batch of {global_batch} has no micro-batches of {micro} for {world} ranks")
        self._data = data
        self._mine = share(global_batch // micro, rank, world, turns)
        self._global, self._micro = global_batch, micro
        self._next = consumed
        self._depth = depth
        self._ready: deque[list[Batch]] = deque()
        self._changed = Condition()
        self._error: BaseException | None = None
        self._closed = False
        self._thread = Thread(target=self._work, name="feed", daemon=True)
        self._thread.start()

    def __next__(self) -> list[Batch]:
        if not self._ready:
            with self._changed:
                self._changed.wait_for(lambda: self._ready or self._error or self._closed)
        if self._closed:
            raise StopIteration
        if not self._ready:
            assert self._error is not None
            if isinstance(self._error, StopIteration):  # here it would say that the run is over
                raise RuntimeError("reading a sample raised StopIteration") from self._error
            raise self._error
        step = self._ready.popleft()
        if self._low():
            with self._changed:
                self._changed.notify_all()
        return step

    def _low(self) -> bool:
        return len(self._ready) <= self._depth // 2

    def _work(self) -> None:
        try:
            step = self._read()
            size = sum(values.nbytes for batch in step for values in batch.values())
            self._depth = min(self._depth, max(2, AHEAD_BYTES // size))
            while not self._closed:
                with self._changed:
                    self._ready.append(step)
                    self._changed.notify_all()
                    if len(self._ready) == self._depth:
                        self._changed.wait_for(lambda: self._low() or self._closed)
                if not self._closed:
                    step = self._read()
        except BaseException as error:  # noqa: BLE001 - it is raised again in the thread that trains
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _read(self) -> list[Batch]:
        """This rank's share of the next step: read at once where it lies together, then cut into micro-batches (views,
        not copies)."""
        mine, micro, step = self._mine, self._micro, self._next
        self._next += self._global
        if mine.step > 1:
            return [self._data.train(step + number * micro, micro) for number in mine]
        batch = self._data.train(step + mine.start * micro, len(mine) * micro)
        return [
            {name: values[start : start + micro] for name, values in batch.items()}
            for start in range(0, len(mine) * micro, micro)
        ]

    def close(self) -> None:
        """Stop reading ahead and wait until the thread has ended."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
