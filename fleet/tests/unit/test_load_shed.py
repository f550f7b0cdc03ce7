"""Jobs that are paused for a load target, by priority, and resumed one after the other."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from phalanx.errors import UsageError
from phalanx_fleet.power.allocation import NodeCaps, PoweredJob
from phalanx_fleet.power.committed_power import list_budgets
from phalanx_fleet.power.fake_fleet import FakeClock, FakeLinks, FakeNetwork, make_fake_nodes
from phalanx_fleet.power.guard import GuardIdentity, PowerGuard, plan_fallbacks
from phalanx_fleet.power.job_shedder import JobShedder, PausableState, ShedInput, choose_paused_jobs
from phalanx_fleet.power.load_targets import LoadTarget, ShedStrategy
from phalanx_fleet.power_settings import PowerSettings
from phalanx_fleet.power_tree import BudgetLevel, NodePower, PoweredNode, PowerTree
from phalanx_fleet.power_units import parse_power_rate

POWER = NodePower(2, 700.0, 70.0, 500.0, 250.0, 200.0)
LIMITS = NodeCaps(200.0, 700.0, 2)
LEVELS = (
    BudgetLevel("site", "s", None),
    BudgetLevel("feed", "a", None, 0),
    BudgetLevel("feed", "b", None, 0),
    BudgetLevel("rack", "ka", None, 1),
    BudgetLevel("rack", "kb", None, 2),
)
TREE = PowerTree(LEVELS, tuple(PoweredNode(f"n{i}", "h", POWER, 3 + i // 3) for i in range(4)))
SETTINGS = PowerSettings(margin=0.0, min_cap_share=0.55)
FLOOR_W, LOWEST_W, MOST_W = 500 + 2 * 385.0, 500 + 2 * 200.0, 500 + 2 * 700.0
JOBS = [
    PoweredJob("low", {0: (0, 1)}, priority=0),
    PoweredJob("middle", {1: (0, 1)}, priority=1),
    PoweredJob("high", {2: (0, 1)}, priority=2),
    PoweredJob("other-feed", {3: (0, 1)}, priority=-1),
]


def choose(limit_w: float, strategy: ShedStrategy = "pause", pausable: Sequence[str] | None = None) -> set[str]:
    target = {"feed a": LoadTarget("feed a", limit_w, 0.0, None, strategy)}
    names = {job.name for job in JOBS} if pausable is None else set(pausable)
    budgets = [None, limit_w, None, None, None]
    return set(choose_paused_jobs(TREE, [LIMITS] * 4, JOBS, budgets, SETTINGS, target, names))


@pytest.mark.parametrize(
    ("limit_w", "strategy", "paused"),
    [
        (3 * FLOOR_W, "pause", set()),  # caps above the floor reach the target
        (3 * FLOOR_W - 1, "pause", {"low"}),  # the lowest priority below the level first
        (2 * FLOOR_W + LOWEST_W - 1, "pause", {"low", "middle"}),
        (3 * LOWEST_W - 1, "pause", set()),  # where it does not help
        (3 * FLOOR_W - 1, "caps", set()),  # best effort
        (2 * MOST_W + LOWEST_W, "pause-first", {"low"}),  # the others keep full speed
    ],
)
def test_which_jobs_are_paused_for_a_target(limit_w: float, strategy: ShedStrategy, paused: set[str]) -> None:
    assert choose(limit_w, strategy) == paused


def test_a_job_that_makes_no_difference_is_not_paused() -> None:
    big = [
        PoweredJob("small", {0: (0,)}),
        PoweredJob("big", {1: (0, 1), 2: (0, 1)}, priority=1),
        PoweredJob("rest", {0: (1,)}, priority=2),
    ]
    limit_w = FLOOR_W + 2 * LOWEST_W
    target = {"feed a": LoadTarget("feed a", limit_w, 0.0)}
    budgets = [None, limit_w, None, None, None]
    found = choose_paused_jobs(TREE, [LIMITS] * 4, big, budgets, SETTINGS, target, {"small", "big", "rest"})
    assert found == {"big"}


def test_jobs_without_a_handle_are_never_paused() -> None:
    assert choose(3 * FLOOR_W - 1, pausable=["middle"]) == {"middle"}


@dataclass
class FakeControl:
    """Jobs that take `saving_polls` questions to stop."""

    states: dict[str, PausableState]
    calls: list[str] = field(default_factory=list)
    saving_polls: int = 1
    refuses: bool = False

    def read_state(self, handle: str) -> PausableState:
        if f"pause {handle}" in self.calls and self.states[handle] is PausableState.RUNNING:
            self.saving_polls -= 1
            if self.saving_polls < 0:
                self.states[handle] = PausableState.PAUSED
        return self.states[handle]

    def pause(self, handle: str) -> None:
        if self.refuses:
            raise UsageError("it starts just now")
        self.calls.append(f"pause {handle}")
        if self.states[handle] is PausableState.WAITING:
            self.states[handle] = PausableState.PAUSED

    def resume(self, handle: str) -> None:
        self.calls.append(f"resume {handle}")
        self.states[handle] = PausableState.RUNNING


class Bench:
    """A shedder, its clock and its jobs."""

    def __init__(self, ramp_w_per_s: float | None = None):
        self.control = FakeControl({f"local:{job.name}": PausableState.RUNNING for job in JOBS})
        self.notices: list[str] = []
        self.limits: list[NodeCaps | None] = [LIMITS] * 4
        self.now = 0.0
        tree = PowerTree((replace(LEVELS[0], max_ramp_w_per_s=ramp_w_per_s), *LEVELS[1:]), TREE.nodes)
        handles = {job.name: f"local:{job.name}" for job in JOBS}
        self.shedder = JobShedder(tree, SETTINGS, JOBS, handles, self.control, self.notices.append)
        self.resumed: dict[str, float] = {}

    def run(self, seconds: float, limit_w: float | None) -> None:
        target = {} if limit_w is None else {"feed a": LoadTarget("feed a", limit_w, 0.0)}
        until = self.now + seconds
        while self.now < until:
            self.now += 2.0
            before = len(self.control.calls)
            self.shedder.update(ShedInput(self.limits, [None, limit_w, None, None, None], target, self.now))
            for call in self.control.calls[before:]:
                if call.startswith("resume"):
                    self.resumed[call.partition(":")[2]] = self.now

    @property
    def running(self) -> list[str]:
        return [job.name for job in self.shedder.list_running()]


def test_a_job_counts_as_running_until_it_has_saved_and_is_asked_once() -> None:
    bench = Bench()
    bench.control.saving_polls = 3
    bench.run(4, 3 * FLOOR_W - 1)
    assert "low" in bench.running
    bench.run(10, 3 * FLOOR_W - 1)
    assert bench.running == ["middle", "high", "other-feed"]
    assert bench.control.calls == ["pause local:low"]


def test_a_job_is_resumed_when_the_power_has_been_there_for_a_while() -> None:
    bench = Bench()
    bench.run(20, 3 * FLOOR_W - 1)
    bench.run(8, None)
    assert bench.resumed == {}
    bench.run(6, None)
    assert list(bench.resumed) == ["low"]
    assert len(bench.running) == 4


def test_jobs_resume_one_after_the_other_within_the_ramp() -> None:
    bench = Bench(ramp_w_per_s=100.0)  # a job is 250 + 2 x 630 W: 15.1 s
    bench.run(20, FLOOR_W + 2 * LOWEST_W)
    assert sorted(bench.running) == ["high", "other-feed"]
    bench.run(60, None)
    assert bench.resumed["middle"] - bench.resumed["low"] == pytest.approx(15.1, abs=2.0)


def test_jobs_that_wait_for_a_lost_feed_are_held_and_start_one_after_the_other() -> None:
    bench = Bench(ramp_w_per_s=100.0)
    bench.limits[:3] = [None] * 3
    for name in ("low", "middle"):
        bench.control.states[f"local:{name}"] = PausableState.WAITING
    bench.run(10, None)
    assert bench.control.calls == ["pause local:low", "pause local:middle"]  # high runs: it is only not heard
    bench.limits[:3] = [LIMITS] * 3
    bench.run(60, None)
    assert bench.resumed["middle"] - bench.resumed["low"] == pytest.approx(15.1, abs=2.0)


def test_a_job_that_cannot_be_paused_is_named_and_asked_again() -> None:
    bench = Bench()
    bench.control.refuses = True
    bench.run(2, 3 * FLOOR_W - 1)
    bench.control.refuses = False
    bench.run(10, 3 * FLOOR_W - 1)
    assert bench.notices[0] == "low (local:low): cannot be paused: it starts just now"
    assert bench.control.calls == ["pause local:low"]


def test_a_job_that_has_ended_is_named_once_and_another_one_makes_way() -> None:
    bench = Bench()
    bench.control.states["local:low"] = PausableState.ENDED
    bench.run(20, 3 * FLOOR_W - 1)
    assert bench.notices[0] == "low (local:low) has ended; remove it from the jobs file"
    assert bench.control.calls == ["pause local:middle"]


def test_a_job_that_was_started_just_when_it_was_asked_is_asked_again() -> None:
    bench = Bench()
    bench.control.saving_polls = 200
    bench.run(310, 3 * FLOOR_W - 1)
    assert bench.control.calls == ["pause local:low"] * 2


@pytest.mark.parametrize("state", [PausableState.RUNNING, PausableState.WAITING])
def test_a_job_that_someone_else_resumes_counts_again_and_is_paused_again(state: PausableState) -> None:
    bench = Bench()
    bench.run(10, 3 * FLOOR_W - 1)
    assert "low" not in bench.running
    bench.control.states["local:low"], bench.control.saving_polls = state, 3
    bench.run(2, 3 * FLOOR_W - 1)
    assert "low" in bench.running
    bench.run(12, 3 * FLOOR_W - 1)
    assert bench.control.calls == ["pause local:low"] * 2
    assert "low" not in bench.running
    bench.run(20, None)
    assert list(bench.resumed) == ["low"]


def test_a_paused_job_stays_one_while_its_backend_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.run(10, 3 * FLOOR_W - 1)

    def fail(handle: str) -> PausableState:
        raise UsageError("slurm does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(bench.control, "read_state", fail)
        bench.run(10, 3 * FLOOR_W - 1)
    assert "low" not in bench.running
    bench.run(20, None)
    assert list(bench.resumed) == ["low"]


def test_a_guard_that_restarts_resumes_what_was_paused_before() -> None:
    bench = Bench()
    bench.control.states["local:low"] = PausableState.PAUSED
    bench.shedder.adopt_paused_jobs()
    bench.run(20, None)
    assert list(bench.resumed) == ["low"]


def test_a_ramp_has_its_unit() -> None:
    assert parse_power_rate("1.5 MW/s") == 1.5e6
    for text in ("1.5 MW", "1 MW/min", 5):
        with pytest.raises(ValueError, match="1 MW/s"):
            parse_power_rate(text)


def test_a_guard_raises_caps_within_the_ramp_of_the_site() -> None:
    clock, settings, limit_w = FakeClock(), PowerSettings(margin=0.0), [3000.0]
    levels = (BudgetLevel("site", "s", 7600.0, max_ramp_w_per_s=50.0), BudgetLevel("rack", "k", None, 0))
    tree = PowerTree(levels, tuple(PoweredNode(f"n{i}", "h", POWER, 1) for i in range(4)))
    nodes = make_fake_nodes(tree.nodes, clock)
    links = FakeLinks(nodes, clock, FakeNetwork(), random.Random(0))
    fallbacks, _ = plan_fallbacks(tree, list_budgets(tree), settings)
    jobs = [PoweredJob(f"j{i}", {i: (0, 1)}) for i in range(4)]
    guard = PowerGuard(
        tree, settings, GuardIdentity(1, "g"), links, lambda: jobs, lambda: [4000.0 + limit_w[0], None], fallbacks
    )
    committed = []
    for second in range(200):
        clock.now += 1.0
        limit_w[0] = 500.0 if second < 60 else 3000.0
        for node in nodes:
            node.check()
        if second % 2 == 0:
            guard.step(clock.now)
        committed.append(sum(node.committed_w(500.0, 0.0) for node in nodes))
    assert committed[59] <= 4500.0
    assert committed[-1] > 6800.0
    assert all(
        later - earlier <= 50.0 * (10 + 2) for earlier, later in zip(committed[59:], committed[69:], strict=False)
    )
    assert committed[-1] - committed[59] > 2000.0
