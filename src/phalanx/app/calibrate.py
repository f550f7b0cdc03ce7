"""Measure this machine: `cluster/calibration` measures, in processes of a fork server. Only a temporary directory is
written, and removed at the end.
"""

import importlib
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from phalanx.cluster import Cluster, Machine
from phalanx.cluster.calibration.location_speed import measure_location
from phalanx.cluster.calibration.runner import Executor, MeasurementFailed, calibrate_machine
from phalanx.errors import SubprocessError, UsageError, describe_os_error
from phalanx.jobs.agent.fork_server_client import ForkServerClient
from phalanx.jobs.agent.trial_workers import TrialWorkers, WorkersFailedError
from phalanx.recipe.locations import StorageLocation
from phalanx.run.boot_clock import unix_now
from phalanx.run.process_messages import Command, RankResult

EXTRA_TIMEOUT_S = 120.0
"""Seconds that a world may take beyond the time that it is asked to measure for."""
MAX_REASON_CHARS = 200
"""Maximum length of the reason of a failure; some libraries have long messages."""
SCRATCH_PREFIX = ".phalanx-probe-"


def calibrate(
    machine: Machine,
    *,
    quick: bool = False,
    num_processes: int | None = None,
    folder: Path = Path(),
    locations: Sequence[StorageLocation] = (),
    progress: Callable[[str, float], None] = lambda family, share: None,
) -> Cluster:
    """Measure this machine with `num_processes` processes (default: one per GPU, else two), the disk of `folder`, and
    the `locations` of a recipe.

    Ctrl-C leaves neither processes nor files. Raises UsageError when `folder` is not writable or full, or a location
    cannot be read or written.
    """
    speeds = []
    for place in locations:
        progress(place.location, 0.0)
        probe_name = f"{SCRATCH_PREFIX}{secrets.token_hex(8)}"
        try:
            speeds.append(measure_location(place, probe_name))
        except OSError as error:
            raise UsageError(f"{place.key}: {describe_os_error(error).replace(f'/{probe_name}', '')}") from None
    with create_scratch_dir(folder) as scratch, ForkServerClient() as fork_server:
        executor = Executor(
            run_in_process=partial(call_in_subprocess, fork_server),
            run_in_world=partial(call_on_ranks, fork_server, scratch),
            scratch_dir=scratch,
            report_progress=progress,
        )
        fork_server.wait_until_ready()
        cluster = calibrate_machine(machine, executor, quick=quick, processes=num_processes)
    assert cluster.measured is not None
    return cluster.model_copy(update={"measured": cluster.measured.model_copy(update={"locations": speeds})})


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
    clock: Callable[[], float] = unix_now,
) -> Any:
    """Run `module:function(payload)` on each rank of a new world, and return the result of rank 0.

    Raises MeasurementFailed when a rank fails, or takes much longer than the payload's `seconds`.
    """
    command = Command(function="phalanx.app.calibrate:run_rank", payload={"function": function, "payload": payload})
    timeout_s = payload["seconds"] + EXTRA_TIMEOUT_S
    try:
        return TrialWorkers(logs_dir, world_size, command, timeout_s=timeout_s, clock=clock).run_to_end(fork_server)
    except WorkersFailedError as error:
        raise MeasurementFailed(str(error)[:MAX_REASON_CHARS]) from None


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
            reporter = AgentReporter(int(os.environ["PHALANX_EVENTS_FD"]), dist_env.rank)
            reporter.send_control(RankResult(rank=dist_env.rank, value=result))
    finally:
        shut_down_process_group()
