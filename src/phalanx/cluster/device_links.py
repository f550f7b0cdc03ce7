"""Links of this machine: of each GPU to the host and to other GPUs (PCIe, NVLink) from NVML (`nvidia-ml-py`), and of
its network cards to other machines from /sys. What links really carry is measured by calibration/collectives.py.

Also bind a process to the cores of its GPU's NUMA node: from another socket, memory reads and writes to the GPU go
through the link between the sockets.
"""

import importlib
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from phalanx.cluster.spec import ScaleOutNetwork, ScaleUpNetwork
from phalanx.cluster.system_files import parse_cpu_list, read_small_file, read_small_int

PCIE_GT_PER_S_BY_GENERATION = {1: 2.5, 2: 5.0, 3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0}
"""Of a PCIe lane, by generation, in 1e9 a second."""
NVLINK_GB_PER_S_BY_VERSION = {1: 20.0, 2: 25.0, 3: 25.0, 4: 25.0, 5: 50.0}
"""GB/s one way of one link by version (NVIDIA's white papers of Pascal, Volta, Ampere, Hopper, Blackwell)."""
MAX_NVLINKS = 18
"""Of one GPU; the library answers for each number with an error when there are fewer."""


@dataclass(frozen=True)
class GpuLinks:
    """The links of one GPU. The PCIe generation is the highest that both ends support: at rest many GPUs go down in
    generation, never in width."""

    pci_address: str
    lanes: int | None = None
    max_lanes: int | None = None
    max_pcie_generation: int | None = None
    nvlinks: int = 0
    nvlink_version: int | None = None

    @property
    def host_gbps(self) -> float | None:
        """GB/s of its PCIe link one way, at its maximum generation and current width, without protocol overhead."""
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


def discover_gpu_links(nvml: Any = None) -> tuple[GpuLinks, ...]:
    """Return the links of all GPUs, by address. `nvml` is NVIDIA's library, imported unless given."""
    nvml = nvml if nvml is not None else import_nvml()
    if nvml is None:
        return ()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:  # no driver that answers it
        return ()
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return tuple(sorted((_query_links(nvml, handle) for handle in handles), key=lambda each: each.pci_address))
    finally:
        nvml.nvmlShutdown()


def choose_scale_up(links: tuple[GpuLinks, ...]) -> ScaleUpNetwork | None:
    """Return the network among the GPUs of this machine: NVLink when all GPUs have the same links, else PCIe. None for
    fewer than 2 GPUs or an unknown rate."""
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


def _query_links(nvml: Any, handle: Any) -> GpuLinks:
    bus = nvml.nvmlDeviceGetPciInfo(handle).busId
    active = [
        link for link in range(MAX_NVLINKS) if _query_or_none(nvml, nvml.nvmlDeviceGetNvLinkState, handle, link) == 1
    ]
    return GpuLinks(
        pci_address=_normalize_address(bus.decode() if isinstance(bus, bytes) else bus),
        lanes=_query_or_none(nvml, nvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
        max_lanes=_query_or_none(nvml, nvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
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


def find_local_cores(address: str, root: Path = Path("/")) -> frozenset[int]:
    """Return the cores of the NUMA node of a PCI device ("0000:1b:00.0") from sysfs; empty if unknown."""
    return frozenset(parse_cpu_list(read_small_file(root / "sys/bus/pci/devices" / address / "local_cpulist")))


def bind_to_local_cores(
    address: str,
    root: Path = Path("/"),
    allowed: Collection[int] | None = None,
    set_affinity: Callable[[Collection[int]], None] = lambda cores: os.sched_setaffinity(0, cores),
) -> None:
    """Restrict this process and its children to the cores near a device. Change nothing when these are unknown, or when
    all or none of the allowed cores are near."""
    local_cores = find_local_cores(address, root)
    allowed_now = frozenset(os.sched_getaffinity(0) if allowed is None else allowed)
    if local_cores & allowed_now and not local_cores >= allowed_now:
        set_affinity(local_cores & allowed_now)


INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True)
class Nic:
    """One port of a network card. `gbps`: GB/s in one direction by the driver, None if unknown, as in most virtual
    machines. `is_physical`: backed by a device, which may be virtual."""

    name: str
    link_kind: Literal["ethernet", "infiniband", "roce"]
    is_up: bool
    gbps: float | None = None
    is_physical: bool = True
    rate_text: str = ""
    """The driver's name of the rate, such as "4X NDR"."""


def discover_nics(root: Path = Path("/")) -> tuple[Nic, ...]:
    """Return all ports except loopback, sorted: RDMA first, then Ethernet. A RoCE port appears as both."""
    rdma = [card for device in _list_dirs(root / "sys/class/infiniband") for card in _rdma_ports(device)]
    plain = [_ethernet_nic(folder) for folder in _list_dirs(root / "sys/class/net") if folder.name != "lo"]
    return (*rdma, *plain)


def choose_scale_out(nics: tuple[Nic, ...]) -> ScaleOutNetwork | None:
    """Return the network that training uses between nodes: all active RDMA ports of the fastest kind, else the fastest
    Ethernet port. None when no active port reports its speed."""
    usable = [nic for nic in nics if nic.is_up and nic.is_physical and nic.gbps]
    for link_kinds in (("infiniband", "roce"), ("ethernet",)):
        ports = [nic for nic in usable if nic.link_kind in link_kinds]
        if not ports:
            continue
        best = max(nic.gbps or 0.0 for nic in ports)
        fastest = [nic for nic in ports if nic.gbps == best]
        # One process group rarely uses several Ethernet ports, but always uses all RDMA ports.
        return ScaleOutNetwork(
            link=_format_link(fastest[0]), gbps=best, ports=len(fastest) if "roce" in link_kinds else 1
        )
    return None


def _format_link(nic: Nic) -> str:
    link_names = {"ethernet": "Ethernet", "infiniband": "InfiniBand", "roce": "RoCE"}
    return f"{link_names[nic.link_kind]} {nic.rate_text or f'{8 * (nic.gbps or 0.0):g} Gbit/s'}"


def _ethernet_nic(folder: Path) -> Nic:
    speed = read_small_int(folder / "speed")  # in Mbit/s; -1 or an error where it is not known
    return Nic(
        name=folder.name,
        link_kind="ethernet",
        is_up=read_small_file(folder / "operstate") == "up",
        gbps=speed / 8000 if speed and speed > 0 else None,
        is_physical=(folder / "device").exists(),
    )


def _rdma_ports(device: Path) -> list[Nic]:
    nics = []
    for port in _list_dirs(device / "ports"):
        rate = re.match(r"([\d.]+)\s*Gb/sec(?:\s*\((.*)\))?", read_small_file(port / "rate"))
        nics.append(
            Nic(
                name=f"{device.name}:{port.name}",
                link_kind="roce" if read_small_file(port / "link_layer") == "Ethernet" else "infiniband",
                is_up="ACTIVE" in read_small_file(port / "state"),
                gbps=float(rate[1]) / 8 if rate and float(rate[1]) > 0 else None,
                rate_text=(rate[2] or "") if rate else "",
            )
        )
    return nics


def _list_dirs(path: Path) -> list[Path]:
    return sorted(each for each in path.iterdir() if each.is_dir()) if path.is_dir() else []


def find_missing_interfaces(environ: Mapping[str, str], interface_names: Collection[str]) -> Iterator[str]:
    """Yield a sentence for each variable that names an interface which this machine does not have."""
    for variable in INTERFACE_VARIABLES:
        value = environ.get(variable)
        if value and not _matches_interface(variable, value, interface_names):
            yield f"{variable}={value}, and there is no such interface ({', '.join(sorted(interface_names))})"


def _matches_interface(variable: str, value: str, names: Collection[str]) -> bool:
    """Match as the libraries do: gloo needs all names to exist; NCCL matches prefixes, "=" full names, "^" excludes."""
    parts = [part for part in value.lstrip("=^").split(",") if part]
    if variable.startswith("GLOO"):
        return all(part in names for part in value.split(","))
    if value.startswith("="):
        return any(part in names for part in parts)
    return value.startswith("^") or any(name.startswith(part) for part in parts for name in names)
