"""Simulated devices for `phalanx power ... --fake`: their draw follows the caps with delay, averaging and noise."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from phalanx.run.boot_clock import seconds_since_boot
from phalanx_fleet.power.devices import CapLimits
from phalanx_fleet.power.links import LocalLinks
from phalanx_fleet.power.node_keeper import CapRecord, NodeKeeper, RecordStore
from phalanx_fleet.power_tree import PoweredNode

AVERAGING_POINTS = 5


@dataclass
class FakeCapDevice:
    """A device. What it draws follows its cap after `dead_time_s`; what it reports is a mean over `averaging_s`.

    `demand_w(t)` is what its work would draw without a cap.
    """

    id: str
    clock: Callable[[], float]
    limits: CapLimits
    demand_w: Callable[[float], float]
    idle_w: float = 50.0
    dead_time_s: float = 1.0
    averaging_s: float = 1.0
    noise_w: float = 0.0
    source: random.Random = field(default_factory=lambda: random.Random(0))
    history: list[tuple[float, float]] = field(default_factory=list, init=False)
    """Times and caps from then on."""

    def __post_init__(self) -> None:
        self.history.append((-math.inf, self.limits.default_w))

    @property
    def cap_w(self) -> float:
        """The cap that it enforces, whether or not it answers."""
        return self.history[-1][1]

    def read_limits(self) -> CapLimits:
        return self.limits

    def read_cap_w(self) -> float:
        return self.cap_w

    def read_draw_w(self) -> float:
        now, num = self.clock(), AVERAGING_POINTS
        times = [now - self.averaging_s * (point + 0.5) / num for point in range(num)]
        mean_w = sum(map(self.draw_at, times)) / num
        return max(0.0, mean_w + self.source.gauss(0.0, self.noise_w))

    def read_temperature_c(self) -> float | None:
        """Return None: what is simulated here has no heat."""
        return None

    def set_cap_w(self, cap_w: float) -> None:
        self.history.append((self.clock(), cap_w))

    def draw_at(self, t: float) -> float:
        return max(self.idle_w, min(self.demand_w(t), self.find_obeyed_w(t)))

    def find_obeyed_w(self, t: float) -> float:
        """Return the cap that its draw follows at a time."""
        return next(cap for since, cap in reversed(self.history) if since + self.dead_time_s <= t or since == -math.inf)


@dataclass
class MemoryStore(RecordStore):
    """Keeps a node's record."""

    record: CapRecord | None = None

    def load(self) -> CapRecord | None:
        return self.record

    def save(self, record: CapRecord) -> None:
        self.record = record


def make_fake_devices(
    node: PoweredNode,
    source: random.Random,
    clock: Callable[[], float],
    dead_time_s: float = 1.0,
    averaging_s: float = 1.0,
    noise_share: float = 0.005,
) -> list[FakeCapDevice]:
    """Return devices of a node's type that are busy at 70 to 100% of their most power."""
    power = node.power
    low_w = 0.3 * power.device_max_w if power.device_min_cap_w is None else power.device_min_cap_w
    return [
        FakeCapDevice(
            f"{node.name}-gpu{index}",
            clock,
            CapLimits(low_w, power.device_max_w, power.device_max_w),
            _constant(source.uniform(0.7, 1.0) * power.device_max_w),
            idle_w=power.device_idle_w,
            dead_time_s=dead_time_s,
            averaging_s=averaging_s,
            noise_w=noise_share * power.device_max_w,
            source=source,
        )
        for index in range(power.num_devices)
    ]


def open_fake_links(nodes: Sequence[PoweredNode], dead_time_s: float, averaging_s: float) -> LocalLinks:
    """Return the keepers of simulated nodes."""
    keepers = {}
    for number, node in enumerate(nodes):
        source = random.Random(f"0 {number}")
        devices = make_fake_devices(node, source, seconds_since_boot, dead_time_s, averaging_s)
        keepers[node.name] = NodeKeeper(node.name, devices, MemoryStore())
    return LocalLinks(keepers)


def _constant(watts: float) -> Callable[[float], float]:
    return lambda t: watts
