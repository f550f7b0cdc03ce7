"""Nodes of a Kubernetes cluster: listed, cordoned and uncordoned through the official client."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fake_kubernetes import SCHEMAS, FakeApiServer, kubeconfig
from node_contract import NodeContract
from phalanx.errors import UsageError
from phalanx.jobs.backends.base import NodeService
from phalanx.jobs.backends.kubernetes.backend import KubernetesBackend
from phalanx.jobs.spec import Job

pytestmark = pytest.mark.skipif(not SCHEMAS.is_dir(), reason=f"the schemas of JobSet and Trainer are not in {SCHEMAS}")


def add_node(server: FakeApiServer, name: str, ready: str = "True", message: str = "") -> None:
    conditions = [
        {"type": "MemoryPressure", "status": "False"},
        {"type": "Ready", "status": ready, "message": message},
    ]
    status: dict[str, Any] = {"conditions": conditions, "capacity": {"cpu": "64", "nvidia.com/gpu": "8"}}
    server.objects["nodes", "", name] = {"metadata": {"name": name, "labels": {}}, "spec": {}, "status": status}


@pytest.fixture
def server() -> FakeApiServer:
    server = FakeApiServer()
    for name in ("gpu-1", "gpu-2", "gpu-3"):
        add_node(server, name)
    return server


@pytest.fixture
def engine(server: FakeApiServer, tmp_path: Path) -> Iterator[KubernetesBackend]:
    with server.serving() as address:
        yield KubernetesBackend(kubeconfig(tmp_path, address), token=lambda: "drawn")


class TestContract(NodeContract):
    @pytest.fixture
    def node(self) -> str:
        return "gpu-2"


def test_a_node_has_its_gpus_its_jobs_and_the_host_names_of_its_pods(
    engine: KubernetesBackend, server: FakeApiServer
) -> None:
    job = Job("gpt", ("phalanx", "train"), Path("/work"), backend_options={"image": "example.org/phalanx:1"})
    ident = engine.submit(engine.render(job))
    server.objects["pods", "team-a", "gpt-workers-0-0-abcde"] = {
        "metadata": {
            "name": "gpt-workers-0-0-abcde",
            "labels": {"jobset.sigs.k8s.io/jobset-name": "gpt", "batch.kubernetes.io/job-completion-index": "0"},
        },
        "spec": {"nodeName": "gpu-2", "hostname": "gpt-workers-0-0"},
        "status": {"phase": "Running"},
    }
    nodes = {node.name: node for node in engine.list_nodes()}
    assert (nodes["gpu-2"].jobs, nodes["gpu-2"].host_names) == ((ident,), ("gpt-workers-0-0",))
    assert (nodes["gpu-1"].jobs, nodes["gpu-1"].num_gpus, nodes["gpu-1"].state) == ((), 8, "Ready")


def test_a_node_that_is_not_ready_is_down_and_says_why(engine: KubernetesBackend, server: FakeApiServer) -> None:
    add_node(server, "gpu-1", "Unknown", "Kubelet stopped posting node status.")
    node = engine.list_nodes()[0]
    assert (node.state, node.service) == ("NotReady", NodeService.DOWN)
    assert node.reason == "Kubelet stopped posting node status."


def test_a_cordon_by_others_is_a_drain_without_a_reason(engine: KubernetesBackend, server: FakeApiServer) -> None:
    server.objects["nodes", "", "gpu-1"]["spec"]["unschedulable"] = True
    node = engine.list_nodes()[0]
    assert (node.state, node.service, node.reason) == ("Ready,SchedulingDisabled", NodeService.DRAINED, None)


def test_a_user_that_may_not_patch_nodes_is_told_what_is_needed(
    engine: KubernetesBackend, server: FakeApiServer
) -> None:
    server.refuse["PATCH", "nodes"] = (403, 'User "ada" cannot patch resource "nodes"')
    with pytest.raises(UsageError, match="changing node gpu-1, which needs the verb patch on nodes: you may not do"):
        engine.drain_node("gpu-1", "hot", "ada")
