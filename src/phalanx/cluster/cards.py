"""Network cards: what links this machine has to others, how fast they say they are, whether they are up.

Linux only, read from /sys below a given root, like discover.py. What a link really carries is measured elsewhere
(probe/collectives.py).
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from phalanx.cluster.description import ScaleOut


@dataclass(frozen=True)
class Card:
    """One port of a network card. `gbps`: GB/s one way as its driver tells, None where it does not (virtual machines
    seldom know). `physical`: there is a device behind it, be it one that a hypervisor made up."""

    name: str
    kind: Literal["ethernet", "infiniband", "roce"]
    up: bool
    gbps: float | None = None
    driver: str | None = None
    physical: bool = True
    numa: int | None = None
    detail: str = ""
    """How the driver describes the rate: "4X NDR"."""


def cards(root: Path = Path("/")) -> tuple[Card, ...]:
    """All ports but loopback: those for RDMA first, then Ethernet, each by name. A port of RDMA over Ethernet appears
    as both, since either way may be used."""
    rdma = [card for device in _folders(root / "sys/class/infiniband") for card in _rdma(device)]
    plain = [_plain(folder) for folder in _folders(root / "sys/class/net") if folder.name != "lo"]
    return (*rdma, *plain)


def scale_out(found: tuple[Card, ...]) -> ScaleOut | None:
    """The network that training would use between nodes: all active RDMA ports of the fastest kind, else the fastest
    Ethernet. None when no port that is up tells its speed."""
    usable = [card for card in found if card.up and card.physical and card.gbps]
    for wanted in (("infiniband", "roce"), ("ethernet",)):
        ports = [card for card in usable if card.kind in wanted]
        if not ports:
            continue
        best = max(card.gbps or 0.0 for card in ports)
        alike = [card for card in ports if card.gbps == best]
        # Several Ethernet ports are seldom used together by one process group, those for RDMA always.
        return ScaleOut(link=_link(alike[0]), gbps=best, ports=len(alike) if "roce" in wanted else 1)
    return None


def _link(card: Card) -> str:
    names = {"ethernet": "Ethernet", "infiniband": "InfiniBand", "roce": "RoCE"}
    return f"{names[card.kind]} {card.detail or f'{8 * (card.gbps or 0.0):g} Gbit/s'}"


def _plain(folder: Path) -> Card:
    speed = _number(folder / "speed")  # in Mbit/s; -1 or an error where it is not known
    return Card(
        name=folder.name,
        kind="ethernet",
        up=_read(folder / "operstate") == "up",
        gbps=speed / 8000 if speed and speed > 0 else None,
        driver=_driver(folder),
        physical=(folder / "device").exists(),
        numa=_numa(folder),
    )


def _rdma(device: Path) -> list[Card]:
    found = []
    for port in _folders(device / "ports"):
        rate = re.match(r"([\d.]+)\s*Gb/sec(?:\s*\((.*)\))?", _read(port / "rate") or "")
        found.append(
            Card(
                name=f"{device.name}:{port.name}",
                kind="roce" if _read(port / "link_layer") == "Ethernet" else "infiniband",
                up="ACTIVE" in (_read(port / "state") or ""),
                gbps=float(rate[1]) / 8 if rate and float(rate[1]) > 0 else None,
                driver=_driver(device),
                numa=_numa(device),
                detail=(rate[2] or "") if rate else "",
            )
        )
    return found


def _driver(folder: Path) -> str | None:
    link = folder / "device/driver"
    return link.resolve().name if link.exists() else None


def _numa(folder: Path) -> int | None:
    number = _number(folder / "device/numa_node")  # -1: the machine has only one
    return number if number is not None and number >= 0 else None


def _folders(path: Path) -> list[Path]:
    return sorted(each for each in path.iterdir() if each.is_dir()) if path.is_dir() else []


def _number(path: Path) -> int | None:
    text = _read(path)
    return int(text) if text is not None and re.fullmatch(r"-?\d+", text) else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:  # the speed of a port that is down is an error, and files differ between kernels
        return None
