"""Network cards: the links of this machine to others, their nominal speed, and whether they are up. Linux only, read
from /sys below a given root, like discovery.py. What a link really carries is measured elsewhere
(calibration/collectives.py).
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from phalanx.cluster.spec import ScaleOutNetwork


@dataclass(frozen=True)
class Nic:
    """One port of a network card.

    `gbps`: GB/s in one direction from the driver, None if unknown, as in most virtual machines. `is_physical`: backed
    by a device, which may be virtual.
    """

    name: str
    link_kind: Literal["ethernet", "infiniband", "roce"]
    is_up: bool
    gbps: float | None = None
    driver_name: str | None = None
    is_physical: bool = True
    numa_node: int | None = None
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
    speed = _read_int(folder / "speed")  # in Mbit/s; -1 or an error where it is not known
    return Nic(
        name=folder.name,
        link_kind="ethernet",
        is_up=_read_text(folder / "operstate") == "up",
        gbps=speed / 8000 if speed and speed > 0 else None,
        driver_name=_read_driver(folder),
        is_physical=(folder / "device").exists(),
        numa_node=_read_numa_node(folder),
    )


def _rdma_ports(device: Path) -> list[Nic]:
    nics = []
    for port in _list_dirs(device / "ports"):
        rate = re.match(r"([\d.]+)\s*Gb/sec(?:\s*\((.*)\))?", _read_text(port / "rate") or "")
        nics.append(
            Nic(
                name=f"{device.name}:{port.name}",
                link_kind="roce" if _read_text(port / "link_layer") == "Ethernet" else "infiniband",
                is_up="ACTIVE" in (_read_text(port / "state") or ""),
                gbps=float(rate[1]) / 8 if rate and float(rate[1]) > 0 else None,
                driver_name=_read_driver(device),
                numa_node=_read_numa_node(device),
                rate_text=(rate[2] or "") if rate else "",
            )
        )
    return nics


def _read_driver(folder: Path) -> str | None:
    link = folder / "device/driver"
    return link.resolve().name if link.exists() else None


def _read_numa_node(folder: Path) -> int | None:
    number = _read_int(folder / "device/numa_node")  # -1: the machine has only one
    return number if number is not None and number >= 0 else None


def _list_dirs(path: Path) -> list[Path]:
    return sorted(each for each in path.iterdir() if each.is_dir()) if path.is_dir() else []


def _read_int(path: Path) -> int | None:
    text = _read_text(path)
    return int(text) if text is not None and re.fullmatch(r"-?\d+", text) else None


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:  # the speed of a port that is down is an error, and files differ between kernels
        return None
