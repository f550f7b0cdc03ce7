"""Environment variables by which each framework configures its processes. `launcher.py` starts the processes.

Sources: PyTorch's torchrun page; jax.distributed.initialize; TensorFlow's TF_CONFIG guide for
MultiWorkerMirroredStrategy; Open MPI's mpirun(1).
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from phalanx.errors import UsageError


@dataclass(frozen=True)
class ProcessTopology:
    """All processes of a job: `nproc_per_node` on every host. `ports`: free ones on each host, one for each of its
    processes and one more. A process of rank r is on host r // each."""

    hosts: tuple[str, ...]
    nproc_per_node: int
    ports: tuple[tuple[int, ...], ...]

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.nproc_per_node * len(self.hosts)

    def address_of(self, rank: int) -> str:
        """HOST:PORT that belongs to a process alone."""
        node_rank, local_rank = divmod(rank, self.nproc_per_node)
        return _format_address(self.hosts[node_rank], self.ports[node_rank][local_rank])

    @property
    def rendezvous_address(self) -> tuple[str, int]:
        """Host and port on the first node that belong to all."""
        return self.hosts[0], self.ports[0][self.nproc_per_node]


def _format_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _torch_variables(topology: ProcessTopology, rank: int) -> dict[str, str]:
    host, port = topology.rendezvous_address
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


def _jax_variables(topology: ProcessTopology, rank: int) -> dict[str, str]:
    coordinator = _format_address(*topology.rendezvous_address)
    return {
        "JAX_COORDINATOR_ADDRESS": coordinator,
        "JAX_NUM_PROCESSES": str(topology.world_size),
        "JAX_PROCESS_ID": str(rank),
    }


def _tensorflow_variables(topology: ProcessTopology, rank: int) -> dict[str, str]:
    workers = [topology.address_of(each) for each in range(topology.world_size)]
    return {"TF_CONFIG": json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}})}


def _no_variables(topology: ProcessTopology, rank: int) -> dict[str, str]:
    return {}


VARIABLES_BY_FRAMEWORK: Mapping[str, Callable[[ProcessTopology, int], dict[str, str]]] = {
    "torch": _torch_variables,
    "jax": _jax_variables,
    "tensorflow": _tensorflow_variables,
    "mpi": _no_variables,
    "plain": _no_variables,
}
"""Environment variables of each framework's processes. mpirun starts MPI processes and sets their environment."""


def make_process_variables(framework: str, topology: ProcessTopology, rank: int) -> dict[str, str]:
    """Return the variables of one process to add to the inherited ones. Raises UsageError for an unknown framework."""
    check_framework(framework)
    phalanx_variables = {"PHALANX_RANK": str(rank), "PHALANX_WORLD_SIZE": str(topology.world_size)}
    return {**phalanx_variables, **VARIABLES_BY_FRAMEWORK[framework](topology, rank)}


def make_mpirun_command(topology: ProcessTopology, hostfile: str, command: list[str], as_root: bool) -> list[str]:
    """The command that starts all processes of an MPI program from the first node."""
    launch = ["mpirun", "-n", str(topology.world_size), "--hostfile", hostfile]
    # Open MPI refuses to run as root without this option, and containers usually run as root
    return [*launch, *(["--allow-run-as-root"] if as_root else []), *command]


def render_hostfile(topology: ProcessTopology) -> str:
    """Open MPI's file of hosts and their slots."""
    return "".join(f"{host} slots={topology.nproc_per_node}\n" for host in topology.hosts)


def select_visible_devices(visible_devices: str | None, nproc_per_node: int, local_rank: int) -> str | None:
    """CUDA_VISIBLE_DEVICES of one process, of those that its node has; None leaves them as they are."""
    names = [name for name in (visible_devices or "").split(",") if name]
    devices_per_process = len(names) // nproc_per_node
    return (
        ",".join(names[local_rank * devices_per_process : (local_rank + 1) * devices_per_process])
        if devices_per_process
        else None
    )


def check_framework(framework: str) -> None:
    """UsageError for a framework that is not in the table."""
    if framework not in VARIABLES_BY_FRAMEWORK:
        raise UsageError(f"--framework {framework}: expected one of {', '.join(VARIABLES_BY_FRAMEWORK)}")
