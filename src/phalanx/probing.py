"""`phalanx calibrate`, as a function: `cluster/probe` measures, the nursery gives it processes, and training its
checkpoint format. Nothing is printed here, and nothing written but the scratch folder, which is gone afterwards.
"""

import importlib
import os
import selectors
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from phalanx.cluster import Cluster, Machine
from phalanx.cluster.probe import Means, NotMeasured, probe
from phalanx.errors import TrialError, UsageError
from phalanx.jobs.attempt import HELD, ORPHANED, OVERDUE, Attempt, verdict
from phalanx.jobs.nursery_process import NurseryLost, NurseryProcess
from phalanx.run.channel import drain, receive
from phalanx.run.messages import Command, Message, RankResult, SendSignal, StartWorkers, WorkerError, WorkerExited
from phalanx.waits import LOOK

PATIENCE = 120.0
"""Seconds that a world may take beyond what it was asked to."""
WORDS = 200
"""Characters of why something failed; some libraries' messages are long."""
SCRATCH = ".phalanx-probe-"


def measured(
    machine: Machine,
    *,
    quick: bool = False,
    nproc: int | None = None,
    folder: Path = Path(),
    progress: Callable[[str, float], None] = lambda family, share: None,
) -> Cluster:
    """Measure this machine with `nproc` processes (default: one a GPU, else two) and the disk of `folder`. Ctrl-C
    leaves neither processes nor files. UsageError when `folder` cannot be written to or has no room."""
    with scratch_in(folder) as scratch, NurseryProcess() as nursery:
        means = Means(
            call=partial(call, nursery),
            gather=partial(gather, nursery, scratch),
            save=partial(save, nursery),
            scratch=scratch,
            progress=progress,
        )
        nursery.wait_ready()
        return probe(machine, means, quick=quick, processes=nproc)


@contextmanager
def scratch_in(folder: Path) -> Iterator[Path]:
    """A new folder in `folder`, removed afterwards whatever happens."""
    try:
        made = tempfile.TemporaryDirectory(prefix=SCRATCH, dir=folder, ignore_cleanup_errors=True)
    except OSError as error:
        raise UsageError(f"--dir {folder}: not writable: {error.strerror}") from None
    with made as name:
        yield Path(name)


def call(nursery: NurseryProcess, function: str, payload: Any) -> Any:
    """`module:function(payload)` in a process of its own. NotMeasured when it fails."""
    try:
        return nursery.call(function, payload)
    except TrialError as error:
        raise NotMeasured(str(error)) from error


def gather(
    nursery: NurseryProcess,
    logs: Path,
    function: str,
    payload: dict[str, Any],
    world: int,
    clock: Callable[[], float] = time.monotonic,
) -> Any:
    """`module:function(payload)` on each rank of a new world; what rank 0 returned. NotMeasured when a rank fails, or
    takes much longer than the payload's `seconds`."""
    nursery.wait_ready()
    for _ in drain(nursery.events):  # of worlds that were there before
        pass
    command = Command(function="phalanx.probing:member", payload={"function": function, "payload": payload})
    nursery.ask(
        StartWorkers(
            attempt=0,
            world_size=world,
            command=command,
            environment={},
            logs_dir=str(logs),
            local_world_size=world,
        )
    )
    attempt, found = Attempt(world, came=set(range(world))), dict[int, Any]()
    until = clock() + payload["seconds"] + PATIENCE
    with selectors.DefaultSelector() as selector:
        for sock in (nursery.control, nursery.events):
            selector.register(sock, selectors.EVENT_READ)
        while len(attempt.codes) < world:
            ready = selector.select(max(0.0, min(LOOK, until - clock())))
            if not ready and (why := nursery.revive()) is not None:
                nursery.kill()
                raise NurseryLost(why)
            if not ready and clock() >= until:
                if attempt.killed:
                    nursery.kill()
                    raise NurseryLost(HELD)
                nursery.ask(SendSignal(signal=9))
                attempt.killed, until = True, clock() + OVERDUE
                attempt.error = attempt.error or WorkerError(rank=0, message="it took far too long", exit_code=75)
            for key, _ in ready:
                assert isinstance(key.fileobj, socket.socket)
                for message in receive(key.fileobj) or _orphans():
                    _take(message, attempt, found, nursery)
    for message in drain(nursery.events):
        _take(message, attempt, found, nursery)
    if any(attempt.codes.values()) or 0 not in found:
        why = attempt.error.message if attempt.error else verdict(attempt, logs, 0)[1]
        raise NotMeasured(str(why).partition(" (log: ")[0][:WORDS])
    return found[0]


def _take(message: Message, attempt: Attempt, found: dict[int, Any], nursery: NurseryProcess) -> None:
    if isinstance(message, WorkerExited):
        attempt.codes[message.rank] = message.exit_status
        if message.exit_status != 0 and len(attempt.codes) < attempt.world:
            nursery.ask(SendSignal(signal=9))  # the others wait for it in vain
    elif isinstance(message, RankResult):
        found[message.rank] = message.value


def _orphans() -> list[Message]:
    raise NurseryLost(ORPHANED)


def member(payload: dict[str, Any]) -> None:
    """One rank of `gather`: joins the others, calls, and rank 0 sends what came of it."""
    from phalanx.train.place import from_environment, join, leave
    from phalanx.train.reporter import ToAgent

    place = from_environment()
    join(place)
    try:
        module, _, name = payload["function"].partition(":")
        found = getattr(importlib.import_module(module), name)(payload["payload"])
        if place.leads:
            ToAgent(int(os.environ["PHALANX_EVENTS_FD"]), place.rank).say(RankResult(rank=place.rank, value=found))
    finally:
        leave()


def save(nursery: NurseryProcess, folder: Path, nbytes: int) -> float:
    """Seconds that a checkpoint of so many bytes takes. NotMeasured when it fails."""
    found: float = call(nursery, "phalanx.probing:checkpoint", {"folder": str(folder), "bytes": nbytes})
    return found


def checkpoint(payload: dict[str, Any]) -> float:
    """Save tensors in Phalanx's own format below a folder, and remove them; the seconds from the snapshot's begin until
    it is published."""
    import shutil

    import torch

    from phalanx.train.checkpoint import Phase, Piece, Saver

    folder, tensors = Path(payload["folder"]) / "checkpoints", 8
    each = torch.randn(max(1, payload["bytes"] // 4 // tensors))
    pieces = [Piece.whole(f"tensor-{index}", each) for index in range(tensors)]
    saver = Saver(folder, 0, 1)
    try:
        saver.reserve(pieces)  # a run has done so before its first checkpoint
        saver.start(1, pieces, {"step": 1, "samples": 0})
        state = saver.wait()
        if state.phase is Phase.WRITTEN:
            state = saver.commit()
        if state.phase is not Phase.COMMITTED:
            raise OSError(state.reason)
        return state.seconds
    finally:
        shutil.rmtree(folder, ignore_errors=True)
