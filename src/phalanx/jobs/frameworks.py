"""What a process must know of its job, in the words of each framework: one table. Starts nothing (`launch.py` does).

Sources: PyTorch's torchrun page; jax.distributed.initialize; TensorFlow's TF_CONFIG guide for
MultiWorkerMirroredStrategy; ps-lite's environment variables for MXNet; Open MPI's mpirun(1).
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from phalanx.errors import UsageError


@dataclass(frozen=True)
class World:
    """All processes of a job: `each` on every host. `ports`: free ones on each host, one for each of its processes and
    one more. A process of rank r is on host r // each."""

    hosts: tuple[str, ...]
    each: int
    ports: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        """Number of processes."""
        return self.each * len(self.hosts)

    def place(self, rank: int) -> str:
        """HOST:PORT that belongs to a process alone."""
        node, local = divmod(rank, self.each)
        return _joined(self.hosts[node], self.ports[node][local])

    @property
    def meeting(self) -> tuple[str, int]:
        """Host and port on the first node that belong to all."""
        return self.hosts[0], self.ports[0][self.each]


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _torch(world: World, rank: int) -> dict[str, str]:
    host, port = world.meeting
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world.size),
        "LOCAL_RANK": str(rank % world.each),
        "LOCAL_WORLD_SIZE": str(world.each),
        "GROUP_RANK": str(rank // world.each),
        "GROUP_WORLD_SIZE": str(len(world.hosts)),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
    }


def _jax(world: World, rank: int) -> dict[str, str]:
    coordinator = _joined(*world.meeting)
    return {
        "JAX_COORDINATOR_ADDRESS": coordinator,
        "JAX_NUM_PROCESSES": str(world.size),
        "JAX_PROCESS_ID": str(rank),
    }


def _tensorflow(world: World, rank: int) -> dict[str, str]:
    workers = [world.place(each) for each in range(world.size)]
    return {"TF_CONFIG": json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}})}


def _mxnet(world: World, rank: int) -> dict[str, str]:
    host, port = world.meeting
    shared = {"DMLC_NUM_WORKER": str(world.size), "DMLC_NUM_SERVER": str(len(world.hosts))}
    shared |= {"DMLC_PS_ROOT_URI": host, "DMLC_PS_ROOT_PORT": str(port)}
    shared |= {"DMLC_TRACKER_URI": host, "DMLC_TRACKER_PORT": str(port)}
    return {**shared, "DMLC_ROLE": "worker", "DMLC_TASK_ID": str(rank), "DMLC_WORKER_ID": str(rank)}


def _plain(world: World, rank: int) -> dict[str, str]:
    return {}


VARIABLES: Mapping[str, Callable[[World, int], dict[str, str]]] = {
    "torch": _torch,
    "jax": _jax,
    "tensorflow": _tensorflow,
    "mpi": _plain,
    "mxnet": _mxnet,
    "plain": _plain,
}
"""What each framework's processes are told. MPI's processes are started, and told, by its own mpirun."""


def variables(framework: str, world: World, rank: int) -> dict[str, str]:
    """The environment of one process, beside what it inherits. UsageError for a framework that is not in the table."""
    check(framework)
    ours = {"PHALANX_RANK": str(rank), "PHALANX_WORLD_SIZE": str(world.size)}
    return {**ours, **VARIABLES[framework](world, rank)}


def helpers(framework: str, world: World, node: int) -> list[dict[str, str]]:
    """Environments of the processes that a framework wants on a node beside its workers: MXNet's servers, one on each
    node, and its scheduler on the first."""
    if framework != "mxnet":
        return []
    server = {**_mxnet(world, node), "DMLC_ROLE": "server", "DMLC_SERVER_ID": str(node)}
    found = [{key: value for key, value in server.items() if key != "DMLC_WORKER_ID"}]
    if node == 0:
        found.append({**found[0], "DMLC_ROLE": "scheduler", "DMLC_TASK_ID": "0"})
        del found[-1]["DMLC_SERVER_ID"]
    return found


def mpirun(world: World, hostfile: str, command: list[str], root: bool) -> list[str]:
    """The command that starts all processes of an MPI program from the first node."""
    asked = ["mpirun", "-n", str(world.size), "--hostfile", hostfile]
    # Open MPI refuses root unless told; in a container everybody is
    return [*asked, *(["--allow-run-as-root"] if root else []), *command]


def hostfile(world: World) -> str:
    """Open MPI's file of hosts and their slots."""
    return "".join(f"{host} slots={world.each}\n" for host in world.hosts)


def devices_of(visible: str | None, each: int, local: int) -> str | None:
    """CUDA_VISIBLE_DEVICES of one process, of those that its node has; None leaves them as they are."""
    names = [name for name in (visible or "").split(",") if name]
    share = len(names) // each
    return ",".join(names[local * share : (local + 1) * share]) if share else None


def check(framework: str) -> None:
    """UsageError for a framework that is not in the table."""
    if framework not in VARIABLES:
        raise UsageError(f"--framework {framework}: expected one of {', '.join(VARIABLES)}")
