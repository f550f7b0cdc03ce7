"""A fleet without hardware: devices with delay, averaging, noise and faults, their keepers, and a network that loses
and delays messages. `phalanx power ... --fake` and the tests run the same guard on it.
"""

import heapq
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from phalanx_fleet.power.devices import CapError, CapLimits
from phalanx_fleet.power.messages import NodeReport, NodeRequest
from phalanx_fleet.power.node_keeper import CapRecord, NodeKeeper, RecordStore
from phalanx_fleet.power_tree import PoweredNode

AVERAGING_POINTS = 5
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
class FakeCapDevice:
    """A device. What it draws follows its cap after `dead_time_s`; what it reports is a mean over `averaging_s`.

    `demand_w(t)` is what its work would draw without a cap. `overshoot` is the share by which it exceeds its cap.
    Faults: `is_lost` (no answer), `ignores_writes` (a write reads back the old cap), `fails_writes` (an error).
    """

    id: str
    clock: Callable[[], float]
    limits: CapLimits
    demand_w: Callable[[float], float]
    idle_w: float = 50.0
    dead_time_s: float = 1.0
    averaging_s: float = 1.0
    noise_w: float = 0.0
    overshoot: float = 0.0
    is_lost: bool = False
    ignores_writes: bool = False
    fails_writes: bool = False
    source: random.Random = field(default_factory=lambda: random.Random(0))
    history: list[tuple[float, float]] = field(default_factory=list)
    """Times and caps from then on."""

    def __post_init__(self) -> None:
        self.history.append((-math.inf, self.limits.default_w))

    @property
    def cap_w(self) -> float:
        """The cap that it enforces, whether or not it answers."""
        return self.history[-1][1]

    def read_limits(self) -> CapLimits:
        """Return the limits, which the driver knows."""
        return self.limits

    def read_cap_w(self) -> float:
        """Return the enforced cap."""
        self._check()
        return self.cap_w

    def read_draw_w(self) -> float:
        """Return the mean draw."""
        self._check()
        now, num = self.clock(), AVERAGING_POINTS
        times = [now - self.averaging_s * (point + 0.5) / num for point in range(num)]
        mean_w = sum(map(self.draw_at, times)) / num
        return max(0.0, mean_w + self.source.gauss(0.0, self.noise_w))

    def read_temperature_c(self) -> float | None:
        """Return None: what is simulated here has no heat."""
        return None

    def set_cap_w(self, cap_w: float) -> None:
        """Enforce a cap from now on."""
        self._check()
        if self.fails_writes:
            raise CapError(f"{self.id}: insufficient permissions")
        if not self.ignores_writes:
            self.put_cap(cap_w)

    def put_cap(self, cap_w: float) -> None:
        """Change the cap past the keeper, as another program, a BMC or a restart does."""
        self.history.append((self.clock(), cap_w))

    def restart(self) -> None:
        """Lose the cap, as at a boot or a driver reload."""
        self.put_cap(self.limits.default_w)

    def draw_at(self, t: float) -> float:
        """Return what it draws at a time."""
        cap = next(cap for since, cap in reversed(self.history) if since + self.dead_time_s <= t or since == -math.inf)
        return max(self.idle_w, min(self.demand_w(t), cap * (1 + self.overshoot)))

    def speed_at(self, t: float) -> float:
        """Return the share of the full speed of its work at a time."""
        full = max(self.demand_w(t) - self.idle_w, ROUNDING_W)
        return float(min(1.0, max(0.0, (self.draw_at(t) - self.idle_w) / full) ** (1 / LEAST_POWER_EXPONENT)))

    def _check(self) -> None:
        if self.is_lost:
            raise CapError(f"{self.id}: the device is lost")


@dataclass
class MemoryStore(RecordStore):
    """Keeps a node's record; `fails`: the disk is full."""

    record: CapRecord | None = None
    fails: bool = False

    def load(self) -> CapRecord | None:
        """Return what was saved."""
        return self.record

    def save(self, record: CapRecord) -> None:
        """Save a record."""
        if self.fails:
            raise OSError(28, "No space left on device")
        self.record = record


class FakeNode:
    """A node with its keeper. `has_job`: whether work may run; a node that has lost its caps gets none until its keeper
    has capped it."""

    def __init__(self, name: str, devices: Sequence[FakeCapDevice], now: Callable[[], float]):
        self.name, self.devices, self.now = name, list(devices), now
        self.store = MemoryStore()
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
        source, power = random.Random(f"{seed} {number}"), node.power
        low_w = 0.3 * power.device_max_w if power.device_min_cap_w is None else power.device_min_cap_w
        limits = CapLimits(low_w, power.device_max_w, power.device_max_w)
        devices = [
            FakeCapDevice(
                f"{node.name}-gpu{index}",
                clock,
                limits,
                _constant(source.uniform(0.7, 1.0) * power.device_max_w),
                idle_w=power.device_idle_w,
                dead_time_s=dead_time_s,
                averaging_s=averaging_s,
                noise_w=noise_share * power.device_max_w,
                source=source,
            )
            for index in range(power.num_devices)
        ]
        found.append(FakeNode(node.name, devices, clock))
    return found


def _constant(watts: float) -> Callable[[float], float]:
    return lambda t: watts
