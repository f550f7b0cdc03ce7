"""Kills its worker before a write or delete of the store: the request of a number that depends on rank and attempt."""

import os
import random
import signal
from collections.abc import Callable

from phalanx.storage.store import Store
from phalanx.train.checkpoint import checkpoint_store

MAX_KILLS = 20
"""Attempts in which a worker is killed. A fast machine trains many steps while one upload is killed early."""
MAX_REQUESTS = 10

checkpoint_store.BLOCK_BYTES = 16 << 10


class KillUploads:
    def on_train_start(self, run: object) -> None:
        attempt, rank = int(os.environ.get("PHALANX_ATTEMPT") or 0), int(os.environ.get("RANK") or 0)
        if attempt < MAX_KILLS and rank == attempt % 2:
            left = [random.Random(attempt).randrange(1, MAX_REQUESTS)]
            for name in ("write", "delete"):
                setattr(Store, name, _counted(getattr(Store, name), left))


def _counted(request: Callable[..., None], left: list[int]) -> Callable[..., None]:
    def call(*arguments: object, **options: object) -> None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        request(*arguments, **options)

    return call
