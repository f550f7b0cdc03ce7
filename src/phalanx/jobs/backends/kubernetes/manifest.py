"""Render the Kubernetes manifests of a job, by its backend options: a JobSet or TrainJob, and its Secret. Pure: nothing
is sent, and no secret value is known here.

Fields are those of JobSet v1alpha2, Kubeflow Trainer v1alpha1 and batch/v1.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass
from typing import Any, TypeVar

from phalanx.errors import ExitCode, UsageError
from phalanx.jobs.backends.base import backend_option, parse_backend_options, parse_choice, parse_count
from phalanx.jobs.spec import Job
from phalanx.run.node_env import NODE_NAME_VARIABLE

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
    """A job's options. Raises UsageError for the first that is wrong; what they name is checked by the cluster."""
    if not job.backend_options.get("image"):
        raise UsageError(
            f"job {job.name}: Kubernetes starts jobs from a container image, and none is given; name one that holds "
            "Phalanx and what the recipe needs with the option image=REGISTRY/NAME:TAG"
        )
    options: KubernetesOptions = parse_backend_options(job, "kubernetes", KubernetesOptions)
    _check_combinations(job, options)
    return options


def make_object_name(job: Job, options: KubernetesOptions) -> str:
    """Return the job's name in lower case, with '-' for '.' and '_'. Raises UsageError when that is no valid name."""
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


Manifest = dict[str, Any]

LEADER_PORT = 29417
"""Port of the leader. Each pod has its own network namespace, so no other program can use the port."""
CONTAINER_NAME = "node"
MANAGED_BY_LABELS = {"app.kubernetes.io/managed-by": "phalanx"}
"""Label that identifies jobs of Phalanx."""
NAME_ANNOTATION = "phalanx-job"
"""Annotation with the name of the job."""
RUN_ANNOTATION = "phalanx-run"
"""Annotation with the run directory of the job."""
PAUSE_ANNOTATION = "phalanx-paused"
"""Annotation with the reason for which the job is paused."""
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
INDEX_ANNOTATION = "batch.kubernetes.io/job-completion-index"
TTL_AFTER_FINISHED_S = 7 * 24 * 3600
"""Seconds after which a finished job, its logs and its name are deleted."""

RESTART_EXIT_CODES = (ExitCode.UNFINISHED, ExitCode.UNFIT_NODE, 137, 143)
"""Exit codes after which a job is restarted. 137 and 143 are those of SIGKILL and SIGTERM."""
FINAL_EXIT_CODES = (ExitCode.USAGE, ExitCode.DATA, ExitCode.RECIPE, ExitCode.GAVE_UP)

TOKEN_VARIABLE = "PHALANX_TOKEN"
MIN_GIB_PER_UNIT = 2
"""GiB of memory that a pod requests for each GPU or worker of a job that does not say what it needs."""
GENERATED_PLACEHOLDER = "<drawn at random when it is submitted>"
ENVIRONMENT_PLACEHOLDER = "<from the submitter's environment>"


def make_secret(job: Job, options: KubernetesOptions) -> Manifest:
    """The Secret of a job, with words where its values will be."""
    values = {TOKEN_VARIABLE: GENERATED_PLACEHOLDER} | dict.fromkeys(job.secrets, ENVIRONMENT_PLACEHOLDER)
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(job, options, {}),
        "type": "Opaque",
        "stringData": values,
    }


def make_jobset(job: Job, options: KubernetesOptions) -> Manifest:
    """A JobSet with one Job that has one pod a node. It fails, and is started again, as a whole."""
    workers = options.worker_group_name
    template: Manifest = {
        "parallelism": job.num_nodes,
        "completions": job.num_nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0 if job.min_nodes is None else options.max_restarts * job.num_nodes,
        "podFailurePolicy": make_pod_failure_policy(job.min_nodes is not None),
        "template": make_pod_template(job, options),
    }
    if job.time_limit_s is not None:
        template["activeDeadlineSeconds"] = _active_deadline_s(job)
    spec: Manifest = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "coordinator": {"replicatedJob": workers, "jobIndex": 0, "podIndex": 0},
        "failurePolicy": make_failure_policy(options.max_restarts, job.min_nodes is not None),
        "ttlSecondsAfterFinished": TTL_AFTER_FINISHED_S,
        "replicatedJobs": [{"name": workers, "replicas": 1, "template": {"spec": template}}],
    }
    if options.queue is not None:
        spec["suspend"] = True
    metadata = _metadata(job, options, _queue_labels(options))
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata, "spec": spec}


def make_pause(reason: str | None) -> Manifest:
    """Return the change of a JobSet or TrainJob that suspends it, or without a reason resumes it."""
    return {"metadata": {"annotations": {PAUSE_ANNOTATION: reason}}, "spec": {"suspend": reason is not None}}


def make_pod_failure_policy(is_elastic: bool = False) -> Manifest:
    """Fail the Job at the first failed pod, with a message that contains the exit code for `make_failure_policy`.
    Without the first rule, an evicted pod would be recreated alone while the others wait for it. The pods of a job that
    may run with fewer nodes do not wait, so a pod that is evicted, killed or unfit is recreated."""
    restart_codes = (ExitCode.UNFINISHED,) if is_elastic else RESTART_EXIT_CODES
    return {
        "rules": [
            {
                "action": "Ignore" if is_elastic else "FailJob",
                "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
            },
            *(
                {
                    "action": "FailJob",
                    "onExitCodes": {
                        "containerName": CONTAINER_NAME,
                        "operator": "In",
                        "values": sorted(map(int, codes)),
                    },
                }
                for codes in (restart_codes, FINAL_EXIT_CODES)
            ),
        ]
    }


def make_failure_policy(max_restarts: int, is_elastic: bool = False) -> Manifest:
    """Restart the JobSet after a disruption, which does not count, or after an unfinished run. `is_elastic`: also when
    its pods failed too often one by one. All other failures are final, including the time limit."""
    codes = "|".join(str(int(code)) for code in RESTART_EXIT_CODES)
    restart = {"onJobFailureReasons": ["PodFailurePolicy"]}
    lost_pods = {"name": "lost-pods", "action": "RestartJobSet", "onJobFailureReasons": ["BackoffLimitExceeded"]}
    return {
        "maxRestarts": max_restarts,
        "restartStrategy": "BlockingRecreate",
        "rules": [
            {"name": "disrupted", "action": "RestartJobSetAndIgnoreMaxRestarts"}
            | restart
            | {"onJobFailureMessagePatterns": ["has condition DisruptionTarget "]},
            {"name": "not-finished", "action": "RestartJobSet"}
            | restart
            | {"onJobFailureMessagePatterns": [f"failed with exit code ({codes}) "]},
            *([lost_pods] if is_elastic else []),
            {"name": "final", "action": "FailJobSet"},
        ],
    }


def make_pod_template(job: Job, options: KubernetesOptions) -> Manifest:
    container: Manifest = {
        "name": CONTAINER_NAME,
        "image": options.image,
        "command": [escape_literal(word) for word in job.command],
        "workingDir": str(job.working_dir),
        "env": make_environment(job, options),
        "volumeMounts": _volume_mounts(options),
        "resources": make_resources(job),
    }
    spec: Manifest = {"restartPolicy": "Never"} | _pod_spec(job, options) | {"containers": [container]}
    if options.queue is None and options.priority_class is not None:
        spec["priorityClassName"] = options.priority_class
    return {
        "metadata": {"labels": dict(MANAGED_BY_LABELS), "annotations": _pod_annotations(job, options)},
        "spec": spec,
    }


def make_trainjob(job: Job, options: KubernetesOptions) -> Manifest:
    """A TrainJob: the runtime that it refers to decides about restarts; our part is patched into its pods."""
    trainer: Manifest = {
        "image": options.image,
        "command": [escape_literal(word) for word in _with_working_dir(job)],
        "env": make_environment(job, options),
        "numNodes": job.num_nodes,
        "resourcesPerNode": make_resources(job),
    }
    patched = {
        "metadata": {"labels": dict(MANAGED_BY_LABELS), "annotations": _pod_annotations(job, options)},
        "spec": _pod_spec(job, options)
        | {"containers": [{"name": CONTAINER_NAME, "volumeMounts": _volume_mounts(options)}]},
    }
    group = {"name": options.worker_group_name, "template": {"spec": {"template": patched}}}
    spec: Manifest = {
        "runtimeRef": {"name": options.runtime},
        "trainer": trainer,
        "runtimePatches": [
            {"manager": "phalanx", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [group]}}}}
        ],
    }
    if job.time_limit_s is not None:
        spec["activeDeadlineSeconds"] = _active_deadline_s(job)
    if options.queue is not None:
        spec["suspend"] = True
    metadata = _metadata(job, options, _queue_labels(options))
    return {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": metadata, "spec": spec}


def make_environment(job: Job, options: KubernetesOptions) -> list[Manifest]:
    """The variables of the node contract, the job's own, and its secrets by reference."""
    name = make_object_name(job, options)
    plain = {**job.environment, "PHALANX_NUM_NODES": job.nodes_variable}
    plain["PHALANX_LEADER_ADDR"] = f"{name}-{options.worker_group_name}-0-0.{name}:{LEADER_PORT}"
    own = (TOKEN_VARIABLE, *job.secrets, "PHALANX_NODE_RANK", NODE_NAME_VARIABLE)
    secrets = own[:-2]
    return [
        *({"name": key, "value": escape_literal(value)} for key, value in plain.items() if key not in own),
        {
            "name": "PHALANX_NODE_RANK",
            "valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX_ANNOTATION}']"}},
        },
        {"name": NODE_NAME_VARIABLE, "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        *({"name": key, "valueFrom": {"secretKeyRef": {"name": name, "key": key}}} for key in secrets),
    ]


def escape_literal(text: str) -> str:
    """Text that Kubernetes, which puts variables in for $(NAME), leaves as it was."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{text!r} is no UTF-8, and Kubernetes takes nothing else") from None
    return text.replace("$", "$$")


def make_resources(job: Job) -> Manifest:
    """Return the resources of a node: what the job asks for as limits and equal requests, so that no other pod can take
    them. What it leaves open is requested without a limit: a pod without requests is the first to be evicted. A little
    of each core is left to the node's own pods."""
    asked: Mapping[str, str | None] = {
        "cpu": None if job.cpus_per_node is None else str(job.cpus_per_node),
        "memory": None if job.memory_bytes is None else str(job.memory_bytes),
        "nvidia.com/gpu": str(job.gpus_per_node) if job.gpus_per_node else None,
    }
    limits = {key: value for key, value in asked.items() if value is not None}
    gibibytes = MIN_GIB_PER_UNIT * max(job.gpus_per_node, job.workers_per_node)
    defaults = {"cpu": f"{900 * job.min_cpus_per_node}m", "memory": f"{gibibytes}Gi"}
    return {**({"limits": limits} if limits else {}), "requests": {**defaults, **limits}}


def _with_working_dir(job: Job) -> tuple[str, ...]:
    """A TrainJob has no working directory: `env` of GNU goes there and becomes the command, and no shell reads it."""
    if "=" in job.command[0]:
        raise UsageError(f"job {job.name}: a TrainJob cannot run {job.command[0]!r}: its name holds a '='")
    return ("env", "-C", str(job.working_dir), *job.command)


def _active_deadline_s(job: Job) -> int:
    """Seconds of work: pods are asked to end when they are over, and may then save for as long as the warning is."""
    assert job.time_limit_s is not None
    return max(1, math.floor(job.time_limit_s - job.warning_s))


def _pod_spec(job: Job, options: KubernetesOptions) -> Manifest:
    volumes: list[Manifest] = [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]
    for number, (claim, _) in enumerate(options.pvc):
        volumes.append({"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": claim}})
    spec: Manifest = {"terminationGracePeriodSeconds": max(30, math.ceil(job.warning_s)), "volumes": volumes}
    if options.service_account is not None:
        spec["serviceAccountName"] = options.service_account
    if options.node_selector:
        spec["nodeSelector"] = dict(options.node_selector)
    if options.tolerations:
        spec["tolerations"] = [dict(toleration) for toleration in options.tolerations]
    return spec


def _volume_mounts(options: KubernetesOptions) -> list[Manifest]:
    claims = [{"name": f"claim-{number}", "mountPath": path} for number, (_, path) in enumerate(options.pvc)]
    return [{"name": "shared-memory", "mountPath": "/dev/shm"}, *claims]


def _metadata(job: Job, options: KubernetesOptions, labels: Mapping[str, str]) -> Manifest:
    namespace_field = {} if options.namespace is None else {"namespace": options.namespace}
    run = {} if job.run_dir is None else {RUN_ANNOTATION: str(job.run_dir)}
    return (
        {"name": make_object_name(job, options)}
        | namespace_field
        | {"labels": {**MANAGED_BY_LABELS, **labels}, "annotations": {NAME_ANNOTATION: job.name} | run}
    )


def _queue_labels(options: KubernetesOptions) -> dict[str, str]:
    if options.queue is None:
        return {}
    chosen = {QUEUE_LABEL: options.queue}
    if options.priority_class is not None:
        chosen["kueue.x-k8s.io/priority-class"] = options.priority_class
    return chosen


def _pod_annotations(job: Job, options: KubernetesOptions) -> dict[str, str]:
    wanted = {"required": options.topology_required, "preferred": options.topology_preferred}
    levels = {f"kueue.x-k8s.io/podset-{how}-topology": level for how, level in wanted.items() if level is not None}
    return {NAME_ANNOTATION: job.name, **levels}
