"""Create the process group of an attempt, and leave it."""

import gc
import os
import socket
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from phalanx.cluster.device_links import INTERFACE_VARIABLES, bind_to_local_cores, find_missing_interfaces
from phalanx.compat import set_allocator
from phalanx.errors import UsageError
from phalanx.recipe.devices import device_kind_of
from phalanx.train.distributed.collective_trace import enable_trace, watch_collectives
from phalanx.train.distributed.environment import DistEnv, is_single_node
from phalanx.train.distributed.failures import is_interface_failure
from phalanx.train.distributed.store import MIN_COLLECTIVE_TIMEOUT, open_attempt_store

COLLECTIVE_TIMEOUT_MARGIN_S = 60.0
"""Seconds by which collectives time out later than the agent, which finds the hanging rank and restarts workers."""
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables with the user's configuration of torch's allocator: the new name and the old one."""
_collective_timeout = [MIN_COLLECTIVE_TIMEOUT]


def init_process_group(
    dist_env: DistEnv,
    environment: Mapping[str, str] = os.environ,
    before: Callable[[DistEnv], None] = lambda place: None,
) -> None:
    """Create the process group of this attempt; do nothing for a world of one. `before` is called when nothing else can
    fail in this worker.

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
    os.environ.update(loopback_variables(environment))
    check_network_interfaces(dist_env, environment)
    store = open_attempt_store(dist_env, environment)
    before(dist_env)
    enable_trace(environment)
    try:
        dist.init_process_group(
            kind.process_group_backend,
            store=store,
            rank=dist_env.rank,
            world_size=dist_env.world_size,
            timeout=_collective_timeout[0],
            # Otherwise NCCL would guess the device at the first collective, connect lazily, and could not split groups.
            device_id=dist_env.device if kind.is_gpu else None,
        )
    except RuntimeError as error:
        if kind.is_gpu or isinstance(error, dist.DistError) or is_interface_failure(error):
            raise
        raise dist.DistError(f"the workers did not find each other: {error}") from error
    watch_collectives(environment)


def set_collective_timeout(hang_timeout_s: float) -> None:
    """Set the timeout of collectives of later groups to more than `hang_timeout_s` seconds, after which the agent ends
    hanging workers. Otherwise gloo and NCCL's watchdog would time out first and report lost peers."""
    timeout = timedelta(seconds=min(hang_timeout_s, 1e9) + COLLECTIVE_TIMEOUT_MARGIN_S)
    _collective_timeout[:] = [max(MIN_COLLECTIVE_TIMEOUT, timeout)]


def patience() -> timedelta:
    """Return the timeout of collectives of a group that is created now."""
    return _collective_timeout[0]


def clone_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Create another group with the workers of `group` (None: the world), for operations in an independent order. All
    of them must call this."""
    ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    new_group: dist.ProcessGroup = dist.new_group(ranks, timeout=_collective_timeout[0], use_local_synchronization=True)
    return new_group


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


def _use(device: torch.device) -> None:
    """Select this GPU. On CUDA, enable expandable segments of torch's allocator, which reduces fragmentation
    (docs/benchmarks/gpu.md), unless the user has configured the allocator or the driver does not support them (virtual
    GPUs, some of WSL2). No effect if a device was selected before."""
    module = torch.get_device_module(device)
    is_configured = any(name in os.environ for name in ALLOCATOR_VARIABLES)
    if device.type != "cuda" or torch.version.hip is not None or is_configured:
        module.set_device(device)
        return
    os.environ[ALLOCATOR_VARIABLES[1]] = "expandable_segments:True"
    module.set_device(device)
    try:
        torch.empty(1, device=device)
    except RuntimeError as error:
        if "CUDA driver error" not in str(error):
            raise
        os.environ[ALLOCATOR_VARIABLES[1]] = "expandable_segments:False"
        set_allocator(os.environ[ALLOCATOR_VARIABLES[1]])


def _pin_to_near_cores(device: torch.device) -> None:
    """On a machine with several GPUs, pin this process to the cores near its GPU."""
    if device.type == "cuda" and torch.cuda.device_count() > 1:
        found: Any = torch.cuda.get_device_properties(device)
        bind_to_local_cores(f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0")


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
