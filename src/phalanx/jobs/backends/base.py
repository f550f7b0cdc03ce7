"""The backend contract: runs jobs in the local queue, on Slurm, Ray or Kubernetes, and lists, drains and undrains their
nodes.

Submitting has two steps. `render` turns a job into a `SubmitRequest`, a value that holds every file and command that
would be sent; printing it is the dry run. `submit` sends exactly that. One suite of tests runs against every backend.

Options that only one backend understands (`-o NAME=VALUE`) are typed fields of a dataclass of its own: the one list of
names, types and defaults. Backends read them, help texts and docs show them.
"""

import itertools
import logging
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from difflib import get_close_matches
from enum import StrEnum
from importlib import import_module
from typing import Any, Protocol

from phalanx.cluster.environment import is_secret
from phalanx.errors import PhalanxError, UsageError
from phalanx.jobs.spec import Job, JobState, JobStatus

logger = logging.getLogger(__name__)

PAUSED_PREFIX = "paused: "
"""Begins the reason for which a paused job waits."""
MAX_SUGGESTED_NAMES = 3


@dataclass(frozen=True)
class SubmitRequest:
    """Exactly what is sent to a backend."""

    backend: str
    job: Job
    files: Mapping[str, str] = field(default_factory=dict)
    """Names and contents of the files or objects that are written or sent."""
    commands: tuple[tuple[str, ...], ...] = ()
    """Commands that submit it, if a program does."""
    array_jobs: tuple[Job, ...] = ()
    """Of an array that is sent as one; `job_id` is the first."""

    def __str__(self) -> str:
        parts = [f"# {name}\n{text.rstrip()}" for name, text in self.files.items()]
        codes = {job.snapshot.digest: job.snapshot for job in (self.job, *self.array_jobs) if job.snapshot is not None}
        parts += [str(code) for code in codes.values()]
        if self.commands:
            parts.append("\n".join(shlex.join(command) for command in self.commands))
        return "\n\n".join(parts)


LogReader = Callable[[bool], list[str]]
"""Returns the lines since the previous call. The argument is True for the last call."""


class Backend(Protocol):
    """Runs jobs. Every method raises UsageError for what the user can fix: a backend that is not installed or does not
    respond, or a job that does not exist. `poll`, `list_jobs` and reading logs change nothing."""

    name: str

    def render(self, job: Job) -> SubmitRequest:
        """Return what `submit` would send. Raises UsageError when this backend cannot run the job; writes nothing."""

    def submit(self, request: SubmitRequest) -> str:
        """Submit the job and return its id. Leaves nothing behind on failure."""

    def poll(self, job_id: str) -> JobStatus:
        """Return the status of a job."""

    def list_jobs(self, array: str | None = None) -> list[JobStatus]:
        """Return the user's jobs, or the members of an array (its name or id), oldest first."""

    def send_signal(self, job_id: str, number: int) -> None:
        """Send a signal to the job's processes on each node. Raises UsageError when the job does not run."""

    def read_logs(self, job_id: str) -> Iterator[str]:
        """Yield the lines that a job has printed so far, without line ends."""

    def cancel(self, job_id: str) -> None:
        """Cancel a job. Does nothing if the job has ended."""

    def pause(self, job_id: str, reason: str) -> None:
        """Pause a job that waits or runs. A running one is asked to save and to end with exit code 75; it is over only
        when `poll` says queued, with PAUSED_PREFIX and the reason. Raises UsageError when the job has ended, or starts
        or ends just now."""

    def resume(self, job_id: str) -> bool:
        """Let a job that is paused, or held because of unfit nodes, start again. Returns whether it was."""

    def render_array(self, jobs: Sequence[Job]) -> list[SubmitRequest]:
        """Return what would be submitted for an array, jobs that differ only in their command: a request for each
        member, or one where the backend has arrays. Raises UsageError like `render`."""
        return [self.render(job) for job in jobs]

    def submit_array(self, requests: Sequence[SubmitRequest]) -> list[str]:
        """Submit the array and return its members' ids. If one cannot be submitted, those before it are cancelled."""
        submitted: list[str] = []
        try:
            for request in requests:
                submitted.append(self.submit(request))
        except BaseException as error:
            not_cancelled = [job_id for job_id in submitted if not _try_cancel(self, job_id)]
            if not isinstance(error, PhalanxError) or not submitted:
                raise
            outcome = "those before it were cancelled"
            if not_cancelled:
                outcome = f"{', '.join(not_cancelled)} could not be cancelled: `phalanx jobs cancel` ends them"
            raise UsageError(f"member {len(submitted)} could not be submitted: {error}; {outcome}") from error
        return submitted

    def follow_logs(self, job_id: str) -> LogReader:
        """Return a reader of the job's log that starts at the first line. This one reads the whole log in each call."""
        num_returned = 0

        def read(is_last: bool) -> list[str]:
            nonlocal num_returned
            lines = list(itertools.islice(self.read_logs(job_id), num_returned, None))
            num_returned += len(lines)
            return lines

        return read

    def release(self, job_id: str) -> bool:
        """Release a job that is held because of unfit nodes, and exclude these. Returns whether it was held."""
        return False

    def restart_dead_daemon(self) -> None:
        """Start the daemon of this user, if the backend has one and jobs wait or run without it: they would never start
        or end. Commands that show or follow jobs call this; `poll` and `list_jobs` do not."""


def _try_cancel(backend: Backend, job_id: str) -> bool:
    try:
        backend.cancel(job_id)
    except UsageError:
        return False
    return True


BACKEND_CLASSES = {
    "local": "phalanx.jobs.backends.local:LocalBackend",
    "slurm": "phalanx.jobs.backends.slurm.backend:SlurmBackend",
    "ray": "phalanx.jobs.backends.ray.backend:RayBackend",
    "kubernetes": "phalanx.jobs.backends.kubernetes.backend:KubernetesBackend",
}


def open_backend(name: str) -> Backend:
    """Return the backend of this name. Raises UsageError for an unknown name, or when its packages are missing."""
    if name not in BACKEND_CLASSES:
        raise UsageError(f"--on {name}: expected one of {', '.join(BACKEND_CLASSES)}")
    module, _, class_name = BACKEND_CLASSES[name].partition(":")
    backend: Backend = getattr(import_module(module), class_name)()
    return backend


def read_secrets(job: Job, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the values of a job's secrets. Raises UsageError when the environment of the submitter lacks one."""
    if missing := [name for name in job.secrets if name not in environment]:
        raise UsageError(f"job {job.name}: its secret {missing[0]} is not in your environment; export it first")
    return {name: environment[name] for name in job.secrets}


def add_inherited_variables(job: Job, environment: Mapping[str, str], shares_files: bool) -> Job:
    """Return a job with the variables that it inherits from the environment of the submitter. Warn about those that it
    will lack. `shares_files`: whether it sees the files of this machine; else it gets no variable that names one."""
    given = {
        name: value
        for name, value in inherit_variables(environment).items()
        if name not in job.secrets and (shares_files or not LOCAL_PATH.search(value))
    }
    job = replace(job, environment={**given, **job.environment})
    warn_about_missing_variables(job, environment)
    return job


def warn_about_missing_variables(job: Job, environment: Mapping[str, str]) -> None:
    """Warn about variables of trackers, networks, storage and the like that are set here and that the job lacks."""
    names = (name for name, _ in _select(environment) if not name.startswith(PREFIXES_BY_PURPOSE["Phalanx"]))
    if missing := [name for name in names if name not in {*job.environment, *job.secrets}]:
        logger.warning(
            "job %s does not get %s: secrets and files of this machine are passed only by --secret NAME or "
            "--env NAME=VALUE",
            job.name,
            ", ".join(missing),
        )


class NoSuchJobError(UsageError):
    """The backend does not know a job: a wrong id, or one that it has forgotten."""

    def __init__(self, backend: str, job_id: str):
        super().__init__(f"{job_id}: {backend} has no such job; `phalanx jobs ls --on {backend}` lists them")


def poll_again(backend: Backend, last: JobStatus) -> JobStatus:
    """Poll a job with this last status. One that a backend has forgotten meanwhile was cancelled, by any user."""
    try:
        return backend.poll(last.id)
    except NoSuchJobError:
        if last.state.is_final:
            return last
        return replace(last, state=JobState.CANCELLED, reason="it was deleted")


class NodeService(StrEnum):
    """Whether a backend starts jobs on a node."""

    OPEN = "open"  # it does, or will when the node is free
    DRAINED = "drained"  # an operator has drained it; jobs that run there may still end
    DOWN = "down"  # the node does not answer, or is out of service for another reason


@dataclass(frozen=True)
class BackendNode:
    """A node as its backend knows it. `state` is in the backend's own words."""

    name: str
    state: str
    service: NodeService
    jobs: tuple[str, ...] = ()
    """Ids of the jobs that run there, as far as this user may see them."""
    reason: str | None = None
    """Why it is drained or down, if the backend knows."""
    num_gpus: int = 0
    host_names: tuple[str, ...] = ()
    """Names by which processes on it know it, where they differ from `name`: those of pods, say."""


class NodeBackend(Backend, Protocol):
    """A backend that lists and drains nodes. Methods raise UsageError for what the user can fix, as a permission."""

    def list_nodes(self) -> list[BackendNode]:
        """Return all nodes, in the backend's order. Changes nothing."""

    def drain_node(self, node: str, reason: str, actor: str) -> None:
        """Start no new job on a node; jobs that run there continue. A drained node gets the new reason."""

    def undrain_node(self, node: str) -> None:
        """Start jobs on a node again."""


def open_node_backend(name: str) -> NodeBackend:
    """Return the backend of this name. Raises UsageError for an unknown name, or when its packages are missing."""
    backend: NodeBackend = open_backend(name)  # type: ignore[assignment]  # each of BACKEND_CLASSES is both
    return backend


def group_running_jobs(statuses: Iterable[JobStatus]) -> Mapping[str, tuple[str, ...]]:
    """Return the ids of the jobs that run on each node."""
    found: dict[str, tuple[str, ...]] = {}
    for status in statuses:
        if status.state is JobState.RUNNING:
            for node in status.nodes:
                found[node] = (*found.get(node, ()), status.id)
    return found


def find_node(nodes: Sequence[BackendNode], name: str, backend: str) -> BackendNode:
    """Return the node of this name. Raises UsageError with the nearest names when there is none."""
    for node in nodes:
        if node.name == name:
            return node
    names = [node.name for node in nodes]
    near = get_close_matches(name, names, MAX_SUGGESTED_NAMES) or names[:MAX_SUGGESTED_NAMES]
    hint = f"nearest are {', '.join(near)}" if near else "it has no nodes"
    raise UsageError(f"{name}: {backend} has no such node; {hint} (`phalanx nodes ls --on {backend}` lists all)")


PREFIXES_BY_PURPOSE = {
    "trackers": ("WANDB_", "MLFLOW_", "TRACKIO_"),
    "networks": ("NCCL_", "RCCL_", "GLOO_", "UCX_", "FI_", "TORCH_NCCL_", "TORCH_GLOO_"),
    "proxies and certificates": (
        *("http_proxy", "https_proxy", "no_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY"),
        *("SSL_CERT_", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    ),
    "storage": ("AWS_", "GOOGLE_", "CLOUDSDK_", "AZURE_", "S3_ENDPOINT"),
    "hubs": ("HF_", "HUGGINGFACE_", "TRANSFORMERS_"),
    "threads": ("OMP_", "MKL_", "KMP_", "GOMP_"),
    "torch": ("TORCH", "PYTORCH_"),
    "Phalanx": ("PHALANX_",),
}
"""Names, or how names begin. Variables of devices and of paths of programs belong to the place where a job runs."""
NOT_INHERITED = re.compile(
    "PHALANX_(NODE_.*|NUM_NODES|LEADER_ADDR|SNAPSHOT_.*|EVENTS_FD|ATTEMPT|RENDEZVOUS_ID|STORE_.*|JOB_TAG)"
)
"""Variables of the node contract, of workers and of a snapshot: a job has its own."""
INHERITED_PREFIXES = tuple(prefix for prefixes in PREFIXES_BY_PURPOSE.values() for prefix in prefixes)
CREDENTIALS_IN_URL = re.compile(r"://[^/@\s]+:[^/@\s]+@")
LOCAL_PATH = re.compile(r"(?:^|file://|sqlite:///)[/~]")


def inherit_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a job inherits, without secrets."""
    return {name: value for name, value in _select(environ) if not _holds_secret(name, value)}


def _select(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name, value in sorted(environ.items()):
        if name.startswith(INHERITED_PREFIXES) and not NOT_INHERITED.fullmatch(name):
            yield name, value


def _holds_secret(name: str, value: str) -> bool:
    names_file = name.endswith(("_FILE", "_PATH")) or name == "GOOGLE_APPLICATION_CREDENTIALS"
    return (is_secret(name) and not names_file) or CREDENTIALS_IN_URL.search(value) is not None


OPTION_CLASSES = {
    "slurm": "phalanx.jobs.backends.slurm.sbatch_options:SlurmOptions",
    "kubernetes": "phalanx.jobs.backends.kubernetes.manifest:KubernetesOptions",
    "ray": "phalanx.jobs.backends.ray.backend:RayOptions",
}
"""The dataclass of each backend that has options. None of them imports torch or the backend's client library."""


@dataclass(frozen=True)
class OptionHelp:
    """What a user reads of an option. `value_type`: what stands for its value, such as NUMBER or `yes|no`."""

    name: str
    value_type: str
    default: str
    is_required: bool
    help: str

    @property
    def note(self) -> str:
        """What stands behind the help: the default, or that there is none."""
        return "required" if self.is_required else f"default: {self.default}" if self.default else ""


def backend_option(
    help: str,
    value_type: str,
    default: Any = None,
    shown_default: str = "",
    default_factory: Any = MISSING,
    parse: Callable[[str], Any] = str,
    **metadata: Any,
) -> Any:
    """Declare an option as a field of a dataclass. `default` is MISSING where a value must be given, or where
    `default_factory` makes it. `shown_default`: the default in words, where it is not that of the field. `parse` reads
    a value, and its ValueError says what was expected. `metadata` is for the backend."""
    more = {"help": help, "value_type": value_type, "shown_default": shown_default, "parse": parse, **metadata}
    return field(default=default, default_factory=default_factory, metadata=more)


def parse_backend_options(job: Job, backend: str, options_class: Any) -> Any:
    """Return the options of a job for its backend. Raises UsageError for an unknown one and for a wrong value."""
    parsers = {each.name.replace("_", "-"): each.metadata["parse"] for each in fields(options_class)}
    values: dict[str, Any] = {}
    for name, text in job.backend_options.items():
        if name not in parsers:
            near = get_close_matches(name, parsers, 1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(parsers)}"
            raise UsageError(f"job {job.name}: {backend} has no option {name!r}; {hint}")
        try:
            values[name.replace("-", "_")] = parsers[name](text)
        except ValueError as error:
            raise UsageError(f"job {job.name}: option {name}={text}: {error}") from None
    return options_class(**values)


def parse_count(text: str) -> int:
    """Read a whole number."""
    if not re.fullmatch(r"[0-9]+", text):
        raise ValueError("expected a whole number, 0 or more")
    return int(text)


def parse_choice(*choices: str) -> Callable[[str], str]:
    """Return the reader of a value that is one of `choices`."""

    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"expected one of {', '.join(choices)}")
        return text

    return parse


def list_option_help(backend: str) -> Iterator[OptionHelp]:
    """Options of a backend, in the order of its dataclass."""
    module, _, name = OPTION_CLASSES[backend].partition(":")
    for each in fields(getattr(import_module(module), name)):
        shown = each.metadata["shown_default"]
        if not shown and each.default not in (None, MISSING, ()):
            shown = str(each.default)
        is_required = each.default is MISSING and each.default_factory is MISSING
        name = each.name.replace("_", "-")
        yield OptionHelp(name, each.metadata["value_type"], shown, is_required, each.metadata["help"])
