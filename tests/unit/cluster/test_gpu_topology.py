"""Links of GPUs, with a library that is made up."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.cluster.device_links import (
    GpuLinks,
    bind_to_local_cores,
    choose_scale_up,
    discover_gpu_links,
    find_local_cores,
    pcie_gbps,
)


class NVMLError(Exception):
    """What the library raises."""


@dataclass
class Library:
    """NVML with two GPUs that have `links` NVLinks of version 4 each."""

    links: int = 18
    answers: bool = True
    open: int = 0
    NVMLError: Any = NVMLError

    def nvmlInit(self) -> None:
        if not self.answers:
            raise NVMLError
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        if link >= self.links:
            raise NVMLError
        return 1

    def __getattr__(self, name: str) -> Any:
        return {
            "nvmlDeviceGetCount": lambda: 2,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetPciInfo": lambda gpu: SimpleNamespace(busId=f"00000000:{'13'[gpu]}{'AB'[gpu]}:00.0".encode()),
            "nvmlDeviceGetNvLinkVersion": lambda gpu, link: 4,
            "nvmlDeviceGetCurrPcieLinkWidth": lambda gpu: 8 if gpu else 16,
            "nvmlDeviceGetMaxPcieLinkWidth": lambda gpu: 16,
            "nvmlDeviceGetMaxPcieLinkGeneration": lambda gpu: 5,
        }[name]


def test_pcie_is_counted_one_way_without_its_coding() -> None:
    assert pcie_gbps(3, 16) == pytest.approx(15.75, abs=0.01)
    assert pcie_gbps(5, 16) == pytest.approx(63.0, abs=0.1)
    assert pcie_gbps(2, 16) == pytest.approx(8.0)


def test_a_link_with_half_its_lanes_is_narrow() -> None:
    fine, half = discover_gpu_links(Library())
    assert fine.narrow_link_warning is None
    assert half.narrow_link_warning is not None
    assert "8 of 16 lanes" in half.narrow_link_warning


def test_the_library_is_closed_again() -> None:
    library = Library()
    first, second = discover_gpu_links(library)
    assert first == GpuLinks("0000:1a:00.0", 16, 16, 5, 18, 4)
    assert discover_gpu_links(Library(answers=False)) == ()
    assert second.pci_address == "0000:3b:00.0"
    assert library.open == 0


def test_nvlink_joins_gpus_that_all_have_it() -> None:
    network = choose_scale_up(discover_gpu_links(Library()))
    assert network is not None
    assert (network.link, network.gbps, network.domain, network.kind) == ("NVLink 4", 450.0, 2, "switch")


def test_else_the_slowest_pcie_link_counts() -> None:
    network = choose_scale_up(discover_gpu_links(Library(links=0)))
    assert network is not None
    assert (network.link, network.kind) == ("PCIe 5", "pcie")
    assert network.gbps == pytest.approx(31.5, abs=0.1)


def test_one_gpu_has_no_network() -> None:
    assert choose_scale_up((GpuLinks("0000:01:00.0", lanes=16, max_pcie_generation=4),)) is None
    assert choose_scale_up((GpuLinks("a"), GpuLinks("b"))) is None


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
