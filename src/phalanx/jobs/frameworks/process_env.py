"""Environment variables by which each framework configures its processes. `launcher.py` starts the processes.

Sources: PyTorch's torchrun page; jax.distributed.initialize; TensorFlow's TF_CONFIG guide for
MultiWorkerMirroredStrategy; Open MPI's mpirun(1).
"""

import json
from collections.abc import Callable, Mapping

from phalanx.errors import UsageError
from phalanx.run.process_messages import Topology


def _format_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _rendezvous_address(topology: Topology) -> tuple[str, int]:
    """Host and port on the first node that belong to all processes."""
    return topology.hosts[0], topology.ports[0][topology.nproc_per_node]


def _torch_variables(topology: Topology, rank: int) -> dict[str, str]:
    host, port = _rendezvous_address(topology)
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(topology.world_size),
        "LOCAL_RANK": str(rank % topology.nproc_per_node),
        "LOCAL_WORLD_SIZE": str(topology.nproc_per_node),
        "GROUP_RANK": str(rank // topology.nproc_per_node),
        "GROUP_WORLD_SIZE": str(len(topology.hosts)),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
    }


def _jax_variables(topology: Topology, rank: int) -> dict[str, str]:
    coordinator = _format_address(*_rendezvous_address(topology))
    return {
        "JAX_COORDINATOR_ADDRESS": coordinator,
        "JAX_NUM_PROCESSES": str(topology.world_size),
        "JAX_PROCESS_ID": str(rank),
    }


def _tensorflow_variables(topology: Topology, rank: int) -> dict[str, str]:
    workers = [
        _format_address(host, port)
        for host, ports in zip(topology.hosts, topology.ports, strict=True)
        for port in ports[: topology.nproc_per_node]
    ]
    return {"TF_CONFIG": json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}})}


VARIABLES_BY_FRAMEWORK: Mapping[str, Callable[[Topology, int], dict[str, str]]] = {
    "torch": _torch_variables,
    "jax": _jax_variables,
    "tensorflow": _tensorflow_variables,
    "mpi": lambda topology, rank: {},
    "plain": lambda topology, rank: {},
}
"""Environment variables of each framework's processes. mpirun starts MPI processes and sets their environment."""


def make_process_variables(framework: str, topology: Topology, rank: int) -> dict[str, str]:
    """Return the variables of one process to add to the inherited ones. Raises UsageError for an unknown framework."""
    check_framework(framework)
    phalanx_variables = {"PHALANX_RANK": str(rank), "PHALANX_WORLD_SIZE": str(topology.world_size)}
    return {**phalanx_variables, **VARIABLES_BY_FRAMEWORK[framework](topology, rank)}


def select_visible_devices(visible_devices: str | None, nproc_per_node: int, local_rank: int) -> str | None:
    """CUDA_VISIBLE_DEVICES of one process, of those that its node has; None leaves them as they are."""
    names = [name for name in (visible_devices or "").split(",") if name]
    devices_per_process = len(names) // nproc_per_node
    if devices_per_process:
        return ",".join(names[local_rank * devices_per_process : (local_rank + 1) * devices_per_process])
    return None


def check_framework(framework: str) -> None:
    """UsageError for a framework that is not in the table."""
    if framework not in VARIABLES_BY_FRAMEWORK:
        raise UsageError(f"--framework {framework}: expected one of {', '.join(VARIABLES_BY_FRAMEWORK)}")
