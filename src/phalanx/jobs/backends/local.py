"""The local backend: the queue of this machine. Nothing needs to be installed or started: submitting a job starts a
daemon, which exits when no jobs are left. `restart_dead_daemon` restarts a daemon that was killed."""

import json
import logging
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from phalanx.cluster import Machine, discover_machine
from phalanx.cluster.environment import is_secret
from phalanx.errors import UsageError
from phalanx.jobs.backends.base import (
    PAUSED_PREFIX,
    Backend,
    BackendNode,
    LogReader,
    NodeService,
    NoSuchJobError,
    SubmitRequest,
    inherit_variables,
    read_secrets,
    warn_about_missing_variables,
)
from phalanx.jobs.local_queue.daemon import ensure_running, find_runner
from phalanx.jobs.local_queue.database import CANCEL_REQUESTED, JobDatabase, JobRecord, Resources, queue_exists
from phalanx.jobs.local_queue.job_runner import OUTPUT_FILE
from phalanx.jobs.log_stream import printed_lines
from phalanx.jobs.pause_file import DRAIN_FILE, read_pause, remove_pause, write_pause
from phalanx.jobs.spec import Job, JobState, JobStatus
from phalanx.run.private_files import state_root

logger = logging.getLogger(__name__)

INHERITED_VARIABLES = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "LANG",
    "TZ",
    "TMPDIR",
    "VIRTUAL_ENV",
    "LD_LIBRARY_PATH",
)
INHERITED_PREFIXES = ("LC_", "XDG_", "CONDA_", "PYTHON", "CUDA_", "HIP_", "ROCR_", "ZE_")
"""Paths of programs and libraries, and devices: they are the same for a job of this machine."""
MAX_ID_DIGITS = 19
"""Number of digits that no job id has: SQLite's integers are shorter."""
DAEMON_START_INTERVAL_S = 5.0
"""Minimum seconds between daemon starts while the queue is watched: a daemon that dies at once must not cause load."""


class LocalBackend(Backend):
    """Jobs of this machine; the queue lies in `folder`."""

    name = "local"

    def __init__(
        self,
        folder: Path | None = None,
        machine: Callable[[], Machine] = discover_machine,
        environment: Mapping[str, str] = os.environ,
        ensure_daemon: Callable[[Path, bool], object] = ensure_running,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.folder = (folder or state_root(environment) / "queue").absolute()
        self._machine, self._environment, self._ensure_daemon_running = machine, environment, ensure_daemon
        self._clock, self._last_daemon_start = clock, -math.inf
        self._has_warned = False

    @cached_property
    def database(self) -> JobDatabase:
        """The queue; created on first use."""
        return JobDatabase(self.folder)

    def render(self, job: Job) -> SubmitRequest:
        """Return the commands that the job will run."""
        self._resources_for(job)
        directory = shlex.quote(str(job.working_dir))
        if job.snapshot is not None:
            subdir = "" if job.snapshot.start_dir == "." else f"/{shlex.quote(job.snapshot.start_dir)}"
            directory = f"<copy of the code>{subdir}"
        lines = [f"cd {directory}"]
        lines += [f"export {name}={shlex.quote(value)}" for name, value in sorted(job.environment.items())]
        lines += [f"export {name}=<from the submitter's environment>" for name in job.secrets]
        lines.append(shlex.join(job.command))
        return SubmitRequest(self.name, job, {f"{job.name} on this machine": "\n".join(lines)})

    def submit(self, request: SubmitRequest) -> str:
        """Add the job to the queue, and make sure that the daemon runs."""
        job = request.job
        resources = self._resources_for(job)
        secret_values = read_secrets(job, self._environment)
        variables = {**inherit_environment(self._environment), **job.environment}
        variables = {name: value for name, value in variables.items() if name not in job.secrets}
        job = replace(job, environment=variables)
        warn_about_missing_variables(job, self._environment)

        def fill_dir(home: Path) -> None:
            (home / OUTPUT_FILE).touch(mode=0o600)
            if secret_values:
                fd = os.open(home / "secrets.json", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with open(fd, "w", encoding="utf-8") as file:
                    json.dump(secret_values, file)

        job_id = self.database.add(job, resources, fill_dir)
        try:
            self._ensure_daemon_running(self.database.folder, True)
        except BaseException:  # after an error nothing is queued
            self.database.update_if(job_id, JobState.QUEUED, state=JobState.CANCELLED)
            self.database.delete_job(job_id)
            raise
        if not self._has_warned and (reason := self._explain_drain()) is not None:
            logger.warning("queued jobs wait: %s", reason)
            self._has_warned = True
        return str(job_id)

    def poll(self, job_id: str) -> JobStatus:
        return self._explain_waiting([self._get_record(job_id).status])[0]

    def list_jobs(self, array: str | None = None) -> list[JobStatus]:
        return self._explain_waiting(self.database.list_statuses(array)) if queue_exists(self.folder) else []

    def send_signal(self, job_id: str, number: int) -> None:
        """Send a signal to the job's runner, which forwards it."""
        row = self._get_record(job_id)
        process = find_runner(row)
        if row.state is not JobState.RUNNING or process is None:
            raise UsageError(f"job {job_id} ({row.name}) is {row.state}: there is nothing to send a signal to")
        process.send_signal(number)

    def read_logs(self, job_id: str) -> Iterator[str]:
        """Yield the output so far of all attempts."""
        row = self._get_record(job_id)
        with open(self.database.job_dir(row.id) / OUTPUT_FILE, encoding="utf-8", errors="replace") as file:
            for line in file:
                yield line.rstrip("\n")

    def follow_logs(self, job_id: str) -> LogReader:
        """Follow the output of all attempts."""
        row = self._get_record(job_id)
        return printed_lines(self.database.job_dir(row.id) / OUTPUT_FILE)

    def cancel(self, job_id: str) -> None:
        """Cancel a job. A running job is asked to save, and killed if it has not ended after its warning time."""
        row = self._get_record(job_id)
        if row.state is JobState.QUEUED:
            values = {"state": JobState.CANCELLED, "cancelled": 1, "reason": "cancelled"}
            if self.database.update_if(row.id, JobState.QUEUED, ended=self.database.clock(), **values):
                (self.database.job_dir(row.id) / "secrets.json").unlink(missing_ok=True)
                return
            row = self._get_record(job_id)  # it was started just now
        if not row.cancelled and self.database.update_if(row.id, JobState.RUNNING, cancelled=CANCEL_REQUESTED):
            self._ensure_daemon_running(self.database.folder, True)

    def pause(self, job_id: str, reason: str) -> None:
        """Ask a running job to save and stop; start no attempt of it until it is resumed, also after a reboot."""
        row = self._get_record(job_id)
        if row.state.is_final:
            raise UsageError(f"job {job_id} ({row.name}) is {row.state}: there is nothing to pause")
        job_dir = self.database.job_dir(row.id)
        write_pause(job_dir, reason)
        row = self._get_record(job_id)  # the daemon may have started it just now
        if row.state is JobState.RUNNING:
            process = find_runner(row)
            if process is None:
                remove_pause(job_dir)
                raise UsageError(f"job {job_id} ({row.name}) starts or ends just now; pause it again")
            process.terminate()

    def resume(self, job_id: str) -> bool:
        """Start the next attempt of a paused job as soon as there is a place."""
        row = self._get_record(job_id)
        job_dir = self.database.job_dir(row.id)
        was_paused = read_pause(job_dir) is not None
        remove_pause(job_dir)
        self.database.update_if(row.id, JobState.QUEUED, due=None, reason=None)  # which the daemon sees
        self._ensure_daemon_running(self.database.folder, True)
        return was_paused

    def delete_job(self, job_id: str) -> None:
        """Delete a finished job with its output and its snapshot. Raises UsageError when it has not ended."""
        row = self._get_record(job_id)
        if not self.database.delete_job(row.id):
            raise UsageError(f"job {job_id} ({row.name}) is {row.state}: only ended jobs can be pruned")

    def list_ended_before(self, seconds: float) -> list[str]:
        """Return the ids of jobs that ended more than `seconds` ago."""
        return [str(id) for id in self.database.list_ended_before(seconds)] if queue_exists(self.folder) else []

    def list_nodes(self) -> list[BackendNode]:
        drain_reason = read_pause(self.folder, DRAIN_FILE)
        running = [status.id for status in self.list_jobs() if status.state is JobState.RUNNING]
        service = NodeService.OPEN if drain_reason is None else NodeService.DRAINED
        return [
            BackendNode(
                name=os.uname().nodename,
                state="busy" if running else "idle",
                service=service,
                jobs=tuple(running),
                reason=drain_reason,
                num_gpus=self._machine().num_gpus,
            )
        ]

    def drain_node(self, node: str, reason: str, actor: str) -> None:
        """Start no job of the queue until this machine is undrained, also after a reboot."""
        write_pause(self.database.folder, f"{reason} ({actor})", DRAIN_FILE)

    def undrain_node(self, node: str) -> None:
        """Start jobs of the queue again."""
        remove_pause(self.folder, DRAIN_FILE)
        self.restart_dead_daemon()

    def _explain_waiting(self, statuses: list[JobStatus]) -> list[JobStatus]:
        """Queued jobs wait for the machine to be undrained, if it is drained, and paused ones to be resumed."""
        drain_reason, found = self._explain_drain(), []
        for each in statuses:
            reason = drain_reason
            if each.state is JobState.QUEUED:
                pause_reason = read_pause(self.database.job_dir(int(each.id)))
                reason = reason if pause_reason is None else f"{PAUSED_PREFIX}{pause_reason}"
            is_held = each.state is JobState.QUEUED and reason is not None
            found.append(replace(each, reason=reason) if is_held else each)
        return found

    def _explain_drain(self) -> str | None:
        """Why this machine starts no jobs, if it is drained."""
        if (drain := read_pause(self.folder, DRAIN_FILE)) is None:
            return None
        return f"this machine is drained: {drain}; `phalanx nodes undrain {os.uname().nodename}` starts jobs again"

    def restart_dead_daemon(self) -> None:
        """Restart a daemon that was killed while jobs wait or run. Looking at a live one's lock takes microseconds."""
        is_due = self._clock() - self._last_daemon_start >= DAEMON_START_INTERVAL_S
        if not is_due or not queue_exists(self.folder) or not self.database.has_open_jobs():
            return
        if self._ensure_daemon_running(self.folder, False):
            logger.info("jobs wait or run in %s without a daemon: started one", self.folder)
            self._last_daemon_start = self._clock()

    def _get_record(self, job_id: str) -> JobRecord:
        known = job_id.isascii() and job_id.isdigit() and len(job_id) < MAX_ID_DIGITS
        row = self.database.get_job(int(job_id)) if known and queue_exists(self.folder) else None
        if row is None:
            raise NoSuchJobError(self.name, job_id)
        return row

    def _resources_for(self, job: Job) -> Resources:
        """Return the resources of a job. The default is all cores, or a share of them equal to its share of the GPUs.
        Raises UsageError when the job can never fit on this machine."""
        machine = self._machine()
        num_gpus = machine.num_gpus
        if job.num_nodes > 1:
            raise UsageError(
                f"job {job.name} wants {job.num_nodes} nodes, and the local queue has this machine only; --on slurm, "
                "kubernetes or ray has more"
            )
        if job.backend_options:
            raise UsageError(f"option {next(iter(job.backend_options))}: the local queue has no options of its own")
        if job.memory_bytes is not None:
            raise UsageError(f"job {job.name}: the local queue does not limit memory; leave out --memory")
        if job.gpus_per_node > num_gpus:
            raise UsageError(f"job {job.name} wants {job.gpus_per_node} GPUs, and this machine has {num_gpus}")
        cpu_share = (
            machine.physical_cores * job.gpus_per_node // num_gpus
            if job.gpus_per_node and num_gpus
            else machine.physical_cores
        )
        num_cpus = job.cpus_per_node or max(1, cpu_share)
        if num_cpus > machine.physical_cores:
            raise UsageError(f"job {job.name} wants {num_cpus} cores, and this machine has {machine.physical_cores}")
        return Resources(job.gpus_per_node, num_cpus)


def inherit_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the submitter's environment that a job of this machine inherits: paths of programs and
    libraries, devices, and what jobs inherit on every backend, except names that look like secrets."""
    found = inherit_variables(environment)
    for name, value in environment.items():
        wanted = name in INHERITED_VARIABLES or name.startswith(INHERITED_PREFIXES)
        if wanted and not is_secret(name):
            found[name] = value
    found["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), found.get("PATH", os.defpath)])
    return found
