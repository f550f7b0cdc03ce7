"""A fleet of simulated devices with faults, and a network that loses and delays messages, for tests and benchmarks: the
same guard and keepers as on hardware run on it.
"""

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from phalanx_fleet.power.devices import CapError
from phalanx_fleet.power.fake_fleet import FakeCapDevice, MemoryStore, make_fake_devices
from phalanx_fleet.power.messages import NodeReport, NodeRequest
from phalanx_fleet.power.node_keeper import CapRecord, NodeKeeper
from phalanx_fleet.power_tree import PoweredNode

ROUNDING_W = 0.01
LEAST_POWER_EXPONENT = 2.0
"""Speed goes with the watts above idle to the power of one over this."""


@dataclass
class FakeClock:
    """Time of a simulation; `skew` is the drift of a node's clock, `offset_s` where it began."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class FaultyCapDevice(FakeCapDevice):
    """A device with faults: `is_lost` (no answer), `ignores_writes` (a write reads back the old cap), `fails_writes`
    (an error), `overshoot` (the share by which it exceeds its cap)."""

    overshoot: float = 0.0
    is_lost: bool = False
    ignores_writes: bool = False
    fails_writes: bool = False

    def read_cap_w(self) -> float:
        self._check()
        return super().read_cap_w()

    def read_draw_w(self) -> float:
        self._check()
        return super().read_draw_w()

    def set_cap_w(self, cap_w: float) -> None:
        self._check()
        if self.fails_writes:
            raise CapError(f"{self.id}: insufficient permissions")
        if not self.ignores_writes:
            self.put_cap(cap_w)

    def put_cap(self, cap_w: float) -> None:
        """Change the cap past the keeper, as another program, a BMC or a restart does."""
        super().set_cap_w(cap_w)

    def restart(self) -> None:
        """Lose the cap, as at a boot or a driver reload."""
        self.put_cap(self.limits.default_w)

    def find_obeyed_w(self, t: float) -> float:
        return super().find_obeyed_w(t) * (1 + self.overshoot)

    def speed_at(self, t: float) -> float:
        """Return the share of the full speed of its work at a time."""
        full = max(self.demand_w(t) - self.idle_w, ROUNDING_W)
        return float(min(1.0, max(0.0, (self.draw_at(t) - self.idle_w) / full) ** (1 / LEAST_POWER_EXPONENT)))

    def _check(self) -> None:
        if self.is_lost:
            raise CapError(f"{self.id}: the device is lost")


@dataclass
class FaultyStore(MemoryStore):
    """Keeps a node's record; `fails`: the disk is full."""

    fails: bool = False

    def save(self, record: CapRecord) -> None:
        if self.fails:
            raise OSError(28, "No space left on device")
        super().save(record)


class FakeNode:
    """A node with its keeper. `has_job`: whether work may run; a node that has lost its caps gets none until its keeper
    has capped it."""

    def __init__(self, name: str, devices: Sequence[FaultyCapDevice], now: Callable[[], float]):
        self.name, self.devices, self.now = name, list(devices), now
        self.store = FaultyStore()
        self.num_starts = 0
        self.has_job = True
        self.keeper: NodeKeeper | None = None
        self.start_keeper(at_boot=False)

    def start_keeper(self, at_boot: bool) -> None:
        """Start the keeper, which caps the node before any work may run."""
        self.num_starts += 1
        session = f"{self.name}-{self.num_starts}"
        self.keeper = NodeKeeper(self.name, self.devices, self.store, self.now, session, starts_lowest=at_boot)
        self.has_job |= self.keeper.is_capped()

    def stop_keeper(self) -> None:
        """Kill the keeper's process. Caps stay, and no lease ends until it is started again."""
        self.keeper = None

    def crash(self) -> None:
        """Lose power: the keeper, the work and the caps."""
        self.keeper, self.has_job = None, False
        for device in self.devices:
            device.restart()

    def reload_driver(self) -> None:
        """Lose the caps but not the keeper; no process used the devices."""
        self.has_job = False
        for device in self.devices:
            device.restart()

    def check(self) -> None:
        """Have the keeper end leases and cap what has restarted."""
        if self.keeper is not None:
            self.keeper.check_lease()
            if not self.has_job:
                self.has_job = self.keeper.is_capped()

    def committed_w(self, rest_max_w: float, margin: float) -> float:
        """Return what the node really may draw: its enforced caps and margin, or idle where no work may run."""
        devices_w = sum(device.cap_w if self.has_job else device.idle_w for device in self.devices)
        return rest_max_w + devices_w * (1 + margin)


@dataclass
class FakeNetwork:
    """What happens to messages, in both directions."""

    delay_s: tuple[float, float] = (0.0, 0.0)
    loss: float = 0.0
    lost_nodes: set[str] = field(default_factory=set)
    duplicates: float = 0.0


class FakeLinks:
    """Carries messages of one guard over a network. `advance` delivers what is due."""

    def __init__(
        self, nodes: Sequence[FakeNode], clock: Callable[[], float], network: FakeNetwork, source: random.Random
    ):
        self._nodes = {node.name: node for node in nodes}
        self._clock, self._network, self._random = clock, network, source
        self._queue: list[tuple[float, int, str, NodeRequest | NodeReport]] = []
        self._num_sent = 0
        self.problems: dict[str, str] = {}
        self._reports: list[NodeReport] = []

    def send(self, node: str, request: NodeRequest) -> None:
        """Put a request on the wire."""
        self._put(node, request)
        self.advance()

    def receive(self) -> list[NodeReport]:
        """Return what has arrived."""
        self.advance()
        reports, self._reports = self._reports, []
        return reports

    def count_reachable(self) -> int:
        """Return the number of nodes."""
        return len(self._nodes)

    def close(self) -> None:
        """Drop what is on the wire."""
        self._queue.clear()

    def advance(self) -> None:
        """Deliver what is due by now."""
        while self._queue and self._queue[0][0] <= self._clock():
            _, _, name, message = heapq.heappop(self._queue)
            if isinstance(message, NodeReport):
                self._reports.append(message)
            elif (node := self._nodes.get(name)) is not None and node.keeper is not None:
                self._put(name, node.keeper.answer(message))

    def _put(self, name: str, message: NodeRequest | NodeReport) -> None:
        network = self._network
        if name in network.lost_nodes or self._random.random() < network.loss:
            return
        for _ in range(2 if self._random.random() < network.duplicates else 1):
            due = self._clock() + self._random.uniform(*network.delay_s)
            self._num_sent += 1
            heapq.heappush(self._queue, (due, self._num_sent, name, message))


def make_fake_nodes(
    nodes: Sequence[PoweredNode],
    clock: Callable[[], float],
    seed: int = 0,
    dead_time_s: float = 1.0,
    averaging_s: float = 1.0,
    noise_share: float = 0.005,
) -> list[FakeNode]:
    """Return a node for each of a tree, with devices of its type that are busy at 70 to 100% of their most power."""
    found = []
    for number, node in enumerate(nodes):
        source = random.Random(f"{seed} {number}")
        devices = make_fake_devices(node, source, clock, dead_time_s, averaging_s, noise_share)
        found.append(FakeNode(node.name, [_add_faults(device) for device in devices], clock))
    return found


def _add_faults(device: FakeCapDevice) -> FaultyCapDevice:
    return FaultyCapDevice(**{name: value for name, value in vars(device).items() if name != "history"})
