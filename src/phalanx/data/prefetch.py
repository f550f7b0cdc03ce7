"""Feed: a background thread that has the next steps' batches ready before they are asked for.

It divides the work and nothing else: which samples a step has is `RunData`'s to say, so the same steps come out for any
number of ranks, only in other hands.
"""

from collections import deque
from collections.abc import Iterator
from threading import Condition, Thread
from typing import Protocol, Self

from phalanx.data.reader import Batch

READ_AHEAD_BYTES = 1 << 26
"""About so much may lie read ahead, but always two steps."""


def micro_batch_range(num_micro_batches: int, rank: int, num_groups: int, stride: int = 1) -> range:
    """Which of `num_micro_batches` micro-batches are this rank's: consecutive ones, as evenly as it goes.

    With `stride`, that many neighbours take one micro-batch each in a round, and consecutive rounds are theirs: which
    micro-batches form a round, and which neighbour takes which, does not depend on `num_groups`.
    """
    num_rounds, group, groups = num_micro_batches // stride, rank // stride, num_groups // stride
    return range(
        num_rounds * group // groups * stride + rank % stride, num_rounds * (group + 1) // groups * stride, stride
    )


class SampleSource(Protocol):
    """What a feed needs of `RunData`."""

    def read_training(self, consumed: int, count: int) -> Batch: ...


class Prefetcher(Iterator[list[Batch]]):
    """An endless iterator over steps; each is the list of this rank's micro-batches.

    Sample i of a step belongs to micro-batch i // micro; a rank owns its `micro_batch_range` of them, with `stride`. Up
    to `max_steps_ahead`
    steps are read ahead, fewer where they are large. An error in the thread is raised here, when its step is asked for.
    `close` ends the thread; so does leaving a `with`.

    The thread fills the store, then sleeps until half of it is used up: waking it for every step would cost several
    times what reading a small step does.
    """

    def __init__(
        self,
        data: SampleSource,
        *,
        global_batch: int,
        micro_size: int,
        rank: int,
        num_groups: int,
        samples_consumed: int,
        stride: int = 1,
        max_steps_ahead: int = 16,
    ):
        if global_batch % (micro_size * stride) or global_batch < micro_size * num_groups:
            raise ValueError(
                f"a global batch of {global_batch} has no micro-batches of {micro_size} for {num_groups} ranks"
            )
        self._data = data
        self._micro_batches = micro_batch_range(global_batch // micro_size, rank, num_groups, stride)
        self._global_size, self._micro_size = global_batch, micro_size
        self._next_sample = samples_consumed
        self._max_steps_ahead = max_steps_ahead
        self._queue: deque[list[Batch]] = deque()
        self._changed = Condition()
        self._error: BaseException | None = None
        self._closed = False
        self._thread = Thread(target=self._read_ahead, name="feed", daemon=True)
        self._thread.start()

    def __next__(self) -> list[Batch]:
        if not self._queue:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._error or self._closed)
        if self._closed:
            raise StopIteration
        if not self._queue:
            assert self._error is not None
            if isinstance(self._error, StopIteration):  # here it would say that the run is over
                raise RuntimeError("reading a sample raised StopIteration") from self._error
            raise self._error
        step = self._queue.popleft()
        if self._is_low():
            with self._changed:
                self._changed.notify_all()
        return step

    def _is_low(self) -> bool:
        return len(self._queue) <= self._max_steps_ahead // 2

    def _read_ahead(self) -> None:
        try:
            step = self._read_step()
            size = sum(values.nbytes for batch in step for values in batch.values())
            self._max_steps_ahead = min(self._max_steps_ahead, max(2, READ_AHEAD_BYTES // size))
            while not self._closed:
                with self._changed:
                    self._queue.append(step)
                    self._changed.notify_all()
                    if len(self._queue) == self._max_steps_ahead:
                        self._changed.wait_for(lambda: self._is_low() or self._closed)
                if not self._closed:
                    step = self._read_step()
        except BaseException as error:  # noqa: BLE001 - it is raised again in the thread that trains
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _read_step(self) -> list[Batch]:
        """This rank's share of the next step: read at once where it lies together, then cut into micro-batches (views,
        not copies)."""
        micro_batches, micro_size, step = self._micro_batches, self._micro_size, self._next_sample
        self._next_sample += self._global_size
        if micro_batches.step > 1:
            return [self._data.read_training(step + number * micro_size, micro_size) for number in micro_batches]
        batch = self._data.read_training(step + micro_batches.start * micro_size, len(micro_batches) * micro_size)
        return [
            {name: values[start : start + micro_size] for name, values in batch.items()}
            for start in range(0, len(micro_batches) * micro_size, micro_size)
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
