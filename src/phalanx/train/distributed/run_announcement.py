"""Announce the run to workers that an outside launcher started: rank 0 says over the store whether to train.

The announcement holds only that and the attempt's number. Each worker takes the run and its code from its own
arguments, because anyone could write to a store that is not signed. Before workers create their process group, they
wait for all to arrive, and a worker that cannot take part publishes the reason; the rendezvous would otherwise wait
until its timeout.
"""

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch.distributed as dist

from phalanx.deadline import Deadline, print_status
from phalanx.errors import ExitCode, PhalanxError, SubprocessError, UsageError
from phalanx.recipe import describe_exception
from phalanx.run.fields import read_as
from phalanx.train.distributed.environment import DistEnv, dist_env_from_environment
from phalanx.train.distributed.failures import PassingError, cause_of
from phalanx.train.distributed.store import MIN_COLLECTIVE_TIMEOUT as COMING
from phalanx.train.distributed.store import open_attempt_store

ANNOUNCEMENT_TIMEOUT_S = 12 * 3600.0
"""Timeout of the announcement: data preparation on rank 0 may take long."""
WAIT_MESSAGE_INTERVAL_S = 60.0
"""Seconds between log messages that this worker waits."""
MIN_POLL_INTERVAL_S, MAX_POLL_INTERVAL_S = 0.001, 0.2
"""Polling interval: first and maximum."""
MAX_ANNOUNCEMENT_BYTES = 1 << 16
"""Maximum bytes of an announcement."""
MAX_ERROR_CHARS = 4000
"""Maximum characters of an error that are published."""
HEAR_TIMEOUT_S = 30.0
"""Seconds for which rank 0, which may host the store, waits for the others to read why there is nothing to train."""
_ANNOUNCEMENT_KEY, _ALL_KEY, _COME_KEY, _HEARD_KEY = "run", "all", "come", "heard"


class RelayedError(PhalanxError):
    """An error of another worker that also ends this one."""


@dataclass(frozen=True)
class RunAnnouncement:
    """What rank 0 announces: the `attempt` of its run, or that the run `is_finished`, or with `error` and `exit_code`
    why there is nothing to train. `rank`: the worker that wrote it."""

    run_dir: str = ""
    attempt: int = 0
    is_finished: bool = False
    error: str = ""
    exit_code: int = 0
    rank: int = 0

    def text(self) -> str:
        """Return its form in the store."""
        return json.dumps(asdict(replace(self, error=self.error[:MAX_ERROR_CHARS])))


def announce_run(dist_env: DistEnv, announcement: RunAnnouncement) -> None:
    """Announce to all workers of this attempt what to train. If that is nothing, wait until they have read it, at most
    HEAR_TIMEOUT_S: the store may disappear when this process ends."""
    if dist_env.world_size == 1:
        return
    store = open_attempt_store(dist_env)
    store.set(_ANNOUNCEMENT_KEY, announcement.text())
    if (announcement.error or announcement.is_finished) and not _supervised():
        wait = Deadline("the other workers to hear why there is nothing to train", HEAR_TIMEOUT_S)
        while store.add(_HEARD_KEY, 0) < dist_env.world_size - 1 and not wait.check_expired():
            time.sleep(MIN_POLL_INTERVAL_S)


@contextlib.contextmanager
def telling_others(place: DistEnv) -> Iterator[None]:
    """Publish a failure of this worker before it enters the process group, so that the others learn the reason."""
    try:
        yield
    except RelayedError:
        raise
    except Exception as error:
        with contextlib.suppress(dist.DistError, PhalanxError):  # there is no store on which others could wait
            _say_why(place, error)
        raise


def _say_why(place: DistEnv, error: Exception) -> None:
    """Publish the error. A bug in code ends the others like a run that fails before its first step."""
    if place.world_size == 1 or (_supervised() and not isinstance(error, PhalanxError)):
        return  # the agent sees any other error by the exit status
    known = error if isinstance(error, SubprocessError) else cause_of(error)
    text, code = (describe_exception(error), ExitCode.GAVE_UP) if known is None else (str(known), known.code)
    what = RunAnnouncement(error=text, exit_code=int(code), rank=place.rank)
    if not _supervised():
        open_attempt_store(_launched(place)).set(_ALL_KEY, what.text())
    if place.is_rank_zero:
        announce_run(_launched(place), what)
    else:
        open_attempt_store(_launched(place)).add(_HEARD_KEY, 1)  # this worker need not read the announcement


def come_together(place: DistEnv) -> None:
    """Wait until all workers are about to create the process group. Raises RelayedError if one cannot. Not needed with
    our agent, which ends all workers when one fails."""
    if place.world_size == 1 or _supervised():
        return
    launched = _launched(place)
    store = open_attempt_store(launched)
    if store.add(_COME_KEY, 1) == place.world_size:
        store.set(_ALL_KEY, RunAnnouncement().text())
    what, patience = f"all {place.world_size} workers to come", COMING.total_seconds()

    def describe_timeout() -> str:
        return f"only {store.add(_COME_KEY, 0)} of {place.world_size} workers came within {patience:.0f} s; start again"

    _read_announcement(launched, _ALL_KEY, what, patience, describe_timeout)


def _launched(place: DistEnv) -> DistEnv:
    """Return `place` with the launcher's attempt number, which all workers know before that of the run."""
    return replace(place, attempt=dist_env_from_environment(device="cpu").attempt)


def _supervised() -> bool:
    return "PHALANX_EVENTS_FD" in os.environ


def _end_if_failed(found: RunAnnouncement, place: DistEnv) -> None:
    """Raise the error that another worker published, if any."""
    if not found.error:
        return
    other = f"worker {found.rank} could not take part"
    who = other if found.rank else "the leading worker could not make the run ready"
    open_attempt_store(place).add(_HEARD_KEY, 1)
    raise RelayedError(f"{who}: {found.error}", ExitCode(found.exit_code))


def wait_for_announcement(dist_env: DistEnv, run: Path) -> RunAnnouncement:
    """Wait for rank 0's announcement. Raises PhalanxError if rank 0 failed and, without an agent, if it was lost;
    UsageError if its run is not that of this worker."""
    try:
        what, hours = "the leading worker to make the run ready", ANNOUNCEMENT_TIMEOUT_S / 3600
        problem = f"the leading worker has said nothing for {hours:.0f} h; start again"
        found = _read_announcement(dist_env, _ANNOUNCEMENT_KEY, what, ANNOUNCEMENT_TIMEOUT_S, lambda: problem)
    except (dist.DistNetworkError, dist.DistStoreError) as lost:  # the second if it does not answer any more
        if _supervised():
            raise
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise PassingError(
            f"the leading worker was lost before it said what to train (at {where}); start again"
        ) from lost
    if found.is_finished:
        open_attempt_store(dist_env).add(_HEARD_KEY, 1)
    elif os.path.realpath(found.run_dir) != os.path.realpath(run):
        raise UsageError(
            f"this worker's run is {os.path.realpath(run)}, and that of worker 0 {found.run_dir}: start all workers in "
            "the same folder with the same arguments"
        )
    return found


def _read_announcement(
    dist_env: DistEnv, key: str, what: str, limit: float, describe_timeout: Callable[[], str]
) -> RunAnnouncement:
    """Wait for what is announced under a key; one worker per node logs it. Raises PassingError on a timeout, and the
    error that another worker published."""
    store, pause = open_attempt_store(dist_env), MIN_POLL_INTERVAL_S
    print_wait = print_status if dist_env.local_rank == 0 else lambda text: None
    wait = Deadline(what, limit, print_wait, report_interval_s=WAIT_MESSAGE_INTERVAL_S)
    while not store.check([key]):
        if wait.check_expired():
            raise PassingError(describe_timeout())
        time.sleep(pause)
        pause = min(2 * pause, MAX_POLL_INTERVAL_S)
    found = _parse_announcement(store.get(key))
    _end_if_failed(found, dist_env)
    return found


def _parse_announcement(content: bytes) -> RunAnnouncement:
    invalid = UsageError("what was announced where the workers meet is not an announcement of Phalanx")
    if len(content) > MAX_ANNOUNCEMENT_BYTES:
        raise invalid
    try:
        said = json.loads(content)
        found: RunAnnouncement = read_as(RunAnnouncement, said)
        if found.exit_code:
            ExitCode(found.exit_code)
    except (ValueError, RecursionError):
        raise invalid from None
    if said.keys() - vars(found).keys() or (found.error and not found.exit_code):
        raise invalid
    return found
