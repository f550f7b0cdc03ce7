"""The distributed environment of a worker: rank, world size, device and process group, from environment variables.

The variables are those of torchrun (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT) and PHALANX_ATTEMPT, so the
agent, torchrun, srun and mpirun can all start workers.
"""

import contextlib
import functools
import gc
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from phalanx.cluster.cpu_affinity import bind_to_local_cores
from phalanx.cluster.discovery import VISIBLE_DEVICES_VARIABLES, explain_too_few_gpus
from phalanx.cluster.interfaces import INTERFACE_VARIABLES, find_missing_interfaces
from phalanx.compat import set_allocator
from phalanx.errors import DataError, PhalanxError, RecipeError, UnfitNodeError, UsageError
from phalanx.recipe.devices import DEVICE_KINDS, device_kind_of
from phalanx.run.authentication import derive_store_key, load_token
from phalanx.run.control_channel import find_listen_address
from phalanx.run.node_env import STORE_KEY_VARIABLE, STORE_VARIABLE
from phalanx.train.distributed.signed_store import SignedStore

MIN_COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""Minimum timeout of a collective, see `set_collective_timeout`. Evaluation and the first steps on slow machines must
fit."""
COLLECTIVE_TIMEOUT_MARGIN_S = 60.0
"""Seconds by which collectives time out later than the agent, which finds the hanging rank and restarts workers."""

STORE_CONNECT_TIMEOUT = timedelta(seconds=30)
"""Timeout for connecting to a store that was started before its workers."""


@dataclass(frozen=True)
class DistEnv:
    """Identity of a worker. `attempt` counts from 0 over the life of the run."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    attempt: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def is_rank_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0


def dist_env_from_environment(environment: Mapping[str, str] = os.environ, device: str = "auto") -> DistEnv:
    """Read the environment; a world of one if it is not set. `device` is the recipe's."""
    try:
        rank, world_size = int(environment.get("RANK") or 0), int(environment.get("WORLD_SIZE") or 1)
        local_rank = int(environment.get("LOCAL_RANK") or 0)
        attempt = int(environment.get("PHALANX_ATTEMPT") or environment.get("TORCHELASTIC_RESTART_COUNT") or 0)
    except ValueError as error:
        raise UsageError(f"RANK, WORLD_SIZE, LOCAL_RANK and PHALANX_ATTEMPT must be numbers: {error}") from None
    if not 0 <= rank < world_size:
        raise UsageError(f"RANK={rank} does not lie in WORLD_SIZE={world_size}")
    return DistEnv(rank, world_size, local_rank, attempt, select_device(local_rank, environment, device))


def find_visible_gpus() -> tuple[str, int]:
    """Return the kind of GPU that torch sees and supports here, and the count; "cpu" and 0 if there is none."""
    if torch.cuda.is_available():
        return "cuda", torch.cuda.device_count()
    if torch.xpu.is_available() and torch.xpu.get_device_properties(0).has_fp64:
        return "xpu", torch.xpu.device_count()
    return "cpu", 0


def select_device(
    local_rank: int,
    environment: Mapping[str, str],
    requested: str = "auto",
    gpus: Callable[[], tuple[str, int]] = find_visible_gpus,
) -> torch.device:
    """Select a worker's GPU: the one with its local rank, or the only visible one (`srun --gpus-per-task=1` gives each
    task a CUDA_VISIBLE_DEVICES of one). The CPU if there is none, or if the recipe has `requested` it.

    Raises RecipeError if the requested kind of device is not here, and UsageError if there are fewer GPUs than workers.
    On one of several nodes with our agent, if the leader's node has the devices, both are UnfitNodeError.
    """
    if requested == "cpu":
        return torch.device("cpu")
    kind, visible = gpus()
    by_agent, found = "PHALANX_EVENTS_FD" in environment, visible if requested in ("auto", kind) else 0
    if by_agent and not is_single_node(environment) and found <= local_rank and (requested != "auto" or visible):
        wanted, gpus_found = environment.get("LOCAL_WORLD_SIZE"), f"{found} {'GPU' if found == 1 else 'GPUs'}"
        raise UnfitNodeError(
            f"torch finds {gpus_found} on {socket.gethostname()} for {wanted} workers, each of which takes one; "
            "run `phalanx doctor` there to find out why"
        )
    if requested not in ("auto", kind):
        raise RecipeError(
            f"device: found {requested}, but torch {torch.__version__} does not find "
            f"{DEVICE_KINDS[requested].description} on "
            f"{socket.gethostname()} to train on; all nodes of a run need the same kind of device"
        )
    if local_rank < visible:
        return torch.device(kind, local_rank)
    if not visible:
        return torch.device("cpu")
    if visible == 1 and not by_agent and any(environment.get(name) for name in VISIBLE_DEVICES_VARIABLES):
        return torch.device(kind, 0)
    raise UsageError(explain_too_few_gpus(local_rank + 1, visible))


def _pin_to_near_cores(device: torch.device) -> None:
    """On a machine with several GPUs, pin this process to the cores near its GPU."""
    if device.type == "cuda" and torch.cuda.device_count() > 1:
        found: Any = torch.cuda.get_device_properties(device)
        bind_to_local_cores(f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0")


ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables with the user's configuration of torch's allocator: the new name and the old one."""


def _use(device: torch.device, environment: MutableMapping[str, str] = os.environ) -> None:
    """Select this GPU. On CUDA, enable expandable segments of torch's allocator, which reduces fragmentation
    (docs/benchmarks/gpu.md), unless the user has configured the allocator or the driver does not support them (virtual
    GPUs, some of WSL2). No effect if a device was selected before."""
    module = torch.get_device_module(device)
    if (
        device.type != "cuda"
        or torch.version.hip is not None
        or any(name in environment for name in ALLOCATOR_VARIABLES)
    ):
        module.set_device(device)
        return
    environment[ALLOCATOR_VARIABLES[1]] = "expandable_segments:True"
    module.set_device(device)
    try:
        torch.empty(1, device=device)
    except RuntimeError as error:
        if "CUDA driver error" not in str(error):
            raise
        environment[ALLOCATOR_VARIABLES[1]] = "expandable_segments:False"
        set_allocator(environment[ALLOCATOR_VARIABLES[1]])


def init_process_group(
    dist_env: DistEnv,
    environment: Mapping[str, str] = os.environ,
    connection_scope: AbstractContextManager[Any] = contextlib.nullcontext(),  # noqa: B008 - it holds nothing
    before: Callable[[DistEnv], None] = lambda place: None,
) -> None:
    """Create the process group of this attempt; do nothing for a world of one. `connection_scope` is entered while the
    group opens its connections. `before` is called when nothing else can fail in this worker.

    Each attempt has its own prefix in the store, because gloo would otherwise read the addresses of the previous
    attempt. A fork server may serve several runs with equal attempt numbers; PHALANX_RENDEZVOUS_ID then separates their
    prefixes.
    """
    kind = device_kind_of(dist_env.device.type)
    if kind.is_gpu:
        _use(dist_env.device)
        _pin_to_near_cores(dist_env.device)
    if dist_env.world_size == 1:
        return
    if kind.dist_backend is None or not dist.is_backend_available(kind.dist_backend):
        raise RecipeError(
            f"device: torch {torch.__version__} has no {kind.dist_backend}, by which workers on {kind.type} exchange "
            "gradients; use one worker, or device=cpu"
        )
    os.environ.update(loopback_variables(environment))
    check_network_interfaces(dist_env, environment)
    store = open_attempt_store(dist_env, environment)
    before(dist_env)
    _connection_scopes[:] = [connection_scope]
    with connection_scope:
        dist.init_process_group(
            kind.process_group_backend,
            store=store,
            rank=dist_env.rank,
            world_size=dist_env.world_size,
            timeout=_collective_timeout[0],
            # Otherwise NCCL would guess the device at the first collective, connect lazily, and could not split groups.
            device_id=dist_env.device if kind.is_gpu else None,
        )


_collective_timeout = [MIN_COLLECTIVE_TIMEOUT]


def set_collective_timeout(hang_timeout_s: float) -> None:
    """Set the timeout of collectives of later groups to more than `hang_timeout_s` seconds, after which the agent ends
    hanging workers. Otherwise gloo and NCCL's watchdog would time out first and report lost peers."""
    _collective_timeout[:] = [
        max(MIN_COLLECTIVE_TIMEOUT, timedelta(seconds=min(hang_timeout_s, 1e9) + COLLECTIVE_TIMEOUT_MARGIN_S))
    ]


def patience() -> timedelta:
    """Return the timeout of collectives of a group that is created now."""
    return _collective_timeout[0]


_connection_scopes: list[AbstractContextManager[Any]] = [contextlib.nullcontext()]
"""Contexts that are entered while a group opens its connections."""


def clone_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Create another group with the workers of `group` (None: the world), for operations in an independent order. All
    of them must call this."""
    ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    with _connection_scopes[0]:
        new_group: dist.ProcessGroup = dist.new_group(
            ranks, timeout=_collective_timeout[0], use_local_synchronization=True
        )
    return new_group


def is_single_node(environment: Mapping[str, str]) -> bool:
    """Return whether all workers are on this machine, according to the launcher."""
    return environment.get("LOCAL_WORLD_SIZE") == environment.get("WORLD_SIZE")


def loopback_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables that make a single-node world use loopback. gloo would bind to the address of the host name,
    which may be unusable, and NCCL to an address that is reachable from outside."""
    return {name: "lo" for name in INTERFACE_VARIABLES if is_single_node(environment) and name not in environment}


def check_network_interfaces(dist_env: DistEnv, environment: Mapping[str, str]) -> None:
    """Raise UsageError if the environment names a network interface that this machine lacks: gloo would report this as
    a lost worker."""
    libraries = ("GLOO_", "NCCL_") if dist_env.device.type == "cuda" else ("GLOO_",)
    requested = {name: value for name, value in environment.items() if name.startswith(libraries)}
    for problem in find_missing_interfaces(requested, [name for _, name in socket.if_nameindex()]):
        raise UsageError(f"{problem} on {socket.gethostname()}")


@functools.cache
def _connect_store(address: str, port: int, is_host: bool, local: bool, key: bytes | None, timeout: timedelta) -> Store:
    if not is_host:
        store = TCPStore(address, port, None, False, timeout)
        store.set_timeout(MIN_COLLECTIVE_TIMEOUT)
    else:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:  # torch itself would listen on all interfaces
            own = address if local or ":" in address else find_listen_address(address)
            listener = socket.create_server((own, port), family=family)
        except OSError as error:
            reason = str(error.strerror).partition(" (while")[0]
            raise UsageError(
                f"MASTER_ADDR={address} MASTER_PORT={port}: worker 0 cannot listen there: {reason}; name an address of "
                "its machine, and a port that is free"
            ) from None
        store = TCPStore(address, port, None, True, MIN_COLLECTIVE_TIMEOUT, master_listen_fd=listener.detach())
    return store if key is None else SignedStore(store, key)


@functools.cache
def _open_file_store(path: str) -> FileStore:
    return FileStore(path, -1)


def open_root_store(dist_env: DistEnv, environment: Mapping[str, str] = os.environ) -> Store:
    """Open the rendezvous store, once per process.

    With our agent on one machine it is a file that only this user can open. On several nodes the agent hosts the store,
    and values are signed with the attempt's key. torchrun hosts its own store; with other launchers rank 0 does. Values
    are signed if the launcher gives the workers a token."""
    if path := environment.get(STORE_VARIABLE):
        return _open_file_store(path)
    address, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    if not address or not port:
        raise UsageError(f"WORLD_SIZE={dist_env.world_size} needs MASTER_ADDR and MASTER_PORT, where the workers meet")
    # torchrun may leave hosting the store to rank 0, or use another rendezvous backend than torch's store.
    hosted = "PHALANX_EVENTS_FD" in environment or environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    timeout = STORE_CONNECT_TIMEOUT if hosted else MIN_COLLECTIVE_TIMEOUT
    is_host = dist_env.is_rank_zero and not hosted
    return _connect_store(
        address, int(port), is_host, is_single_node(environment), _get_store_key(environment), timeout
    )


def _get_store_key(environment: Mapping[str, str]) -> bytes | None:
    if given := environment.get(STORE_KEY_VARIABLE):
        return bytes.fromhex(given)
    if environment.keys().isdisjoint({"PHALANX_TOKEN", "PHALANX_TOKEN_FILE"}):
        return None
    return derive_store_key(load_token(environment), environment.get("TORCHELASTIC_RUN_ID", ""))


def open_attempt_store(dist_env: DistEnv, environment: Mapping[str, str] = os.environ) -> PrefixStore:
    """Open the part of the root store that belongs to this attempt."""
    name = f"attempt{dist_env.attempt}/{environment.get('PHALANX_RENDEZVOUS_ID', 0)}"
    return PrefixStore(name, open_root_store(dist_env, environment))


def assert_same_on_all_ranks(
    dist_env: DistEnv,
    value: str,
    what: str,
    hint: str,
    also_single_node: bool = False,
    environment: Mapping[str, str] = os.environ,
    error: type[PhalanxError] = DataError,
) -> None:
    """Raise `error`, with the `hint`, on every worker unless `value` is the same on all. Skipped on one node, where the
    workers read the same files, unless `also_single_node`."""
    local = environment.get("LOCAL_WORLD_SIZE") == environment.get("WORLD_SIZE")
    if dist_env.world_size == 1 or (local and not also_single_node):
        return
    digest = xxhash.xxh3_64_intdigest(value.encode()) >> 1  # int64 is signed
    mine = torch.tensor([digest])
    all_of_them = [torch.empty_like(mine) for _ in range(dist_env.world_size)]
    dist.all_gather(all_of_them, mine)
    others = [rank for rank, theirs in enumerate(all_of_them) if not torch.equal(theirs, all_of_them[0])]
    if others:
        raise error(f"the {what} of worker {others[0]} is not that of worker 0: {hint}")


GLOO_PEER_LOSS_MESSAGES = ("gloo/transport", "caused pair closure")
"""Messages of gloo, which has no exception type for a lost peer. Other threads get the second after a peer closed."""


def is_peer_failure(error: BaseException) -> bool:
    """Return whether a collective raised this because a peer is gone, so that this worker is not at fault."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in GLOO_PEER_LOSS_MESSAGES)


GPU_FAILURE_MESSAGES = (
    "uncorrectable ECC error",
    "uncorrectable NVLink error",
    "devices unavailable",
    "device(s) is/are busy or unavailable",
    "no CUDA-capable device is detected",
    "GPU is lost",
    "fell off the bus",
    "over nvlink or a hardware error",
    "integrity checks failed",
    "system not yet initialized",
    "CUDA error: unknown error",
)
"""Messages of CUDA and HIP, from torch, Triton or NCCL, about a GPU that failed or is gone; the last three are about a
driver, or the service of its links, that does not work."""


def is_gpu_failure(error: BaseException) -> bool:
    """Return whether a GPU of this machine failed: a new process may be able to use it again, or only another machine.
    An illegal address or a failed launch is usually a bug in a program and does not count."""
    kinds = (RuntimeError, torch.cuda.DeferredCudaCallError)
    return isinstance(error, kinds) and any(words in str(error) for words in GPU_FAILURE_MESSAGES)


def abort_process_group() -> None:
    """Leave a process group without waiting for its other workers, some of which may be gone."""
    if dist.is_initialized():
        dist.destroy_process_group()


_collector_threads: list[threading.Thread] = []


def collect_in_background(freeze: bool) -> None:
    """Collect the garbage of groups that were left, in a thread: gloo takes one round of its event loop to close each
    connection, in total 40 to 90 ms for a sharded replica. `freeze` exempts the remaining objects from later
    collections."""

    def collect() -> None:
        gc.collect()
        if freeze:
            gc.freeze()

    _wait_collectors()
    _collector_threads.append(threading.Thread(target=collect, name="letting go of a group"))
    _collector_threads[-1].start()


def _wait_collectors() -> None:
    """Wait for a collection in progress, because a concurrent one would do nothing."""
    while _collector_threads:
        _collector_threads.pop().join()


def shut_down_process_group(collect: bool = True) -> None:
    """Leave the process group in order, if there is one.

    What is left of it is garbage-collected: if a group lives until the interpreter exits, its threads may still release
    a tensor then, which ends the process by SIGABRT ("terminate called without an active exception"). Without `collect`
    it is left to a process that ends by `os._exit`: a collection copies and walks the 330,000 objects that a worker
    inherited from the fork server, 0.3 to 0.7 s on two cores.
    """
    was_initialized = dist.is_initialized()
    if was_initialized:
        dist.destroy_process_group()
    _wait_collectors()
    if not collect:
        return
    gc.unfreeze()  # otherwise the model of this run would stay in memory as long as the process
    if was_initialized:
        gc.collect()


def end_at_once(code: int) -> int:
    """Return the exit code. If the process group could not be left, exit this process at once, because the group's
    threads would make it exit with another code."""
    if dist.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code
