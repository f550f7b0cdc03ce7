"""Nodes as the API server describes them, and the changes that drain and undrain one. Pure: objects in, values out."""

from collections.abc import Iterable, Mapping
from typing import Any

from phalanx.jobs.backends.kubernetes.status import KubernetesObject, find_condition
from phalanx.jobs.backends.nodes import BackendNode, NodeService

REASON_ANNOTATION, ACTOR_ANNOTATION = "phalanx-drain-reason", "phalanx-drain-actor"
"""Annotations of a node that Phalanx has cordoned."""
GPU_RESOURCES = ("nvidia.com/gpu", "amd.com/gpu")


def parse_node(
    node: KubernetesObject, pods: Iterable[KubernetesObject], jobs: Mapping[str, tuple[str, ...]]
) -> BackendNode:
    """Return a node. `pods`: those of jobs on any node; `jobs`: ids of the jobs on each node, by its name."""
    metadata, spec, status = node["metadata"], node.get("spec") or {}, node.get("status") or {}
    name, annotations = metadata["name"], metadata.get("annotations") or {}
    is_ready = find_condition(status, "Ready") is not None
    is_cordoned = bool(spec.get("unschedulable"))
    own_pods = (pod for pod in pods if pod["spec"].get("nodeName") == name)
    reason = annotations.get(REASON_ANNOTATION) if is_cordoned else None
    if reason is not None and (actor := annotations.get(ACTOR_ANNOTATION)):
        reason = f"{reason} ({actor})"
    return BackendNode(
        name=name,
        state=("Ready" if is_ready else "NotReady") + (",SchedulingDisabled" if is_cordoned else ""),  # as in kubectl
        service=NodeService.DRAINED if is_cordoned else NodeService.OPEN if is_ready else NodeService.DOWN,
        jobs=jobs.get(name, ()),
        reason=reason if is_ready or reason else _why_not_ready(status),
        num_gpus=sum(int((status.get("capacity") or {}).get(resource, 0)) for resource in GPU_RESOURCES),
        host_names=tuple(pod["spec"].get("hostname") or pod["metadata"]["name"] for pod in own_pods),
    )


def make_cordon(reason: str, actor: str) -> dict[str, Any]:
    """Return the change that cordons a node."""
    return {
        "metadata": {"annotations": {REASON_ANNOTATION: reason, ACTOR_ANNOTATION: actor}},
        "spec": {"unschedulable": True},
    }


def make_uncordon() -> dict[str, Any]:
    """Return the change that uncordons a node. None removes an annotation."""
    return {
        "metadata": {"annotations": {REASON_ANNOTATION: None, ACTOR_ANNOTATION: None}},
        "spec": {"unschedulable": False},
    }


def _why_not_ready(status: KubernetesObject) -> str | None:
    for condition in status.get("conditions") or ():
        if condition["type"] == "Ready":
            return str(condition.get("message") or condition.get("reason"))
    return "its kubelet has not reported"
