"""A callback that makes exchanges slow, by the bytes that they send: for tests, copied beside their recipes."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from phalanx.train.exchange.fixed_tree import FixedTree
from phalanx.train.exchange.ways import WAYS

SECONDS: Mapping[Any, float] = {FixedTree: 0.12, WAYS["all-reduce"]: 0.12, WAYS["bf16"]: 0.06}


class SlowLinks:
    """A worker waits so long for each bucket."""

    def start(self, run: object) -> None:
        for way, seconds in SECONDS.items():
            way.take = slowed(way.take, seconds)


def slowed(take: Callable[..., None], seconds: float) -> Callable[..., None]:
    def slow(*args: Any) -> None:
        time.sleep(seconds)
        take(*args)

    return slow
