"""Machines of a Ray cluster. The real Ray: tests/cluster/test_ray_backend.py."""

from types import SimpleNamespace

import pytest

from phalanx.errors import UsageError
from phalanx.jobs.backends.base import NodeService
from phalanx.jobs.backends.ray.backend import RayBackend, parse_node


def test_a_dead_machine_is_down_and_says_why() -> None:
    state = SimpleNamespace(
        node_ip="10.0.0.1", node_name="gpu-1", state="DEAD", state_message="no heartbeat", resources_total=None
    )
    node = parse_node(state, {})
    assert (node.service, node.reason, node.num_gpus, node.host_names) == (
        NodeService.DOWN,
        "no heartbeat",
        0,
        ("gpu-1",),
    )


def test_a_machine_has_its_gpus_and_jobs() -> None:
    state = SimpleNamespace(
        node_ip="10.0.0.1", node_name="10.0.0.1", state="ALIVE", state_message="", resources_total={"GPU": 8.0}
    )
    node = parse_node(state, {"10.0.0.1": ("gpt-1",)})
    assert (node.service, node.jobs, node.num_gpus, node.host_names) == (NodeService.OPEN, ("gpt-1",), 8, ())


def test_a_drain_is_refused_with_what_to_do_instead() -> None:
    with pytest.raises(UsageError, match=r"cannot be undone.*`ray stop`"):
        RayBackend("http://127.0.0.1:1").drain_node("10.0.0.1", "hot", "ada")
    with pytest.raises(UsageError, match="Ray drains no nodes"):
        RayBackend("http://127.0.0.1:1").undrain_node("10.0.0.1")
