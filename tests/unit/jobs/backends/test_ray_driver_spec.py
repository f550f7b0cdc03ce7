"""What the ends of nodes mean on Ray, whether there is room for them, and what a log tells. No Ray is needed."""

import json
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.errors import UsageError
from phalanx.jobs.backends.base import NodeService
from phalanx.jobs.backends.ray.backend import DRIVER_MODULE, REQUEST_FILE, SNAPSHOT_PLACEHOLDER, RayBackend, parse_node
from phalanx.jobs.backends.ray.driver import PlacementError, RayAttempt, RayDriver, send_signal
from phalanx.jobs.backends.ray.driver_spec import (
    LOST_NODE_EXIT_CODE,
    NO_NODE,
    DriverSpec,
    DriverState,
    decide_exit_code,
    describe_shortage,
    list_unfit_nodes,
    parse_driver_state,
    strip_ray_preamble,
)
from phalanx.jobs.backends.ray.node_actor import NodeActor
from phalanx.jobs.snapshot import Snapshot, snapshot_folder
from phalanx.jobs.spec import Job


def task(**fields: Any) -> DriverSpec:
    given = {
        "command": ("x",),
        "working_dir": "/work",
        "num_nodes": 2,
        "gpus_per_node": 0,
        "cpus_per_node": 1,
        "memory_bytes": None,
    }
    rest = {
        "time_limit_s": None,
        "warning_s": 5.0,
        "environment": {},
        "secrets": (),
        "strategy": "STRICT_SPREAD",
        "placement_timeout_s": 1.0,
    }
    return DriverSpec(**given | rest | {"max_restarts": 3} | fields)


@pytest.mark.parametrize(
    ("ended", "code"),
    [
        ([(0, 0), (1, 0)], 0),
        ([(1, 77), (0, 75)], 77),  # who was first and said what it wants decides
        ([(1, 93), (0, 75)], 93),
        ([(1, 1), (0, 75)], 75),  # else node 0 does
        ([(1, 1), (0, -15)], 1),
        ([(1, -9), (0, -15)], 75),  # killed: nobody said anything
        ([(1, 137), (0, 93)], 93),
        ([(0, 0), (1, 3)], 3),
    ],
)
def test_the_code_of_an_attempt_is_that_of_who_has_most_to_say(ended: list[tuple[int, int]], code: int) -> None:
    assert decide_exit_code(ended) == code


def test_an_attempt_that_may_run_on_fewer_nodes_is_done_when_one_of_them_says_so() -> None:
    assert decide_exit_code([(2, -9), (0, 0), (1, 0)], min_nodes=2) == 0
    assert decide_exit_code([(2, -9), (0, 75), (1, 75)], min_nodes=2) == 75


def test_machines_for_the_least_number_of_nodes_are_enough() -> None:
    machines = [{"CPU": 64.0, "GPU": 1.0}]
    assert describe_shortage(task(gpus_per_node=1, min_nodes=1), machines) is None
    assert describe_shortage(task(gpus_per_node=1), machines) is not None


def test_every_unfit_node_is_named() -> None:
    assert list_unfit_nodes([(2, 77), (0, 75), (1, 77)]) == [2, 1]


@pytest.mark.parametrize(
    ("strategy", "machines", "enough"),
    [
        ("STRICT_SPREAD", [8, 0], False),
        ("STRICT_SPREAD", [1, 4], True),
        ("PACK", [2], True),
        ("PACK", [1], False),
        ("STRICT_PACK", [1, 1], False),
        ("STRICT_PACK", [2, 1], True),
    ],
)
def test_room_is_counted_as_the_strategy_says(strategy: str, machines: list[int], enough: bool) -> None:
    wanted = task(strategy=strategy, gpus_per_node=1)
    assert (describe_shortage(wanted, [{"CPU": 64, "GPU": gpus} for gpus in machines]) is None) is enough


def test_a_task_is_read_as_it_was_written() -> None:
    one = task(command=("a", "é'\"$"), memory_bytes=5, environment={"A": "b"}, secrets=("S",))
    assert DriverSpec.from_json(one.to_json()) == one


def test_a_log_tells_attempts_and_waiting() -> None:
    waits, begun = "phalanx driver: waits for its machines: why", "phalanx driver: attempt 2 on 10.0.0.1, 10.0.0.2"
    assert parse_driver_state([]) == DriverState()
    assert parse_driver_state([waits]).is_waiting
    assert parse_driver_state(["x", waits, begun, "y"]) == DriverState(2, ("10.0.0.1", "10.0.0.2"), False)
    assert parse_driver_state([begun, "phalanx driver: ended"]) == DriverState(
        2, ("10.0.0.1", "10.0.0.2"), False, "ended"
    )


def test_lines_before_the_jobs_own_are_left_out() -> None:
    assert strip_ray_preamble("Runtime env is setting up.\nRunning entrypoint for job a: b\none\n\n two\n") == [
        "one",
        "",
        " two",
    ]
    assert strip_ray_preamble("Runtime env is setting up.\n") == []
    assert strip_ray_preamble("") == []


def job(**fields: Any) -> Job:
    return Job(**{"name": "gpt", "command": ("x",), "working_dir": Path("/work")} | fields)


def test_the_entrypoint_reaches_the_driver_through_a_shell_as_it_was() -> None:
    nasty = ("$HOME", "a b", "'", '"', "`id`", "\\", "\n", "é", "")
    sent = json.loads(RayBackend().render(job(command=("x", *nasty))).files[REQUEST_FILE])
    python, _, _, module, order, text = shlex.split(sent["entrypoint"])
    assert (python, module, order) == ("python", DRIVER_MODULE, "run")
    assert DriverSpec.from_json(text).command == ("x", *nasty)


def test_the_folder_travels_only_when_it_is_asked_to(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "model.py").write_text("x = 1\n")
    code = snapshot_folder(tmp_path, "deep")
    for given, folder, shipped in ((None, str(tmp_path), None), (code, "deep", SNAPSHOT_PLACEHOLDER)):
        sent = json.loads(RayBackend().render(job(working_dir=tmp_path, snapshot=given)).files[REQUEST_FILE])
        assert DriverSpec.from_json(shlex.split(sent["entrypoint"])[-1]).working_dir == folder
        assert sent["runtime_env"].get("working_dir") == shipped


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        (
            {"secrets": ("HF_TOKEN",), "snapshot": Snapshot(b"", Path("/a"), ".", 0, 0)},
            "HF_TOKEN cannot be passed on",
        ),
        ({"priority": 3}, "no priorities"),
        ({"backend_options": {"strategy": "NEAR"}}, "expected one of STRICT_SPREAD"),
        ({"max_parallel": 2}, "cannot limit the members of an array"),
        ({"backend_options": {"patience": "-1"}}, "expected a whole number"),
        ({"backend_options": {"image": "x"}}, "ray has no option 'image'"),
    ],
)
def test_what_ray_cannot_do_is_refused(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        RayBackend().render(job(**fields))


def test_a_ray_that_does_not_answer_is_an_error_in_words() -> None:
    pytest.importorskip("ray")
    with pytest.raises(UsageError, match="Ray does not answer"):
        RayBackend("http://127.0.0.1:9", environ={}).list_jobs()


def test_an_address_that_is_not_the_dashboards_is_refused() -> None:
    with pytest.raises(UsageError, match="expected the dashboard's"):
        RayBackend(environ={"RAY_ADDRESS": "ray://head:10001"}).list_jobs()


def run_node(folder: Path, *command: str) -> tuple[list[str], int]:
    node = NodeActor()
    node.start(command, str(folder), {"A": "b"}, "token")
    lines: list[str] = []
    while True:
        more, code = node.read()
        lines += more
        if code is not None:
            return lines, code


def test_a_node_hands_on_all_lines_and_the_code(tmp_path: Path) -> None:
    script = (
        "import os, sys; print(os.environ['A'], open(os.environ['PHALANX_TOKEN_FILE']).read()); print('x\\n' * 2500)"
    )
    lines, code = run_node(tmp_path, sys.executable, "-c", script + "; sys.exit(75)")
    assert (lines[0], len(lines), code) == ("b token", 2502, 75)


def test_what_a_command_leaves_behind_with_its_output_open_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phalanx.jobs.backends.ray.node_actor.OUTPUT_TIMEOUT_S", 0.2)
    lines, code = run_node(tmp_path, "sh", "-c", "setsid sleep 20 & echo said; exit 3")
    assert (lines, code) == (["said"], 3)


class Unanswering:
    """A Ray whose nodes never begin."""

    def wait(self, asked: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        return [], asked


def test_nodes_that_ray_never_starts_are_not_waited_for_without_end() -> None:
    driver = RayDriver(Unanswering(), task(placement_timeout_s=0.0), "raysubmit_1", {}, lambda: None)
    with pytest.raises(PlacementError, match="Ray did not start its nodes within 0 s"):
        driver._get_results([object()])
    driver.request_stop()
    with pytest.raises(PlacementError, match="it was asked to end"):
        driver._get_results([object()])


def made_driver(
    monkeypatch: pytest.MonkeyPatch,
    ends: Sequence[list[tuple[int, int]]],
    max_restarts: int = 0,
    find_pause: Callable[[], str | None] = lambda: None,
) -> tuple[RayDriver, list[int]]:
    """A driver whose attempts end like this, one after another, and the numbers of those that are made."""
    made, left = list[int](), iter(ends)

    def start(self: RayDriver, group: Any, number: int) -> RayAttempt:
        made.append(number)
        return RayAttempt([], ["m0", "m1"], next(left))

    monkeypatch.setattr(RayDriver, "_reserve_nodes", lambda self: "group")
    monkeypatch.setattr(RayDriver, "_start_attempt", start)
    monkeypatch.setattr(RayDriver, "_run_attempt", lambda self, attempt: decide_exit_code(attempt.ended))
    ray = SimpleNamespace(util=SimpleNamespace(remove_placement_group=lambda group: None))
    return RayDriver(ray, task(max_restarts=max_restarts), "raysubmit_1", {}, find_pause), made


def ends_of(monkeypatch: pytest.MonkeyPatch, *attempts: list[tuple[int, int]]) -> tuple[int, int]:
    """The job's code, and how many attempts were made."""
    driver, made = made_driver(monkeypatch, attempts, max_restarts=9)
    return driver.run(), len(made)


@pytest.mark.parametrize("death", [[(1, -9), (0, 75)], [(0, 137), (1, -15)]])
def test_a_job_that_is_killed_the_third_time_in_a_row_is_not_started_again(
    monkeypatch: pytest.MonkeyPatch, death: list[tuple[int, int]]
) -> None:
    assert ends_of(monkeypatch, *[death] * 9) == (137, 3)


@pytest.mark.parametrize(
    "between", [[(0, 75), (1, 75)], [(1, LOST_NODE_EXIT_CODE), (0, 75)], [(0, LOST_NODE_EXIT_CODE), (1, -15)]]
)
def test_deaths_in_a_row_end_with_a_word_of_the_job_or_the_loss_of_a_machine(
    monkeypatch: pytest.MonkeyPatch, between: list[tuple[int, int]]
) -> None:
    death = [(0, -9), (1, -15)]
    assert ends_of(monkeypatch, death, death, between, death, death, [(0, 0), (1, 0)]) == (0, 6)


def test_deaths_after_progress_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.jobs.backends.ray.driver.MIN_PROGRESS_S", 0.0)
    assert ends_of(monkeypatch, *[[(0, -9), (1, -15)]] * 5, [(0, 0), (1, 0)]) == (0, 6)


def test_a_paused_job_waits_without_machines_and_a_pause_is_no_restart(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pauses, slept = [None, "for power", "for power", "for power", None], list[float]()
    monkeypatch.setattr("phalanx.jobs.backends.ray.driver.time.sleep", slept.append)
    driver, _ = made_driver(monkeypatch, [[(0, 75)], [(0, 0)]], find_pause=lambda: pauses.pop(0))
    assert driver.run() == 0
    lines = capsys.readouterr().out.splitlines()
    paused = lines.index("phalanx driver: paused: for power")
    assert parse_driver_state(lines[: paused + 1]) == DriverState(is_waiting=True, reason="paused: for power")
    assert len(slept) == 2


def test_a_job_that_is_resumed_while_it_saves_has_used_no_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = [None, "for power", None, None]

    def run_attempt(self: RayDriver, attempt: RayAttempt) -> int:
        self._enforce_deadlines(attempt)
        return decide_exit_code(attempt.ended)

    driver, _ = made_driver(monkeypatch, [[(0, 75)], [(0, 0)]], find_pause=lambda: pauses.pop(0) if pauses else None)
    monkeypatch.setattr(RayDriver, "_run_attempt", run_attempt)
    assert driver.run() == 0


def test_a_job_that_waits_for_machines_leaves_its_place_when_it_is_paused() -> None:
    removed = list[str]()
    ray = SimpleNamespace(
        util=SimpleNamespace(
            placement_group=lambda *_, **__: SimpleNamespace(ready=lambda: 1),
            remove_placement_group=lambda _: removed.append("group"),
        ),
        wait=lambda asked, timeout: ([], asked),
        nodes=list,
    )
    assert RayDriver(ray, task(), "raysubmit_1", {}, lambda: "for power")._reserve_nodes() is None
    assert removed == ["group"]


def test_nodes_of_a_job_that_is_paused_are_asked_to_save_once() -> None:
    driver, attempt = RayDriver(None, task(), "raysubmit_1", {}, lambda: "for power"), RayAttempt([], ["m0"])
    asked = list[tuple[object, ...]]()
    attempt.call_all = lambda *words: asked.append(words)  # type: ignore[method-assign]
    driver._enforce_deadlines(attempt)
    driver._enforce_deadlines(attempt)
    assert asked == [("signal", 15)]


class Ended:
    """A Ray on which one job runs, and what is to signal it ends in these ways, one after another."""

    def __init__(self, *ways: str | int):
        self.ways, self.made = list(ways), list[int]()

    def submit_job(self, entrypoint: str) -> int:
        self.made.append(len(self.made))
        return self.made[-1]

    def get_job_status(self, job: int) -> Any:
        return SimpleNamespace(is_terminal=lambda: True)

    def get_job_info(self, job: int) -> Any:
        way = self.ways[min(job, len(self.ways) - 1)]
        code = way if isinstance(way, int) else None
        status = "SUCCEEDED" if way == 0 else "FAILED"
        return SimpleNamespace(status=status, driver_exit_code=code, message=f"it ended so: {way}")

    def delete_job(self, job: int) -> None:
        """It is over."""


def signalled(monkeypatch: pytest.MonkeyPatch, ray: Ended) -> None:
    engine, runs = RayBackend("http://head:8265"), SimpleNamespace(status="RUNNING", entrypoint="python x", metadata={})
    runs.metadata["phalanx-nodes"] = "2"
    monkeypatch.setattr(RayBackend, "_info", lambda self, job: runs)
    monkeypatch.setattr(RayBackend, "_find", lambda self, job: (job, ray))
    engine.send_signal("job-1", 10)


def test_a_signal_whose_sender_fails_on_a_busy_cluster_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = Ended("could not be started", 1, 0)
    signalled(monkeypatch, ray)
    assert len(ray.made) == 3


def test_a_signal_that_finds_no_node_is_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = Ended(NO_NODE)
    with pytest.raises(UsageError, match="none of its nodes runs"):
        signalled(monkeypatch, ray)
    assert len(ray.made) == 1


class DiedError(Exception):
    """As Ray's."""


class UnavailableError(DiedError):
    """As Ray's."""


@pytest.mark.parametrize(
    ("answers", "code"),
    [
        ([True, False], 0),
        ([UnavailableError(), True], 0),
        ([True, UnavailableError()], 0),
        ([UnavailableError(), False], 1),
        ([DiedError(), ValueError("no such actor")], NO_NODE),
        ([False, False], NO_NODE),
    ],
)
def test_a_node_that_does_not_answer_just_now_may_run(answers: list[Any], code: int) -> None:
    def actor(name: str, namespace: str) -> Any:
        return SimpleNamespace(signal=SimpleNamespace(remote=lambda number: answers[int(name[-1])]))

    def get(answer: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    errors = SimpleNamespace(RayActorError=DiedError, ActorUnavailableError=UnavailableError)
    assert send_signal(SimpleNamespace(get_actor=actor, get=get, exceptions=errors), "job", 2, 10) == code


def test_a_command_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert run_node(tmp_path, "no-such-program") == (["no-such-program: No such file or directory"], 64)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    (line,), code = run_node(tmp_path / "none", sys.executable)
    assert ("there is no directory" in line, code) == (True, 64)


def test_the_token_is_removed_with_the_node(tmp_path: Path) -> None:
    (line,), _ = run_node(tmp_path, sys.executable, "-c", "import os; print(os.environ['PHALANX_TOKEN_FILE'])")
    assert not Path(line).exists()


def test_a_dead_machine_is_down_and_says_why() -> None:
    state = SimpleNamespace(
        node_ip="10.0.0.1", node_name="gpu-1", state="DEAD", state_message="no heartbeat", resources_total=None
    )
    node = parse_node(state, {})
    assert (node.service, node.reason, node.num_gpus, node.host_names) == (
        NodeService.DOWN,
        "no heartbeat",
        0,
        ("gpu-1",),
    )


def test_a_machine_has_its_gpus_and_jobs() -> None:
    state = SimpleNamespace(
        node_ip="10.0.0.1", node_name="10.0.0.1", state="ALIVE", state_message="", resources_total={"GPU": 8.0}
    )
    node = parse_node(state, {"10.0.0.1": ("gpt-1",)})
    assert (node.service, node.jobs, node.num_gpus, node.host_names) == (NodeService.OPEN, ("gpt-1",), 8, ())


def test_a_drain_is_refused_with_what_to_do_instead() -> None:
    with pytest.raises(UsageError, match=r"cannot be undone.*`ray stop`"):
        RayBackend("http://127.0.0.1:1").drain_node("10.0.0.1", "hot", "ada")
    with pytest.raises(UsageError, match="Ray drains no nodes"):
        RayBackend("http://127.0.0.1:1").undrain_node("10.0.0.1")
