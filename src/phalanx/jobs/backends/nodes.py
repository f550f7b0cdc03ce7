"""The nodes of a backend: list them, drain one so that no new job starts there, and undrain it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from typing import Protocol

from phalanx.errors import UsageError
from phalanx.jobs.backends.base import Backend, open_backend
from phalanx.jobs.spec import JobState, JobStatus

MAX_SUGGESTED_NAMES = 3


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
    """A backend that lists and drains nodes. Every method raises UsageError for what the user can fix, such as a
    missing permission."""

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
    raise UsageError(f"{name}: {backend} has no such node; {hint} (`phalanx fleet ls --on {backend}` lists all)")
