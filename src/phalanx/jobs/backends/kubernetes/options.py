"""Backend options of a job on Kubernetes, and names of objects. Parses text; `manifest.py` renders the objects."""

import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass
from typing import Any, TypeVar

from phalanx.errors import UsageError
from phalanx.jobs.backends.options import backend_option, parse_backend_options, parse_choice, parse_count
from phalanx.jobs.spec import Job

OptionT = TypeVar("OptionT")

LABEL_PATTERN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
"""RFC 1123: the names of namespaces, queues and most else."""
SERVICE_PATTERN = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
"""RFC 1035: the names of services, which a JobSet's becomes."""
TAINT_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
WORKLOAD_KINDS = ("jobset", "trainjob")
POD_SUFFIX_CHARS = len("-abcde")
"""Length of the suffix that Kubernetes adds to pod names."""


def _parse_list(text: str, read: Callable[[str], OptionT]) -> tuple[OptionT, ...]:
    return tuple(read(part.strip()) for part in text.split(","))


def _parse_claim(text: str) -> tuple[str, str]:
    claim, colon, path = text.partition(":")
    if not colon or not path.startswith("/") or ":" in path:
        raise ValueError("expected CLAIM:/PATH, several divided by commas")
    return claim, path


def _parse_selector(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ValueError("expected KEY=VALUE, several divided by commas")
    return key, value


def _parse_toleration(text: str) -> Mapping[str, Any]:
    """KEY[=VALUE][:EFFECT], as `kubectl taint` writes taints."""
    rest, _, effect = text.partition(":")
    key, equals, value = rest.partition("=")
    if effect and effect not in TAINT_EFFECTS:
        raise ValueError(
            f"{effect!r} is no effect of a taint; expected KEY[=VALUE][:EFFECT] with {', '.join(TAINT_EFFECTS)}"
        )
    toleration: dict[str, Any] = {"key": key, "operator": "Equal" if equals else "Exists"}
    if equals:
        toleration["value"] = value
    return toleration | ({"effect": effect} if effect else {})


@dataclass(frozen=True)
class KubernetesOptions:
    """A job's options, checked."""

    image: str = backend_option("Container image with Phalanx and what the recipe needs.", "IMAGE", MISSING)
    kind: str = backend_option(
        "What runs the job.", "|".join(WORKLOAD_KINDS), "jobset", parse=parse_choice(*WORKLOAD_KINDS)
    )
    namespace: str | None = backend_option("Namespace.", "NAME", shown_default="that of the kubeconfig's context")
    runtime: str = backend_option("Training runtime, with kind=trainjob.", "NAME", "torch-distributed")
    queue: str | None = backend_option("Queue of Kueue.", "NAME")
    priority_class: str | None = backend_option("Class of priority, in place of --priority.", "NAME")
    topology_required: str | None = backend_option("Node label within which Kueue must place all pods.", "LABEL")
    topology_preferred: str | None = backend_option("Node label within which Kueue places all pods if it can.", "LABEL")
    service_account: str | None = backend_option("Service account of the pods.", "NAME")
    pvc: tuple[tuple[str, str], ...] = backend_option(
        "Volume claims to mount.", "CLAIM:/PATH,...", (), parse=lambda text: _parse_list(text, _parse_claim)
    )
    """Claims, and where each is mounted."""
    node_selector: Mapping[str, str] = backend_option(
        "Labels of the nodes.",
        "KEY=VALUE,...",
        MISSING,
        default_factory=dict,
        parse=lambda text: dict(_parse_list(text, _parse_selector)),
    )
    tolerations: tuple[Mapping[str, Any], ...] = backend_option(
        "Taints of nodes that are tolerated.",
        "KEY[=VALUE][:EFFECT],...",
        (),
        parse=lambda text: _parse_list(text, _parse_toleration),
    )
    max_restarts: int = backend_option("Maximum number of restarts, with kind=jobset.", "NUMBER", 10, parse=parse_count)

    @property
    def worker_group_name(self) -> str:
        """Name of the group of pods. A TrainJob's runtime decides it; it is "node" in all runtimes of Kubeflow."""
        return "workers" if self.kind == "jobset" else "node"


def parse_options(job: Job) -> KubernetesOptions:
    """A job's options; UsageError names the first that is wrong, and what would be right. What they name is checked by
    the cluster."""
    if not job.backend_options.get("image"):
        raise UsageError(
            f"job {job.name}: Kubernetes starts jobs from a container image, and none is given; name one that holds "
            "Phalanx and what the recipe needs with the option image=REGISTRY/NAME:TAG"
        )
    options: KubernetesOptions = parse_backend_options(job, "kubernetes", KubernetesOptions)
    _check_combinations(job, options)
    return options


def make_object_name(job: Job, options: KubernetesOptions) -> str:
    """Return the name of a job's objects: the job's name in lower case, with '-' for '.' and '_'.

    Raises UsageError when the result is no valid name.
    """
    name = re.sub(r"[._]+", "-", job.name.lower()).strip("-")
    if not SERVICE_PATTERN.fullmatch(name):
        raise UsageError(f"job name {job.name!r}: on Kubernetes it becomes a DNS name and must begin with a letter")
    max_chars = 63 - len(f"-{options.worker_group_name}-0-{job.num_nodes - 1}") - POD_SUFFIX_CHARS
    if len(name) > max_chars:
        raise UsageError(
            f"job name {job.name!r}: on Kubernetes the names of its {job.num_nodes} pods are made of it, which leaves "
            f"it "
            f"{max_chars} characters; it has {len(name)}"
        )
    return name


def _check_combinations(job: Job, options: KubernetesOptions) -> None:
    where = f"job {job.name}"
    if (options.topology_required or options.topology_preferred) and options.queue is None:
        raise UsageError(f"{where}: it is Kueue that places by topology; name one of its queues with queue=NAME")
    if job.priority and options.priority_class is None:
        raise UsageError(
            f"{where}: Kubernetes knows no numbers for priorities, but classes; leave priority away, and name one "
            "with priority-class=NAME (`kubectl get workloadpriorityclasses,priorityclasses` lists them)"
        )
    if options.kind == "trainjob" and "max-restarts" in job.backend_options:
        raise UsageError(f"{where}: a TrainJob is restarted as its runtime says; max-restarts is for kind=jobset")
    if options.kind == "trainjob" and options.queue is None and options.priority_class is not None:
        raise UsageError(f"{where}: a TrainJob takes a priority-class only together with a queue of Kueue's")
    if options.kind == "jobset" and "runtime" in job.backend_options:
        raise UsageError(f"{where}: option runtime is for kind=trainjob")
