"""Check `network`: whether the host name of this machine resolves to an address that other machines can reach, and
whether the interfaces that gloo and NCCL are configured to use exist.

Gloo listens on the address of the host name. If that is 127.0.1.1, workers of other nodes cannot connect.
"""

import ipaddress
import os
import socket
from collections.abc import Callable, Mapping

from phalanx.cluster.health.finding import CheckContext, FindingValue, HealthFinding, HealthVerdict, worst_verdict
from phalanx.cluster.nics import Nic, discover_nics, find_missing_interfaces

ResolveName = Callable[[str], list[str]]


def resolve_addresses(name: str) -> list[str]:
    """Return the IP addresses of a name. Raises OSError when there are none."""
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return sorted({str(each[4][0]).partition("%")[0] for each in found})


def is_reachable(address: str) -> bool:
    """Whether another machine could reach it."""
    ip = ipaddress.ip_address(address)
    return not (ip.is_loopback or ip.is_link_local or ip.is_unspecified)


def check_network(context: CheckContext) -> list[HealthFinding]:
    return [
        evaluate_hostname(socket.gethostname(), resolve_addresses),
        evaluate_interfaces(discover_nics(context.root), os.environ),
    ]


def evaluate_hostname(name: str, resolve: ResolveName) -> HealthFinding:
    """Check the address of the host name."""
    try:
        found = resolve(name)
    except OSError as error:
        text = (
            f"the name of this machine, {name}, has no address ({error.strerror or error}); add it to /etc/hosts or DNS"
        )
        return HealthFinding("network/name", HealthVerdict.WARN, text, {"name": name})
    figures: dict[str, FindingValue] = {"name": name, "addresses": " ".join(found)}
    if not any(is_reachable(each) for each in found):
        text = (
            f"{name} resolves to {', '.join(found)}, which only this machine can reach: workers of other nodes cannot "
            "connect; fix /etc/hosts, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        )
        return HealthFinding("network/name", HealthVerdict.WARN, text, figures)
    return HealthFinding("network/name", HealthVerdict.PASS, f"{name} is {', '.join(found)}", figures)


def evaluate_interfaces(nics: tuple[Nic, ...], environ: Mapping[str, str]) -> HealthFinding:
    """Check the interfaces that gloo and NCCL are configured to use, and which links are up."""
    names = {nic.name for nic in nics if nic.link_kind == "ethernet"} | {"lo"}
    up = [nic.name for nic in nics if nic.is_up and nic.is_physical]
    figures: dict[str, FindingValue] = {"up": " ".join(up)}
    verdicts, texts = [HealthVerdict.PASS], [f"up: {', '.join(up)}" if up else "no network card is up"]
    for problem in find_missing_interfaces(environ, names):
        verdicts.append(HealthVerdict.FAIL)
        texts.insert(0, problem)
    rdma = [nic for nic in nics if nic.link_kind != "ethernet"]
    down = [nic.name for nic in rdma if not nic.is_up]
    if down and len(down) < len(rdma):
        verdicts.append(HealthVerdict.WARN)
        texts.insert(0, f"{len(down)} of {len(rdma)} RDMA ports are down: {', '.join(down)}; see cable and switch")
    return HealthFinding("network/links", worst_verdict(verdicts), "; ".join(texts), figures)
