"""Network cards: the links of this machine to others, their nominal speed, and whether they are up. Linux only, read
from /sys below a given root, like discovery.py. What a link really carries is measured elsewhere
(calibration/collectives.py).
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from phalanx.cluster.spec import ScaleOutNetwork
from phalanx.cluster.system_files import read_small_file, read_small_int

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
    """Return all ports except loopback: RDMA first, then Ethernet, each sorted by name. A RoCE port appears as both,
    since it can be used as either."""
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
