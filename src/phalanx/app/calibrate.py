"""Measure this machine: `cluster/calibration` measures, in processes of a fork server. Only a temporary directory is
written, and removed at the end.
"""

import importlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from phalanx.cluster import Cluster, Machine
from phalanx.cluster.calibration import Executor, MeasurementFailed, calibrate_machine
from phalanx.deadline import POLL_INTERVAL_S
from phalanx.errors import SubprocessError, UsageError
from phalanx.jobs.agent.attempt import (
    EXIT_REPORT_TIMEOUT_S,
    EXITS_NOT_REPORTED_MESSAGE,
    AttemptState,
    decide_outcome,
)
from phalanx.jobs.agent.fork_server_client import ForkServerClient, ForkServerLostError
from phalanx.jobs.agent.forked_child import LOST_PEER_STATUS
from phalanx.run.message_socket import drain
from phalanx.run.messages import Message
from phalanx.run.process_messages import Command, RankResult, SendSignal, StartWorkers, WorkerError, WorkerExited

EXTRA_TIMEOUT_S = 120.0
"""Seconds that a world may take beyond the time that it is asked to measure for."""
CAUSE_TIMEOUT_S = 10.0
"""Seconds for the other ranks to report a failure, after one that has only lost its peer."""
MAX_REASON_CHARS = 200
"""Maximum length of the reason of a failure; some libraries have long messages."""
SCRATCH_PREFIX = ".phalanx-probe-"


def calibrate(
    machine: Machine,
    *,
    quick: bool = False,
    num_processes: int | None = None,
    folder: Path = Path(),
    progress: Callable[[str, float], None] = lambda family, share: None,
) -> Cluster:
    """Measure this machine with `num_processes` processes (default: one per GPU, else two), and the disk of `folder`.

    Ctrl-C leaves neither processes nor files. Raises UsageError when `folder` is not writable or full.
    """
    with create_scratch_dir(folder) as scratch, ForkServerClient() as fork_server:
        executor = Executor(
            run_in_process=partial(call_in_subprocess, fork_server),
            run_in_world=partial(call_on_ranks, fork_server, scratch),
            save_checkpoint=partial(time_checkpoint, fork_server),
            scratch_dir=scratch,
            report_progress=progress,
        )
        fork_server.wait_until_ready()
        return calibrate_machine(machine, executor, quick=quick, processes=num_processes)


@contextmanager
def create_scratch_dir(folder: Path) -> Iterator[Path]:
    """Create a directory in `folder`, and remove it at the end."""
    try:
        scratch_dir = tempfile.TemporaryDirectory(prefix=SCRATCH_PREFIX, dir=folder, ignore_cleanup_errors=True)
    except OSError as error:
        raise UsageError(f"--dir {folder}: not writable: {error.strerror}") from None
    with scratch_dir as name:
        yield Path(name)


def call_in_subprocess(fork_server: ForkServerClient, function: str, payload: Any) -> Any:
    """Run `module:function(payload)` in a separate process. Raises MeasurementFailed."""
    try:
        return fork_server.call(function, payload)
    except SubprocessError as error:
        raise MeasurementFailed(str(error)) from error


def call_on_ranks(
    fork_server: ForkServerClient,
    logs_dir: Path,
    function: str,
    payload: dict[str, Any],
    world_size: int,
    clock: Callable[[], float] = time.monotonic,
) -> Any:
    """Run `module:function(payload)` on each rank of a new world, and return the result of rank 0.

    Raises MeasurementFailed when a rank fails, or takes much longer than the payload's `seconds`.
    """
    fork_server.wait_until_ready()
    for _ in drain(fork_server.events):  # events of earlier worlds
        pass
    command = Command(function="phalanx.app.calibrate:run_rank", payload={"function": function, "payload": payload})
    fork_server.send(
        StartWorkers(
            attempt=0,
            world_size=world_size,
            command=command,
            environment={},
            logs_dir=str(logs_dir),
            local_world_size=world_size,
        )
    )
    attempt, results = AttemptState(world_size, announced_ranks=set(range(world_size))), dict[int, Any]()
    deadline, has_lost_peer = clock() + payload["seconds"] + EXTRA_TIMEOUT_S, False
    while len(attempt.exit_statuses) < world_size:
        messages = fork_server.receive(min(POLL_INTERVAL_S, deadline - clock()))
        for message in messages:
            _handle_message(message, attempt, results, fork_server)
        if LOST_PEER_STATUS in attempt.exit_statuses.values() and not has_lost_peer:
            has_lost_peer, deadline = True, min(deadline, clock() + CAUSE_TIMEOUT_S)
        if messages:
            continue
        fork_server.check_stopped()
        if clock() >= deadline:
            if attempt.killed:
                fork_server.kill()
                raise ForkServerLostError(EXITS_NOT_REPORTED_MESSAGE)
            fork_server.send(SendSignal(signal=9))
            attempt.killed, deadline = True, clock() + EXIT_REPORT_TIMEOUT_S
            attempt.error = attempt.error or WorkerError(rank=0, message="timed out", exit_code=75)
    for message in drain(fork_server.events):
        _handle_message(message, attempt, results, fork_server)
    if any(attempt.exit_statuses.values()) or 0 not in results:
        reason = attempt.error.message if attempt.error else decide_outcome(attempt, logs_dir, 0)[1]
        raise MeasurementFailed(str(reason).partition(" (log: ")[0][:MAX_REASON_CHARS])
    return results[0]


def _handle_message(
    message: Message, attempt: AttemptState, results: dict[int, Any], fork_server: ForkServerClient
) -> None:
    if isinstance(message, WorkerExited):
        attempt.exit_statuses[message.rank] = message.exit_status
        # one that lost its peer may be known before the peer has reported why
        is_cause = message.exit_status not in (0, LOST_PEER_STATUS)
        if is_cause and len(attempt.exit_statuses) < attempt.world_size:
            fork_server.send(SendSignal(signal=9))  # the others would wait for it until their timeout
    elif isinstance(message, RankResult):
        results[message.rank] = message.value


def run_rank(payload: dict[str, Any]) -> None:
    """Run one rank of `call_on_ranks`: join the process group, call the function; rank 0 sends the result."""
    from phalanx.train.distributed.environment import dist_env_from_environment
    from phalanx.train.distributed.process_group import init_process_group, shut_down_process_group
    from phalanx.train.reporter import AgentReporter

    dist_env = dist_env_from_environment()
    init_process_group(dist_env)
    try:
        module, _, name = payload["function"].partition(":")
        result = getattr(importlib.import_module(module), name)(payload["payload"])
        if dist_env.is_rank_zero:
            AgentReporter(int(os.environ["PHALANX_EVENTS_FD"]), dist_env.rank).send_control(
                RankResult(rank=dist_env.rank, value=result)
            )
    finally:
        shut_down_process_group()


def time_checkpoint(fork_server: ForkServerClient, folder: Path, num_bytes: int) -> float:
    """Return the seconds that a checkpoint of `num_bytes` takes. Raises MeasurementFailed."""
    found: float = call_in_subprocess(
        fork_server, "phalanx.app.calibrate:save_test_checkpoint", {"folder": str(folder), "bytes": num_bytes}
    )
    return found


def save_test_checkpoint(payload: dict[str, Any]) -> float:
    """Save a checkpoint of random tensors and remove it; return the seconds from its start until it is committed."""
    import shutil

    import torch

    from phalanx.train.checkpoint import CheckpointSaver, DurableDirectory, SavePhase, TensorShard

    folder, tensors = Path(payload["folder"]) / "checkpoints", 8
    values = torch.randn(max(1, payload["bytes"] // 4 // tensors))
    shards = [TensorShard.full_tensor(f"tensor-{index}", values) for index in range(tensors)]
    saver = CheckpointSaver(DurableDirectory(folder, 0, 1))
    try:
        saver.reserve_space(shards)  # a run has done so before its first checkpoint
        saver.start(1, shards, {"step": 1, "samples_consumed": 0})
        state = saver.poll_when_idle()
        if state.phase is SavePhase.WRITTEN:
            state = saver.commit()
        if state.phase is not SavePhase.COMMITTED:
            raise OSError(state.reason)
        return state.duration_s
    finally:
        shutil.rmtree(folder, ignore_errors=True)
