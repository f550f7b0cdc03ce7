"""Cores near a GPU, by a made-up /sys."""

from collections.abc import Collection
from pathlib import Path

import pytest

from phalanx.cluster.gpu_topology import bind_to_local_cores, find_local_cores

GPU = "0000:1b:00.0"


def machine(root: Path, cores: str) -> Path:
    folder = root / "sys/bus/pci/devices" / GPU
    folder.mkdir(parents=True)
    (folder / "local_cpulist").write_text(f"{cores}\n")
    return root


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0-3,8-9", {0, 1, 2, 3, 8, 9}), ("5", {5}), ("", set())],
)
def test_the_kernels_list_is_read(tmp_path: Path, text: str, expected: set[int]) -> None:
    assert find_local_cores(GPU, machine(tmp_path, text)) == expected


def test_of_a_device_that_is_not_there_nothing_is_known(tmp_path: Path) -> None:
    assert find_local_cores(GPU, tmp_path) == frozenset()


@pytest.mark.parametrize(
    ("near", "allowed", "expected"),
    [
        ("0-3", range(8), {0, 1, 2, 3}),
        ("0-3", range(2, 6), {2, 3}),
        ("0-7", range(8), None),  # one NUMA node
        ("0-3", range(4, 8), None),  # the launcher gave cores of the other one
        ("", range(8), None),
    ],
)
def test_a_process_stays_on_cores_that_are_near_and_allowed(
    tmp_path: Path, near: str, allowed: Collection[int], expected: set[int] | None
) -> None:
    asked: list[Collection[int]] = []
    bind_to_local_cores(GPU, machine(tmp_path, near), allowed, asked.append)
    assert asked == ([] if expected is None else [expected])
