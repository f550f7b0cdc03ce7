"""Sweep the caps of a job on a fake fleet: rates, temperatures, leases, and the stored curve."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from faulty_fleet import FakeClock, FakeLinks, FakeNetwork, FaultyCapDevice, make_fake_nodes
from phalanx.errors import DataError, RecipeError, UsageError
from phalanx.jobs.spec import JobState, JobStatus
from phalanx.run import Run
from phalanx_fleet.power.control import load_jobs_file
from phalanx_fleet.power.speed_curve import PowerSweep, SweptCap, choose_sweep_caps, load_sweep, save_sweep
from phalanx_fleet.power.sweep import SweepError, SweepTimes, SweptNodes, find_swept_run, sweep_caps
from phalanx_fleet.power_tree import BudgetLevel, NodePower, PoweredNode, PowerTree

POWER = NodePower(2, 700.0, 70.0, 500.0, 250.0, 200.0)
TREE = PowerTree((BudgetLevel("rack", "k", None),), tuple(PoweredNode(f"n{i}", "h", POWER, 0) for i in range(2)))
CAPS = choose_sweep_caps(200.0, 700.0)


class Bench:
    """A job on two fake nodes, a step of 0.5 s at full speed, and time that passes in `sleep`."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.fakes = make_fake_nodes(TREE.nodes, self.clock)
        for device in self.list_devices():
            device.demand_w = lambda t: 650.0
        self.network, self.done, self.is_running = FakeNetwork(), 0.0, True
        self.links = FakeLinks(self.fakes, self.clock, self.network, random.Random(0))
        self.nodes = SweptNodes(
            self.links, {"n0": "h", "n1": "h"}, 1, "s", 30.0, self.clock, self.sleep, {"n0": 2, "n1": 2}
        )
        self.durations: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.clock.now += seconds
        speed = min(device.speed_at(self.clock.now) for device in self.list_devices())
        self.done += self.is_running * seconds * speed / 0.5
        while self.done >= 1.0:
            self.done -= 1.0
            self.durations.append(0.5 / speed)
        for node in self.fakes:
            node.check()

    def read_steps(self) -> Sequence[float]:
        found, self.durations = self.durations, []
        return found

    def list_devices(self) -> list[FaultyCapDevice]:
        return [device for node in self.fakes for device in node.devices]

    def caps(self) -> list[float]:
        return [device.cap_w for device in self.list_devices()]

    def heat(self, rate_k_per_s: float) -> None:
        for device in self.list_devices():
            device.read_temperature_c = lambda: 40.0 + rate_k_per_s * self.clock.now  # type: ignore[method-assign]

    def run(self, caps: Sequence[float] = CAPS) -> list[SweptCap]:
        self.nodes.take_over()
        found = sweep_caps(self.nodes, {"h": list(caps)}, SweepTimes(), self.read_steps)
        return [each for results in found for each in results]


def test_a_sweep_measures_the_speed_at_each_cap_and_returns_to_the_old_ones() -> None:
    bench = Bench()
    measured = bench.run()
    full = bench.fakes[0].devices[0].speed_at(0.0)
    assert [each.cap_w for each in measured] == [700.0, 525.0, 377.0, 262.0, 200.0]
    assert measured[0].rate == pytest.approx(2.0 * full, rel=0.03)
    assert measured[-1].rate == pytest.approx(2.0 * ((200 - 70) / (650 - 70)) ** 0.5, rel=0.03)
    assert measured[-1].draw_w == pytest.approx(200.0, rel=0.02)
    bench.sleep(2.0)
    assert bench.caps() == [700.0] * 4
    assert bench.clock.now <= 5 * 61


@pytest.mark.parametrize(("rate_k_per_s", "is_steady", "seconds"), [(0.5, False, 60), (0.01, True, 40)])
def test_temperatures_that_change_are_waited_for_and_said(rate_k_per_s: float, is_steady: bool, seconds: int) -> None:
    bench = Bench()
    bench.heat(rate_k_per_s)
    (measured,) = bench.run(CAPS[:1])
    assert (measured.is_steady, round(bench.clock.now)) == (is_steady, seconds)


@pytest.mark.parametrize("stop", [KeyboardInterrupt, GeneratorExit])
def test_an_interrupted_sweep_returns_to_the_old_caps(stop: type[BaseException]) -> None:
    bench = Bench()
    bench.nodes.take_over()
    steps = sweep_caps(bench.nodes, {"h": CAPS[3:]}, SweepTimes(), bench.read_steps)
    next(steps)
    assert bench.caps() == [262.0] * 4
    with pytest.raises(stop):
        steps.throw(stop)
    bench.sleep(2.0)
    assert bench.caps() == [700.0] * 4


def test_a_killed_sweep_returns_to_the_old_caps_when_its_leases_end() -> None:
    bench = Bench()
    bench.nodes.take_over()
    bench.nodes.set_caps({"h": 250.0})
    bench.sleep(29.0)
    before = bench.caps()
    bench.sleep(2.0)
    assert (before, bench.caps()) == ([250.0] * 4, [700.0] * 4)


def test_a_job_without_steps_ends_the_sweep() -> None:
    bench = Bench()
    bench.is_running = False
    with pytest.raises(SweepError, match="the job made 0 steps in 120 s; a sweep needs 3 at least"):
        bench.run()
    bench.sleep(2.0)
    assert bench.caps() == [700.0] * 4


@pytest.mark.parametrize(
    ("break_node", "problem"),
    [
        (lambda bench: bench.network.lost_nodes.add("n1"), "n1: does not answer; it restores its caps within 30 s"),
        (lambda bench: setattr(bench.fakes[1].devices[0], "fails_writes", True), "n1: .*insufficient permissions"),
        (lambda bench: bench.fakes[1].start_keeper(at_boot=False), "n1: the order is of before this node's restart"),
    ],
)
def test_a_node_that_does_not_follow_ends_the_sweep(break_node: Callable[[Bench], None], problem: str) -> None:
    bench = Bench()
    bench.nodes.take_over()
    break_node(bench)
    with pytest.raises(SweepError, match=problem):
        list(sweep_caps(bench.nodes, {"h": CAPS[2:]}, SweepTimes(), bench.read_steps))


def make_sweep(*rates: float) -> PowerSweep:
    caps = choose_sweep_caps(200.0, 700.0, len(rates))
    return PowerSweep(tuple(SweptCap("h", c, r, None, None, None, 9) for c, r in zip(caps, rates, strict=True)), 1.0)


def test_a_stored_sweep_is_the_curve_of_a_job(tmp_path: Path) -> None:
    run = Run(tmp_path / "runs" / "a")
    run.path.mkdir(parents=True)
    save_sweep(run, make_sweep(2.0, 2.1, 1.0))
    (tmp_path / "jobs.yaml").write_text("jobs: {a: {nodes: n0, run: runs/a}}")
    (job,) = load_jobs_file(tmp_path / "jobs.yaml", TREE)
    assert {200.0, 377.0, 700.0} <= {*job.curves["h"].caps_w}
    assert [job.curves["h"].speed_at(cap) for cap in (200, 377, 700)] == pytest.approx([1.0 / 2.05, 1.0, 1.0])


def test_a_run_without_a_sweep_is_refused(tmp_path: Path) -> None:
    (tmp_path / "jobs.yaml").write_text("jobs: {a: {nodes: n0, run: runs/a}}")
    with pytest.raises(RecipeError, match="no sweep there; `phalanx power sweep FLEET"):
        load_jobs_file(tmp_path / "jobs.yaml", TREE)
    (tmp_path / "power_sweep.json").write_text('{"kind": "power_sweep", "caps": 3}')
    with pytest.raises(DataError, match="no sweep"):
        load_sweep(tmp_path)


class QueueOfOne:
    """A backend with one job."""

    def __init__(self, status: JobStatus):
        self.status, self.asked = status, list[str]()

    def __call__(self, name: str) -> Any:
        self.asked.append(name)
        return self

    def poll(self, job_id: str) -> JobStatus:
        self.asked.append(job_id)
        return self.status


@pytest.mark.parametrize(("job", "asked"), [("7", ["local", "7"]), ("slurm:12_1", ["slurm", "12_1"])])
def test_a_job_is_swept_by_the_steps_of_its_run(
    job: str, asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "resolved.yaml").touch()
    queue = QueueOfOne(JobStatus("7", "gpt", JobState.RUNNING, run_dir=str(tmp_path / "run")))
    assert find_swept_run(job, queue).path == tmp_path / "run"
    assert queue.asked == asked
    assert find_swept_run("run", queue).path == Path("run")
    assert queue.asked == asked
    queue.status = replace(queue.status, state=JobState.QUEUED)
    with pytest.raises(UsageError, match=f"job {job} .gpt. is queued; sweep a job that runs"):
        find_swept_run(job, queue)
    queue.status = replace(queue.status, run_dir=None)
    with pytest.raises(UsageError, match="trains no run"):
        find_swept_run(job, queue)
    (tmp_path / "7").mkdir()
    with pytest.raises(UsageError, match="7: no run here"):
        find_swept_run("7", queue)
