"""Discover the links of each GPU to the host and to other GPUs (PCIe, NVLink), and its clocks from NVML.

Asked of NVML where `nvidia-ml-py` is installed, else read from /sys/bus/pci below a given root, which knows PCIe only.
What the links really carry is measured elsewhere (calibration/collectives.py).
"""

import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.cluster.spec import ScaleUpNetwork

PCIE_GT_PER_S_BY_GENERATION = {1: 2.5, 2: 5.0, 3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0}
"""Of a PCIe lane, by generation, in 1e9 a second."""
NVLINK_GB_PER_S_BY_VERSION = {1: 20.0, 2: 25.0, 3: 25.0, 4: 25.0, 5: 50.0}
"""GB/s one way of one link by version (NVIDIA's white papers of Pascal, Volta, Ampere, Hopper, Blackwell)."""
MAX_NVLINKS = 18
"""Of one GPU; the library answers for each number with an error when there are fewer."""
GPU_PCI_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")
"""PCI classes of display controllers and of accelerators."""
GPU_PCI_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD"}


@dataclass(frozen=True)
class GpuLinks:
    """The links of one GPU. PCIe generations are those of now and of the most that both ends can: at rest many GPUs go
    down in generation, never in width."""

    pci_address: str
    """PCI address, such as "0000:1b:00.0"."""
    vendor: str = ""
    lanes: int | None = None
    max_lanes: int | None = None
    pcie_generation: int | None = None
    max_pcie_generation: int | None = None
    nvlinks: int = 0
    nvlink_version: int | None = None
    numa_node: int | None = None

    @property
    def host_gbps(self) -> float | None:
        """GB/s of its PCIe link in one direction, at its maximum generation and current width, without protocol
        overhead."""
        if not self.lanes or not self.max_pcie_generation:
            return None
        return pcie_gbps(self.max_pcie_generation, self.lanes)

    @property
    def nvlink_gbps(self) -> float | None:
        """GB/s of all its NVLinks together, in one direction."""
        each = NVLINK_GB_PER_S_BY_VERSION.get(self.nvlink_version or 0)
        return each * self.nvlinks if each and self.nvlinks else None

    @property
    def narrow_link_warning(self) -> str | None:
        """A warning if the link has fewer lanes than possible, else None."""
        if self.lanes and self.max_lanes and self.lanes < self.max_lanes:
            return (
                f"GPU {self.pci_address}: its PCIe link has {self.lanes} of {self.max_lanes} lanes; reseat the card "
                "or riser"
            )
        return None


def pcie_gbps(generation: int, lanes: int) -> float:
    """GB/s one way of a PCIe link: 8 of 10 bits are data up to generation 2, then 128 of 130."""
    coding = 8 / 10 if generation <= 2 else 128 / 130
    return PCIE_GT_PER_S_BY_GENERATION[generation] * coding / 8 * lanes


def discover_gpu_links(root: Path = Path("/"), nvml: Any = None) -> tuple[GpuLinks, ...]:
    """The links of all GPUs, in the order of their addresses. `nvml` is NVIDIA's library, looked for unless given."""
    with open_nvml(nvml if nvml is not None else import_nvml()) as library:
        if library is not None:
            return tuple(
                sorted(
                    (_query_links(library, handle) for handle in gpu_handles(library)),
                    key=lambda each: each.pci_address,
                )
            )
    return _read_links_from_sysfs(root)


def choose_scale_up(links: tuple[GpuLinks, ...]) -> ScaleUpNetwork | None:
    """Return the network among the GPUs of this machine: NVLink when all GPUs have the same links, else PCIe.

    None for fewer than 2 GPUs or an unknown rate.
    """
    if len(links) < 2:
        return None
    nvlink = {each.nvlink_gbps for each in links}
    if len(nvlink) == 1 and (gbps := nvlink.pop()) is not None:
        link = f"NVLink {links[0].nvlink_version}"
        return ScaleUpNetwork(link=link, gbps=gbps, domain=len(links), kind="switch")
    rates = [each.host_gbps for each in links]
    if any(rate is None for rate in rates):
        return None
    slowest = min(rate for rate in rates if rate is not None)
    generation = min(each.max_pcie_generation or 0 for each in links)
    return ScaleUpNetwork(link=f"PCIe {generation}", gbps=slowest, domain=len(links), kind="pcie")


def import_nvml() -> Any:
    """NVIDIA's library, where its Python package is installed; else None."""
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None


@contextmanager
def open_nvml(nvml: Any) -> Iterator[Any]:
    """The library, ready to be asked; None where there is none, or no driver that answers it."""
    if nvml is not None:
        try:
            nvml.nvmlInit()
        except nvml.NVMLError:
            nvml = None
    try:
        yield nvml
    finally:
        if nvml is not None:
            nvml.nvmlShutdown()


def gpu_handles(nvml: Any) -> list[Any]:
    """The library's handles of all GPUs."""
    return [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]


def lowest_clock_share(nvml: Any) -> float | None:
    """The lowest clock of any GPU right now over the highest it can have; for asking while they work."""
    with open_nvml(nvml) as library:
        if library is None:
            return None
        shares = []
        for handle in gpu_handles(library):
            now = _query_or_none(library, library.nvmlDeviceGetClockInfo, handle, library.NVML_CLOCK_SM)
            max_clock = _query_or_none(library, library.nvmlDeviceGetMaxClockInfo, handle, library.NVML_CLOCK_SM)
            shares += [now / max_clock] if now and max_clock else []
        return min(shares, default=None)


def _query_links(nvml: Any, handle: Any) -> GpuLinks:
    bus = nvml.nvmlDeviceGetPciInfo(handle).busId
    active = [
        link for link in range(MAX_NVLINKS) if _query_or_none(nvml, nvml.nvmlDeviceGetNvLinkState, handle, link) == 1
    ]
    return GpuLinks(
        pci_address=_normalize_address(bus.decode() if isinstance(bus, bytes) else bus),
        vendor="NVIDIA",
        lanes=_query_or_none(nvml, nvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
        max_lanes=_query_or_none(nvml, nvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
        pcie_generation=_query_or_none(nvml, nvml.nvmlDeviceGetCurrPcieLinkGeneration, handle),
        max_pcie_generation=_query_or_none(nvml, nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
        nvlinks=len(active),
        nvlink_version=_query_or_none(nvml, nvml.nvmlDeviceGetNvLinkVersion, handle, active[0]) if active else None,
    )


def _query_or_none(nvml: Any, function: Any, *arguments: Any) -> int | None:
    """Return the result of an NVML function; None if the GPU or its driver does not support it."""
    try:
        return int(function(*arguments))
    except nvml.NVMLError:
        return None


def _normalize_address(bus: str) -> str:
    """NVML writes 00000000:1B:00.0 where the kernel writes 0000:1b:00.0."""
    domain, _, rest = bus.lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def _read_links_from_sysfs(root: Path) -> tuple[GpuLinks, ...]:
    folder = root / "sys/bus/pci/devices"
    found = []
    for device in sorted(folder.iterdir()) if folder.is_dir() else []:
        vendor = GPU_PCI_VENDORS.get(_read_text(device / "vendor"))
        if vendor is None or not _read_text(device / "class").startswith(GPU_PCI_CLASSES):
            continue
        numa = _read_int(device / "numa_node")
        found.append(
            GpuLinks(
                pci_address=device.name,
                vendor=vendor,
                lanes=_read_int(device / "current_link_width"),
                max_lanes=_read_int(device / "max_link_width"),
                pcie_generation=_read_generation(device / "current_link_speed"),
                max_pcie_generation=_read_generation(device / "max_link_speed"),
                numa_node=numa if numa is not None and numa >= 0 else None,
            )
        )
    return tuple(found)


def _read_generation(path: Path) -> int | None:
    match = re.match(r"([\d.]+) GT/s", _read_text(path))  # "32.0 GT/s PCIe"
    rate = float(match[1]) if match else 0.0
    return next((generation for generation, each in PCIE_GT_PER_S_BY_GENERATION.items() if each == rate), None)


def _read_int(path: Path) -> int | None:
    text = _read_text(path)
    return int(text) if re.fullmatch(r"-?\d+", text) else None


def _read_text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # a device without PCIe, or hidden in this container
        return ""
