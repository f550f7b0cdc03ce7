"""The Ray backend. It uses Ray's job submission API: Ray runs a driver, which starts the command on each node. It needs
only the address of the dashboard; Phalanx must be installed on the cluster.

The id of a job is Ray's submission id, followed by @ADDRESS if the job named an address. All users of the dashboard can
see a job's entrypoint and environment. So secrets go through a file in the job's directory, which only its owner can
read and which the driver removes. They are refused if the directory is not shared.
"""

import json
import logging
import os
import secrets
import shlex
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.errors import UsageError
from phalanx.jobs.backends.base import (
    Backend,
    BackendNode,
    NodeService,
    NoSuchJobError,
    SubmitRequest,
    add_inherited_variables,
    backend_option,
    group_running_jobs,
    parse_backend_options,
    parse_choice,
    parse_count,
    read_secrets,
)
from phalanx.jobs.backends.ray.driver_spec import (
    JOB_ID_VARIABLE,
    NO_NODE,
    NOT_PAUSED,
    SNAPSHOT_FILE,
    DriverSpec,
    parse_driver_state,
    secrets_path,
    strip_ray_preamble,
)
from phalanx.jobs.spec import SNAPSHOT_DIGEST_VARIABLE, Job, JobState, JobStatus, is_array_member, state_from_exit_code

PLACEMENT_STRATEGIES = ("STRICT_SPREAD", "SPREAD", "PACK", "STRICT_PACK")
logger = logging.getLogger(__name__)

DEFAULT_ADDRESS = "http://127.0.0.1:8265"
DRIVER_MODULE = "phalanx.jobs.backends.ray.driver"
JOB_NAME_KEY = "phalanx-job"
NUM_NODES_KEY = "phalanx-nodes"
WORKING_DIR_KEY = "phalanx-folder"
RUN_DIR_KEY = "phalanx-run"
"""Keys of a job's metadata: its name, how many nodes it has, its folder, and the run that it trains."""
GENERATED_PLACEHOLDER = "<drawn when it is submitted>"
SNAPSHOT_PLACEHOLDER = "<a folder with the code>"
REQUEST_FILE = "ray-job.json"
MAX_LISTED_NODES = 10_000
"""Nodes of a list, at most, which is also Ray's own limit."""
SIGNAL_TIMEOUT_S, SIGNAL_POLL_INTERVAL_S = 30.0, 0.1
"""Seconds for a signal to be delivered, and between two polls of whether it was."""


@dataclass(frozen=True)
class RayOptions:
    """A job's options, checked."""

    address: str | None = backend_option(
        "Address of the dashboard.", "URL", shown_default="RAY_API_SERVER_ADDRESS, RAY_ADDRESS, else port 8265 here"
    )
    strategy: str | None = backend_option(
        "Placement strategy of the nodes.",
        "|".join(PLACEMENT_STRATEGIES),
        shown_default="STRICT_SPREAD with several nodes, else PACK",
        parse=parse_choice(*PLACEMENT_STRATEGIES),
    )
    patience: int = backend_option("Seconds to wait for machines.", "NUMBER", 600, parse=parse_count)
    max_restarts: int = backend_option("Maximum number of restarts.", "NUMBER", 10, parse=parse_count)
    python: str = backend_option("Python of the cluster's machines, which has Phalanx.", "PATH", "python")


class RayBackend(Backend):
    """The Ray backend. `address`: that of the dashboard."""

    name = "ray"

    def __init__(self, address: str | None = None, environ: Mapping[str, str] = os.environ):
        self._address, self._environ = address, environ
        self._clients: dict[str, Any] = {}

    def render(self, job: Job) -> SubmitRequest:
        job = add_inherited_variables(job, self._environ, shares_files=False)
        options: RayOptions = parse_backend_options(job, "ray", RayOptions)
        _check_job(job)
        task = make_driver_spec(job)
        words = (options.python, "-P", "-m", DRIVER_MODULE, "run", task.to_json())
        # By default Ray kills a job after 3 s; the driver needs the warning time to end the nodes.
        variables = {"RAY_JOB_STOP_WAIT_TIME_S": str(int(job.warning_s) + 15), JOB_ID_VARIABLE: GENERATED_PLACEHOLDER}
        environment: dict[str, Any] = {"env_vars": variables}
        if job.snapshot is not None:
            environment["working_dir"] = SNAPSHOT_PLACEHOLDER
        metadata = {JOB_NAME_KEY: job.name, NUM_NODES_KEY: str(job.num_nodes), WORKING_DIR_KEY: str(job.working_dir)}
        sent = {
            "submission_id": GENERATED_PLACEHOLDER,
            "entrypoint": shlex.join(words),
            "runtime_env": environment,
            "metadata": metadata | ({} if job.run_dir is None else {RUN_DIR_KEY: str(job.run_dir)}),
        }
        return SubmitRequest(self.name, job, {REQUEST_FILE: json.dumps(sent, indent=2)})

    def submit(self, request: SubmitRequest) -> str:
        """Give it an id, and send it. Its secrets lie in its folder until its driver has read them."""
        job, sent = request.job, json.loads(request.files[REQUEST_FILE])
        secret_values = read_secrets(job, self._environ)
        address = job.backend_options.get("address")
        client = self._client(address)
        with _translate_ray_errors("listing jobs"):
            active_jobs = [info for info in client.list_jobs() if not info.status.is_terminal()]
        same_name = [info.submission_id for info in active_jobs if (info.metadata or {}).get(JOB_NAME_KEY) == job.name]
        if same_name:
            raise UsageError(f"job {job.name}: that name is taken by {same_name[0]}; stop it, or take another")
        submission = f"{job.name}-{secrets.token_hex(4)}"
        sent["submission_id"] = sent["runtime_env"]["env_vars"][JOB_ID_VARIABLE] = submission
        file = secrets_path(str(job.working_dir), submission)
        if job.secrets:
            file.touch(mode=0o600, exist_ok=False)
            file.write_text(json.dumps(secret_values))
        try:
            what = f"submitting job {job.name}"
            with _translate_ray_errors(what), tempfile.TemporaryDirectory(prefix="phalanx-code-") as folder:
                if job.snapshot is not None:  # as one file, of which Ray leaves nothing out
                    (Path(folder) / SNAPSHOT_FILE).write_bytes(job.snapshot.tar)
                    sent["runtime_env"]["working_dir"] = folder
                client.submit_job(**sent)
        except BaseException:
            file.unlink(missing_ok=True)
            raise
        logger.info("submitted job %s with driver %s", submission, sent["entrypoint"].partition(" run ")[0])
        return submission if address is None else f"{submission}@{address}"

    def poll(self, job_id: str) -> JobStatus:
        return self._read_status(job_id, self._info(job_id))

    def _read_status(self, job_id: str, info: Any) -> JobStatus:
        """Return the status of a job from its record in Ray and its log."""
        log = ""
        if str(info.status) != "PENDING":
            submission, client = self._find(job_id)
            with _translate_ray_errors(f"reading the log of {job_id}"):
                log = client.get_job_logs(submission)
        return parse_status(job_id, info, log)

    def list_jobs(self, array: str | None = None) -> list[JobStatus]:
        """Return the jobs of all users that Phalanx submitted to the backend's address."""
        with _translate_ray_errors("listing jobs"):
            found = [info for info in self._client(None).list_jobs() if JOB_NAME_KEY in (info.metadata or {})]
        if array is not None:
            found = [info for info in found if is_array_member(info.submission_id, info.metadata[JOB_NAME_KEY], array)]
        found.sort(key=lambda info: (info.start_time or 0, info.submission_id))
        return [self._read_status(info.submission_id, info) for info in found]

    def send_signal(self, job_id: str, number: int) -> None:
        """A second, small job on the cluster reaches the nodes of the first."""
        info = self._info(job_id)
        if str(info.status) != "RUNNING":
            raise UsageError(f"{job_id}: it does not run, so that nothing can be signalled")
        name = signal.Signals(number).name
        if self._order(job_id, info, name, "signal", info.metadata[NUM_NODES_KEY], str(int(number))) == NO_NODE:
            raise UsageError(f"{job_id}: none of its nodes runs, so that nothing can be signalled")

    def pause(self, job_id: str, reason: str) -> None:
        """Have the job's driver end its nodes, which get the job's warning time to save, and wait."""
        info = self._info(job_id)
        if info.status.is_terminal():
            raise UsageError(f"{job_id}: it has ended: there is nothing to pause")
        if self._order(job_id, info, "the pause", "pause", reason) == NO_NODE:
            raise UsageError(f"{job_id}: its driver starts or ends just now; pause it again")

    def resume(self, job_id: str) -> bool:
        """Have the driver of a paused job start its nodes again."""
        info = self._info(job_id)
        return not info.status.is_terminal() and self._order(job_id, info, "the resume", "resume") == 0

    def _order(self, job_id: str, info: Any, what: str, *order: str) -> int:
        """Run a verb of the driver as a second, small job; return its exit code: 0, NO_NODE or NOT_PAUSED."""
        submission, client = self._find(job_id)
        verb, *rest = order
        words = (shlex.split(info.entrypoint)[0], "-P", "-m", DRIVER_MODULE, verb, submission, *rest)
        deadline = time.monotonic() + SIGNAL_TIMEOUT_S
        while True:
            with _translate_ray_errors(f"sending {what} to {job_id}"):
                ended = _run(client, shlex.join(words), deadline)
            if ended is None:
                raise UsageError(f"{job_id}: {what} did not arrive within {SIGNAL_TIMEOUT_S:g} s")
            if str(ended.status) == "SUCCEEDED":
                return 0
            if ended.driver_exit_code in (NO_NODE, NOT_PAUSED):
                return int(ended.driver_exit_code)
            if time.monotonic() > deadline:  # a busy cluster may fail to start it, or to let it in
                raise UsageError(f"{job_id}: {what} was not sent: {ended.message}")

    def read_logs(self, job_id: str) -> Iterator[str]:
        self._info(job_id)
        submission, client = self._find(job_id)
        with _translate_ray_errors(f"reading the log of {job_id}"):
            yield from strip_ray_preamble(client.get_job_logs(submission))

    def cancel(self, job_id: str) -> None:
        """Stop the job. Its nodes get the job's warning time to save."""
        info = self._info(job_id)
        submission, client = self._find(job_id)
        if not info.status.is_terminal():
            with _translate_ray_errors(f"stopping {job_id}"):
                client.stop_job(submission)
        # a driver that never started has not removed it
        secrets_path(info.metadata[WORKING_DIR_KEY], submission).unlink(missing_ok=True)

    def list_nodes(self) -> list[BackendNode]:
        """Return the machines of the cluster, by their IP addresses, as Ray names them in a job."""
        client = self._client(None)
        from ray.util.state import list_nodes
        from ray.util.state.exception import RayStateApiException

        try:
            with _translate_ray_errors("listing nodes"):
                found = list_nodes(address=client.get_address(), limit=MAX_LISTED_NODES)
        except RayStateApiException as error:
            raise UsageError(f"listing nodes: Ray does not answer: {error}") from error
        jobs = group_running_jobs(self.list_jobs())
        return [parse_node(node, jobs) for node in found]

    def drain_node(self, node: str, reason: str, actor: str) -> None:
        """Raises UsageError: a drain in Ray cannot be undone, and its API is private."""
        raise UsageError(
            f"{node}: a drain in Ray cannot be undone, so Phalanx does not start one; run `ray stop` on the node to "
            "take it out, and `ray start` to bring it back. A job excludes a node that ends with exit code 77"
        )

    def undrain_node(self, node: str) -> None:
        """Raises UsageError: nodes of Ray are not drained."""
        raise UsageError(f"{node}: Ray drains no nodes; run `ray start` on one that was taken out")

    def _find(self, job_id: str) -> tuple[str, Any]:
        """Return Ray's submission id of a job, and the client for its cluster."""
        submission, _, address = job_id.partition("@")
        return submission, self._client(address or None)

    def _info(self, job_id: str) -> Any:
        submission, client = self._find(job_id)
        with _translate_ray_errors(f"asking for {job_id}"):
            try:
                info = client.get_job_info(submission)
            except RuntimeError as error:
                if "404" in str(error):
                    raise NoSuchJobError(self.name, job_id) from None
                raise
        if JOB_NAME_KEY not in (info.metadata or {}):
            raise NoSuchJobError(self.name, job_id)
        return info

    def _client(self, address: str | None) -> Any:
        configured = (self._environ.get(name) for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"))
        url = address or self._address or next(filter(None, configured), DEFAULT_ADDRESS)
        if not url.startswith(("http://", "https://")):
            expected = f"the dashboard's, such as {DEFAULT_ADDRESS} (option address, or RAY_ADDRESS)"
            raise UsageError(f"Ray's address {url}: expected {expected}")
        if url not in self._clients:
            logger.debug("connecting to Ray at %s", url)
            try:
                from ray.job_submission import JobSubmissionClient
            except ImportError:
                raise UsageError("jobs on Ray need it here, too: pip install 'phalanx[ray]'") from None
            with _translate_ray_errors("connecting to Ray"):
                self._clients[url] = JobSubmissionClient(url)
        return self._clients[url]


def make_driver_spec(job: Job) -> DriverSpec:
    """A job in the words of its driver."""
    options: RayOptions = parse_backend_options(job, "ray", RayOptions)
    return DriverSpec(
        command=job.command,
        working_dir=str(job.working_dir) if job.snapshot is None else job.snapshot.start_dir,
        num_nodes=job.num_nodes,
        gpus_per_node=job.gpus_per_node,
        cpus_per_node=job.cpus_per_node or job.min_cpus_per_node,
        memory_bytes=job.memory_bytes,
        time_limit_s=job.time_limit_s,
        warning_s=job.warning_s,
        environment=dict(job.environment)
        | ({} if job.snapshot is None else {SNAPSHOT_DIGEST_VARIABLE: job.snapshot.digest}),
        secrets=job.secrets,
        strategy=options.strategy or ("STRICT_SPREAD" if job.num_nodes > 1 else "PACK"),
        placement_timeout_s=float(options.patience),
        max_restarts=options.max_restarts,
        min_nodes=job.min_nodes,
    )


def parse_status(job_id: str, info: Any, log: str) -> JobStatus:
    """Return the status of a job from Ray's record and its log."""
    driver_state = parse_driver_state(strip_ray_preamble(log))
    state = JobState.QUEUED
    code = info.driver_exit_code
    reason = info.message
    ray_status = str(info.status)
    if ray_status == "RUNNING":
        state = JobState.QUEUED if driver_state.is_waiting else JobState.RUNNING
        code, reason = None, driver_state.reason
    elif ray_status == "SUCCEEDED":
        state, code, reason = JobState.DONE, 0, None
    elif ray_status == "STOPPED":
        state, reason = JobState.CANCELLED, driver_state.reason
    elif ray_status == "FAILED":
        state = JobState.FAILED if code is None else state_from_exit_code(code)
        reason = driver_state.reason or info.message
    is_over = state.is_final and info.end_time
    return JobStatus(
        id=job_id,
        name=info.metadata[JOB_NAME_KEY],
        state=state,
        exit_code=code,
        num_attempts=driver_state.num_attempts,
        nodes=driver_state.nodes,
        reason=reason,
        submitted_at=info.start_time / 1000 if info.start_time else None,
        ended_at=info.end_time / 1000 if is_over else None,
        run_dir=info.metadata.get(RUN_DIR_KEY),
    )


def parse_node(node: Any, jobs: Mapping[str, tuple[str, ...]]) -> BackendNode:
    """Return a machine from its `NodeState`. `jobs`: ids of the jobs on each node, by its address."""
    is_alive = node.state == "ALIVE"
    return BackendNode(
        name=node.node_ip,
        state=node.state.lower(),
        service=NodeService.OPEN if is_alive else NodeService.DOWN,
        jobs=jobs.get(node.node_ip, ()),
        reason=None if is_alive else node.state_message or None,
        num_gpus=int((node.resources_total or {}).get("GPU", 0)),
        host_names=(node.node_name,) if node.node_name not in (None, "", node.node_ip) else (),
    )


def _check_job(job: Job) -> None:
    """Raise UsageError for what Ray cannot do."""
    job_text = f"job {job.name}"
    if job.max_parallel is not None:
        raise UsageError(f"{job_text}: Ray cannot limit the members of an array that run: it starts all that fit")
    if job.secrets and job.snapshot is not None:
        raise UsageError(
            f"{job_text}: all users of the cluster can read a snapshot's directory, so {job.secrets[0]} cannot be "
            "passed on; omit --snapshot, or set it where Ray is started on the machines"
        )
    if job.priority:
        raise UsageError(f"{job_text}: Ray has no priorities; omit the priority")


def _run(client: Any, command: str, deadline: float) -> Any:
    """Run a short job and return its info; None if it was stopped at the deadline."""
    job = client.submit_job(entrypoint=command)
    while not client.get_job_status(job).is_terminal():
        if time.monotonic() > deadline:
            client.stop_job(job)
            return None
        time.sleep(SIGNAL_POLL_INTERVAL_S)  # Ray does not notify of a job's end
    info = client.get_job_info(job)
    client.delete_job(job)
    return info


@contextmanager
def _translate_ray_errors(what: str) -> Iterator[None]:
    """UsageError for every way in which a request can fail."""
    try:
        yield
    except (ConnectionError, OSError) as error:
        raise UsageError(f"{what}: Ray does not answer: {error}; is its dashboard there (option address)?") from error
    except (RuntimeError, ValueError) as error:
        lines = str(error).strip().splitlines()
        raise UsageError(f"{what}: Ray refuses it: {lines[-1] if lines else error!r}") from error
