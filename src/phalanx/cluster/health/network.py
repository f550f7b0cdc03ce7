"""Check `network`: whether this machine's name leads to an address that others can reach, and whether the interface
that gloo or NCCL is told to use exists.

Gloo listens on the address of the machine's own name: where that is 127.0.1.1, workers of other nodes wait in vain.
"""

import ipaddress
import os
import socket
import time
from collections.abc import Callable, Mapping

from phalanx.cluster.cards import Card, cards
from phalanx.cluster.health.finding import Figure, Finding, Verdict, worst
from phalanx.cluster.health.site import Site
from phalanx.cluster.health.thresholds import judge
from phalanx.cluster.interfaces import missing

Resolve = Callable[[str], list[str]]


def addresses(name: str) -> list[str]:
    """IP addresses of a name. OSError when there are none."""
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return sorted({str(each[4][0]).partition("%")[0] for each in found})


def usable(address: str) -> bool:
    """Whether another machine could reach it."""
    ip = ipaddress.ip_address(address)
    return not (ip.is_loopback or ip.is_link_local or ip.is_unspecified)


def check(
    site: Site,
    name: str | None = None,
    resolve: Resolve = addresses,
    clock: Callable[[], float] = time.monotonic,
    environ: Mapping[str, str] = os.environ,
) -> list[Finding]:
    return [resolved(name or socket.gethostname(), resolve, clock), interfaces(cards(site.root), environ)]


def resolved(name: str, resolve: Resolve, clock: Callable[[], float]) -> Finding:
    """Of the machine's own name."""
    begun = clock()
    try:
        found = resolve(name)
    except OSError as error:
        text = (
            f"the name of this machine, {name}, has no address ({error.strerror or error}); add it to /etc/hosts or DNS"
        )
        return Finding("network/name", Verdict.WARN, text, {"name": name, "seconds": clock() - begun})
    seconds = clock() - begun
    figures: dict[str, Figure] = {"name": name, "seconds": seconds, "addresses": " ".join(found)}
    if not any(usable(each) for each in found):
        text = (
            f"{name} is {', '.join(found)}, which only this machine can reach: workers of other nodes would wait in "
            "vain; mend /etc/hosts, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        )
        return Finding("network/name", Verdict.WARN, text, figures)
    verdict = judge("name resolution", seconds)
    slow = f", found in {seconds:.1f} s: names should be answered in milliseconds" if verdict is not Verdict.OK else ""
    return Finding("network/name", verdict, f"{name} is {', '.join(found)}{slow}", figures)


def interfaces(found: tuple[Card, ...], environ: Mapping[str, str]) -> Finding:
    """Of what the libraries were told to use, and which links are up."""
    names = {card.name for card in found if card.kind == "ethernet"} | {"lo"}
    up = [card.name for card in found if card.up and card.physical]
    figures: dict[str, Figure] = {"up": " ".join(up), "down": " ".join(_down(found))}
    verdicts, told = [Verdict.OK], [f"up: {', '.join(up)}" if up else "no network card is up"]
    for problem in missing(environ, names):
        verdicts.append(Verdict.BAD)
        told.insert(0, problem)
    rdma = [card for card in found if card.kind != "ethernet"]
    down = [card.name for card in rdma if not card.up]
    if down and len(down) < len(rdma):
        verdicts.append(Verdict.WARN)
        told.insert(0, f"{len(down)} of {len(rdma)} RDMA ports are down: {', '.join(down)}; see cable and switch")
    return Finding("network/links", worst(verdicts), "; ".join(told), figures)


def _down(found: tuple[Card, ...]) -> list[str]:
    return [card.name for card in found if card.physical and not card.up]
