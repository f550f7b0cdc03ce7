"""Nodes behind links of a known speed, on this machine: real TCP between network namespaces. Needs root.

    with Links(4) as links:
        links.limit("100mbit")                      # every node's link, both ways; None lifts it
        process = links.start(0, ["hostname"])      # a process on a node, with subprocess.Popen's arguments
        before = links.counters(0)                  # bytes that the kernel saw on the node's interface

A node's link is a token bucket filter (tc tbf) at each end; the bridge between has no limit, as a switch. The limit
knows headers: at most 0.95 of a link's speed is there for data. The kernel counts what the filter lets through to the
interface: packets with their headers where its burst is shorter than TCP's large segments (64 kB), as at 100 Mbit/s,
and elsewhere large segments with one header each, so that the same exchange counts 5% less there.
All nodes share the cores of this machine, so that above some Gbit/s these are the limit, not the link.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "helpers"))
import network_namespaces
from network_namespaces import parse_rate

__all__ = [
    "INTERFACE_NAME",
    "MAX_NODES",
    "RENDEZVOUS_PORT",
    "ByteCounters",
    "Links",
    "address",
    "congestion_control",
    "counters",
    "find_obstacle",
    "parse_rate",
]

INTERFACE_NAME = "eth0"
RENDEZVOUS_PORT = 29400
MAX_NODES = 64  # numbers of nodes are the last part of addresses, and the bridge is .100


@dataclass(frozen=True)
class ByteCounters:
    """What an interface has sent and received."""

    sent: int
    received: int

    def since(self, before: "ByteCounters") -> "ByteCounters":
        return ByteCounters(self.sent - before.sent, self.received - before.received)


def address(node: int) -> str:
    return f"10.77.0.{node + 1}"


def counters(pid: int | str = "self", interface: str = INTERFACE_NAME) -> ByteCounters:
    """The kernel's counters of an interface in the network of a process."""
    lines = Path(f"/proc/{pid}/net/dev").read_text().splitlines()
    for line in lines:
        name, colon, figures = line.partition(":")
        if colon and name.strip() == interface:
            fields = figures.split()
            return ByteCounters(sent=int(fields[8]), received=int(fields[0]))
    raise LookupError(f"process {pid} has no interface {interface}")


def find_obstacle() -> str | None:
    """Why there can be no links on this machine, in words; None if nothing is in the way."""
    return network_namespaces.find_obstacle("a network with limited links")


def congestion_control() -> str:
    """How TCP finds out what a link carries, on this machine and, as they take it over, on all nodes: `cubic` is
    Linux's default. It matters where links are slow (docs/benchmarks/grad-sync.md)."""
    return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()


class Links:
    """So many nodes, as a context; everything on them ends with it."""

    def __init__(self, nodes: int) -> None:
        if not 1 <= nodes <= MAX_NODES:
            raise ValueError(f"{nodes} nodes: must be 1 to {MAX_NODES}")
        self.nodes = nodes
        self._spaces = network_namespaces.Namespaces()
        self._limited = False

    def __enter__(self) -> Self:
        try:
            self._spaces.open("switch")
            for node in range(self.nodes):
                self._spaces.add(f"n{node}", node + 1)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._spaces.close()

    def limit(self, rate: str | None) -> None:
        """Slow all links down, in both directions, to a rate such as `1gbit`; None for no limit."""
        if rate is not None or self._limited:
            for node in range(self.nodes):
                self._spaces.limit(f"n{node}", rate)
        self._limited = rate is not None

    def counters(self, node: int) -> ByteCounters:
        """What this node has sent and received so far."""
        return counters(self._spaces.nodes[f"n{node}"][1])

    def start(
        self,
        node: int,
        argv: Sequence[str],
        environment: Mapping[str, str] | None = None,
        errors: IO[str] | None = None,
    ) -> "subprocess.Popen[str]":
        """Start a process on a node, with pipes to its input and from its output."""
        return subprocess.Popen(
            self._spaces.inside(argv, f"n{node}"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, **(environment or {})},
            start_new_session=True,  # Ctrl-C ends the namespaces, and these with them
        )
