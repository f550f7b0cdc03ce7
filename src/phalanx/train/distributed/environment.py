"""The distributed environment of a worker: rank, world size and device, from environment variables.

The variables are those of torchrun (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT) and PHALANX_ATTEMPT, so the
agent, torchrun, srun and mpirun can all start workers.
"""

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from phalanx.cluster.discovery import VISIBLE_DEVICES_VARIABLES, explain_too_few_gpus
from phalanx.errors import RecipeError, UnfitNodeError, UsageError
from phalanx.recipe.devices import DEVICE_KINDS


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
    """Return the kind of GPU that torch sees here, and the count; "cpu" and 0 if there is none."""
    return ("cuda", torch.cuda.device_count()) if torch.cuda.is_available() else ("cpu", 0)


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


def is_single_node(environment: Mapping[str, str]) -> bool:
    """Return whether all workers are on this machine, according to the launcher."""
    return environment.get("LOCAL_WORLD_SIZE") == environment.get("WORLD_SIZE")
