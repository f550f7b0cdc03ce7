"""Jobs on Ray, through its job submission API: Ray runs a driver (ray_driver), which starts the command on each node.
It needs only the address of the dashboard; Phalanx has to be installed on the cluster.

A job's id is Ray's submission id, with @ADDRESS behind it when the job named one. Ray shows a job's entrypoint and
environment to everybody who sees its dashboard: secrets go through a file in the job's folder that only its owner can
read, and that the driver removes. Where the folder is not shared, they are refused.
"""

import json
import os
import secrets
import shlex
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from phalanx.errors import UsageError
from phalanx.jobs.engine import Request, no_such_job
from phalanx.jobs.engines.ray_task import CODE_FILE, JOB, NO_NODE, Task, own_lines, secrets_file, told
from phalanx.jobs.spec import DIGEST, Job, State, Status, state_of

DEFAULT = "http://127.0.0.1:8265"
STRATEGIES = ("STRICT_SPREAD", "SPREAD", "PACK", "STRICT_PACK")
OPTIONS = ("address", "strategy", "patience", "max-restarts", "python")
MODULE = "phalanx.jobs.engines.ray_driver"
OURS, NODES, FOLDER, RUN = "phalanx-job", "phalanx-nodes", "phalanx-folder", "phalanx-run"
"""Keys of a job's metadata: its name, how many nodes it has, its folder, and the run that it trains."""
DRAWN = "<drawn when it is submitted>"
TRAVELS = "<a folder with the code>"
FILE = "ray-job.json"
ANSWER = 30.0
"""Seconds in which a signal has to arrive."""


class Ray:
    """The engine. `address` is that of the dashboard."""

    name = "ray"

    def __init__(
        self,
        address: str | None = None,
        environ: Mapping[str, str] = os.environ,
        unique: Callable[[], str] = lambda: secrets.token_hex(4),
    ):
        self._address, self._environ, self._unique = address, environ, unique
        self._clients: dict[str, Any] = {}

    def render(self, job: Job) -> Request:
        """What is sent to the API."""
        for option in job.options:
            if option not in OPTIONS:
                raise UsageError(f"job {job.name}: ray has no option {option!r}; known are {', '.join(OPTIONS)}")
        _check(job)
        task = task_of(job)
        words = (job.options.get("python", "python"), "-P", "-m", MODULE, "run", task.text())
        # Ray gives a job three seconds to end unless told otherwise; the driver ends nodes within the warning
        environment: dict[str, Any] = {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(int(job.warning) + 15), JOB: DRAWN}}
        if job.code is not None:
            environment["working_dir"] = TRAVELS
        sent = {
            "submission_id": DRAWN,
            "entrypoint": shlex.join(words),
            "runtime_env": environment,
            "metadata": {OURS: job.name, NODES: str(job.nodes), FOLDER: str(job.folder)}
            | ({} if job.run is None else {RUN: str(job.run)}),
        }
        return Request(self.name, job, {FILE: json.dumps(sent, indent=2)})

    def submit(self, request: Request) -> str:
        """Give it an id, and send it. Its secrets lie in its folder until its driver has read them."""
        job, sent = request.job, json.loads(request.files[FILE])
        missing = [name for name in job.secrets if name not in self._environ]
        if missing:
            raise UsageError(f"job {job.name}: its secret {missing[0]} is not in your environment; export it first")
        address = job.options.get("address")
        client = self._client(address)
        with _explained("listing jobs"):
            live = [info for info in client.list_jobs() if not info.status.is_terminal()]
        twins = [info.submission_id for info in live if (info.metadata or {}).get(OURS) == job.name]
        if twins:
            raise UsageError(f"job {job.name}: there is one of that name already, {twins[0]}; stop it, or take another")
        submission = f"{job.name}-{self._unique()}"
        sent["submission_id"] = sent["runtime_env"]["env_vars"][JOB] = submission
        file = secrets_file(str(job.folder), submission)
        if job.secrets:
            file.touch(mode=0o600, exist_ok=False)
            file.write_text(json.dumps({name: self._environ[name] for name in job.secrets}))
        try:
            what = f"submitting job {job.name}"
            with _explained(what), tempfile.TemporaryDirectory(prefix="phalanx-code-") as folder:
                if job.code is not None:  # as one file, of which Ray leaves nothing out
                    (Path(folder) / CODE_FILE).write_bytes(job.code.tar)
                    sent["runtime_env"]["working_dir"] = folder
                client.submit_job(**sent)
        except BaseException:
            file.unlink(missing_ok=True)
            raise
        return submission if address is None else f"{submission}@{address}"

    def poll(self, job: str) -> Status:
        info = self._info(job)
        log = ""
        if str(info.status) != "PENDING":
            submission, client = self._find(job)
            with _explained(f"reading the log of {job}"):
                log = client.get_job_logs(submission)
        return status_of(job, info, log)

    def jobs(self) -> list[Status]:
        """Those that Phalanx submitted to the engine's address, of everybody who may use it."""
        with _explained("listing jobs"):
            found = [info for info in self._client(None).list_jobs() if OURS in (info.metadata or {})]
        found.sort(key=lambda info: (info.start_time or 0, info.submission_id))
        return [self.poll(info.submission_id) for info in found]

    def signal(self, job: str, number: int) -> None:
        """A second, small job on the cluster reaches the nodes of the first."""
        info = self._info(job)
        submission, client = self._find(job)
        if str(info.status) != "RUNNING":
            raise UsageError(f"{job}: it does not run, so that nothing can be signalled")
        python = shlex.split(info.entrypoint)[0]
        words = (python, "-P", "-m", MODULE, "signal", submission, info.metadata[NODES], str(int(number)))
        deadline = time.monotonic() + ANSWER
        while True:
            with _explained(f"sending {signal.Signals(number).name} to {job}"):
                ended = _run(client, shlex.join(words), deadline)
            if ended is None:
                raise UsageError(f"{job}: the signal did not arrive within {ANSWER:g} s")
            if str(ended.status) == "SUCCEEDED":
                return
            if ended.driver_exit_code == NO_NODE:
                raise UsageError(f"{job}: none of its nodes runs, so that nothing can be signalled")
            if time.monotonic() > deadline:  # a busy cluster may fail to start it, or to let it in
                raise UsageError(f"{job}: the signal was not sent: {ended.message}")

    def logs(self, job: str) -> Iterator[str]:
        self._info(job)
        submission, client = self._find(job)
        with _explained(f"reading the log of {job}"):
            yield from own_lines(client.get_job_logs(submission))

    def cancel(self, job: str) -> None:
        """Its nodes may save for as long as the job's warning is."""
        info = self._info(job)
        submission, client = self._find(job)
        if not info.status.is_terminal():
            with _explained(f"stopping {job}"):
                client.stop_job(submission)
        # a driver that never started has not removed it
        secrets_file(info.metadata[FOLDER], submission).unlink(missing_ok=True)

    def _find(self, job: str) -> tuple[str, Any]:
        """Ray's own id of a job, and the client that knows it."""
        submission, _, address = job.partition("@")
        return submission, self._client(address or None)

    def _info(self, job: str) -> Any:
        submission, client = self._find(job)
        with _explained(f"asking for {job}"):
            try:
                info = client.get_job_info(submission)
            except RuntimeError as error:
                if "404" in str(error):
                    raise no_such_job(self.name, job) from None
                raise
        if OURS not in (info.metadata or {}):
            raise no_such_job(self.name, job)
        return info

    def _client(self, address: str | None) -> Any:
        named = (self._environ.get(name) for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"))
        where = address or self._address or next(filter(None, named), DEFAULT)
        if not where.startswith(("http://", "https://")):
            raise UsageError(
                f"Ray's address {where}: expected the dashboard's, such as {DEFAULT} (option address, or RAY_ADDRESS)"
            )
        if where not in self._clients:
            try:
                from ray.job_submission import JobSubmissionClient
            except ImportError:
                raise UsageError("jobs on Ray need it here, too: pip install 'phalanx[ray]'") from None
            with _explained("connecting to Ray"):
                self._clients[where] = JobSubmissionClient(where)
        return self._clients[where]


def task_of(job: Job) -> Task:
    """A job in the words of its driver."""
    return Task(
        command=job.command,
        folder=str(job.folder) if job.code is None else job.code.start,
        nodes=job.nodes,
        devices=job.devices,
        cores=job.cores or 1,
        memory=job.memory,
        limit=job.limit,
        warning=job.warning,
        environment=dict(job.environment) | ({} if job.code is None else {DIGEST: job.code.digest}),
        secrets=job.secrets,
        strategy=job.options.get("strategy", "STRICT_SPREAD" if job.nodes > 1 else "PACK"),
        patience=float(job.options.get("patience", "600")),
        max_restarts=int(job.options.get("max-restarts", "10")),
    )


def status_of(job: str, info: Any, log: str) -> Status:
    """What is known of a job from Ray's record of it and its log."""
    said, state, code, reason = told(own_lines(log)), State.QUEUED, info.driver_exit_code, info.message
    ray_says = str(info.status)
    if ray_says == "RUNNING":
        state = State.QUEUED if said.waits else State.RUNNING
        code, reason = None, said.reason
    elif ray_says == "SUCCEEDED":
        state, code, reason = State.DONE, 0, None
    elif ray_says == "STOPPED":
        state, reason = State.CANCELLED, said.reason
    elif ray_says == "FAILED":
        state = State.FAILED if code is None else state_of(code)
        reason = said.reason or info.message
    over = state.over and info.end_time
    return Status(
        id=job,
        name=info.metadata[OURS],
        state=state,
        code=code,
        attempts=said.attempts,
        nodes=said.nodes,
        reason=reason,
        submitted=info.start_time / 1000 if info.start_time else None,
        ended=info.end_time / 1000 if over else None,
        run=info.metadata.get(RUN),
    )


def _check(job: Job) -> None:
    """UsageError for what Ray cannot do, and for options that are wrong."""
    where, options = f"job {job.name}", job.options
    if job.at_most is not None:
        raise UsageError(f"{where}: Ray starts what there is room for, and does not count the members of an array")
    if job.secrets and job.code is not None:
        raise UsageError(
            f"{where}: what travels with a job can be read by everybody on the cluster, so that {job.secrets[0]} "
            "cannot be passed on; omit --snapshot, or set it where Ray is started on the machines"
        )
    if job.priority:
        raise UsageError(f"{where}: Ray knows no priorities; leave it away")
    if options.get("strategy", STRATEGIES[0]) not in STRATEGIES:
        raise UsageError(f"{where}: option strategy={options['strategy']}: expected one of {', '.join(STRATEGIES)}")
    for name in ("patience", "max-restarts"):
        if not options.get(name, "0").isascii() or not options.get(name, "0").isdigit():
            raise UsageError(f"{where}: option {name}={options[name]}: expected a whole number, 0 or more")
    if len(json.dumps(job.command)) + len(json.dumps(dict(job.environment))) > 100_000:
        raise UsageError(f"{where}: its command and environment are over 100,000 characters long; put them into a file")


def _run(client: Any, command: str, deadline: float) -> Any:
    """What Ray tells of a small job that has ended; None where it was stopped because it had not by then."""
    job = client.submit_job(entrypoint=command)
    while not client.get_job_status(job).is_terminal():
        if time.monotonic() > deadline:
            client.stop_job(job)
            return None
        time.sleep(0.1)
    info = client.get_job_info(job)
    client.delete_job(job)
    return info


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """UsageError for every way in which a request can fail."""
    try:
        yield
    except (ConnectionError, OSError) as error:
        raise UsageError(f"{what}: Ray does not answer: {error}; is its dashboard there (option address)?") from error
    except (RuntimeError, ValueError) as error:
        lines = str(error).strip().splitlines()
        raise UsageError(f"{what}: Ray refuses it: {lines[-1] if lines else error!r}") from error
