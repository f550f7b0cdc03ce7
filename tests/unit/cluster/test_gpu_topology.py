"""Links of GPUs, on machines that are made of text files, and with a library that is made up."""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.cluster.gpu_topology import GpuLinks, choose_scale_up, discover_gpu_links, lowest_clock_share, pcie_gbps


def device(root: Path, bus: str, **files: str) -> None:
    folder = root / "sys/bus/pci/devices" / bus
    folder.mkdir(parents=True)
    whole = {
        "vendor": "0x10de",
        "class": "0x030200",
        "current_link_width": "16",
        "max_link_width": "16",
        "current_link_speed": "2.5 GT/s PCIe",
        "max_link_speed": "32.0 GT/s PCIe",
        "numa_node": "1",
    }
    for name, text in {**whole, **files}.items():
        (folder / name).write_text(text + "\n")


class NVMLError(Exception):
    """What the library raises."""


@dataclass
class Library:
    """NVML with two GPUs that have `links` NVLinks of version 4 each."""

    links: int = 18
    answers: bool = True
    clock: int = 1000
    open: int = 0
    NVMLError: Any = NVMLError
    NVML_CLOCK_SM: int = 1
    asked: list[str] = field(default_factory=list)

    def nvmlInit(self) -> None:
        if not self.answers:
            raise NVMLError
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return SimpleNamespace(busId=f"00000000:{'3B' if handle else '1A'}:00.0".encode())

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        if link >= self.links:
            raise NVMLError
        return 1

    def nvmlDeviceGetNvLinkVersion(self, handle: int, link: int) -> int:
        return 4

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: int) -> int:
        return 8 if handle else 16

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: int) -> int:
        return 16

    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle: int) -> int:
        raise NVMLError

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: int) -> int:
        return 5

    def nvmlDeviceGetClockInfo(self, handle: int, which: int) -> int:
        return self.clock + handle

    def nvmlDeviceGetMaxClockInfo(self, handle: int, which: int) -> int:
        return 2000


def test_pcie_is_counted_one_way_without_its_coding() -> None:
    assert pcie_gbps(3, 16) == pytest.approx(15.75, abs=0.01)
    assert pcie_gbps(5, 16) == pytest.approx(63.0, abs=0.1)
    assert pcie_gbps(2, 16) == pytest.approx(8.0)


def test_the_kernel_knows_lanes_and_generations(tmp_path: Path) -> None:
    device(tmp_path, "0000:1b:00.0")
    assert discover_gpu_links(tmp_path, Library(answers=False)) == (
        GpuLinks("0000:1b:00.0", "NVIDIA", 16, 16, 1, 5, numa_node=1),
    )


def test_other_devices_are_no_gpus(tmp_path: Path) -> None:
    device(tmp_path, "0000:01:00.0", vendor="0x8086")
    device(tmp_path, "0000:02:00.0", **{"class": "0x020000"})
    assert discover_gpu_links(tmp_path, Library(answers=False)) == ()


def test_a_gpu_at_rest_is_not_narrow_one_with_half_its_lanes_is(tmp_path: Path) -> None:
    device(tmp_path, "0000:01:00.0")
    device(tmp_path, "0000:02:00.0", current_link_width="8")
    fine, half = discover_gpu_links(tmp_path, Library(answers=False))
    assert fine.narrow_link_warning is None
    assert half.narrow_link_warning is not None
    assert "8 of 16 lanes" in half.narrow_link_warning


def test_a_device_without_pcie_tells_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "sys/bus/pci/devices/0000:01:00.0"
    folder.mkdir(parents=True)
    (folder / "vendor").write_text("0x1002\n")
    (folder / "class").write_text("0x120000\n")
    (found,) = discover_gpu_links(tmp_path, Library(answers=False))
    assert (found.vendor, found.host_gbps, found.narrow_link_warning) == ("AMD", None, None)


def test_the_library_is_asked_first_and_closed_again(tmp_path: Path) -> None:
    library = Library()
    first, second = discover_gpu_links(tmp_path, library)
    assert first == GpuLinks("0000:1a:00.0", "NVIDIA", 16, 16, None, 5, 18, 4)
    assert second.pci_address == "0000:3b:00.0"
    assert library.open == 0


def test_nvlink_joins_gpus_that_all_have_it(tmp_path: Path) -> None:
    network = choose_scale_up(discover_gpu_links(tmp_path, Library()))
    assert network is not None
    assert (network.link, network.gbps, network.domain, network.kind) == ("NVLink 4", 450.0, 2, "switch")


def test_else_the_slowest_pcie_link_counts(tmp_path: Path) -> None:
    network = choose_scale_up(discover_gpu_links(tmp_path, Library(links=0)))
    assert network is not None
    assert (network.link, network.kind) == ("PCIe 5", "pcie")
    assert network.gbps == pytest.approx(31.5, abs=0.1)


def test_one_gpu_has_no_network() -> None:
    assert choose_scale_up((GpuLinks("0000:01:00.0", lanes=16, max_pcie_generation=4),)) is None
    assert choose_scale_up((GpuLinks("a"), GpuLinks("b"))) is None


def test_the_slowest_clock_counts() -> None:
    assert lowest_clock_share(Library()) == 0.5
    assert lowest_clock_share(Library(answers=False)) is None
    assert lowest_clock_share(None) is None
