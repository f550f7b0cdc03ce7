"""The helper of a node as a real process, with CPU packages that are files: killed guards and helpers, half-done
writes, strangers, and the way over standard streams."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx_fleet.power.links import HelperLinks, connect_by_command, connect_to_socket, is_listening
from phalanx_fleet.power.messages import NodeReport, NodeRequest
from phalanx_fleet.power.node_helper import AllowedPeers, PeerList
from serve_process import wait_until

TIMEOUT_S = 60.0
NAMES = ("constraint_0_power_limit_uw", "constraint_1_power_limit_uw", "constraint_0_max_power_uw")
GUARD = """
import sys, time
from pathlib import Path
from phalanx_fleet.power.links import HelperLinks, connect_to_socket
from phalanx_fleet.power.messages import NodeRequest
links, session = HelperLinks({"n0": lambda: connect_to_socket(Path(sys.argv[1]))}), ""
for seq in range(1, 10**6):
    order = {"caps_w": (330.0, 330.0), "fallback_w": (200.0, 200.0), "lease_s": 1.5}
    links.send("n0", NodeRequest(seq, 5, "killed", session=session, **order if session else {"takes_over": True}))
    time.sleep(0.1)
    for report in links.receive():
        session = report.session
"""


class Node:
    """A folder with two CPU packages of 360 W, and a helper for them."""

    def __init__(self, folder: Path):
        self.folder, self.socket = folder, folder / "helper.sock"
        self.packages = [folder / f"sys/class/powercap/intel-rapl:{index}" for index in range(2)]
        for package in self.packages:
            package.mkdir(parents=True)
            (package / "name").write_text(f"package-{package.name[-1]}\n")
            for name in NAMES:
                (package / name).write_text("360000000")
        self.file = folder / "helper.yaml"
        self.write_file("{kind: rapl, root: FOLDER}")
        self.process: subprocess.Popen[bytes] | None = None
        self.links = self.make_links()

    def make_links(self) -> HelperLinks:
        return HelperLinks({"n0": lambda: connect_to_socket(self.socket)})

    def write_file(self, devices: str, allow: str = "{}") -> None:
        self.file.write_text(
            f"allow: {allow}\nnode: n0\nsocket: {self.socket}\nstate: {self.folder / 'state'}\nwithout_record: keep\n"
            f"devices: {devices.replace('FOLDER', str(self.folder))}\n"
        )

    def start(self, notify: str = "") -> None:
        words = [sys.executable, "-m", "phalanx", "power", "node", str(self.file), "--yes"]
        self.process = subprocess.Popen(words, env={**os.environ, "NOTIFY_SOCKET": notify})
        wait_until(lambda: is_listening(self.socket))

    def kill(self, number: int = signal.SIGKILL) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        self.process.wait(TIMEOUT_S)
        self.links.close()
        self.links = self.make_links()

    def caps_w(self) -> list[float]:
        return [self.cap_w(package) for package in self.packages]

    def cap_w(self, package: Path) -> float:
        return int((package / NAMES[0]).read_text() or 0) / 1e6

    def ask(self, seq: int, epoch: int = 1, **fields: object) -> NodeReport:
        return ask(self.links, NodeRequest(seq, epoch, f"g{epoch}", **fields))  # type: ignore[arg-type]

    def order(self, cap_w: float, lease_s: float = 60.0, epoch: int = 1) -> NodeReport:
        seq = int(time.monotonic() * 1e3)
        session = self.ask(seq, epoch, takes_over=True).session
        caps, fallback = (cap_w,) * 2, (200.0,) * 2
        return self.ask(seq + 1, epoch, session=session, caps_w=caps, fallback_w=fallback, lease_s=lease_s)


def ask(links: HelperLinks, request: NodeRequest) -> NodeReport:
    links.send("n0", request)
    found: list[NodeReport] = []
    wait_until(lambda: bool(found.extend(links.receive()) or found))
    return found[-1]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.links.close()
    if made.process is not None:
        made.process.kill()
        made.process.wait()


def test_a_node_falls_back_when_its_guard_is_killed(node: Node) -> None:
    node.start()
    guard = subprocess.Popen([sys.executable, "-c", GUARD, str(node.socket)])
    try:
        wait_until(lambda: node.caps_w() == [330.0, 330.0])
    finally:
        guard.kill()
        guard.wait()
    killed_at = time.monotonic()
    wait_until(lambda: node.caps_w() == [200.0, 200.0])
    assert time.monotonic() - killed_at < 1.5 + 2.0
    assert node.ask(1).lease_left_s == 0.0


def test_a_helper_that_was_killed_starts_with_the_fallback_and_can_release(node: Node) -> None:
    node.start()
    assert node.order(330.0).refusal == ""
    node.kill()
    assert node.caps_w() == [330.0, 330.0]
    node.start()
    assert node.caps_w() == [200.0, 200.0]
    session = node.ask(1, 9, takes_over=True).session
    assert node.ask(2, 9, session=session, releases=True).refusal == ""
    assert node.caps_w() == [360.0, 360.0]  # of before the first order
    orders = [json.loads(line) for line in (node.folder / "state/audit.jsonl").read_text().splitlines()]
    assert [each["caps_w"] for each in orders if each["caps_w"]] == [[330.0, 330.0]]
    assert orders[-1]["releases"] is True


def test_a_helper_that_is_ended_lowers_to_the_fallback(node: Node) -> None:
    node.start()
    node.order(330.0)
    node.kill(signal.SIGTERM)
    assert node.caps_w() == [200.0, 200.0]


def test_garbage_ends_a_connection_and_not_the_helper(node: Node, tmp_path: Path) -> None:
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as manager:
        manager.bind(str(tmp_path / "notify"))
        node.start(notify=str(tmp_path / "notify"))
        manager.settimeout(TIMEOUT_S)
        assert manager.recv(100) == b"READY=1"
        assert manager.recv(100) == b"WATCHDOG=1"
    for line in (b"{}\n", b"\xff" * 100 + b"\n", b"x" * (1 << 17)):
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as stranger:
            stranger.connect(str(node.socket))
            stranger.settimeout(TIMEOUT_S)
            with contextlib.suppress(ConnectionError):
                stranger.sendall(line)
                assert stranger.recv(100) == b""
    words = [sys.executable, "-m", "phalanx", "power", "node", "--stdio", "--socket", str(node.socket)]
    links = HelperLinks({"n0": lambda: connect_by_command(words)})
    report = ask(links, NodeRequest(1, 0, "over ssh"))
    assert [device.cap_w for device in report.devices] == [360.0, 360.0]
    links.close()


def test_a_helper_that_is_not_there_is_a_problem_with_its_reason(tmp_path: Path) -> None:
    links = HelperLinks({"n0": lambda: connect_by_command([sys.executable, "-c", "import sys; sys.exit('no route')"])})
    links.send("n0", NodeRequest(1, 0, "w"))
    wait_until(lambda: not links.receive() and bool(links.problems))
    assert links.problems == {"n0": "no route"}


def test_users_and_groups_that_are_not_allowed_are_refused() -> None:
    assert PeerList(AllowedPeers()).find_refusal(0, 0) == ""
    assert "user nobody may not use this helper" in PeerList(AllowedPeers(users=["root"])).find_refusal(65534, 65534)
    assert PeerList(AllowedPeers(users=["nobody"])).find_refusal(65534, 65534) == ""
    assert PeerList(AllowedPeers(groups=["nogroup"])).find_refusal(65534, 65534) == ""
