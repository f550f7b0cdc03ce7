"""Checks of the network. `network`: whether the host name of this machine resolves to an address that other machines
can reach, and whether the interfaces that gloo and NCCL are configured to use exist. `all-reduce`: its bandwidth
between the GPUs of this node, by all_reduce_perf of nccl-tests or rccl-tests, if it is in PATH.

Gloo listens on the address of the host name. If that is 127.0.1.1, workers of other nodes cannot connect.
"""

import ipaddress
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from phalanx.cluster.device_links import Nic, discover_nics, find_missing_interfaces
from phalanx.cluster.health.finding import CheckContext, FindingValue, HealthFinding, HealthVerdict, worst_verdict
from phalanx.formatting import format_bytes

ResolveName = Callable[[str], list[str]]
ALL_REDUCE_TIMEOUT_S = 120.0
ALL_REDUCE_SIZE = "1G"
"""Large enough that bandwidth counts and not latency."""


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


def check_all_reduce(context: CheckContext) -> list[HealthFinding]:
    """Measure an all-reduce over the GPUs of this node; no finding where there are fewer than two."""
    import torch

    num_gpus = torch.cuda.device_count()
    if num_gpus < 2:
        return []
    return [measure_all_reduce(num_gpus)]


def measure_all_reduce(num_gpus: int) -> HealthFinding:
    """Run all_reduce_perf on this number of GPUs."""
    make_finding = partial(HealthFinding, "all-reduce")
    command = ["all_reduce_perf", "-b", ALL_REDUCE_SIZE, "-e", ALL_REDUCE_SIZE, "-g", str(num_gpus)]
    if shutil.which(command[0]) is None:
        return make_finding(HealthVerdict.UNKNOWN, "not measured: all_reduce_perf (nccl-tests) is not in PATH")
    returncode, output = _run_tool(command, ALL_REDUCE_TIMEOUT_S)
    bandwidth = re.search(r"^# Avg bus bandwidth\s*:\s*([\d.]+)", output, re.MULTILINE)
    if returncode or bandwidth is None:
        last_line = (output.strip().splitlines() or ["it printed nothing"])[-1].strip()
        return make_finding(HealthVerdict.ERROR, f"all_reduce_perf failed: {last_line}")
    if not re.search(r"^# Out of bounds values\s*:\s*0 OK", output, re.MULTILINE):
        return make_finding(
            HealthVerdict.FAIL, "all_reduce_perf found wrong sums: a GPU or a link between GPUs is broken"
        )
    bytes_per_s = float(bandwidth[1]) * 1e9
    reason = f"{format_bytes(bytes_per_s)}/s bus bandwidth over {num_gpus} GPUs, by all_reduce_perf"
    return make_finding(HealthVerdict.PASS, reason, {"bus_bytes_per_s": bytes_per_s})


def _run_tool(command: Sequence[str], timeout_s: float) -> tuple[int, str]:
    """Run a tool. Returns its exit code and what it printed."""
    try:
        process = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        return 1, f"no result within {timeout_s:.0f} s"
    return process.returncode, process.stdout.decode(errors="replace")
