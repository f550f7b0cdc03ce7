"""How workers that an outside launcher started learn whether to train: the leading one tells the others over the store.

Only that, and the attempt's number: which run and whose code, each worker knows by its own arguments. Where the store
is not signed, others might say something else.
"""

import json
import os
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch.distributed as dist

from phalanx.errors import ExitCode, PhalanxError, UsageError
from phalanx.train.place import Place, store_of
from phalanx.waits import Wait, say

PATIENCE = 12 * 3600.0
"""Seconds to wait for it: preparing data on the leading worker may take long."""
SAYING = 60.0
"""Seconds after which it is said, again and again, that this one waits."""
SOON, SELDOM = 0.001, 0.2
"""Seconds between two looks: at first, and at most."""
LARGEST = 1 << 16
"""Bytes of an announcement."""
LONGEST = 4000
"""Characters of an error that are told."""
_KEY = "run"


@dataclass(frozen=True)
class Announced:
    """What the leading worker says: the `attempt` of its `run`, or that it is `finished`, or with `error` and `code`
    why there is nothing to train."""

    run: str = ""
    attempt: int = 0
    finished: bool = False
    error: str = ""
    code: int = 0


def announce(place: Place, what: Announced) -> None:
    """Tell all workers of this attempt what to train."""
    if place.world > 1:
        store_of(place).set(_KEY, json.dumps(asdict(replace(what, error=what.error[:LONGEST]))))


def await_announcement(place: Place, run: Path) -> Announced:
    """What the leading worker told. PhalanxError when it failed, and where no agent looks after this worker also when
    it is gone; UsageError when its run is another than this worker's."""
    try:
        found = _read(_awaited(place))
    except (dist.DistNetworkError, dist.DistStoreError) as lost:  # the latter where it does not answer any more
        if "PHALANX_EVENTS" in os.environ:
            raise
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        gone = PhalanxError(f"the leading worker was lost before it said what to train (at {where}); start again")
        gone.code = ExitCode.UNFINISHED
        raise gone from lost
    if found.error:
        error = PhalanxError(f"the leading worker could not make the run ready: {found.error}")
        error.code = ExitCode(found.code)
        raise error
    if not found.finished and os.path.realpath(found.run) != os.path.realpath(run):
        raise UsageError(
            f"this worker's run is {os.path.realpath(run)}, and that of worker 0 {found.run}: start all workers in the "
            "same folder with the same arguments"
        )
    return found


def _awaited(place: Place) -> bytes:
    store, pause = store_of(place), SOON
    tell = say if place.local_rank == 0 else _leave_unsaid
    wait = Wait("the leading worker to make the run ready", PATIENCE, tell, saying=SAYING)
    while not store.check([_KEY]):
        if wait.over():
            silent = PhalanxError(f"the leading worker has said nothing for {PATIENCE / 3600:.0f} h; start again")
            silent.code = ExitCode.UNFINISHED
            raise silent
        time.sleep(pause)
        pause = min(2 * pause, SELDOM)
    content: bytes = store.get(_KEY)
    return content


def _leave_unsaid(_: str) -> None:
    """One worker of a machine says it for all."""


def _read(content: bytes) -> Announced:
    wrong = UsageError("what was announced where the workers meet is not an announcement of Phalanx")
    if len(content) > LARGEST:
        raise wrong
    try:
        found = Announced(**json.loads(content))
        if found.code:
            ExitCode(found.code)
    except (ValueError, TypeError, RecursionError):
        raise wrong from None
    kinds = {"run": str, "attempt": int, "finished": bool, "error": str, "code": int}
    typed = all(type(getattr(found, name)) is kind for name, kind in kinds.items())
    if not typed or (found.error and not found.code):
        raise wrong
    return found
