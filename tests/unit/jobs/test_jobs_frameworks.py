"""What each framework's processes are told of their job."""

import json

import pytest

from phalanx.errors import UsageError
from phalanx.jobs.frameworks import World, check, devices_of, helpers, hostfile, mpirun, variables

WORLD = World(("10.0.0.1", "10.0.0.2"), 2, ((5001, 5002, 5003), (6001, 6002, 6003)))


def test_torch_gets_what_torchrun_gives() -> None:
    found = variables("torch", WORLD, 3)
    wanted = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}
    assert wanted.items() <= found.items()
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("10.0.0.1", "5003")


def test_jax_gets_its_coordinator() -> None:
    found = variables("jax", WORLD, 2)
    assert found["JAX_COORDINATOR_ADDRESS"] == "10.0.0.1:5003"
    assert (found["JAX_NUM_PROCESSES"], found["JAX_PROCESS_ID"]) == ("4", "2")


def test_tensorflow_gets_every_worker_and_its_own_index() -> None:
    config = json.loads(variables("tensorflow", WORLD, 2)["TF_CONFIG"])
    assert config["cluster"]["worker"] == ["10.0.0.1:5001", "10.0.0.1:5002", "10.0.0.2:6001", "10.0.0.2:6002"]
    assert config["task"] == {"type": "worker", "index": 2}


def test_mxnet_gets_one_scheduler_a_server_on_each_node_and_its_workers() -> None:
    roles = [told["DMLC_ROLE"] for node in (0, 1) for told in helpers("mxnet", WORLD, node)]
    assert roles == ["server", "scheduler", "server"]
    worker = variables("mxnet", WORLD, 3)
    assert (worker["DMLC_ROLE"], worker["DMLC_NUM_WORKER"], worker["DMLC_NUM_SERVER"]) == ("worker", "4", "2")
    assert (worker["DMLC_PS_ROOT_URI"], worker["DMLC_PS_ROOT_PORT"]) == ("10.0.0.1", "5003")
    assert helpers("torch", WORLD, 0) == []


def test_mpi_gets_a_file_of_hosts() -> None:
    assert hostfile(WORLD) == "10.0.0.1 slots=2\n10.0.0.2 slots=2\n"
    assert mpirun(WORLD, "/f", ["prog", "a b"], root=False) == ["mpirun", "-n", "4", "--hostfile", "/f", "prog", "a b"]
    assert "--allow-run-as-root" in mpirun(WORLD, "/f", ["prog"], root=True)


def test_an_address_of_the_sixth_version_is_put_into_brackets() -> None:
    world = World(("fe80::1",), 1, ((1, 2),))
    assert variables("jax", world, 0)["JAX_COORDINATOR_ADDRESS"] == "[fe80::1]:2"


def test_every_process_of_a_plain_program_knows_its_rank() -> None:
    assert variables("plain", WORLD, 1) == {"PHALANX_RANK": "1", "PHALANX_WORLD_SIZE": "4"}


@pytest.mark.parametrize(
    ("visible", "local", "found"),
    [("0,1,2,3", 1, "2,3"), ("GPU-a,GPU-b", 0, "GPU-a"), ("0", 0, None), ("", 0, None), (None, 1, None)],
)
def test_processes_of_a_node_share_its_devices(visible: str | None, local: int, found: str | None) -> None:
    assert devices_of(visible, 2, local) == found


def test_a_framework_that_is_not_in_the_table_is_told_with_those_that_are() -> None:
    with pytest.raises(UsageError, match="torch, jax, tensorflow, mpi, mxnet, plain"):
        check("pytroch")
