"""How workers that an outside launcher started learn whether to train: the leading one tells the others over the store.

Only that, and the attempt's number: which run and whose code, each worker knows by its own arguments. Where the store
is not signed, others might say something else. Before they enter their group they wait for all to be there, and who
cannot take part says why instead: in the group's own store they would wait for it until that gives up.
"""

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch.distributed as dist

from phalanx.errors import ExitCode, PhalanxError, TrialError, UsageError
from phalanx.recipe import told
from phalanx.run.fields import read_as
from phalanx.train.causes import PassingError, cause_of
from phalanx.train.place import PATIENCE as COMING
from phalanx.train.place import Place, from_environment, store_of
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
LISTENING = 30.0
"""Seconds for which who leads, and may host the store, waits for the others to hear why there is nothing to train."""
_KEY, _ALL, _COME, _HEARD = "run", "all", "come", "heard"


class RelayedError(PhalanxError):
    """What another worker said that ends this one, too."""


@dataclass(frozen=True)
class RunAnnouncement:
    """What the leading worker says: the `attempt` of its run, or that the run `is_finished`, or with `error` and
    `exit_code` why there is nothing to train. `rank`: of the worker that says it."""

    run_dir: str = ""
    attempt: int = 0
    is_finished: bool = False
    error: str = ""
    exit_code: int = 0
    rank: int = 0

    def text(self) -> str:
        """As it stands in the store."""
        return json.dumps(asdict(replace(self, error=self.error[:LONGEST])))


def announce(place: Place, what: RunAnnouncement) -> None:
    """Tell all workers of this attempt what to train. Where that is nothing, wait until they have heard it, or a while:
    when this process ends, the store may be gone."""
    if place.world == 1:
        return
    store = store_of(place)
    store.set(_KEY, what.text())
    if (what.error or what.is_finished) and not _supervised():
        wait = Wait("the other workers to hear why there is nothing to train", LISTENING)
        while store.add(_HEARD, 0) < place.world - 1 and not wait.over():
            time.sleep(SOON)


@contextlib.contextmanager
def telling_others(place: Place) -> Iterator[None]:
    """Around what a worker does before it enters the group: where it fails, the others learn why."""
    try:
        yield
    except RelayedError:
        raise
    except Exception as error:
        with contextlib.suppress(dist.DistError, PhalanxError):  # there is no store at which others could wait
            _say_why(place, error)
        raise


def _say_why(place: Place, error: Exception) -> None:
    """A mistake in somebody's code ends the others as it would end a run of ours before its first step."""
    if place.world == 1 or (_supervised() and not isinstance(error, PhalanxError)):
        return  # an agent knows the rest by the worker's status
    known = error if isinstance(error, TrialError) else cause_of(error)
    text, code = (told(error), ExitCode.GAVE_UP) if known is None else (str(known), known.code)
    what = RunAnnouncement(error=text, exit_code=int(code), rank=place.rank)
    if not _supervised():
        store_of(_launched(place)).set(_ALL, what.text())
    if place.leads:
        announce(_launched(place), what)
    else:
        store_of(_launched(place)).add(_HEARD, 1)  # there is nothing that it has to hear


def come_together(place: Place) -> None:
    """Wait until all workers are about to enter the group; the RelayedError of who cannot. Under our agent none needs
    to: it ends all when one fails."""
    if place.world == 1 or _supervised():
        return
    launched = _launched(place)
    store = store_of(launched)
    if store.add(_COME, 1) == place.world:
        store.set(_ALL, RunAnnouncement().text())
    what, patience = f"all {place.world} workers to come", COMING.total_seconds()
    _end_if_failed(_read(_awaited(launched, _ALL, what, patience, _too_few)), launched)


def _too_few(place: Place, limit: float) -> str:
    come = store_of(place).add(_COME, 0)
    return f"only {come} of {place.world} workers came within {limit:.0f} s; start again"


def _launched(place: Place) -> Place:
    """With the launcher's own count of attempts, which all workers know before they know the run's."""
    return replace(place, attempt=from_environment(device="cpu").attempt)


def _supervised() -> bool:
    return "PHALANX_EVENTS_FD" in os.environ


def _end_if_failed(found: RunAnnouncement, place: Place) -> None:
    """End this worker where another says so."""
    if not found.error:
        return
    who = (
        f"worker {found.rank} could not take part" if found.rank else "the leading worker could not make the run ready"
    )
    error = RelayedError(f"{who}: {found.error}")
    error.code = ExitCode(found.exit_code)
    store_of(place).add(_HEARD, 1)
    raise error


def await_announcement(place: Place, run: Path) -> RunAnnouncement:
    """What the leading worker told. PhalanxError when it failed, and where no agent looks after this worker also when
    it is gone; UsageError when its run is another than this worker's."""
    try:
        content = _awaited(place, _KEY, "the leading worker to make the run ready", PATIENCE, _silent)
        found = _read(content)
        _end_if_failed(found, place)
    except (dist.DistNetworkError, dist.DistStoreError) as lost:  # the latter where it does not answer any more
        if _supervised():
            raise
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise PassingError(
            f"the leading worker was lost before it said what to train (at {where}); start again"
        ) from lost
    if found.is_finished:
        store_of(place).add(_HEARD, 1)
    elif os.path.realpath(found.run_dir) != os.path.realpath(run):
        raise UsageError(
            f"this worker's run is {os.path.realpath(run)}, and that of worker 0 {found.run_dir}: start all workers in "
            "the same folder with the same arguments"
        )
    return found


def _silent(_: Place, limit: float) -> str:
    return f"the leading worker has said nothing for {limit / 3600:.0f} h; start again"


def _awaited(place: Place, key: str, what: str, limit: float, over: Callable[[Place, float], str]) -> bytes:
    """What is said under a key. PassingError, with the words of `over`, when it is not in time."""
    store, pause = store_of(place), SOON
    tell = say if place.local_rank == 0 else _leave_unsaid
    wait = Wait(what, limit, tell, saying=SAYING)
    while not store.check([key]):
        if wait.over():
            raise PassingError(over(place, limit))
        time.sleep(pause)
        pause = min(2 * pause, SELDOM)
    content: bytes = store.get(key)
    return content


def _leave_unsaid(_: str) -> None:
    """One worker of a machine says it for all."""


def _read(content: bytes) -> RunAnnouncement:
    wrong = UsageError("what was announced where the workers meet is not an announcement of Phalanx")
    if len(content) > LARGEST:
        raise wrong
    try:
        said = json.loads(content)
        found: RunAnnouncement = read_as(RunAnnouncement, said)
        if found.exit_code:
            ExitCode(found.exit_code)
    except (ValueError, RecursionError):
        raise wrong from None
    if said.keys() - vars(found).keys() or (found.error and not found.exit_code):
        raise wrong
    return found
