"""Feed: a background thread that has the next steps' batches ready before they are asked for.

It divides the work and nothing else: which samples a step has is `RunData`'s to say, so the same steps come out for any
number of ranks, only in other hands.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
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


@dataclass(frozen=True)
class RankBatch:
    """The part of each global batch that one rank reads: its `micro_batch_range` of the micro-batches.

    Raises ValueError when the micro-batches cannot be divided among the ranks.
    """

    global_size: int
    micro_size: int
    rank: int = 0
    num_groups: int = 1
    stride: int = 1

    def __post_init__(self) -> None:
        if self.global_size % (self.micro_size * self.stride) or self.global_size < self.micro_size * self.num_groups:
            raise ValueError(
                f"a global batch of {self.global_size} has no micro-batches of {self.micro_size} for "
                f"{self.num_groups} ranks"
            )

    @property
    def micro_batches(self) -> range:
        """Indices of the rank's micro-batches."""
        return micro_batch_range(self.global_size // self.micro_size, self.rank, self.num_groups, self.stride)


class SampleSource(Protocol):
    """What a feed needs of `RunData`. `has_images`: a batch has arrays with rows for images, which cannot be cut."""

    @property
    def has_images(self) -> bool: ...

    def read_training(self, consumed: int, count: int) -> Batch: ...


class Prefetcher(Iterator[list[Batch]]):
    """An endless iterator over steps; each is the list of this rank's micro-batches.

    Sample i of a step belongs to micro-batch i // micro_size. Up to `max_steps_ahead` steps are read ahead, fewer where
    they are large. An error in the thread is raised here, when its step is asked for. `close` ends the thread; so does
    leaving a `with`.

    The thread fills the store, then sleeps until half of it is used up: waking it for every step would cost several
    times what reading a small step does.
    """

    def __init__(self, data: SampleSource, rank_batch: RankBatch, samples_consumed: int, max_steps_ahead: int = 16):
        self._data, self._rank_batch = data, rank_batch
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
        micro_batches, micro_size = self._rank_batch.micro_batches, self._rank_batch.micro_size
        step = self._next_sample
        self._next_sample += self._rank_batch.global_size
        if micro_batches.step > 1 or self._data.has_images:
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
