"""What a job does to keep the limits of its site."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from phalanx.app import framework_node
from phalanx.app.run_display import DeferredDisplay
from phalanx.app.site_limits import open_site_limits
from phalanx.errors import UsageError
from phalanx.fleet.power.start_slots import MAX_WAIT_S
from phalanx.jobs.agent.leader_state import StartTerms
from phalanx.jobs.signal_queue import SignalQueue
from phalanx.run import Run
from phalanx.run.event_types import RunEnded, RunWarning
from phalanx.run.stall_slots import SwingShare, read_swing_shares

FLEET = """\
sites: {{s: {{{ramp}}}, t: {{}}}}
feeds: {{a: {{site: s}}, b: {{site: t}}}}
rows: {{r: {{feed: a}}, q: {{feed: b}}}}
racks:
  "k[1-2]": {{row: r, node_type: h, nodes: 4}}
  c: {{row: q, node_type: h, nodes: 1}}
node_types: {{h: {{node: dgx-h100, power: 10 kW, device_power: 700 W, idle: 3 kW, device_idle: 100 W}}}}
power: {{slots: slots}}
"""
RAMP_W_PER_S = 8000.0
REST_RISE_W, DEVICE_RISE_W = 10_000 - 8 * 700 - (3000 - 8 * 100), 600


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    path = tmp_path / "fleet.yaml"
    path.write_text(FLEET.format(ramp="max_ramp: 8 kW/s"))
    return path


def take(fleet: Path | str, nodes: list[str], gpus: int = 8) -> StartTerms:
    return open_site_limits(gpus, environment={"PHALANX_CLUSTER": str(fleet)})(nodes)


def test_the_next_job_waits_for_the_rise_of_all_nodes_of_the_one_before(fleet: Path) -> None:
    assert take(fleet, ["k1-1", "k2-4"]) == StartTerms()
    two_nodes_s = 2 * (REST_RISE_W + 8 * DEVICE_RISE_W) / RAMP_W_PER_S
    second = take(f"{fleet}:h", ["k1-2"], gpus=1)
    assert second.seconds == pytest.approx(two_nodes_s, abs=0.5)
    assert second.reason == f"starting in {second.seconds:.1f} s: max_ramp of site s"
    third = take(fleet, ["k1-3"])
    assert third.seconds == pytest.approx(two_nodes_s + (REST_RISE_W + DEVICE_RISE_W) / RAMP_W_PER_S, abs=0.5)


def test_a_node_is_found_by_its_host_name_with_the_domain(fleet: Path) -> None:
    take(fleet, ["k1-1.cluster.example"])
    assert take(fleet, ["k1-2.cluster.example"]).seconds > 0.5


def test_jobs_meet_in_the_folder_of_the_fleet_file(fleet: Path) -> None:
    take(fleet, ["k1-1"])
    assert json.loads((fleet.parent / "slots" / "starts-s.json").read_text()).keys() == {"free_at"}


def test_without_a_folder_the_jobs_of_a_user_meet(fleet: Path, tmp_path: Path) -> None:
    fleet.write_text(fleet.read_text().replace("power: {slots: slots}", ""))
    environment = {"PHALANX_CLUSTER": str(fleet), "PHALANX_STATE_DIR": str(tmp_path / "state")}
    open_site_limits(8, environment=environment)(["k1-1"])
    assert (tmp_path / "state" / "power" / "fleet" / "starts-s.json").is_file()


def test_without_a_ramp_or_on_other_nodes_nothing_is_delayed_or_written(fleet: Path, tmp_path: Path) -> None:
    assert [take(fleet, [node]) for node in ("c-1", "login") for _ in range(2)] == [StartTerms()] * 4
    assert [take(text, ["k1-1"]) for text in ("h100:8", "") for _ in range(2)] == [StartTerms()] * 4
    fleet.write_text(FLEET.format(ramp=""))
    assert [take(fleet, ["k1-1"]) for _ in range(2)] == [StartTerms()] * 2
    assert not (tmp_path / "slots").exists()


def test_a_job_that_cannot_take_a_slot_starts_and_says_so(fleet: Path, tmp_path: Path) -> None:
    (tmp_path / "slots").write_text("no folder")
    delay = take(fleet, ["k1-1"])
    assert delay.seconds == 0.0
    assert "the slots for starts of jobs cannot be written" in delay.reason
    assert "without regard to max_ramp of site s" in delay.reason


@pytest.mark.parametrize("text", ["nowhere.yaml", "nowhere.yml:h"])
def test_a_job_that_does_not_find_the_fleet_file_starts_and_says_so(text: str) -> None:
    delay = take(text, ["k1-1"])
    assert delay.seconds == 0.0
    assert delay.reason == (
        f"PHALANX_CLUSTER: {Path(text.partition(':')[0]).absolute()} is not there; training without max_ramp and "
        "max_swing"
    )


def test_the_workers_of_a_run_learn_by_how_much_it_may_swing_the_power_of_its_site(fleet: Path, tmp_path: Path) -> None:
    fleet.write_text(FLEET.format(ramp="max_swing: 30 kW"))
    terms = open_site_limits(8, Run(tmp_path / "run"), {"PHALANX_CLUSTER": str(fleet)})(
        ["k1-1", "k1-2", "c-1", "login"]
    )
    (share,) = read_swing_shares(terms.environment)
    assert share == SwingShare(
        site="s",
        path=str(tmp_path / "slots" / "stalls-s.json"),
        holder=f"k1-1:{tmp_path / 'run'}",
        swing_w=2 * (REST_RISE_W + 8 * DEVICE_RISE_W),
        max_swing_w=30_000.0,
    )
    assert replace(terms, environment={}) == StartTerms()


@pytest.mark.parametrize("text", ["{", "[1]", "7", '[{"site": "s"}]', 1000 * "["])
def test_shares_that_no_agent_wrote_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="PHALANX_SWING_SHARES: the agent of a job sets it"):
        read_swing_shares({"PHALANX_SWING_SHARES": text})


@pytest.mark.parametrize(("rank", "is_delayed"), [("0", True), ("1", False)])
def test_the_first_node_of_a_framework_takes_the_slot(
    fleet: Path, monkeypatch: pytest.MonkeyPatch, rank: str, is_delayed: bool
) -> None:
    take(fleet, ["k1-1"])
    waited: list[float] = []
    leader_delays: list[float] = []

    def launch(arguments: Sequence[str], leader_delay_s: float) -> int:
        leader_delays.append(leader_delay_s)
        return 5

    node = {"PHALANX_NODE_NAME": "k1-2", "PHALANX_NODE_RANK": rank, "PHALANX_NUM_NODES": "2"}
    for name, value in {**node, "PHALANX_LEADER_ADDR": "k1-2:1234", "PHALANX_CLUSTER": str(fleet)}.items():
        monkeypatch.setitem(os.environ, name, value)
    monkeypatch.setattr(framework_node, "time", SimpleNamespace(monotonic=lambda: sum(waited)))
    monkeypatch.setattr(SignalQueue, "wait", lambda signals, seconds: waited.append(seconds))
    monkeypatch.setattr("phalanx.app.framework_node.launcher.main", launch)
    assert framework_node.main(["torch", "8", "--", "true"]) == 5
    assert [seconds > 0.2 for seconds in waited] == [True] * is_delayed
    assert leader_delays == [0.0 if is_delayed else MAX_WAIT_S]  # the other nodes wait for the first as long as it may
    if is_delayed:  # the next one waits for both of its nodes
        assert take(fleet, ["k1-3"]).seconds == pytest.approx(3 * 7000 / RAMP_W_PER_S, abs=0.5)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_framework_job_that_is_stopped_while_it_waits_may_be_started_again(fleet: Path, number: int) -> None:
    (fleet.parent / "slots").mkdir()
    (fleet.parent / "slots" / "starts-s.json").write_text(json.dumps({"free_at": time.time() + 600.0}))
    command = [sys.executable, "-P", "-m", "phalanx.app.framework_node", "torch", "1", "--", "true"]
    environment = {**os.environ, "PHALANX_CLUSTER": str(fleet), "PHALANX_NODE_NAME": "k1-1"}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("starting in ")
        process.send_signal(number)
        assert (process.wait(60.0), process.stderr.read()) == (75, "asked to stop before its processes were started\n")


def test_a_script_says_that_it_waits_before_its_recipe_is_known(tmp_path: Path) -> None:
    out = io.StringIO()
    with DeferredDisplay(Run(tmp_path), out) as display:
        display.show_event(RunWarning(text="starting in 600.0 s: max_ramp of site s"))
        assert out.getvalue().endswith("  warning: starting in 600.0 s: max_ramp of site s\n")
        display.show_event(RunEnded(status="interrupted", step=0))
    assert out.getvalue().count("starting in") == 1
