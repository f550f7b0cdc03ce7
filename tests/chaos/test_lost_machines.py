"""`--run URL` when processes, nodes and machines are lost: any machine resumes the run, one at a time."""

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from phalanx.errors import ExitCode
from phalanx.run import Event, Run, read_events
from phalanx.run.event_types import AttemptStarted, RunEnded, StepDone
from phalanx.storage.run_objects import find_local_directory
from run_nodes import Nodes, make_nodes
from train_harness import TrainHarness, Values, plan_fault, wait_until, write_faults

SMALL: Values = {"steps": 8, "evaluation": {"every": None}, "callbacks": []}
LONG: Values = {**SMALL, "steps": 4000, "checkpoint": {"every": 2000}}


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store/run"


def stored(tmp_path: Path, name: str) -> Path:
    return tmp_path / "store/run" / name


def read_stored_events(lab: TrainHarness, url: str) -> list[Event]:
    with lab.environment():
        return list(read_events(Run(url).events))  # type: ignore[arg-type]


def list_attempts(lab: TrainHarness, url: str) -> list[int]:
    return [event.attempt for event in read_stored_events(lab, url) if isinstance(event, AttemptStarted)]


def age_lease(tmp_path: Path) -> None:
    """Make the lease one that was not renewed for a minute, by the clock of the store."""
    (lease,) = stored(tmp_path, "lease").glob("*.json")
    os.utime(lease, (0, 0))


def plan_faults_of(url: str, cache: Path, faults: Sequence[Values]) -> None:
    """Plan the faults of the workers of a machine with this cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PHALANX_CACHE_DIR", str(cache))
        write_faults(Run(find_local_directory(url, "runs")), faults)


def test_a_run_at_a_url_that_was_killed_resumes_at_once_on_its_machine(
    lab: TrainHarness, url: str, tmp_path: Path
) -> None:
    text = str(lab.folder / "few.txt")  # the run's own recipe is in another directory
    recipe = lab.recipe_file({**LONG, "data": {"source": {"text": text}}}, "at-url-killed")
    with lab.start("train", recipe, "--run", url) as agent:
        wait_until(lambda: list(stored(tmp_path, "events").glob("*")), 100, "events in the store")
        second = lab.command("train", recipe, "--run", url)
        assert second.returncode == ExitCode.USAGE
        assert f"{url}: another process is training this run" in second.stderr
        below = psutil.Process(agent.pid).children(recursive=True)
        agent.kill()
        agent.wait()
    psutil.wait_procs(below, 10)
    assert stored(tmp_path, "lease/00000001.json").exists()
    with lab.start("train", "--run", url) as agent:  # with the run's own recipe
        wait_until(lambda: stored(tmp_path, "lease/00000002.json").exists(), 100, "the next lease")
        wait_until(lambda: list_attempts(lab, url) == [0, 1], 100, "the next attempt")
        agent.send_signal(signal.SIGTERM)
        _, errors = agent.communicate(timeout=150)
    assert agent.returncode == ExitCode.UNFINISHED, errors
    assert f"resume with: phalanx train --run {url}" in errors
    assert not list(stored(tmp_path, "lease").glob("*"))
    assert isinstance(read_stored_events(lab, url)[-1], RunEnded)  # the last events are written before the command ends


def test_a_run_resumes_on_another_machine_from_the_url_alone(lab: TrainHarness, url: str, tmp_path: Path) -> None:
    text = str(lab.folder / "few.txt")
    changes: Values = {"data": {"source": {"text": text}}}
    recipe = lab.recipe_file(changes, "at-url-moved")
    plan_faults_of(url, tmp_path / "one", [plan_fault(1, "slow", delay=0.5, attempt=None)])
    machine = {"PHALANX_CACHE_DIR": str(tmp_path / "one")}
    with lab.start("train", recipe, "--run", url, variables=machine) as agent:
        wait_until(stored(tmp_path, "checkpoints/step-000000004/MANIFEST.json").exists, 100, "a checkpoint")
        agent.kill()
        agent.wait()
    stored(tmp_path, "lease/00000001.json").unlink()  # as after 60 seconds
    with lab.start("train", "--run", url, variables={"PHALANX_CACHE_DIR": str(tmp_path / "two")}) as agent:
        _, errors = agent.communicate(timeout=100)
    assert agent.returncode == ExitCode.DONE, errors
    assert f"digest   {lab.train_reference({}).digest}" in errors
    scores = lab.command("evaluate", url, "--samples", "2")
    assert "step-000000012" in scores.stdout, scores.stderr


def test_two_nodes_without_a_shared_disk_survive_a_killed_worker(lab: TrainHarness, url: str, tmp_path: Path) -> None:
    reference = lab.train_reference({}, nproc=2)
    nodes = make_nodes(lab, tmp_path)
    nodes.location = url
    caches = [tmp_path / "node-0", tmp_path / "node-1"]
    plan_faults_of(url, caches[1], [plan_fault(6, "kill", ranks=[1])])
    with nodes.stack:
        other = nodes.start(1, PHALANX_CACHE_DIR=str(caches[1]))
        leader = nodes.start(0, PHALANX_CACHE_DIR=str(caches[0]))
        ended = nodes.end(leader, other, seconds=150)
    assert ended.code == ExitCode.DONE, ended.message
    assert f"digest   {reference.digest}" in str(ended.message)
    assert list_attempts(lab, url) == [0, 1]


def test_a_run_whose_lease_was_taken_over_stops_with_75(lab: TrainHarness, url: str, tmp_path: Path) -> None:
    with lab.start("train", lab.recipe_file(LONG, "at-url-lost"), "--run", url) as agent:
        wait_until(lambda: list(stored(tmp_path, "events").glob("*")), 100, "events in the store")
        stored(tmp_path, "lease/00000002.json").write_text("{}")
        _, errors = agent.communicate(timeout=150)
    assert agent.returncode == ExitCode.UNFINISHED, errors
    assert f"{url}: another process has taken over this run" in errors
    assert not list(stored(tmp_path, "checkpoints").glob("*"))
    assert stored(tmp_path, "lease/00000002.json").exists()


def test_two_nodes_without_a_shared_disk_lose_one_and_end_in_the_undisturbed_bits(
    lab: TrainHarness, url: str, tmp_path: Path
) -> None:
    nodes = make_nodes(lab, tmp_path)
    nodes.changes, nodes.num_nodes, nodes.location = {"determinism": "elastic"}, "1:2", url
    reference = lab.train_reference(nodes.changes, nproc=2)
    caches = [tmp_path / "node-0", tmp_path / "node-1"]
    plan_faults_of(url, caches[1], [plan_fault(7, "kill-agent", ranks=[1])])
    with nodes.stack:
        lost = nodes.start(1, PHALANX_CACHE_DIR=str(caches[1]))
        leader = nodes.start(0, PHALANX_CACHE_DIR=str(caches[0]))
        ended = nodes.end(leader, seconds=150)
        assert lost.wait(timeout=90) == -signal.SIGKILL
    assert ended.code == ExitCode.DONE, ended.message
    assert f"digest   {reference.digest}" in str(ended.message)
    assert "training on 1 of 2 nodes" in str(ended.message)


def list_world_sizes(lab: TrainHarness, url: str) -> list[int]:
    return [event.world_size for event in read_stored_events(lab, url) if isinstance(event, AttemptStarted)]


@pytest.fixture
def three_nodes(lab: TrainHarness, url: str, tmp_path: Path) -> Iterator[Nodes]:
    """Nodes with a local directory each, in a run at a URL that is slow until the file `fast` is there."""
    nodes = make_nodes(lab, tmp_path)
    nodes.changes, nodes.location = {"determinism": "elastic", "steps": 150}, url
    nodes.count, nodes.num_nodes = 3, "1:3"
    for rank in range(3):
        slow = plan_fault(1, "slow", delay=0.3, attempt=None, until=str(tmp_path / "fast"))
        plan_faults_of(url, tmp_path / f"node-{rank}", [slow])
    with nodes.stack:
        yield nodes


def start_node(nodes: Nodes, rank: int, tmp_path: Path) -> "subprocess.Popen[str]":
    """The first leader has an address of its own: a port of a process that is paused is not free."""
    variables = {"PHALANX_CACHE_DIR": str(tmp_path / f"node-{rank}"), "PHALANX_LEADER_ADDR": f"127.0.0.2:{nodes.port}"}
    return nodes.start(rank, **variables)


def test_another_node_leads_without_a_shared_disk_and_the_lost_one_returns_as_a_node(
    lab: TrainHarness, three_nodes: Nodes, url: str, tmp_path: Path
) -> None:
    leader, *members = (start_node(three_nodes, rank, tmp_path) for rank in range(3))
    wait_until(lambda: list(stored(tmp_path, "checkpoints").glob("*/MANIFEST.json")), 150, "a checkpoint")
    wait_until(lambda: list_world_sizes(lab, url) == [3], 100, "events")
    leader.kill()
    leader.wait()
    age_lease(tmp_path)
    wait_until(lambda: list_world_sizes(lab, url) == [3, 2], 100, "an attempt without it")
    returned = start_node(three_nodes, 0, tmp_path)
    wait_until(lambda: list_world_sizes(lab, url) == [3, 2, 3], 100, "an attempt with it")
    (tmp_path / "fast").touch()
    outputs = [node.communicate(timeout=150)[1] for node in (*members, returned)]
    assert [node.returncode for node in (*members, returned)] == [ExitCode.DONE] * 3, outputs
    assert sum("this node leads the run now" in output for output in outputs) == 1, outputs
    reference = lab.train_reference(three_nodes.changes, nproc=3)
    assert sum(f"digest   {reference.digest}" in output for output in outputs) == 1, outputs
    assert not list(stored(tmp_path, "lease").glob("*"))


def test_a_leader_that_was_cut_off_without_a_shared_disk_stops_when_another_node_leads(
    lab: TrainHarness, three_nodes: Nodes, url: str, tmp_path: Path
) -> None:
    """Its machine is paused meanwhile."""
    leader, *members = (start_node(three_nodes, rank, tmp_path) for rank in range(3))
    wait_until(lambda: list(stored(tmp_path, "checkpoints").glob("*/MANIFEST.json")), 150, "a checkpoint")
    wait_until(lambda: list_world_sizes(lab, url) == [3], 100, "events")
    agent = psutil.Process(leader.pid)
    machine = [agent, *agent.children(recursive=True)]
    for process in machine:
        process.suspend()
    age_lease(tmp_path)
    wait_until(lambda: list_world_sizes(lab, url) == [3, 2], 100, "an attempt without it")
    for process in machine:
        process.resume()
    _, errors = leader.communicate(timeout=100)
    assert leader.returncode == ExitCode.UNFINISHED, errors
    assert f"{url}: another process has" in errors
    (tmp_path / "fast").touch()
    outputs = [node.communicate(timeout=150)[1] for node in members]
    assert [node.returncode for node in members] == [ExitCode.DONE] * 2, outputs
    reference = lab.train_reference(three_nodes.changes, nproc=3)
    assert sum(f"digest   {reference.digest}" in output for output in outputs) == 1, outputs
    assert list_world_sizes(lab, url) == [3, 2]


def test_a_leader_that_is_asked_to_go_hands_over_at_once_without_a_shared_disk(
    lab: TrainHarness, three_nodes: Nodes, url: str, tmp_path: Path
) -> None:
    three_nodes.changes = {**three_nodes.changes, "steps": 40}
    leader, *members = (start_node(three_nodes, rank, tmp_path) for rank in range(3))
    wait_until(lambda: list(stored(tmp_path, "checkpoints").glob("*/MANIFEST.json")), 150, "a checkpoint")
    leader.send_signal(signal.SIGTERM)
    _, errors = leader.communicate(timeout=100)
    assert leader.returncode == ExitCode.UNFINISHED, errors
    (tmp_path / "fast").touch()
    outputs = [node.communicate(timeout=100)[1] for node in members]
    assert [node.returncode for node in members] == [ExitCode.DONE] * 2, outputs
    events = read_stored_events(lab, url)
    assert [event.step for event in events if isinstance(event, StepDone)] == list(range(1, 41))
    reference = lab.train_reference(three_nodes.changes, nproc=3)
    assert sum(f"digest   {reference.digest}" in output for output in outputs) == 1, outputs
