"""The Slurm backend: sbatch submits a script that starts the command once per node with srun. It needs no accounting
database, but a shared file system for $PHALANX_STATE_DIR and for the job's working directory. A snapshot is unpacked
below $PHALANX_STATE_DIR.

Each job has a directory there with its scripts, its log and its results (`batch_script.py`). The scripts requeue an
unfinished job. They cannot exclude unfit nodes; the process that polls the job does.
"""

import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from phalanx.errors import UsageError
from phalanx.jobs.backends.base import (
    PAUSED_PREFIX,
    Backend,
    LogReader,
    NoSuchJobError,
    SubmitRequest,
    add_inherited_variables,
    read_secrets,
)
from phalanx.jobs.backends.slurm.batch_script import (
    BATCH_FILE,
    CANCELLED_FILE,
    ID_FILE,
    LOG_FILE,
    RUN_FILE,
    SECRETS_FILE,
    TOKEN_FILE,
    UNFIT_FILE,
    SlurmJobDirs,
    read_result_file,
    render_array_scripts,
    render_scripts,
    write_job_dir,
    write_private_file,
)
from phalanx.jobs.backends.slurm.programs import (
    COMPLETING_REASON,
    QUEUE_FORMAT,
    SIZES_COMMAND,
    UNSET_VALUES,
    NodeSize,
    RunProgram,
    SlurmNodes,
    add_node_share,
    clean_error,
    expand_hostlist,
    is_command,
    is_held,
    parse_live_status,
    parse_node_sizes,
    parse_past_status,
    parse_queue,
    run_program,
)
from phalanx.jobs.backends.slurm.sbatch_options import Version
from phalanx.jobs.log_stream import printed_lines
from phalanx.jobs.pause_file import is_paused, read_pause, remove_pause, write_pause
from phalanx.jobs.spec import Job, JobState, JobStatus, is_array_member
from phalanx.run.private_files import state_root

logger = logging.getLogger(__name__)

QUEUE_MAX_AGE_S = 5.0
"""Seconds for which an answer of squeue is reused while jobs are polled: one controller serves all users."""
NO_JOBS_TEXT = "Invalid job id"
"""The answer of scontrol for an unknown job, and of squeue for a user without jobs."""
NODES_UNAVAILABLE_TEXT = "Requested node configuration is not available"
"""Slurm's answer when more nodes are requested than exist or are in service."""


@dataclass(frozen=True)
class _Queue:
    """An answer of squeue for all jobs. `folders`: directories of the jobs that were submitted before the query. Slurm
    has forgotten those that are not in `jobs`."""

    asked_at: float
    folders: Mapping[str, Path]
    jobs: Mapping[str, Mapping[str, str]]
    error: UsageError | None = None


class SlurmBackend(SlurmNodes, Backend):
    """The Slurm backend. `run_program` runs Slurm's programs; `folder` contains the directories of jobs. One squeue
    answers for all jobs, and is reused for QUEUE_MAX_AGE_S while jobs are polled."""

    name = "slurm"

    def __init__(
        self,
        run_program: RunProgram = run_program,
        folder: Path | None = None,
        environ: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
    ):
        super().__init__(run_program)
        self._environ, self._clock = environ, clock
        self._dirs = SlurmJobDirs((folder or state_root(environ) / "slurm").absolute())
        self._version: Version | None = None
        self._node_sizes: list[NodeSize] | None = None
        self._queue: _Queue | None = None

    def render(self, job: Job) -> SubmitRequest:
        """Both scripts, and how they are sent. Values of secrets are not in them."""
        version, job = self.get_version(), self._complete(job)
        folder = self._dirs.make_new_path(job.name)
        return self._make_request((job,), folder, render_scripts(job, version, folder))

    def render_array(self, jobs: Sequence[Job]) -> list[SubmitRequest]:
        """Return the scripts of a job array: one request for all members."""
        version, jobs = self.get_version(), [self._complete(job) for job in jobs]
        folder = self._dirs.make_new_path(jobs[0].array_name or jobs[0].name)
        request = self._make_request(jobs, folder, render_array_scripts(jobs, version, folder))
        return [replace(request, array_jobs=tuple(jobs))]

    def submit(self, request: SubmitRequest) -> str:
        """Write the job's folder, ask Slurm whether it could run the job, and send it."""
        (id,) = self._submit_files(request, request.job.name, {"": request.job})
        return id

    def submit_array(self, requests: Sequence[SubmitRequest]) -> list[str]:
        """Send a job array. The members' ids are ARRAY_INDEX."""
        (request,) = requests
        job = request.job
        members = {str(index): member for index, member in enumerate(request.array_jobs)}
        return self._submit_files(request, job.array_name or job.name, members)

    def poll(self, job_id: str) -> JobStatus:
        """Return the status from Slurm, or from the job's files when Slurm has forgotten it."""
        return self._find_job(job_id, QUEUE_MAX_AGE_S)[1]

    def list_jobs(self, array: str | None = None) -> list[JobStatus]:
        """Return the jobs that have a directory here."""
        folders = self._dirs.list_all()
        if array is not None:
            names = {id: self._dirs.job_name(folder) for id, folder in folders.items()}
            folders = {id: folders[id] for id, name in names.items() if is_array_member(id, name, array)}
        if not folders:
            return []
        queue = self._query_queue(folders)
        ordered = sorted(folders, key=lambda id: [int(number) for number in id.split("_")])
        return [self._get_status(id, folders[id], queue) for id in ordered]

    def release(self, job_id: str) -> bool:
        """Release a job that is held because of unfit nodes, without these nodes. Returns False for any other job."""
        folder = self._find_job_dir(job_id)
        marker = folder / UNFIT_FILE
        if not marker.exists() or is_paused(folder):
            return False
        found = self._query_queue([job_id], max_age_s=0.0).jobs.get(job_id, {})
        if found.get("JobState") != "PENDING" or not is_command(found, self._dirs.script_suffix(folder)):
            return False  # its script is still at its end
        excluded = self._run_checked(
            ["squeue", f"--jobs={job_id}", "--noheader", "--format=%x"], f"job {job_id}"
        ).strip()
        unfit = [*expand_hostlist("" if excluded in UNSET_VALUES else excluded), *marker.read_text().split()]
        self._run_checked(["scontrol", "update", f"JobId={job_id}", f"ExcNodeList={','.join(unfit)}"], f"job {job_id}")
        self._run_checked(["scontrol", "release", job_id], f"job {job_id}")
        self._queue = None
        marker.unlink(missing_ok=True)
        logger.info("released job %s without nodes %s", job_id, ", ".join(unfit))
        return True

    def pause(self, job_id: str, reason: str) -> None:
        """Hold a job, also after a requeue. The script of one that runs saves and requeues it as at the time limit."""
        folder, status = self._find_job(job_id)
        if status.state.is_final:
            raise UsageError(f"job {job_id} ({status.name}) is {status.state}: there is nothing to pause")
        is_running = status.state is JobState.RUNNING and status.reason != COMPLETING_REASON
        if is_running and not (folder / TOKEN_FILE.format(attempt=status.num_attempts - 1)).exists():
            raise UsageError(f"job {job_id} ({status.name}) starts just now; pause it again")  # it would be killed
        was_paused = is_paused(folder)
        self._run_checked(["scontrol", "uhold", job_id], f"job {job_id}")
        self._queue = None
        try:
            write_pause(folder, reason)
            if is_running:
                self._run_checked(["scancel", "--batch", "--signal=USR1", job_id], f"job {job_id}")
        except BaseException:
            if not was_paused:  # a job that stays held would not start after its next requeue
                remove_pause(folder)
                self._run_program(["scontrol", "release", job_id])
            raise

    def resume(self, job_id: str) -> bool:
        """Release a job that is held by `pause` or because of unfit nodes; without these nodes."""
        folder, status = self._find_job(job_id)
        if status.state.is_final:
            return False
        if not is_paused(folder):
            return self.release(job_id)
        if not (folder / UNFIT_FILE).exists():
            self._run_checked(["scontrol", "release", job_id], f"job {job_id}")
        self._queue = None
        remove_pause(folder)
        self.release(job_id)
        return True

    def send_signal(self, job_id: str, number: int) -> None:
        """Send a signal to every process of the step; the batch script does not get it."""
        _, status = self._find_job(job_id)
        if status.state is not JobState.RUNNING:
            raise UsageError(f"{job_id} ({status.name}) does not run, it is {status.state}")
        self._run_checked(
            ["scancel", f"--signal={number}", f"{job_id}.0"], f"{job_id} ({status.name}) does not run at this moment"
        )

    def read_logs(self, job_id: str) -> Iterator[str]:
        """Yield the output so far of all nodes and attempts, in the order in which it was printed."""
        log = self._find_job_dir(job_id) / LOG_FILE
        if log.exists():
            with open(log, errors="replace", newline="\n") as lines:
                for line in lines:
                    yield line.rstrip("\n")

    def follow_logs(self, job_id: str) -> LogReader:
        """Follow the output of all nodes."""
        return printed_lines(self._find_job_dir(job_id) / LOG_FILE)

    def cancel(self, job_id: str) -> None:
        folder, status = self._find_job(job_id)
        if status.state.is_final:
            return
        (folder / CANCELLED_FILE).touch()  # first: its script must not queue it again
        self._run_checked(["scancel", job_id], f"job {job_id}")
        self._queue = None
        (folder / SECRETS_FILE).unlink(missing_ok=True)

    def get_version(self) -> Version:
        """Slurm's version, such as (22, 5, 8)."""
        if self._version is None:
            code, out, err = self._run_program(["sbatch", "--version"])
            if code == 127:
                raise UsageError("slurm: sbatch is not installed here, or not in PATH; submit from a login node of it")
            found = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", out)
            if code:
                raise UsageError(f"slurm: sbatch --version: {clean_error(err)}")
            if not found:
                raise UsageError(f"slurm: sbatch --version says {out.strip()!r}; expected a version")
            self._version = tuple(int(number) for number in found.groups() if number is not None)
        return self._version

    def _complete(self, job: Job) -> Job:
        """Add the variables of the submitter, and the job's share of a node's cores and memory."""
        job = add_inherited_variables(job, self._environ, shares_files=True)
        if job.cpus_per_node is not None and job.memory_bytes is not None:
            return job
        if self._node_sizes is None:
            partition = job.backend_options.get("partition")
            command = [*SIZES_COMMAND, *([f"--partition={partition}"] if partition else [])]
            self._node_sizes = parse_node_sizes(self._run_program(command)[1])
        return add_node_share(job, self._node_sizes)

    def _make_request(self, jobs: Sequence[Job], folder: Path, texts: Mapping[str, str]) -> SubmitRequest:
        job, script = jobs[0], str(folder / BATCH_FILE)
        if "container-image" in job.backend_options and "--container-image" not in self._run_checked(
            ["srun", "--help"]
        ):
            raise UsageError(f"job {job.name}: option container-image needs pyxis, which this Slurm does not have")
        files = {str(folder / name): text for name, text in texts.items()}
        return SubmitRequest(
            self.name, job, files, (("sbatch", "--test-only", script), ("sbatch", "--parsable", script))
        )

    def _submit_files(self, request: SubmitRequest, name: str, jobs: Mapping[str, Job]) -> list[str]:
        """Submit a job, or the members of an array by the names of their directories. Returns their ids."""
        values = read_secrets(request.job, self._environ)
        for job in jobs.values():
            if job.snapshot is None and not job.working_dir.is_dir():
                raise UsageError(f"job {job.name}: its folder {job.working_dir} is not there")
        test, send = request.commands
        folder = Path(send[-1]).parent
        with self._dirs.hold_lock():
            self._check_name(name)
            try:
                folder.mkdir(mode=0o700)
            except FileExistsError:
                raise UsageError(f"job {name}: another one took {folder} meanwhile; submit it once more") from None
            try:
                for own, job in jobs.items():
                    write_job_dir(folder / own, job, values)
                for path, text in request.files.items():
                    write_private_file(Path(path), text)
                self._check_accepted(request.job, test)
                id = self._run_checked(send, f"job {name}").strip().partition(";")[0]
            except BaseException:
                shutil.rmtree(folder)
                raise
            ids = {own: f"{id}_{own}" if own else id for own in jobs}
            try:
                for own, each in ids.items():
                    write_private_file(folder / own / ID_FILE, f"{each}\n")
            except BaseException:
                self._run_program(["scancel", id])  # without the file the job could not be found again
                raise
        return list(ids.values())

    def _query_queue(self, ids: Iterable[str], max_age_s: float = QUEUE_MAX_AGE_S) -> _Queue:
        """What squeue says of these jobs and all others: as it said before, unless that is older or does not cover
        them. So is an error, or a controller that is down would be asked the more often."""
        last = self._queue
        if last is None or self._clock() - last.asked_at >= max_age_s or not last.folders.keys() >= set(ids):
            folders = self._dirs.list_all()  # first: what is submitted meanwhile counts as not asked for
            code, out, err = self._run_program(
                ["squeue", "--me", "--array", "--noheader", "--states=all", f"--Format={QUEUE_FORMAT}"]
            )
            if code and NO_JOBS_TEXT in err:
                code, out = 0, ""
            error = UsageError(f"slurm does not answer: {clean_error(err)}") if code else None
            last = self._queue = _Queue(self._clock(), folders, {} if code else parse_queue(out), error)
        if last.error is not None:
            raise last.error
        return last

    def _get_status(self, id: str, folder: Path, queue: _Queue) -> JobStatus:
        name = self._dirs.job_name(folder)
        found = queue.jobs.get(id)
        result = read_result_file(folder)
        submitted = (folder / ID_FILE).stat().st_mtime
        run = (folder / RUN_FILE).read_text().removesuffix("\n") if (folder / RUN_FILE).exists() else None
        if found is None or not is_command(found, self._dirs.script_suffix(folder)):
            is_cancelled = (folder / CANCELLED_FILE).exists()
            return replace(parse_past_status(id, name, is_cancelled, submitted, result), run_dir=run)
        status = parse_live_status(id, name, found, submitted, result)
        if status.state is not JobState.QUEUED:
            return replace(status, run_dir=run)
        if is_held(found) and (pause_reason := read_pause(folder)) is not None:
            status = replace(status, reason=f"{PAUSED_PREFIX}{pause_reason}")
        elif (folder / UNFIT_FILE).exists():
            unfit = ", ".join((folder / UNFIT_FILE).read_text().split())
            remedy = f"`phalanx jobs resume {id} --on slurm` continues it on other nodes"
            status = replace(status, reason=f"is held because of unfit nodes ({unfit}): {remedy}")
        return replace(status, run_dir=run)

    def _check_accepted(self, job: Job, test: Sequence[str]) -> None:
        """Whether Slurm could ever run a job. That nodes are out of service for now is no reason to refuse it."""
        code, _, err = self._run_program(test)
        if code == 0:
            return
        partition = job.backend_options.get("partition")
        nodes: dict[str, str] = {}  # of the partition, or of the default's
        if NODES_UNAVAILABLE_TEXT in err:
            listed = self._run_checked(["sinfo", "--noheader", "--Node", "--format=%N %P %T"])
            for name, named, state, *_ in (line.split() for line in listed.splitlines()):
                if named.rstrip("*") == partition if partition else named[-1] == "*":
                    nodes[name] = state
        if nodes and job.num_nodes > len(nodes):
            size_text = f"{len(nodes)} nodes" if len(nodes) > 1 else "1 node"
            raise UsageError(
                f"job {job.name}: it needs {job.num_nodes} nodes, and {partition or 'the default partition'} has "
                f"{size_text}: {clean_error(err)}"
            )
        if not any(state.startswith(("down", "drain", "fail", "maint", "unk")) for state in nodes.values()):
            raise UsageError(f"job {job.name}: {clean_error(err)}")

    def _check_name(self, name: str) -> None:
        folders = self._dirs.list_all()
        same_name = [id for id in folders if self._dirs.find_array_dir(folders[id]).name.rpartition("-")[0] == name]
        if not same_name:
            return
        queue = self._query_queue(same_name, max_age_s=0.0)
        for id in same_name:
            status = self._get_status(id, folders[id], queue)
            if not status.state.is_final:
                raise UsageError(f"job {name}: there is one of this name already, {id}, and it is {status.state}")

    def _find_job(self, job_id: str, max_age_s: float = 0.0) -> tuple[Path, JobStatus]:
        """Return the directory and the status of a job, as squeue says it now or said it `max_age_s` ago."""
        folder = self._find_job_dir(job_id)
        return folder, self._get_status(job_id, folder, self._query_queue([job_id], max_age_s))

    def _find_job_dir(self, job_id: str) -> Path:
        known = {} if self._queue is None else self._queue.folders
        found = known.get(job_id) or self._dirs.list_all().get(job_id)
        if found is None:
            raise NoSuchJobError(self.name, job_id)
        return found
