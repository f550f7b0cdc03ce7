"""What each framework's processes are told of their job."""

import json

import pytest

from phalanx.errors import UsageError
from phalanx.jobs.frameworks.process_env import (
    check_framework,
    make_process_variables,
    select_visible_devices,
)
from phalanx.run.process_messages import Topology

WORLD = Topology(hosts=("10.0.0.1", "10.0.0.2"), nproc_per_node=2, ports=((5001, 5002, 5003), (6001, 6002, 6003)))


def test_torch_gets_what_torchrun_gives() -> None:
    found = make_process_variables("torch", WORLD, 3)
    wanted = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}
    assert wanted.items() <= found.items()
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("10.0.0.1", "5003")


def test_jax_gets_its_coordinator() -> None:
    found = make_process_variables("jax", WORLD, 2)
    assert found["JAX_COORDINATOR_ADDRESS"] == "10.0.0.1:5003"
    assert (found["JAX_NUM_PROCESSES"], found["JAX_PROCESS_ID"]) == ("4", "2")


def test_tensorflow_gets_every_worker_and_its_own_index() -> None:
    config = json.loads(make_process_variables("tensorflow", WORLD, 2)["TF_CONFIG"])
    assert config["cluster"]["worker"] == ["10.0.0.1:5001", "10.0.0.1:5002", "10.0.0.2:6001", "10.0.0.2:6002"]
    assert config["task"] == {"type": "worker", "index": 2}


def test_an_address_of_the_sixth_version_is_put_into_brackets() -> None:
    world = Topology(hosts=("fe80::1",), nproc_per_node=1, ports=((1, 2),))
    assert make_process_variables("jax", world, 0)["JAX_COORDINATOR_ADDRESS"] == "[fe80::1]:2"


def test_every_process_of_a_plain_program_knows_its_rank() -> None:
    assert make_process_variables("plain", WORLD, 1) == {"PHALANX_RANK": "1", "PHALANX_WORLD_SIZE": "4"}


@pytest.mark.parametrize(
    ("visible", "local", "found"),
    [("0,1,2,3", 1, "2,3"), ("GPU-a,GPU-b", 0, "GPU-a"), ("0", 0, None), ("", 0, None), (None, 1, None)],
)
def test_processes_of_a_node_share_its_devices(visible: str | None, local: int, found: str | None) -> None:
    assert select_visible_devices(visible, 2, local) == found


def test_a_framework_that_is_not_in_the_table_is_told_with_those_that_are() -> None:
    with pytest.raises(UsageError, match="torch, jax, tensorflow, plain"):
        check_framework("pytroch")
