"""Nodes in namespaces of their own, on a bridge, on this machine: what `slurm_cluster.py` puts a Slurm on and
`benchmarks/grad_sync/links.py` measures with. Needs root.

Each node has network, process, mount and host name of its own: 10.77.0.1 (the first) and so on, on a bridge in
namespaces of their own, too, where 10.77.0.100 is. Files are the host's.

Nothing of the host is touched, and nothing is left: all processes are in one process namespace that dies with its
first process, which dies when whoever holds it closes it or is killed; interfaces and mounts go with them.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

PROGRAMS = ("ip", "tc", "unshare", "nsenter", "setpriv")
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
BURST = 32 * 1024
"""Bytes that a slow link may send at once: some packets."""


def find_obstacle(what: str, programs: Sequence[str] = (), packages: str = "iproute2 util-linux") -> str | None:
    """Why there can be no such nodes on this machine, in words; None if nothing is in the way. `what` wants them, with
    `programs` besides; `packages` have them all."""
    if os.geteuid() != 0:
        return f"{what} needs root, for its namespaces"
    missing = [name for name in (*programs, *PROGRAMS) if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (Debian: apt-get install {packages})"
    tried = subprocess.run(
        ["unshare", "--mount", "--net", "--uts", "--pid", "--fork", "ip", "link", "add", "name", "a", "type", "bridge"],
        capture_output=True,
        text=True,
    )
    return f"namespaces are forbidden here: {tried.stderr.strip()}" if tried.returncode else None


def parse_rate(rate: str) -> float:
    """Bits a second of a rate as tc writes it, such as `100mbit`. ValueError for anything else."""
    for unit, factor in UNITS.items():
        if rate.endswith(unit):
            return float(rate.removesuffix(unit)) * factor
    raise ValueError(f"{rate!r} is no rate such as 100mbit or 1gbit")


def burst(rate: str) -> int:
    """Bytes that a link of this rate may send at once: what it carries in 1 ms, as its timer may wake that late on a
    busy machine; more would be bandwidth for nothing in small transfers."""
    return max(BURST, round(parse_rate(rate) / 8 * 1e-3))


class Namespaces:
    """The bridge and its nodes. `pid`: the first process of the bridge's namespaces, as seen from here."""

    def __init__(self) -> None:
        self._first: subprocess.Popen[str] | None = None
        self.nodes: dict[str, tuple[subprocess.Popen[str], int]] = {}

    def open(self, name: str) -> None:
        """Make the bridge, in namespaces whose host has this name."""
        spaces = ["unshare", "--mount", "--net", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self._first, self.pid = waiting(["setpriv", "--pdeathsig", "KILL", *spaces])
        for argv in (
            ("hostname", name),
            ("ip", "link", "set", "lo", "up"),
            ("ip", "link", "add", "name", "bridge", "type", "bridge"),
            ("ip", "address", "add", "10.77.0.100/24", "dev", "bridge"),
            ("ip", "link", "set", "bridge", "up"),
        ):
            self.administer(*argv)

    def add(self, node: str, number: int) -> None:
        """Start a node; its address is 10.77.0.<number>."""
        spaces = ["unshare", "--mount", "--net", "--uts", "--pid", "--fork", "--mount-proc"]
        enter = ["nsenter", f"--target={self.pid}", "--mount", "--net", "--uts", "--pid", "--"]
        process, pid = waiting([*enter, *spaces])
        self.nodes[node] = process, pid
        # the process id is the host's, so this must not enter the process namespace
        self.administer("ip", "link", "add", "name", node, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
        self.administer("ip", "link", "set", node, "master", "bridge", "up")
        for argv in (
            ("hostname", node),
            ("ip", "link", "set", "lo", "up"),
            ("ip", "address", "add", f"10.77.0.{number}/24", "dev", "eth0"),
            ("ip", "link", "set", "eth0", "up"),
        ):
            self.administer(*argv, node=node)

    def kill(self, node: str) -> None:
        """Kill everything that runs on a node, at once; its interface is gone, too."""
        process, pid = self.nodes.pop(node)
        os.kill(pid, signal.SIGKILL)
        ended(process)

    def limit(self, node: str, rate: str | None) -> None:
        """Slow a node's link down, in both directions: a rate as tc writes it, such as `1gbit`; None for no limit."""
        for where, interface in ((None, node), (node, "eth0")):
            if rate is None:
                self.administer("tc", "qdisc", "del", "dev", interface, "root", node=where)
            else:
                shape = ["root", "tbf", "rate", rate, "burst", str(burst(rate)), "latency", "50ms"]
                self.administer("tc", "qdisc", "replace", "dev", interface, *shape, node=where)

    def inside(self, argv: Sequence[str], node: str | None = None) -> list[str]:
        """The command that runs `argv` on a node, or where the bridge is, in this process's folder."""
        here = f"--wd={os.getcwd()}"
        return ["nsenter", f"--target={self._pid(node)}", "--mount", "--net", "--uts", "--pid", here, "--", *argv]

    def administer(self, *argv: str, node: str | None = None) -> None:
        """Run a command on a node, or where the bridge is, as its administrator, who sees the host's processes."""
        enter = ["nsenter", f"--target={self._pid(node)}", "--mount", "--net", "--uts", "--"]
        done = subprocess.run([*enter, *argv], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()}")

    def daemon(self, argv: Sequence[str], node: str | None = None) -> subprocess.Popen[bytes]:
        """Start what runs until all ends, on a node or where the bridge is."""
        enter = ["nsenter", f"--target={self._pid(node)}", "--mount", "--net", "--uts", "--pid", "--"]
        no = subprocess.DEVNULL
        return subprocess.Popen([*enter, *argv], start_new_session=True, cwd="/", stdin=no, stdout=no, stderr=no)

    def close(self) -> None:
        """End everything."""
        if self._first is not None:
            ended(self._first)  # with it go all others
            for process, _ in self.nodes.values():
                ended(process)
            self._first = None
            self.nodes.clear()

    @property
    def is_open(self) -> bool:
        return self._first is not None

    def _pid(self, node: str | None) -> int:
        return self.pid if node is None else self.nodes[node][1]


def waiting(spaces: Sequence[str]) -> tuple[subprocess.Popen[str], int]:
    """Start the first process of new namespaces, which does nothing but reap orphans and wait for the end of its input;
    the process that leads to it, and its id as seen from here."""
    process = subprocess.Popen(
        [*spaces, "bash", "-c", "echo ready; read -r _"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is not for the cluster
    )
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout, process.stderr:
        if process.stdout.readline() != "ready\n":
            raise RuntimeError(f"{' '.join(spaces)}: {process.stderr.read().strip()}")
    pid = process.pid
    while below := children(pid):
        (pid,) = below
    return process, pid


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def ended(process: subprocess.Popen[str]) -> None:
    """End what `waiting` started, by the end of its input, if it has not ended, and wait for it."""
    assert process.stdin is not None
    process.stdin.close()
    process.wait()
