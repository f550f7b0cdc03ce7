"""Who carries buckets: backward waits for nothing, and what has come is taken while the rest is on its way."""

import os
import threading
from typing import Any

import pytest
import torch

from phalanx.train.grad_sync.comm_queue import CommQueue

PATIENCE = 20.0


class Slow:
    """Its stages wait for events: `start` for `may_send`, the answer of bucket 1 until bucket 0 is taken."""

    carries_metrics = is_two_phase = True
    uses_error_feedback = is_low_rank = False
    num_channels = 1

    def __init__(self) -> None:
        self.may_send, self.taken_first = threading.Event(), threading.Event()
        self.done: list[str] = []

    def start(self, number: int, bucket: Any) -> None:
        assert self.may_send.wait(PATIENCE)
        self.done.append(f"send {number}")

    def start_second_phase(self, number: int, bucket: Any) -> None:
        if number == 1:
            assert self.taken_first.wait(PATIENCE)
        self.done.append(f"answer {number}")

    def finish(self, number: int, bucket: Any) -> None:
        self.done.append(f"take {number}")
        self.taken_first.set()


class Failing(Slow):
    def start(self, number: int, bucket: Any) -> None:
        if number == 1:
            raise RuntimeError("no room to round in")

    def finish(self, number: int, bucket: Any) -> None:
        self.done.append(f"take {number}")


def test_backward_does_not_wait_while_a_bucket_is_made_ready_and_sent() -> None:
    strategy = Slow()
    courier = CommQueue(strategy, use_threads=True)
    for number in range(2):
        courier.submit(number, None)  # type: ignore[arg-type]
    assert strategy.done == []
    strategy.may_send.set()
    courier.wait_all()
    courier.close()
    assert [each for each in strategy.done if each.startswith("send")] == ["send 0", "send 1"]


def test_a_bucket_is_taken_beside_backward_while_later_ones_are_still_coming() -> None:
    strategy = Slow()
    strategy.may_send.set()
    courier = CommQueue(strategy, use_threads=True)
    for number in range(2):
        courier.submit(number, None)  # type: ignore[arg-type]
    assert strategy.taken_first.wait(PATIENCE)
    courier.wait_all()
    courier.close()
    assert strategy.done.index("take 0") < strategy.done.index("answer 1")


def test_what_goes_wrong_in_sending_is_raised_at_the_end_of_the_step() -> None:
    strategy = Failing()
    courier = CommQueue(strategy, use_threads=True)
    for number in range(3):
        courier.submit(number, None)  # type: ignore[arg-type]
    strategy.taken_first.set()
    with pytest.raises(RuntimeError, match="no room to round in"):
        courier.wait_all()
    courier.close()
    assert strategy.done == ["answer 0", "take 0"]


class Multiplying(Slow):
    """Its first operation is a product of matrices; `more`: threads that this process has more since."""

    more = 0

    def __init__(self) -> None:
        super().__init__()
        self._matrix = torch.ones(1024, 1024)

    def start(self, number: int, bucket: Any) -> None:
        before = len(os.listdir("/proc/self/task"))
        torch.mm(self._matrix, self._matrix)
        self.more = len(os.listdir("/proc/self/task")) - before


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="SKIPPED: this machine has one core")
def test_sending_computes_with_no_more_threads_than_the_worker_has() -> None:
    assert torch.get_num_threads() == 1
    strategy = Multiplying()
    courier = CommQueue(strategy, use_threads=True)
    courier.submit(0, None)  # type: ignore[arg-type]
    courier.wait_all()
    courier.close()
    assert strategy.more == 0
