"""A callback that makes exchanges slow, by the bytes that they send: for tests, copied into the folder of their
recipes. What they save is more than int8 costs to compute on a busy machine."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from phalanx.train.grad_sync.algorithms.deterministic_tree import DeterministicTree
from phalanx.train.grad_sync.registry import GRAD_SYNC_ALGORITHMS

DELAY_S_BY_STRATEGY: Mapping[Any, float] = {
    DeterministicTree: 0.24,
    GRAD_SYNC_ALGORITHMS["all-reduce"]: 0.24,
    GRAD_SYNC_ALGORITHMS["bf16"]: 0.12,
}


class SlowLinks:
    """A worker waits so long for each bucket."""

    def start(self, run: object) -> None:
        for way, seconds in DELAY_S_BY_STRATEGY.items():
            way.finish = add_delay(way.finish, seconds)


def add_delay(take: Callable[..., None], seconds: float) -> Callable[..., None]:
    def slow(*args: Any) -> None:
        time.sleep(seconds)
        take(*args)

    return slow
