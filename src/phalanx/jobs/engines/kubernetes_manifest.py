"""Kubernetes manifests of a job: a JobSet or a TrainJob, and the Secret that belongs to it. Pure: a job goes in, values
come out; nothing is sent, and no secret is known here.

Fields are those of JobSet v1alpha2, Kubeflow Trainer v1alpha1 and batch/v1.
"""

import math
from collections.abc import Mapping
from typing import Any

from phalanx.errors import ExitCode, UsageError
from phalanx.jobs.engines.kubernetes_options import Options, object_name
from phalanx.jobs.spec import Job

Manifest = dict[str, Any]

PORT = 29417
"""Of the leader. Each pod has a network of its own, so that no other program can hold it."""
CONTAINER = "node"
MANAGED_BY = {"app.kubernetes.io/managed-by": "phalanx"}
"""The label by which our jobs are found again."""
NAME = "phalanx-job"
"""The annotation that keeps a job's own name."""
RUN = "phalanx-run"
"""The annotation that names the run that a job trains."""
INDEX = "batch.kubernetes.io/job-completion-index"
KEPT = 7 * 24 * 3600
"""Seconds for which an ended job, its logs and its name stay."""

UNFINISHED = (ExitCode.UNFINISHED, ExitCode.UNFIT_NODE, 137, 143)
"""Codes after which a job is started again. Who was killed by SIGKILL or SIGTERM (137, 143) could not say its own."""
FINAL = (ExitCode.USAGE, ExitCode.DATA, ExitCode.RECIPE, ExitCode.GAVE_UP)

TOKEN = "PHALANX_TOKEN"
DRAWN = "<drawn at random when it is submitted>"
FROM_ENVIRONMENT = "<from the environment of who submits>"


def secret(job: Job, options: Options) -> Manifest:
    """The Secret of a job, with words where its values will be."""
    values = {TOKEN: DRAWN} | dict.fromkeys(job.secrets, FROM_ENVIRONMENT)
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(job, options, {}),
        "type": "Opaque",
        "stringData": values,
    }


def workload(job: Job, options: Options) -> Manifest:
    """What runs the job."""
    return jobset(job, options) if options.kind == "jobset" else trainjob(job, options)


def jobset(job: Job, options: Options) -> Manifest:
    """A JobSet with one Job that has one pod a node. It fails as a whole, and is started again as a whole when the exit
    code says so."""
    workers = options.workers
    template: Manifest = {
        "parallelism": job.nodes,
        "completions": job.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": pod_failures(),
        "template": pod(job, options),
    }
    if job.limit is not None:
        template["activeDeadlineSeconds"] = _deadline(job)
    spec: Manifest = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "coordinator": {"replicatedJob": workers, "jobIndex": 0, "podIndex": 0},
        "failurePolicy": failure_policy(options.max_restarts),
        "ttlSecondsAfterFinished": KEPT,
        "replicatedJobs": [{"name": workers, "replicas": 1, "template": {"spec": template}}],
    }
    if options.queue is not None:
        spec["suspend"] = True
    metadata = _metadata(job, options, _queue_labels(options))
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata, "spec": spec}


def pod_failures() -> Manifest:
    """One bad end fails the Job at once, with a message that holds the code; `failure_policy` goes by that message.
    Without the first rule a pod that was evicted would be made anew alone, while the others wait for it."""
    return {
        "rules": [
            {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            *(
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": sorted(map(int, codes))},
                }
                for codes in (UNFINISHED, FINAL)
            ),
        ]
    }


def failure_policy(max_restarts: int) -> Manifest:
    """Which failures of the Job start everything again. Disruptions are nobody's fault and count for nothing; any other
    failure than an unfinished run is final, the time limit too."""
    codes = "|".join(str(int(code)) for code in UNFINISHED)
    restart = {"onJobFailureReasons": ["PodFailurePolicy"]}
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
            {"name": "final", "action": "FailJobSet"},
        ],
    }


def pod(job: Job, options: Options) -> Manifest:
    """The template of a JobSet's pods."""
    container: Manifest = {
        "name": CONTAINER,
        "image": options.image,
        "command": [literal(word) for word in job.command],
        "workingDir": str(job.folder),
        "env": environment(job, options),
        "volumeMounts": _mounts(options),
    }
    wanted = resources(job)
    if wanted:
        container["resources"] = wanted
    spec: Manifest = {"restartPolicy": "Never"} | _pod_spec(job, options) | {"containers": [container]}
    if options.queue is None and options.priority_class is not None:
        spec["priorityClassName"] = options.priority_class
    return {"metadata": {"labels": dict(MANAGED_BY), "annotations": _pod_annotations(job, options)}, "spec": spec}


def trainjob(job: Job, options: Options) -> Manifest:
    """A TrainJob: the runtime that it refers to decides about restarts; our part is patched into its pods."""
    trainer: Manifest = {
        "image": options.image,
        "command": [literal(word) for word in _from_folder(job)],
        "env": environment(job, options),
        "numNodes": job.nodes,
    }
    wanted = resources(job)
    if wanted:
        trainer["resourcesPerNode"] = wanted
    patched = {
        "metadata": {"labels": dict(MANAGED_BY), "annotations": _pod_annotations(job, options)},
        "spec": _pod_spec(job, options) | {"containers": [{"name": CONTAINER, "volumeMounts": _mounts(options)}]},
    }
    group = {"name": options.workers, "template": {"spec": {"template": patched}}}
    spec: Manifest = {
        "runtimeRef": {"name": options.runtime},
        "trainer": trainer,
        "runtimePatches": [
            {"manager": "phalanx", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [group]}}}}
        ],
    }
    if job.limit is not None:
        spec["activeDeadlineSeconds"] = _deadline(job)
    if options.queue is not None:
        spec["suspend"] = True
    metadata = _metadata(job, options, _queue_labels(options))
    return {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": metadata, "spec": spec}


def environment(job: Job, options: Options) -> list[Manifest]:
    """The variables of the node contract, the job's own, and its secrets by reference."""
    name = object_name(job, options)
    plain = {**job.environment, "PHALANX_NUM_NODES": str(job.nodes)}
    plain["PHALANX_LEADER_ADDR"] = f"{name}-{options.workers}-0-0.{name}:{PORT}"
    plain.pop("PHALANX_NODE_RANK", None)
    secrets = (TOKEN, *job.secrets)
    return [
        *({"name": key, "value": literal(value)} for key, value in plain.items() if key not in secrets),
        {"name": "PHALANX_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}}},
        *({"name": key, "valueFrom": {"secretKeyRef": {"name": name, "key": key}}} for key in secrets),
    ]


def literal(text: str) -> str:
    """Text that Kubernetes, which puts variables in for $(NAME), leaves as it was."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{text!r} is no UTF-8, and Kubernetes takes nothing else") from None
    return text.replace("$", "$$")


def resources(job: Job) -> Manifest:
    """What a node needs, as limits and requests, so that nothing else on the machine can take it."""
    wanted: Mapping[str, str | None] = {
        "cpu": None if job.cores is None else str(job.cores),
        "memory": None if job.memory is None else str(job.memory),
        "nvidia.com/gpu": str(job.devices) if job.devices else None,
    }
    amounts = {key: value for key, value in wanted.items() if value is not None}
    return {"limits": amounts, "requests": dict(amounts)} if amounts else {}


def _from_folder(job: Job) -> tuple[str, ...]:
    """A TrainJob has no working directory: `env` of GNU goes there and becomes the command, and no shell reads it."""
    if "=" in job.command[0]:
        raise UsageError(f"job {job.name}: a TrainJob cannot run {job.command[0]!r}: its name holds a '='")
    return ("env", "-C", str(job.folder), *job.command)


def _deadline(job: Job) -> int:
    """Seconds of work: pods are asked to end when they are over, and may then save for as long as the warning is."""
    assert job.limit is not None
    return max(1, math.floor(job.limit - job.warning))


def _pod_spec(job: Job, options: Options) -> Manifest:
    volumes: list[Manifest] = [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]
    for number, (claim, _) in enumerate(options.pvc):
        volumes.append({"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": claim}})
    spec: Manifest = {"terminationGracePeriodSeconds": max(30, math.ceil(job.warning)), "volumes": volumes}
    if options.service_account is not None:
        spec["serviceAccountName"] = options.service_account
    if options.node_selector:
        spec["nodeSelector"] = dict(options.node_selector)
    if options.tolerations:
        spec["tolerations"] = [dict(toleration) for toleration in options.tolerations]
    return spec


def _mounts(options: Options) -> list[Manifest]:
    claims = [{"name": f"claim-{number}", "mountPath": path} for number, (_, path) in enumerate(options.pvc)]
    return [{"name": "shared-memory", "mountPath": "/dev/shm"}, *claims]


def _metadata(job: Job, options: Options, labels: Mapping[str, str]) -> Manifest:
    place = {} if options.namespace is None else {"namespace": options.namespace}
    run = {} if job.run is None else {RUN: str(job.run)}
    return (
        {"name": object_name(job, options)}
        | place
        | {"labels": {**MANAGED_BY, **labels}, "annotations": {NAME: job.name} | run}
    )


def _queue_labels(options: Options) -> dict[str, str]:
    if options.queue is None:
        return {}
    chosen = {"kueue.x-k8s.io/queue-name": options.queue}
    if options.priority_class is not None:
        chosen["kueue.x-k8s.io/priority-class"] = options.priority_class
    return chosen


def _pod_annotations(job: Job, options: Options) -> dict[str, str]:
    wanted = {"required": options.topology_required, "preferred": options.topology_preferred}
    levels = {f"kueue.x-k8s.io/podset-{how}-topology": level for how, level in wanted.items() if level is not None}
    return {NAME: job.name, **levels}
