"""A worker's place among the others: rank, world, device and process group, taken from environment variables.

The variables are torchrun's (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT) and our PHALANX_ATTEMPT, so the
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

from phalanx.cluster.discover import VISIBLE_DEVICES, too_few_gpus
from phalanx.cluster.interfaces import VARIABLES, missing
from phalanx.cluster.near_cores import stay_near
from phalanx.compat import set_allocator
from phalanx.errors import DataError, PhalanxError, RecipeError, UnfitNodeError, UsageError
from phalanx.recipe.devices import KINDS, kind_of
from phalanx.run.membership import KEY_VARIABLE, STORE_VARIABLE
from phalanx.run.wire import listening_at, store_key, token_from
from phalanx.train.signed import SignedStore

PATIENCE = timedelta(minutes=10)
"""How long a collective may take before it is an error, or longer: see `outwait`. Evaluation and first steps on slow
machines must fit."""
AFTERWARDS = 60.0
"""Seconds that a collective waits longer than the agent, which knows who is stuck and starts workers again."""

CONNECTING = timedelta(seconds=30)
"""How long it may take to reach a store that was there before its workers were started."""


@dataclass(frozen=True)
class Place:
    """Which worker this is. `attempt` counts from 0 over the life of the run."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    attempt: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def leads(self) -> bool:
        """Whether this is the worker that speaks for all."""
        return self.rank == 0


def from_environment(environment: Mapping[str, str] = os.environ, device: str = "auto") -> Place:
    """The place that the environment gives; alone on this machine when it says nothing. `device` is a recipe's."""
    try:
        rank, world = int(environment.get("RANK") or 0), int(environment.get("WORLD_SIZE") or 1)
        local_rank = int(environment.get("LOCAL_RANK") or 0)
        attempt = int(environment.get("PHALANX_ATTEMPT") or environment.get("TORCHELASTIC_RESTART_COUNT") or 0)
    except ValueError as error:
        raise UsageError(f"RANK, WORLD_SIZE, LOCAL_RANK and PHALANX_ATTEMPT must be numbers: {error}") from None
    if not 0 <= rank < world:
        raise UsageError(f"RANK={rank} does not lie in WORLD_SIZE={world}")
    return Place(rank, world, local_rank, attempt, device_of(local_rank, environment, device))


def visible_gpus() -> tuple[str, int]:
    """The kind of GPU that torch sees and can train on here, and how many; "cpu" and 0 where there is none."""
    if torch.cuda.is_available():
        return "cuda", torch.cuda.device_count()
    if torch.xpu.is_available() and torch.xpu.get_device_properties(0).has_fp64:
        return "xpu", torch.xpu.device_count()
    return "cpu", 0


def device_of(
    local_rank: int,
    environment: Mapping[str, str],
    asked: str = "auto",
    gpus: Callable[[], tuple[str, int]] = visible_gpus,
) -> torch.device:
    """The GPU of a worker: its own of those that torch sees, or the only one that a launcher lets it see (`srun
    --gpus-per-task=1` gives each task a CUDA_VISIBLE_DEVICES of one). The CPU where there is none, or where a recipe's
    device is `asked` to be that. RecipeError where what is asked for is not here, UsageError when there are fewer GPUs
    than workers; UnfitNodeError for either on one of several nodes of our agents, whose leading one has what it takes.
    """
    if asked == "cpu":
        return torch.device("cpu")
    kind, visible = gpus()
    by_agent, found = "PHALANX_EVENTS_FD" in environment, visible if asked in ("auto", kind) else 0
    if by_agent and not is_local(environment) and found <= local_rank and (asked != "auto" or visible):
        wanted, gpus_found = environment.get("LOCAL_WORLD_SIZE"), f"{found} {'GPU' if found == 1 else 'GPUs'}"
        raise UnfitNodeError(
            f"torch finds {gpus_found} on {socket.gethostname()} for {wanted} workers, each of which takes one; "
            "`phalanx doctor` there may tell why"
        )
    if asked not in ("auto", kind):
        raise RecipeError(
            f"device: found {asked}, but torch {torch.__version__} does not find {KINDS[asked].what} on "
            f"{socket.gethostname()} to train on; all nodes of a run need the same kind of device"
        )
    if local_rank < visible:
        return torch.device(kind, local_rank)
    if not visible:
        return torch.device("cpu")
    if visible == 1 and not by_agent and any(environment.get(name) for name in VISIBLE_DEVICES):
        return torch.device(kind, 0)
    raise UsageError(too_few_gpus(local_rank + 1, visible))


def _stay_near(device: torch.device) -> None:
    """On a machine with several GPUs, run on the cores that are near this worker's own."""
    if device.type == "cuda" and torch.cuda.device_count() > 1:
        found: Any = torch.cuda.get_device_properties(device)
        stay_near(f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0")


ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""By which a user configures torch's allocator, by its new and its old name."""


def _use(device: torch.device, environment: MutableMapping[str, str] = os.environ) -> None:
    """Work on this GPU. On CUDA torch's allocator extends the memory it reserved rather than reserve more, unless the
    user configured it or the driver cannot, as on virtual GPUs and some of WSL2: less of it lies unused
    (docs/benchmarks/gpu.md). Without effect where a device was set before."""
    module = torch.get_device_module(device)
    if device.type != "cuda" or torch.version.hip is not None or any(name in environment for name in ALLOCATOR):
        module.set_device(device)
        return
    environment[ALLOCATOR[1]] = "expandable_segments:True"
    module.set_device(device)
    try:
        torch.empty(1, device=device)
    except RuntimeError as error:
        if "CUDA driver error" not in str(error):
            raise
        environment[ALLOCATOR[1]] = "expandable_segments:False"
        set_allocator(environment[ALLOCATOR[1]])


def join(
    place: Place,
    environment: Mapping[str, str] = os.environ,
    connections: AbstractContextManager[Any] = contextlib.nullcontext(),  # noqa: B008 - it holds nothing
    before: Callable[[Place], None] = lambda place: None,
) -> None:
    """Enter the process group of this attempt; nothing to do for a world of one. `connections` is entered while the
    group opens its own; `before` is called when nothing else can go wrong in this worker.

    Each attempt has its own prefix in the store: gloo would otherwise read addresses of the attempt that died. A
    nursery that serves several runs, whose attempts may have the same number, tells them apart by
    PHALANX_RENDEZVOUS_ID.
    """
    kind = kind_of(place.device.type)
    if kind.is_gpu:
        _use(place.device)
        _stay_near(place.device)
    if place.world == 1:
        return
    if kind.backend is None or not dist.is_backend_available(kind.backend):
        raise RecipeError(
            f"device: torch {torch.__version__} has no {kind.backend}, by which workers on {kind.type} exchange "
            "gradients; use one worker, or device=cpu"
        )
    os.environ.update(local_network(environment))
    check_interfaces(place, environment)
    store = store_of(place, environment)
    before(place)
    _watching[:] = [connections]
    with connections:
        dist.init_process_group(
            kind.group,
            store=store,
            rank=place.rank,
            world_size=place.world,
            timeout=_patience[0],
            # NCCL would guess the device at the first collective, connect lazily and could not split communicators.
            device_id=place.device if kind.is_gpu else None,
        )


_patience = [PATIENCE]


def outwait(silence: float) -> None:
    """Have collectives of groups made from now on wait longer than `silence` seconds, after which the agent ends
    workers that seem stuck: gloo and NCCL's watchdog would end them first, and say that the others were lost."""
    _patience[:] = [max(PATIENCE, timedelta(seconds=min(silence, 1e9) + AFTERWARDS))]


def patience() -> timedelta:
    """How long collectives of a group that is made now wait."""
    return _patience[0]


_watching: list[AbstractContextManager[Any]] = [contextlib.nullcontext()]
"""What is told of connections that this process opens for a group."""


def twin(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Another group of the workers of `group` (None: of all), for operations whose order is not that of the first's.
    All of them must call this."""
    ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    with _watching[0]:
        made: dist.ProcessGroup = dist.new_group(ranks, timeout=_patience[0], use_local_synchronization=True)
    return made


def is_local(environment: Mapping[str, str]) -> bool:
    """Whether all workers are on this machine, as the launcher says."""
    return environment.get("LOCAL_WORLD_SIZE") == environment.get("WORLD_SIZE")


def local_network(environment: Mapping[str, str]) -> dict[str, str]:
    """gloo binds to the address of the host's name, which need not be usable, and NCCL to any that others may reach; a
    local world talks over loopback."""
    return {name: "lo" for name in VARIABLES if is_local(environment) and name not in environment}


def check_interfaces(place: Place, environment: Mapping[str, str]) -> None:
    """UsageError where the environment names a network interface that this machine has not: gloo would say so as if a
    worker had been lost."""
    libraries = ("GLOO_", "NCCL_") if place.device.type == "cuda" else ("GLOO_",)
    asked = {name: value for name, value in environment.items() if name.startswith(libraries)}
    for problem in missing(asked, [name for _, name in socket.if_nameindex()]):
        raise UsageError(f"{problem} on {socket.gethostname()}")


@functools.cache
def _connect(address: str, port: int, hosts: bool, local: bool, key: bytes | None, patience: timedelta) -> Store:
    if not hosts:
        store = TCPStore(address, port, None, False, patience)
        store.set_timeout(PATIENCE)
    else:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:  # torch itself would listen on all addresses
            own = address if local or ":" in address else listening_at(address)
            listener = socket.create_server((own, port), family=family)
        except OSError as error:
            why = str(error.strerror).partition(" (while")[0]
            raise UsageError(
                f"MASTER_ADDR={address} MASTER_PORT={port}: worker 0 cannot listen there: {why}; name an address of "
                "its machine, and a port that is free"
            ) from None
        store = TCPStore(address, port, None, True, PATIENCE, master_listen_fd=listener.detach())
    return store if key is None else SignedStore(store, key)


@functools.cache
def _shared(path: str) -> FileStore:
    return FileStore(path, -1)


def open_store(place: Place, environment: Mapping[str, str] = os.environ) -> Store:
    """The store where workers meet, opened once in a process. Workers of our agent on one machine have a file that no
    other user can open; on several nodes the agent hosts one, and what stands there is signed with the attempt's key.
    torchrun hosts its own; under any other launcher the leading worker does. What stands there is signed where the
    launcher gives workers a token."""
    if path := environment.get(STORE_VARIABLE):
        return _shared(path)
    address, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    if not address or not port:
        raise UsageError(f"WORLD_SIZE={place.world} needs MASTER_ADDR and MASTER_PORT, where the workers meet")
    # torchrun leaves it to the leading worker where it is configured so, or meets in another store than torch's.
    hosted = "PHALANX_EVENTS_FD" in environment or environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    patience = CONNECTING if hosted else PATIENCE
    hosts = place.leads and not hosted
    return _connect(address, int(port), hosts, is_local(environment), _key(environment), patience)


def _key(environment: Mapping[str, str]) -> bytes | None:
    if given := environment.get(KEY_VARIABLE):
        return bytes.fromhex(given)
    if environment.keys().isdisjoint({"PHALANX_TOKEN", "PHALANX_TOKEN_FILE"}):
        return None
    return store_key(token_from(environment), environment.get("TORCHELASTIC_RUN_ID", ""))


def store_of(place: Place, environment: Mapping[str, str] = os.environ) -> PrefixStore:
    """The part of it that this attempt has for itself."""
    name = f"attempt{place.attempt}/{environment.get('PHALANX_RENDEZVOUS_ID', 0)}"
    return PrefixStore(name, open_store(place, environment))


def agree(
    place: Place,
    value: str,
    what: str,
    cure: str,
    everywhere: bool = False,
    environment: Mapping[str, str] = os.environ,
    error: type[PhalanxError] = DataError,
) -> None:
    """An `error` on every worker when `value` is not the same on all of them, with the `cure`. Nothing to do on one
    node, whose workers read the same files, unless it has to hold `everywhere`."""
    local = environment.get("LOCAL_WORLD_SIZE") == environment.get("WORLD_SIZE")
    if place.world == 1 or (local and not everywhere):
        return
    digest = xxhash.xxh3_64_intdigest(value.encode()) >> 1  # an int64 has a sign
    mine = torch.tensor([digest])
    all_of_them = [torch.empty_like(mine) for _ in range(place.world)]
    dist.all_gather(all_of_them, mine)
    others = [rank for rank, theirs in enumerate(all_of_them) if not torch.equal(theirs, all_of_them[0])]
    if others:
        raise error(f"the {what} of worker {others[0]} is not that of worker 0: {cure}")


GLOO_SAYS = ("gloo/transport", "caused pair closure")
"""gloo has no type for the loss of a peer. The second is what other threads get when one has hung up after it."""


def lost_peer(error: BaseException) -> bool:
    """Whether this is what a collective raises whose other end is gone: no mistake of the worker that raises it."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in GLOO_SAYS)


GPU_SAYS = (
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
"""What CUDA and HIP say, by way of torch, Triton or NCCL, of a GPU that failed or is gone; the last three of a driver
that does not work, or the service of its links."""


def broken_gpu(error: BaseException) -> bool:
    """Whether a GPU of this machine failed: a process that begins again may have it back, or only another machine. An
    illegal address or a failed launch is a mistake of a program, most often."""
    kinds = (RuntimeError, torch.cuda.DeferredCudaCallError)
    return isinstance(error, kinds) and any(words in str(error) for words in GPU_SAYS)


def part() -> None:
    """Leave a process group of which others may be gone, to enter another: nothing waits for anybody."""
    if dist.is_initialized():
        dist.destroy_process_group()


_collecting: list[threading.Thread] = []


def let_go(stays: bool) -> None:
    """Collect what is left of groups that were parted from, beside what goes on: gloo waits for a round of its loop for
    every connection that ends, which made 40 to 90 ms for a sharded replica. `stays`: what exists then stays, and later
    collections need not look at it."""

    def collect() -> None:
        gc.collect()
        if stays:
            gc.freeze()

    _collected()
    _collecting.append(threading.Thread(target=collect, name="letting go of a group"))
    _collecting[-1].start()


def _collected() -> None:
    """Wait for the collection that is under way: another one beside it would do nothing."""
    while _collecting:
        _collecting.pop().join()


def leave() -> None:
    """Leave the process group in order, if there is one.

    What is left of it is collected: threads of a group that lives until the interpreter ends may still be letting go of
    a tensor then, which ends the process by SIGABRT ("terminate called without an active exception").
    """
    joined = dist.is_initialized()
    if joined:
        dist.destroy_process_group()
    _collected()
    gc.unfreeze()  # or the model of this run would stay for as long as the process
    if joined:
        gc.collect()


def end_at_once(code: int) -> int:
    """The exit code; or the end of this process, where its group could not be left in order: what threads of that still
    do would end it with another code."""
    if dist.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code
