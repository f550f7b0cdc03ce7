"""The background thread: it reads ahead, divides the work, and never hides an error."""

import threading

import numpy as np
import pytest

from phalanx.data import Prefetcher, RankBatch


class Counting:
    """Samples that are their own number; `broken` raises from that sample on."""

    has_images = False

    def __init__(self, broken=None):
        self.broken = broken
        self.asked = []
        self.changed = threading.Condition()

    def read_training(self, consumed, count):
        with self.changed:
            self.asked.append((consumed, count))
            self.changed.notify_all()
        if self.broken is not None and consumed >= self.broken:
            raise OSError("the disk is gone")
        return {"tokens": np.arange(consumed, consumed + count)}


def feed(data, samples_consumed=0, max_steps_ahead=16, **options):
    return Prefetcher(
        data, RankBatch(**{"global_size": 12, "micro_size": 2, **options}), samples_consumed, max_steps_ahead
    )


def test_a_step_is_a_list_of_micro_batches():
    with feed(Counting(), samples_consumed=24) as steps:
        assert [batch["tokens"].tolist() for batch in next(steps)] == [[24 + i, 25 + i] for i in range(0, 12, 2)]
        assert next(steps)[0]["tokens"].tolist() == [36, 37]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 6])
def test_ranks_own_consecutive_micro_batches(world):
    owned = []
    for rank in range(world):
        with feed(Counting(), rank=rank, num_groups=world) as steps:
            owned += [batch["tokens"].tolist() for batch in next(steps)]
    assert owned == [[i, i + 1] for i in range(0, 12, 2)]


@pytest.mark.parametrize(("world", "rank", "mine"), [(2, 1, [1, 3, 5]), (4, 0, [0]), (4, 2, [2, 4]), (6, 5, [5])])
def test_neighbours_take_turns_in_rounds_that_do_not_depend_on_the_world(world, rank, mine):
    with feed(Counting(), rank=rank, num_groups=world, stride=2, samples_consumed=24) as steps:
        for first in (24, 36):
            got = [batch["tokens"].tolist() for batch in next(steps)]
            assert got == [[first + 2 * number, first + 2 * number + 1] for number in mine]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_groups": 4, "stride": 4}, "no micro-batches of 2 for 4 ranks"),
        ({"micro_size": 5}, "global batch of 12"),
    ],
)
def test_a_batch_that_cannot_be_divided_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        feed(Counting(), **options)


@pytest.mark.parametrize(("buffer_bytes", "steps"), [(None, 4), (100, 2)], ids=["small", "large: two steps"])
def test_it_reads_ahead_but_not_further_than_told(monkeypatch, buffer_bytes, steps):
    if buffer_bytes is not None:
        monkeypatch.setattr("phalanx.data.prefetch.READ_AHEAD_BYTES", buffer_bytes)
    data = Counting()
    with feed(data, max_steps_ahead=4), data.changed:
        assert data.changed.wait_for(lambda: len(data.asked) == steps, timeout=10)
        assert not data.changed.wait_for(lambda: len(data.asked) > steps, timeout=0.1)


def test_an_error_is_raised_when_its_step_is_asked_for():
    with feed(Counting(broken=24)) as steps:
        assert next(steps)[0]["tokens"][0] == 0
        assert next(steps)[0]["tokens"][0] == 12
        for _ in range(2):
            with pytest.raises(OSError, match="the disk is gone"):
                next(steps)


def test_close_ends_the_thread_and_the_steps():
    steps = feed(Counting())
    next(steps)
    steps.close()
    steps.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "feed"]
    with pytest.raises(StopIteration):
        next(steps)


def test_a_sample_that_raises_stop_iteration_does_not_end_the_steps_silently():
    class Ending(Counting):
        def read_training(self, consumed, count):
            raise StopIteration

    with feed(Ending()) as steps, pytest.raises(RuntimeError, match="reading a sample raised StopIteration"):
        next(steps)
