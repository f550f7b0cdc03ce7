"""`phalanx power` on a node whose CPU packages are files: plan, sweep, kill and release, without a helper."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.cli.main import main
from phalanx.run import Run
from phalanx.run.event_types import StepDone, StepPhases, WorkerStarted
from phalanx.run.events import EventLog
from phalanx_fleet.power.speed_curve import load_sweep
from serve_process import wait_until

TIMEOUT_S = 40.0
STEP_AT_MOST_POWER_S = 0.02
FLEET = """
sites: {{s: {{budget: {budget}}}}}
feeds: {{a: {{site: s}}}}
rows: {{r: {{feed: a}}}}
racks: {{k: {{row: r, node_type: c, names: {node}}}}}
node_types: {{c: {{node: laptop CPU, power: 900 W, device_power: 360 W, idle: 200 W, device_idle: 50 W}}}}
power:
  lease_s: 20
  devices: {{kind: rapl, root: {folder}, packages: 2, package_power: 360 W}}
  helper: {{socket: {folder}/none.sock}}
"""


class Node:
    """This machine as a node, with a job of which the speed follows the caps."""

    def __init__(self, folder: Path):
        self.fleet, self.run = folder / "fleet.yaml", Run(folder / "run")
        self.packages = [folder / f"sys/class/powercap/intel-rapl:{index}" for index in range(2)]
        for package in self.packages:
            package.mkdir(parents=True)
            (package / "name").write_text(f"package-{package.name[-1]}\n")
            (package / "constraint_0_max_power_uw").write_text("360000000")
            (package / "constraint_0_power_limit_uw").write_text("300000000")
        self.set_budget("1 kW")
        self.run.create()
        self.log, self.is_ended = EventLog(self.run.events), threading.Event()
        self.log.write(WorkerStarted(pid=1, rank=0, host=os.uname().nodename, attempt=0))
        self.trainer = threading.Thread(target=self.train)
        self.trainer.start()

    def set_budget(self, budget: str) -> None:
        text = FLEET.format(folder=self.fleet.parent, node=os.uname().nodename, budget=budget)
        self.fleet.write_text(text)

    def train(self) -> None:
        step, cap_w = 0, 300.0
        while not self.is_ended.wait(duration_s := STEP_AT_MOST_POWER_S * 360 / cap_w):
            step, cap_w = step + 1, self.caps_w()[0] or cap_w  # a file that is being written is empty for a moment
            phases = StepPhases(checkpoint_stall=1.0)
            self.log.write(
                StepDone(
                    step=step,
                    loss=1.0,
                    grad_norm=1.0,
                    lr=1.0,
                    units=1,
                    duration_s=duration_s + 1.0,
                    breakdown_s=phases,
                )
            )

    def caps_w(self) -> list[float]:
        return [int((each / "constraint_0_power_limit_uw").read_text() or 0) / 1e6 for each in self.packages]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setenv("PHALANX_STATE_DIR", str(tmp_path / "state"))
    made = Node(tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    yield made
    signal.signal(signal.SIGTERM, before)
    made.is_ended.set()
    made.trainer.join()


def test_a_job_is_swept_planned_capped_and_released(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(node.fleet), str(node.run.path), "--caps", "3", "--wait", "1", "--measure", "1", "--yes"]
    assert main(["power", "sweep", *words]) == 0
    assert node.caps_w() == [300.0, 300.0]
    caps = load_sweep(node.run.path).caps
    assert [each.cap_w for each in caps] == [360.0, 205.0, 120.0]
    assert [each.rate / caps[0].rate for each in caps] == pytest.approx([1.0, 205 / 360, 1 / 3], rel=0.01)
    jobs = node.fleet.with_name("jobs.yaml")
    jobs.write_text(f"jobs: {{a: {{nodes: {os.uname().nodename}, run: run}}}}")
    node.set_budget("670 W")  # 180 W are all else in the node
    assert main(["power", "plan", str(node.fleet), "--jobs", str(jobs)]) == 0
    assert "240 W  33%" in capsys.readouterr().out
    assert main(["power", "guard", str(node.fleet), "--jobs", str(jobs), "--once"]) == 0
    assert f"lower {os.uname().nodename}: 240 W, 240 W\ndry run: " in capsys.readouterr().out
    assert node.caps_w() == [300.0, 300.0]
    assert main(["power", "guard", str(node.fleet), "--jobs", str(jobs), "--once", "--yes"]) == 0
    assert node.caps_w() == pytest.approx([240.2, 240.2], abs=1.0)
    assert main(["power", "release", str(node.fleet), "--yes"]) == 64
    assert "must not break a budget" in capsys.readouterr().err
    assert main(["power", "release", str(node.fleet), "--yes", "--over-budget"]) == 0
    assert node.caps_w() == [300.0, 300.0]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_old_caps_come_back_when_a_sweep_is_killed(node: Node, number: int) -> None:
    words = [sys.executable, "-m", "phalanx", "power", "sweep", str(node.fleet), str(node.run.path), "--yes"]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as sweep:
        try:
            wait_until(lambda: node.caps_w() == [360.0, 360.0])
            sweep.send_signal(number)
            sweep.wait(TIMEOUT_S)
        finally:
            sweep.kill()
    wait_until(lambda: node.caps_w() == [300.0, 300.0])
