"""A worker's place, from environment variables."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from phalanx.errors import RecipeError, UnfitNodeError, UsageError
from phalanx.train.distributed.environment import DistEnv, dist_env_from_environment, select_device
from phalanx.train.distributed.failures import is_gpu_failure, is_peer_failure
from phalanx.train.distributed.process_group import (
    check_network_interfaces,
    init_process_group,
    loopback_variables,
    set_collective_timeout,
)
from phalanx.train.distributed.store import open_root_store

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "TORCHELASTIC_RESTART_COUNT": "2"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (0, 1, 0, 0, True)),
        (TORCHRUN, (3, 8, 1, 2, False)),
        ({**TORCHRUN, "PHALANX_ATTEMPT": "5"}, (3, 8, 1, 5, False)),
    ],
    ids=["alone", "torchrun", "our own attempt"],
)
def test_variables_give_a_worker_its_place(variables: dict[str, str], expected: tuple[int, ...]) -> None:
    place = dist_env_from_environment(variables)
    assert (place.rank, place.world_size, place.local_rank, place.attempt, place.is_rank_zero) == expected


@pytest.mark.parametrize(("rank", "world"), [("2", "2"), ("-1", "2"), ("0", "0")])
def test_a_rank_outside_of_the_world_is_refused(rank: str, world: str) -> None:
    with pytest.raises(UsageError, match=f"RANK={rank} does not lie in WORLD_SIZE={world}"):
        dist_env_from_environment({"RANK": rank, "WORLD_SIZE": world})


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "PHALANX_ATTEMPT"])
def test_variables_must_be_numbers(name: str) -> None:
    with pytest.raises(UsageError, match="must be numbers"):
        dist_env_from_environment({name: "first"})


def test_several_workers_need_a_place_to_meet() -> None:
    with pytest.raises(UsageError, match="WORLD_SIZE=2 needs MASTER_ADDR and MASTER_PORT"):
        open_root_store(DistEnv(rank=1, world_size=2), {"MASTER_ADDR": "127.0.0.1"})


def test_a_network_interface_that_is_not_there_is_told_before_workers_meet() -> None:
    with pytest.raises(UsageError, match=r"^GLOO_SOCKET_IFNAME=nope0, and there is no such interface \(.*lo.*\) on "):
        init_process_group(DistEnv(0, 2), {"GLOO_SOCKET_IFNAME": "nope0"})


def test_of_nccls_interfaces_a_worker_without_a_gpu_asks_nothing() -> None:
    check_network_interfaces(DistEnv(0, 2), {"NCCL_SOCKET_IFNAME": "nope0"})
    with pytest.raises(UsageError, match="NCCL_SOCKET_IFNAME=nope0"):
        check_network_interfaces(DistEnv(0, 2, device=torch.device("cuda", 0)), {"NCCL_SOCKET_IFNAME": "nope0"})


@pytest.mark.parametrize(("silence", "least"), [(5.0, 600.0), (600.0, 600.1), (7200.0, 7200.1), (1e300, 1e8)])
def test_a_collective_waits_longer_than_the_agent_does(
    silence: float, least: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **options: made.append(options))
    try:
        set_collective_timeout(silence)
        init_process_group(
            DistEnv(0, 2), {"PHALANX_STORE_PATH": str(tmp_path / "store"), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        )
    finally:
        set_collective_timeout(600.0)
    assert made[0]["timeout"] >= timedelta(seconds=least)


@pytest.mark.parametrize(
    ("variables", "network"),
    [
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}),
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "eth0"}, {"NCCL_SOCKET_IFNAME": "lo"}),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, {}),
    ],
)
def test_a_local_world_talks_over_loopback_unless_told_otherwise(
    variables: dict[str, str], network: dict[str, str]
) -> None:
    assert loopback_variables(variables) == network


def test_a_broken_connection_is_told_from_a_mistake() -> None:
    broken = "[third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:2973: Connection reset by peer"
    assert is_peer_failure(RuntimeError(broken))
    assert is_peer_failure(dist.DistBackendError("NCCL error: remote process exited or there was a network error"))
    assert not is_peer_failure(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_peer_failure(ConnectionResetError("of the user's own database"))


def test_a_network_interface_that_is_missing_here_is_no_lost_peer() -> None:
    with pytest.raises(RuntimeError, match="gloo/transport") as caught:
        dist.ProcessGroupGloo.create_device(interface="absent0")
    assert not is_peer_failure(caught.value)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"), True),
        (dist.DistBackendError("NCCL error ... Cuda failure 'uncorrectable ECC error encountered'"), True),
        (RuntimeError("Triton Error [CUDA]: uncorrectable NVLink error detected during the execution"), True),
        (torch.cuda.DeferredCudaCallError("failed lazily with error: CUDA error: unknown error"), True),
        (torch.AcceleratorError("CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error"), True),
        (torch.AcceleratorError("CUDA error: unspecified launch failure"), False),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), False),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (ValueError("uncorrectable ECC error, says the user's own code"), False),
    ],
)
def test_a_gpu_that_failed_is_known_by_what_its_driver_says(error: Exception, expected: bool) -> None:
    assert is_gpu_failure(error) is expected


def seeing(count: int, kind: str = "cuda") -> Callable[[], tuple[str, int]]:
    return lambda: (kind if count else "cpu", count)


@pytest.mark.parametrize(
    ("count", "asked", "variables", "expected"),
    [
        (0, "auto", {}, "cpu"),
        (4, "auto", {}, "cuda:3"),
        (4, "cuda", {}, "cuda:3"),
        (4, "cpu", {}, "cpu"),
        (1, "auto", {"CUDA_VISIBLE_DEVICES": "2"}, "cuda:0"),  # srun --gpus-per-task=1
    ],
)
def test_a_worker_takes_its_own_gpu_or_the_only_one_that_its_launcher_shows_it_unless_the_recipe_asks_for_a_cpu(
    count: int, asked: str, variables: dict[str, str], expected: str
) -> None:
    assert select_device(3, variables, asked, gpus=seeing(count)) == torch.device(expected)


@pytest.mark.parametrize("variables", [{}, {"CUDA_VISIBLE_DEVICES": "0", "PHALANX_EVENTS_FD": "socket"}])
def test_more_workers_than_gpus_are_refused(variables: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=r"2 workers on a node with 1 GPU.*--nproc-per-node 1"):
        select_device(1, variables, gpus=seeing(1))


def test_a_node_without_the_device_of_its_run_says_so() -> None:
    with pytest.raises(RecipeError, match=r"^device: found cuda, but torch .* does not find an .* GPU on .*same kind"):
        select_device(0, {}, "cuda", seeing(0, "cpu"))


@pytest.mark.parametrize(("asked", "count"), [("auto", 1), ("cuda", 1), ("cuda", 0)])
def test_one_of_several_nodes_that_has_fewer_gpus_than_the_leading_one_is_unfit(asked: str, count: int) -> None:
    variables = {"PHALANX_EVENTS_FD": "5", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"}
    with pytest.raises(UnfitNodeError, match=rf"^torch finds {count} GPUs? on .* for 2 workers, each of which takes"):
        select_device(1, variables, asked, seeing(count))


@pytest.mark.parametrize(
    ("device", "group", "bound"),
    [("cpu", "gloo", None), ("cuda:1", "cpu:gloo,cuda:nccl", "cuda:1")],
)
def test_workers_exchange_by_the_backend_of_their_device(
    device: str, group: str, bound: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[Any, ...]] = []
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False")  # or it would be tried on the GPU
    monkeypatch.setattr(dist, "init_process_group", lambda name, **more: made.append((name, more["device_id"])))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    init_process_group(DistEnv(0, 2, device=torch.device(device)), {"PHALANX_STORE_PATH": str(tmp_path / "store")})
    assert made == [(group, None if bound is None else torch.device(bound))]
