"""Random histories of a fleet under power control: lost nodes, late, lost and repeated messages, restarts, clock drift,
two guards, half-done writes and factory limits. After every event the real committed power is compared with budgets."""

import random
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from faulty_fleet import FakeClock, FakeLinks, FakeNetwork, make_fake_nodes
from phalanx_fleet.power.allocation import PoweredJob
from phalanx_fleet.power.committed_power import find_excesses
from phalanx_fleet.power.guard import GuardIdentity, LostNodeError, PowerGuard, plan_fallbacks
from phalanx_fleet.power.speed_curve import SpeedCurve
from phalanx_fleet.power_settings import PowerSettings
from phalanx_fleet.power_tree import BudgetLevel, NodePower, PoweredNode, PowerTree

EVENTS_PER_HISTORY = 25
CALM_S = 12
"""Seconds without faults in which the first guard raises caps."""
FAULTS: tuple[str, ...] = (
    "lose node",
    "find node",
    "crash",
    "boot",
    "kill keeper",
    "start keeper",
    "reload driver",
    "fail writes",
)
FAULTS += ("ignore writes", "repair", "fill disk", "empty disk", "lose record", "lower outside", "second guard")
FAULTS += ("stop guard", "change jobs", "change budget", "suspend guard")
MARGIN = 0.02


@dataclass(frozen=True)
class Violation:
    """A level was over its budget at a time of the history with a seed."""

    seed: int
    time_s: float
    event: str
    text: str


class DriftingClock:
    """A node's clock: it runs a little fast or slow, and began anywhere."""

    def __init__(self, clock: FakeClock, source: random.Random):
        self._clock, self._rate, self._offset_s = clock, source.uniform(0.98, 1.02), source.uniform(-1e6, 1e6)

    def __call__(self) -> float:
        return self._clock.now * self._rate + self._offset_s


def make_tree(source: random.Random) -> PowerTree:
    """Return a small tree: a site, a feed, one or two racks with one to three nodes."""
    num_racks = source.randint(1, 2)
    power = NodePower(source.randint(1, 2), 700.0, 70.0, 500.0, 250.0, 200.0)
    nodes = [
        PoweredNode(f"n{rack}{i}", "h", power, 3 + rack)
        for rack in range(num_racks)
        for i in range(source.randint(1, 3))
    ]
    racks = [BudgetLevel("rack", f"k{rack}", 0.0, 2) for rack in range(num_racks)]
    upper = (BudgetLevel("site", "s", 0.0), BudgetLevel("feed", "f", None, 0), BudgetLevel("row", "r", None, 1))
    return PowerTree((*upper, *racks), tuple(nodes))


def draw_budgets(tree: PowerTree, source: random.Random) -> list[float | None]:
    """Return budgets from what the lowest caps commit up to what all devices commit at their most power."""
    powers = [node.power for node in tree.nodes]
    lowest_w = tree.sum_by_level([p.rest_max_w + p.num_devices * 200.0 * (1 + MARGIN) for p in powers])
    most_w = tree.sum_by_level([p.rest_max_w + p.num_devices * p.device_max_w * (1 + MARGIN) for p in powers])
    return [
        None if level.budget_w is None else low + source.choice([0.0, 0.3, 0.5, 0.5, 0.7, 1.0]) * (high - low)
        for level, low, high in zip(tree.levels, lowest_w, most_w, strict=True)
    ]


class History:
    """One random history."""

    def __init__(self, seed: int):
        self.seed, self.random = seed, random.Random(seed)
        self.tree, self.clock = make_tree(self.random), FakeClock()
        self.settings = PowerSettings(
            margin=MARGIN, dead_time_s=0.5, averaging_s=0.5, lease_s=self.random.choice([5.0, 30.0])
        )
        self.budgets_w = draw_budgets(self.tree, self.random)
        self.nodes = make_fake_nodes(self.tree.nodes, self.clock, seed, 0.5, 0.5)
        for node in self.nodes:
            node.now = DriftingClock(self.clock, self.random)
            node.start_keeper(at_boot=True)
        self.network = FakeNetwork(
            (0.0, self.random.choice([0.01, 0.5, 1.5, 6.0])), self.random.choice([0.0, 0.0, 0.1, 0.4])
        )
        self.network.duplicates = self.random.choice([0.0, 0.2])
        self.epoch = 0
        self.jobs: list[PoweredJob] = []
        self.guards: list[tuple[PowerGuard, FakeLinks, float]] = []
        self.is_binding = self.has_changed = False
        self.num_checks = 0
        self.share_idle = self.random.choice([0.0, 0.3])
        self.change_jobs()
        self.add_guard()

    def change_jobs(self) -> None:
        """Move watts: jobs that need many take the place of jobs that need few; sometimes a node has no job, or one
        without a curve."""
        self.has_changed = not self.has_changed
        self.jobs = []
        for index, node in enumerate(self.nodes):
            if self.random.random() < self.share_idle:
                continue
            knee_w = 690.0 if index % 2 == self.has_changed else 250.0
            curve = SpeedCurve((200.0, knee_w, 700.0), (0.3, 0.99, 1.0), (200.0, knee_w, 700.0))
            curves = {} if self.random.random() < self.share_idle else {"h": curve}
            self.jobs.append(PoweredJob(f"j{index}", {index: tuple(range(len(node.devices)))}, curves))

    def add_guard(self) -> None:
        """Start a guard with an epoch above all others, or of the same epoch as the last one."""
        self.epoch += self.random.random() < 0.8 or self.epoch == 0
        links = FakeLinks(self.nodes, self.clock, self.network, self.random)
        fallbacks, _ = plan_fallbacks(self.tree, self.budgets_w, self.settings)
        identity = GuardIdentity(self.epoch, f"guard-{self.epoch}-{self.random.random()}")
        guard = PowerGuard(
            self.tree, self.settings, identity, links, lambda: self.jobs, lambda: self.budgets_w, fallbacks
        )
        self.guards.append((guard, links, 0.0))

    def run(self) -> list[Violation]:
        """Return the violations."""
        found: list[Violation] = []
        for _ in range(CALM_S):
            self.clock.now += 1.0
            self.act()
        faults = self.random.sample(FAULTS, self.random.randint(1, 6))
        for _ in range(EVENTS_PER_HISTORY):
            kind = self.random.random()
            event = self.random.choice(faults) if kind < 0.4 else "change jobs" if kind < 0.7 else "time passes"
            self.cause(event)
            for _ in range(self.random.randint(1, 4)):
                self.clock.now += self.random.choice([0.1, 0.5, 1.0, 1.0, 2.0])
                self.act()
                found += self.check(event)
        return found

    def act(self) -> None:
        """Let messages arrive, keepers look at their leases and guards step."""
        for node in self.nodes:
            node.check()
        for number, (guard, links, due) in enumerate(list(self.guards)):
            links.advance()
            if self.clock.now >= due:
                try:
                    status = guard.step(self.clock.now)
                    self.is_binding |= all(each.excess_w <= 0 for each in status.committed)
                    self.guards[number] = guard, links, self.clock.now + self.settings.period_s
                except LostNodeError:
                    self.guards[number] = guard, links, float("inf")
            links.advance()

    def check(self, event: str) -> list[Violation]:
        """Compare what nodes really may draw with the budgets. After the start and after a change of budgets that
        begins when what a guard itself counts is within them."""
        if not self.is_binding:
            return []
        self.num_checks += 1
        committed = [
            node.committed_w(each.power.rest_max_w, MARGIN)
            for node, each in zip(self.nodes, self.tree.nodes, strict=True)
        ]
        over = find_excesses(self.tree, committed, self.budgets_w)
        return [Violation(self.seed, self.clock.now, event, str(each)) for each in over]

    def cause(self, event: str) -> None:
        """Cause an event."""
        node = self.random.choice(self.nodes)
        device = self.random.choice(node.devices)
        if event == "lose node":
            self.network.lost_nodes.add(node.name)
        elif event == "find node":
            self.network.lost_nodes.discard(node.name)
        elif event == "crash":
            node.crash()
        elif event in ("boot", "start keeper") and node.keeper is None:
            node.start_keeper(at_boot=True)
        elif event == "kill keeper":
            node.stop_keeper()
        elif event == "reload driver":
            node.reload_driver()
        elif event == "fail writes":
            device.fails_writes = True
        elif event == "ignore writes":
            device.ignores_writes = True
        elif event == "repair":
            device.fails_writes = device.ignores_writes = device.is_lost = False
        elif event == "fill disk":
            node.store.fails = True
        elif event == "empty disk":
            node.store.fails = False
        elif event == "lose record" and node.keeper is None:
            node.store.record = None
        elif event == "lower outside":
            device.put_cap(max(device.limits.min_w, device.cap_w * 0.8))
        elif event in ("second guard", "suspend guard", "stop guard", "change jobs", "change budget"):
            self.cause_of_guards(event)

    def cause_of_guards(self, event: str) -> None:
        """Cause an event of guards, jobs or budgets."""
        if event == "second guard" and len(self.guards) < 4:
            self.add_guard()
        elif event == "suspend guard":
            number = self.random.randrange(len(self.guards))
            guard, links, due = self.guards[number]
            self.guards[number] = guard, links, due + self.random.choice([5.0, 40.0])
        elif event == "stop guard" and len(self.guards) > 1:
            self.guards.pop(0)
        elif event == "change jobs":
            self.change_jobs()
        elif event == "change budget":
            self.budgets_w = draw_budgets(self.tree, self.random)
            self.is_binding = False


def run_histories(seeds: range) -> list[Violation]:
    """Return all violations of the histories with these seeds."""
    return [violation for seed in seeds for violation in History(seed).run()]


def run_many(num_histories: int, num_processes: int = 2, block: int = 500) -> list[Violation]:
    """The same in several processes."""
    blocks = [range(begin, min(begin + block, num_histories)) for begin in range(0, num_histories, block)]
    with ProcessPoolExecutor(num_processes) as pool:
        return [violation for found in pool.map(run_histories, blocks) for violation in found]
