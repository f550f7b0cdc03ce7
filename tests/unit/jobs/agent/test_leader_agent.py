"""The agent's decisions: what an attempt's end means, when to start again, what signals do. No process is started."""

import io
import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from made_events import made
from made_messages import COMMAND, start_workers
from phalanx.cluster.health import HealthFinding, HealthVerdict
from phalanx.errors import ExitCode, UnfitNodeError
from phalanx.jobs.agent.attempt import (
    EXIT_REPORT_TIMEOUT_S,
    NEVER_JOINED_MESSAGE,
    AttemptState,
    decide_outcome,
    fault_fields,
    find_first_failure,
)
from phalanx.jobs.agent.attempt_supervisor import AttemptSupervisor
from phalanx.jobs.agent.fork_server_client import ForkServerClient, ForkServerLostError, StopRequestedError
from phalanx.jobs.agent.forked_child import GPU_FAILED_STATUS, LOST_PEER_STATUS, STORAGE_FAILED_STATUS
from phalanx.jobs.agent.heartbeat_checks import check_deadlock, check_hangs, check_stop
from phalanx.jobs.agent.leader_agent import LeaderAgent
from phalanx.jobs.agent.leader_state import RecoveryPolicy
from phalanx.jobs.agent.node_agent import NodeAgent, report_departure
from phalanx.jobs.agent.node_group import LocalNode, NodeGroup, RemoteNode, find_ended_ranks
from phalanx.run import Event, Run, read_events
from phalanx.run.control_channel import ControlServer
from phalanx.run.event_types import AttemptStarted, CheckpointSaved, HangDetected, RunWarning, StepDone
from phalanx.run.heartbeat import Heartbeat, HeartbeatTable, HeartbeatWriter
from phalanx.run.messages import drain, make_socket_pair, receive, send
from phalanx.run.node_env import NodeEnv
from phalanx.run.process_messages import (
    Hello,
    PendingCollective,
    Ping,
    RunResult,
    SendSignal,
    StoreDied,
    WaitingInCollective,
    WorkerError,
    WorkerExited,
    WorkerFinishing,
    WorkersStarted,
)
from phalanx.storage.stored_run import StoredRunLostError
from train_harness import wait_until


def attempt(codes: dict[int, int], early: bool = False, **fields: Any) -> AttemptState:
    """Workers that ended with these codes, after they said so unless they left early. One that is done has a result."""
    if not any(codes.values()) and not early:
        fields = {"result": {"status": "done"}, **fields}
    return AttemptState(
        len(codes),
        exit_statuses=codes,
        announced_ranks=set(codes),
        planned_exits={} if early else dict(codes),
        **fields,
    )


def error(code: ExitCode, text: str = "what the worker said") -> WorkerError:
    return WorkerError(rank=0, message=text, exit_code=int(code))


CRASHED = {0: -11, 1: -9}
EARLY = "before the run was done: something in it ended the process (os._exit, say)"


@pytest.mark.parametrize(
    ("ended", "code", "message"),
    [
        (attempt({0: 0, 1: 0}), ExitCode.DONE, None),
        (attempt({0: 0, 1: 0}, result=None), None, "the workers ended without telling how the run ended"),
        (attempt({0: 0, 1: 0}, result={"status": "interrupted"}), ExitCode.UNFINISHED, None),
        (attempt({0: 0}, early=True), None, f"worker 0 left with exit code 0, {EARLY}"),
        (attempt({0: LOST_PEER_STATUS, 1: 0}, early=True), None, f"worker 1 left with exit code 0, {EARLY}"),
        (attempt({1: 75, 0: -9}, early=True), None, f"worker 1 left with exit code 75, {EARLY}"),
        (AttemptState(2, exit_statuses={1: 0, 0: -9}, announced_ranks={0}), ExitCode.USAGE, NEVER_JOINED_MESSAGE),
        (attempt({0: 75, 1: 75}), ExitCode.UNFINISHED, None),
        (attempt({0: 0, 1: 75}), ExitCode.UNFINISHED, None),
        (attempt({0: 75}, error=error(ExitCode.UNFINISHED)), ExitCode.UNFINISHED, "what the worker said"),
        (attempt({0: 78, 1: -9}, error=error(ExitCode.RECIPE)), ExitCode.RECIPE, "what the worker said"),
        (attempt({0: 65, 1: -9}, error=error(ExitCode.DATA)), ExitCode.DATA, "what the worker said"),
        (attempt({0: 64}, error=error(ExitCode.USAGE)), ExitCode.USAGE, "what the worker said"),
        (attempt({0: 77}, error=error(ExitCode.UNFIT_NODE)), ExitCode.UNFIT_NODE, "what the worker said"),
        (attempt({0: 93}, error=error(ExitCode.GAVE_UP)), ExitCode.GAVE_UP, "what the worker said"),
        (attempt({1: -6, 0: -9}), None, "worker 1 was killed by SIGABRT"),
        (attempt({0: 75, 1: -11}), None, "worker 1 was killed by SIGSEGV"),
        (attempt({1: 1, 0: -9}), None, "worker 1 ended with exit code 1"),
        (attempt({1: LOST_PEER_STATUS, 0: LOST_PEER_STATUS}), None, "worker 1 lost the connection to another worker"),
        (attempt({1: STORAGE_FAILED_STATUS, 0: -9}), None, "worker 1 ended because storage failed"),
        (
            attempt({1: STORAGE_FAILED_STATUS, 0: -9}, error=error(ExitCode.UNFINISHED, "a: Input/output error")),
            None,
            "worker 1 ended because storage failed: a: Input/output error",
        ),
        (attempt({1: 3, 0: 75}, error=error(ExitCode.UNFINISHED)), None, "worker 1 ended with exit code 3"),
        (attempt({0: LOST_PEER_STATUS, 1: GPU_FAILED_STATUS}), None, "worker 1 ended because its GPU failed"),
    ],
)
def test_what_the_end_of_an_attempt_means(
    ended: AttemptState, code: ExitCode | None, message: str | None, tmp_path: Path
) -> None:
    assert decide_outcome(ended, tmp_path) == (code, message)


def test_a_kill_that_nobody_did_is_told_as_lack_of_memory(tmp_path: Path) -> None:
    _, message = decide_outcome(attempt({1: -9, 0: -9}), tmp_path)
    assert message is not None
    assert message.startswith("worker 1 was killed by SIGKILL (possibly out of memory")


@pytest.mark.parametrize("crash", [None, "MemoryError: no more (mine.py:3)"], ids=["log", "reported"])
def test_a_crash_is_told_as_reported_or_else_with_the_last_line_of_its_log(tmp_path: Path, crash: str | None) -> None:
    log = tmp_path / "attempt-4-rank-1.log"
    log.write_text("Traceback (most recent call last):\n  ...\nMemoryError: no more\n")
    ended = attempt({1: 1, 0: -9}, number=4, crashes={1: crash} if crash else {})
    _, message = decide_outcome(ended, tmp_path)
    assert message == f"worker 1 ended with exit code 1: {crash or 'MemoryError: no more'} (log: {log})"


@pytest.mark.parametrize(
    ("codes", "context", "first"),
    [
        ({2: 0, 1: 75, 3: -6, 0: -9}, {}, 3),
        # who only lost a peer is not the first, although it was gone first
        ({1: LOST_PEER_STATUS, 0: -9, 2: -9}, {}, 0),
        ({1: LOST_PEER_STATUS, 0: 1}, {}, 0),
        ({1: LOST_PEER_STATUS, 0: -9}, {"killed_ranks": {0}}, 1),
        ({1: LOST_PEER_STATUS, 2: -9, 0: -9}, {"killed_ranks": {2}}, 0),
        ({1: LOST_PEER_STATUS, 0: LOST_PEER_STATUS}, {}, 1),
        # the first exception is the cause whichever process is gone first
        ({1: 1, 0: 1}, {"crashed_ranks": [0, 1]}, 0),
        ({1: LOST_PEER_STATUS, 0: LOST_PEER_STATUS, 2: -9}, {"killed_ranks": {2}, "crashed_ranks": [0, 1]}, 0),
    ],
)
def test_the_first_to_fall_is_the_first_that_failed_by_itself(
    codes: dict[int, int], context: dict[str, Any], first: int
) -> None:
    assert find_first_failure(codes, **context) == (first, codes[first])


def test_a_fault_names_rank_and_signal_or_code() -> None:
    killed = fault_fields(attempt({1: -9, 0: -9}), "why")
    assert (killed.rank, killed.cause, killed.signal, killed.message) == (1, "signal", "SIGKILL", "why")
    failed = fault_fields(attempt({0: 3}), "why")
    assert (failed.rank, failed.cause, failed.exit_code) == (0, "exit_code", 3)
    lost = fault_fields(attempt({0: LOST_PEER_STATUS, 1: LOST_PEER_STATUS}), "why")
    assert (lost.rank, lost.cause, lost.what) == (0, "peer_disconnected", "peer disconnected")


class Stage(ForkServerClient):
    """Sockets without a fork server behind them: what it would say is put into `says` and `workers`."""

    def __init__(self) -> None:
        self.heartbeat_table = HeartbeatTable()
        self.control, self.says = make_socket_pair()
        self.events, self.workers = make_socket_pair()
        self.ended = False
        self.report = lambda text: None
        self.is_stop_requested = lambda: False

    def has_exited(self) -> bool:
        return self.ended

    def wait_until_ready(self) -> None:
        """It is."""


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    for sock in (stage.control, stage.says, stage.events, stage.workers):
        sock.close()
    stage.heartbeat_table.close()


@pytest.fixture
def shown() -> list[Any]:
    return []


class Led(LeaderAgent):
    """An agent of this stage, and the events that it shows."""

    def __init__(self, run: Run, stage: Stage, shown: list[Any]):
        super().__init__(run, stage, shown.append)
        self.stage, self.shown = stage, shown

    def play(self, ends: list[AttemptState]) -> tuple[Any, list[int]]:
        """Supervise a run whose attempts end like this; returns the outcome and the numbers of the attempts."""
        numbers, script = list[int](), iter(ends)

        def next_end(number: int, *_: Any) -> AttemptState:
            numbers.append(number)
            return next(script)

        self.run_attempt = next_end  # type: ignore[method-assign]
        return self.supervise(2, COMMAND, 0), numbers


@pytest.fixture
def agent(tmp_path: Path, stage: Stage, shown: list[Any]) -> Iterator[Led]:
    run = Run(tmp_path)
    run.create()
    with Led(run, stage, shown) as agent:
        yield agent


def kinds(shown: list[Any]) -> list[str]:
    return [event.kind for event in shown]


@pytest.mark.parametrize(
    ("fallen", "rank", "what"),
    [
        (attempt(CRASHED, num_steps=3), 0, "SIGSEGV"),
        (attempt({1: GPU_FAILED_STATUS, 0: -9}), 1, "gpu failed"),
    ],
    ids=["crash", "GPU that fails before the first step"],
)
def test_an_attempt_that_falls_is_told_and_followed_by_another(
    agent: Led, shown: list[Any], fallen: AttemptState, rank: int, what: str
) -> None:
    outcome, numbers = agent.play([fallen, attempt({0: 0})])
    assert (outcome.code, numbers) == (ExitCode.DONE, [0, 1])
    assert kinds(shown) == ["failure", "warning"]
    assert (shown[0].rank, shown[0].what) == (rank, what)
    assert "restarting from the last good checkpoint" in shown[1].text


NO_PROGRESS = "no progress in 3 attempts"


@pytest.mark.parametrize(
    ("end", "code", "message"),
    [
        (attempt(CRASHED, num_steps=3), ExitCode.GAVE_UP, f"worker 0 was killed by SIGSEGV; gave up: {NO_PROGRESS}"),
        (
            attempt({0: STORAGE_FAILED_STATUS}, num_steps=3),
            ExitCode.GAVE_UP,
            f"worker 0 ended because storage failed; gave up: {NO_PROGRESS}",
        ),
        (
            attempt({0: GPU_FAILED_STATUS}, num_steps=3),
            ExitCode.UNFIT_NODE,
            f"worker 0 ended because its GPU failed; {NO_PROGRESS}: train on another machine, or reset the GPU",
        ),
    ],
    ids=["crash", "storage", "GPU"],
)
def test_attempts_that_save_nothing_new_are_given_up(
    agent: Led, end: AttemptState, code: ExitCode, message: str
) -> None:
    outcome, numbers = agent.play([end] * 9)
    assert (outcome.code, outcome.message, numbers) == (code, message, [0, 1, 2])


@pytest.mark.parametrize(
    ("field", "steps"),
    [
        ("saved_step", [10, 10, 0, 20, 20, 20, 20]),
        ("start_step", [0, 4, 4, 8, 8, 8]),  # killed between a save and its report: the next attempt resumes from it
    ],
)
def test_progress_forgives_the_attempts_before_it(agent: Led, field: str, steps: list[int]) -> None:
    outcome, numbers = agent.play([attempt(CRASHED, num_steps=3, **{field: step}) for step in steps])
    assert (outcome.code, len(numbers)) == (ExitCode.GAVE_UP, len(steps))


@pytest.mark.parametrize(
    ("end", "message"),
    [
        (attempt({1: 1, 0: -9}), "worker 1 ended with exit code 1"),
        (attempt({0: 0}, early=True), f"worker 0 left with exit code 0, {EARLY}"),
    ],
    ids=["exception", "left"],
)
def test_a_worker_that_fails_before_the_first_step_is_not_tried_again(
    agent: Led, end: AttemptState, message: str
) -> None:
    outcome, numbers = agent.play([end])
    assert (outcome.code, outcome.message, numbers) == (ExitCode.GAVE_UP, message, [0])


def second_node(agent: Led, stage: Stage) -> RemoteNode:
    """Have a run on two nodes with a worker each; the other one."""
    agent.node_group = NodeGroup(agent.node_group.local_node, 2)  # type: ignore[arg-type]
    agent.node_group.remote_nodes[1] = RemoteNode(None, Hello(host="n2", node_rank=1, num_nodes=2))  # type: ignore[arg-type]
    return agent.node_group.remote_nodes[1]


@pytest.mark.parametrize(
    "first",
    [{1: GPU_FAILED_STATUS, 0: LOST_PEER_STATUS}, {0: LOST_PEER_STATUS, 1: GPU_FAILED_STATUS}],
    ids=["failed", "lost peer"],
)
def test_a_gpu_that_fails_again_and_again_on_another_node_has_that_node_left_out(
    agent: Led, first: dict[int, int]
) -> None:
    there = second_node(agent, agent.stage)
    places = {agent.node_group.local_node: range(1), there: range(1, 2)}
    outcome, numbers = agent.play([attempt(first, num_steps=3, ranks_by_node=places)] * 9)
    why = "worker 1 ended because its GPU failed; no progress in 3 attempts: train on another machine, or reset the GPU"
    assert (outcome.code, numbers) == (ExitCode.UNFINISHED, [0, 1, 2])
    assert outcome.message == f"node 1 (n2) is unfit: {why}"
    assert agent.node_group.unfit == {1: why}


def test_a_gpu_that_fails_again_and_again_on_the_leading_node_leaves_out_no_other(agent: Led) -> None:
    places = {agent.node_group.local_node: range(1), second_node(agent, agent.stage): range(1, 2)}
    ends = [attempt({1: LOST_PEER_STATUS, 0: GPU_FAILED_STATUS}, num_steps=3, ranks_by_node=places)] * 9
    outcome, _ = agent.play(ends)
    assert (outcome.code, agent.node_group.unfit) == (ExitCode.UNFIT_NODE, {})


@pytest.mark.parametrize("status", [GPU_FAILED_STATUS, LOST_PEER_STATUS])
def test_a_node_that_is_lost_after_a_workers_own_failure_is_not_the_cause(agent: Led, status: int) -> None:
    there = second_node(agent, agent.stage)
    there.connection = Mock()
    places = {agent.node_group.local_node: range(1), there: range(1, 2)}
    ended = AttemptState(2, places)  # type: ignore[arg-type]
    supervisor = AttemptSupervisor(agent, ended)
    supervisor.handle_message(exited(0, status))
    supervisor._on_node_lost(there, "it has given no sign for 10 s")
    assert ended.failed_with(GPU_FAILED_STATUS) == (status == GPU_FAILED_STATUS)
    assert fault_fields(ended, "why").cause == ("gpu_failed" if status == GPU_FAILED_STATUS else "node_lost")


def test_a_worker_that_finds_its_node_unfit_has_that_node_left_out(agent: Led) -> None:
    places = {agent.node_group.local_node: range(1), second_node(agent, agent.stage): range(1, 2)}
    end = attempt({1: 77, 0: -9}, error=error(ExitCode.UNFIT_NODE, "7 of 8 GPUs"), ranks_by_node=places)
    outcome, _ = agent.play([end])
    assert (outcome.code, outcome.message) == (ExitCode.UNFINISHED, "node 1 (n2) is unfit: 7 of 8 GPUs")
    assert agent.node_group.unfit == {1: "7 of 8 GPUs"}
    assert [(each.host, each.exit_code, each.message) for each in agent.shown] == [("n2", 77, "7 of 8 GPUs")]


def test_attempts_whose_storage_fails_before_a_step_are_not_counted(
    agent: Led, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phalanx.jobs.agent.leader_agent.MIN_DELAY_S", 0.0)
    outcome, numbers = agent.play([attempt({0: STORAGE_FAILED_STATUS})] * 5 + [attempt({0: 0})])
    assert (outcome.code, len(numbers)) == (ExitCode.DONE, 6)
    assert (agent.shown[0].rank, agent.shown[0].what) == (0, "storage failed")


def test_a_run_that_waits_for_storage_can_be_stopped(agent: Led) -> None:
    agent.signals.received.append(signal.SIGTERM)
    agent.run.checkpoints.rmdir()
    outcome, numbers = agent.play([attempt({0: STORAGE_FAILED_STATUS})])
    assert (outcome.code, len(numbers)) == (ExitCode.UNFINISHED, 1)
    assert outcome.message == "worker 0 ended because storage failed; asked to stop while storage failed"


@pytest.mark.parametrize("at_once", [True, False])
def test_a_crash_while_stopping_is_not_started_again_and_no_reason_where_workers_were_killed(
    agent: Led, at_once: bool
) -> None:
    agent.stopping, agent.force_stop = True, at_once
    outcome, numbers = agent.play([attempt(CRASHED, num_steps=4)])
    message = None if at_once else "worker 0 was killed by SIGSEGV"
    assert (outcome.code, outcome.message, len(numbers)) == (ExitCode.UNFINISHED, message, 1)


def test_without_the_process_that_forks_workers_there_is_no_other_attempt(agent: Led) -> None:
    send(agent.stage.workers, made(StepDone))
    agent.stage.says.close()
    outcome = agent.supervise(1, COMMAND, 0)
    assert outcome.code == ExitCode.UNFINISHED
    assert outcome.message == "the process that forks workers died, and they with it"
    assert kinds(agent.shown) == ["step", "failure"]
    assert (agent.shown[1].rank, agent.shown[1].what) == (0, "fork server died")


@pytest.mark.parametrize("is_signalled", [False, True])
def test_it_ends_the_run_where_its_sockets_are_held_by_what_a_worker_forked_or_workers_have_a_signal(
    agent: Led, is_signalled: bool
) -> None:
    if is_signalled:
        agent.stage.says.close()
        agent.signals.received.append(signal.SIGTERM)
    else:
        agent.stage.ended = True
    outcome = agent.supervise(1, COMMAND, 0)
    assert (outcome.code, outcome.message) == (
        ExitCode.UNFINISHED,
        "the process that forks workers died, and they with it",
    )


def test_an_error_of_our_own_is_not_taken_for_the_death_of_that_process(agent: Led) -> None:
    def broken(event: Any) -> None:
        raise ConnectionResetError("of a callback's own connection")

    agent.show = broken
    send(agent.stage.workers, made(StepDone))
    with pytest.raises(ConnectionResetError, match="own connection"):
        agent.supervise(1, COMMAND, 0)


def test_what_a_process_said_before_it_died_with_messages_unread_is_heard() -> None:
    ours, theirs = make_socket_pair()
    send(theirs, exited(0, 1))
    send(ours, SendSignal(signal=9))
    theirs.close()
    assert list(drain(ours)) == [exited(0, 1)]
    assert receive(ours) is None
    ours.close()


class Leaps:
    """A clock that is further each time that it is read."""

    def __init__(self, seconds: float = 10.0) -> None:
        self.now, self._seconds = 0.0, seconds

    def __call__(self) -> float:
        self.now += self._seconds
        return self.now


@pytest.fixture
def ended_process() -> Iterator[int]:
    """The number of a process that has ended, and that its parent has not waited for."""
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        yield process.pid


@pytest.mark.parametrize("killed", [False, True], ids=["they ended", "they were killed"])
def test_workers_without_a_report_of_their_end_are_not_waited_for_without_end(
    tmp_path: Path, stage: Stage, shown: list[Any], ended_process: int, killed: bool
) -> None:
    run, clock = Run(tmp_path), Leaps()
    run.create()
    with LeaderAgent(run, stage, shown.append, clock=clock) as agent:
        node = agent.node_group.local_node
        node.reset = lambda: None  # type: ignore[method-assign]
        if killed:
            agent.signals.received += [signal.SIGTERM, signal.SIGINT]
        pids = {rank: Heartbeat(os.getpid() if killed else ended_process, 1, 9, "step", 0.0, 0.0) for rank in (0, 1)}
        node.heartbeats = lambda ranks: pids  # type: ignore[method-assign]
        send(stage.says, WorkersStarted(attempt=0))
        outcome = agent.supervise(2, COMMAND, 0)
    assert outcome.code == ExitCode.UNFINISHED
    assert outcome.message is not None
    assert outcome.message.startswith("the process that forks workers does not report their end")
    assert sent_signals(stage)[-1] == signal.SIGKILL
    assert 200 < clock.now < 2000


def test_workers_that_are_never_started_are_not_waited_for_without_end_and_without_a_word(
    tmp_path: Path, stage: Stage, shown: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever should fork them hangs: it takes the message, and does nothing."""
    run = Run(tmp_path)
    run.create()
    monkeypatch.setattr("phalanx.jobs.agent.attempt_supervisor.CHECK_INTERVAL_S", 0.0)
    with LeaderAgent(run, stage, shown.append, clock=Leaps(2.0)) as agent:
        outcome = agent.supervise(2, COMMAND, 0)
    assert (outcome.code, outcome.message) == (
        ExitCode.UNFINISHED,
        "the process that forks workers started none for 120 s: it hangs; start again with the same command",
    )
    said = [event.text for event in shown if isinstance(event, RunWarning)]
    assert [text.partition(" after")[0] for text in said] == ["still waiting for workers to be started"] * 3
    assert shown[-1].what == "fork server died"


def test_workers_that_get_ready_for_long_are_reported_now_and_then(
    tmp_path: Path, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = []

    def show(event: Event) -> None:
        if isinstance(event, RunWarning):
            shown.append(event)
        if len(shown) == 2:
            stage.ended = True

    run = Run(tmp_path)
    run.create()
    monkeypatch.setattr("phalanx.jobs.agent.attempt_supervisor.CHECK_INTERVAL_S", 0.0)
    send(stage.says, WorkersStarted(attempt=0))
    with LeaderAgent(run, stage, show, clock=Leaps(2.0)) as agent:
        agent.supervise(2, COMMAND, 0)
    said = [event.text.rpartition(" after")[0] for event in shown[:2]]
    assert said == ["still waiting for the first step"] * 2


def test_one_that_never_gets_ready_ends_the_run_with_an_event(agent: Led, monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs() -> None:
        agent.stage.report("still waiting")
        raise ForkServerLostError("it hangs")

    monkeypatch.setattr(agent.stage, "wait_until_ready", hangs)
    outcome = agent.supervise(2, COMMAND, 0)
    assert (outcome.code, outcome.message) == (ExitCode.UNFINISHED, "it hangs")
    assert kinds(agent.shown) == ["warning", "failure"]


def test_a_leading_node_whose_run_another_start_waits_for_does_not_wait_for_nodes(agent: Led) -> None:
    """It is cut off, and the engine has started the run again elsewhere."""
    agent.node_group = NodeGroup(agent.node_group.local_node, 2)  # type: ignore[arg-type]
    (agent.run.path / "wanted").touch()
    outcome = agent.supervise(2, COMMAND, 0)
    assert outcome.code is ExitCode.UNFINISHED
    assert outcome.message == "another start of this run waits for it, and node 1 is not here"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_request_to_stop_ends_a_wait_for_the_process_that_forks(
    agent: Led, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    def waits() -> None:
        os.kill(os.getpid(), number)
        wait_until(agent.stage.is_stop_requested)
        raise StopRequestedError("asked to stop while it waited")

    monkeypatch.setattr(agent.stage, "wait_until_ready", waits)
    outcome = agent.supervise(2, COMMAND, 0)
    assert (outcome.code, outcome.message) == (ExitCode.UNFINISHED, "asked to stop while it waited")
    assert agent.shown == []


@pytest.mark.parametrize("leaves", [True, False])
def test_a_node_that_is_missing_is_waited_for_with_words_and_named_at_the_end(
    tmp_path: Path, stage: Stage, shown: list[Any], leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phalanx.jobs.agent.leader_agent.CHECK_INTERVAL_S", 0.0)
    monkeypatch.setattr("phalanx.jobs.agent.leader_agent.JOIN_TIMEOUT_S", 120.0)
    run, token = Run(tmp_path), b"0123456789abcdef"
    run.create()
    here = LocalNode(stage.control, stage.events, stage.heartbeat_table)
    with ControlServer(("127.0.0.1", 0), token) as door, NodeGroup(here, 2, door) as crew:
        if leaves:
            place = NodeEnv(1, 2, (door.address, door.port))
            report_departure(place, token, UnfitNodeError("its GPU does not answer"))
            wait_until(lambda: not door.joins.empty() or crew._departures)
        with LeaderAgent(run, stage, shown.append, clock=Leaps(2.0), node_group=crew) as agent:
            outcome = agent.supervise(2, COMMAND, 0)
    assert outcome.code == ExitCode.UNFINISHED
    said = [event.text for event in shown]
    assert said[0].startswith("waiting for node 1 until ")
    left = f"node 1 ({socket.gethostname()}) left with exit code 77: its GPU does not answer"
    again = "start again, with node 1 on another machine if that one is unfit"
    if leaves:
        assert said[1] == left
        assert said[2].startswith("waiting for it, or another in its place, until ")
        assert said[2].endswith("; then this ends with 75")
        assert said[3:] == ["still waiting for node 1 after 30 s, for 60 s at most"]
        assert outcome.message == f"node 1 did not come within 60 s; {left}; {again}"
    else:
        assert said[1:] == [f"still waiting for node 1 after {each} s, for 120 s at most" for each in (30, 60, 90)]
        assert outcome.message == f"node 1 did not come within 120 s; {again}"


def test_a_script_may_go_on_as_long_as_it_likes_after_its_run(ended_process: int) -> None:
    attempt = AttemptState(1, planned_exits={0: 0})
    alive, over = Heartbeat(os.getpid(), 1, 9, "step", 0.0, 0.0), Heartbeat(ended_process, 1, 9, "step", 0.0, 0.0)
    assert find_ended_ranks({0: alive, 1: over, 2: None}) == {1}
    assert [attempt.are_exits_overdue(now, exits_expected=False) for now in (0.0, 9 * EXIT_REPORT_TIMEOUT_S)] == [
        False,
        False,
    ]
    assert [
        attempt.are_exits_overdue(now, exits_expected=True)
        for now in (0.0, EXIT_REPORT_TIMEOUT_S - 1, EXIT_REPORT_TIMEOUT_S)
    ] == [False, False, True]


def test_a_node_that_lost_its_leader_does_not_wait_without_end_for_its_workers(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phalanx.jobs.agent.node_agent.EXIT_REPORT_TIMEOUT_S", 4.0)
    here = LocalNode(stage.control, stage.events, stage.heartbeat_table)
    with NodeAgent(
        NodeEnv(1, 2, ("127.0.0.1", 9)), b"token", io.StringIO(), {}, clock=Leaps(2 * EXIT_REPORT_TIMEOUT_S)
    ) as member:
        member._live_ranks = {3}
        assert not member._kill_workers(here, lambda: False)
        send(stage.says, exited(3, -9))
        assert member._kill_workers(here, lambda: False)


def leaving(rank: int, code: int) -> WorkerFinishing:
    return WorkerFinishing(rank=rank, exit_code=code)


def exited(rank: int, status: int) -> WorkerExited:
    return WorkerExited(rank=rank, exit_status=status)


def test_an_attempt_lasts_until_the_last_worker_is_gone(agent: Led) -> None:
    send(agent.stage.workers, leaving(1, 0), leaving(0, 0))
    send(agent.stage.says, exited(1, 0), exited(0, 0))
    ended = agent.run_attempt(4, 1, 2, COMMAND)
    assert ended.exit_statuses == {0: 0, 1: 0}
    (start,) = drain(agent.stage.says)
    assert start == start_workers("f", {}, agent.run.logs, 2, attempt=4)


def test_events_of_workers_are_written_and_shown_and_count_as_progress(agent: Led) -> None:
    first = (made(StepDone, time=1.0, step=7), made(CheckpointSaved, time=2.0, step=7))
    send(agent.stage.workers, *first)
    send(agent.stage.workers, made(StepDone, time=3.0, step=8), RunResult(value={"steps": 8}))
    send(agent.stage.says, exited(0, 0))
    ended = agent.run_attempt(0, 1, 1, COMMAND)
    assert (ended.num_steps, ended.saved_step, ended.result) == (2, 7, {"steps": 8})
    assert [(event.time, event.kind, event.step) for event in agent.shown] == [
        (1.0, "step", 7),
        (2.0, "checkpoint_saved", 7),
        (3.0, "step", 8),
    ]
    assert list(read_events(agent.run.events)) == agent.shown


def test_a_message_that_is_no_event_is_warned_of_and_not_written(agent: Led) -> None:
    agent.stage.workers.send(json.dumps([{"kind": "step", "time": 1.0, "step": "seven"}, {"kind": "gossip"}]).encode())
    send(agent.stage.workers, Ping())
    send(agent.stage.workers, RunResult(value={"steps": 8}))
    send(agent.stage.says, exited(0, 0))
    ended = agent.run_attempt(0, 1, 1, COMMAND)
    assert ended.num_steps == 0
    assert ended.result == {"steps": 8}
    assert kinds(agent.shown) == ["warning"] * 3
    assert "not an event of this version: {'kind': 'step'" in agent.shown[0].text


@pytest.mark.parametrize(
    ("begun", "number", "ended"), [(False, 3, True), (True, 3, False), (False, 2, False)], ids=["now", "met", "before"]
)
def test_workers_that_have_not_met_when_their_store_dies_are_started_again(
    agent: Led, begun: bool, number: int, ended: bool
) -> None:
    if begun:
        send(agent.stage.workers, made(AttemptStarted, attempt=3, world_size=2))
    send(agent.stage.workers, leaving(0, 75), leaving(1, 75))
    send(agent.stage.says, StoreDied(attempt=number), exited(0, 75), exited(1, 75))
    found = agent.run_attempt(3, 1, 2, COMMAND)
    assert found.store_lost == ended
    assert sent_signals(agent.stage) == ([signal.SIGKILL] if ended else [])
    assert [event.text for event in agent.shown if isinstance(event, RunWarning)] == (
        ["the rendezvous store died; the rendezvous is complete, and the workers continue"] if begun else []
    )
    if ended:
        assert fault_fields(found, "why").cause == "store_died"
        assert decide_outcome(found, agent.run.logs) == (None, found.abort_reason)


def sent_signals(stage: Stage) -> list[int]:
    return [message.signal for message in drain(stage.says) if isinstance(message, SendSignal)]


@pytest.mark.parametrize("status", [1, 0, 75])
def test_when_a_worker_fails_or_leaves_before_its_end_the_others_are_killed(agent: Led, status: int) -> None:
    send(agent.stage.workers, leaving(0, status))
    send(agent.stage.says, exited(1, status), exited(0, -9))
    assert agent.run_attempt(0, 1, 2, COMMAND).early_exits == (set() if status == 1 else {1})
    assert sent_signals(agent.stage) == [signal.SIGKILL]


@pytest.mark.parametrize("status", [0, 75])
def test_when_a_worker_ends_in_order_the_others_may_end_too(agent: Led, status: int) -> None:
    send(agent.stage.workers, leaving(1, status), leaving(0, status))
    send(agent.stage.says, exited(1, status), exited(0, status))
    agent.run_attempt(0, 1, 2, COMMAND)
    assert sent_signals(agent.stage) == []


def test_a_worker_that_leaves_early_is_told_with_its_step_and_the_attempt_is_made_again(agent: Led) -> None:
    pulse = HeartbeatWriter(agent.fork_server.heartbeat_table.fd, 1)
    pulse.step = 5
    pulse.record("forward")
    ends = [
        attempt({0: -9, 1: 0}, early=True, num_steps=5, ranks_by_node={agent.node_group.local_node: range(2)}),
        attempt({0: 0}),
    ]
    ends[0].exit_statuses = {1: 0, 0: -9}
    outcome, numbers = agent.play(ends)
    assert (outcome.code, numbers) == (ExitCode.DONE, [0, 1])
    assert (agent.shown[0].rank, agent.shown[0].what) == (1, "exit 0")
    assert agent.shown[0].message == f"worker 1 left in step 5 with exit code 0, {EARLY}"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_first_signal_asks_the_workers_to_save_and_leave(agent: Led, number: signal.Signals) -> None:
    signal.raise_signal(number)
    send(agent.stage.says, exited(0, 75))
    agent.run_attempt(0, 1, 1, COMMAND)
    assert agent.stopping
    assert sent_signals(agent.stage) == [signal.SIGTERM]
    assert [event.text for event in agent.shown] == [
        "saving a checkpoint, then stopping; a second signal stops immediately"
    ]


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        (signal.SIGINT, [signal.SIGTERM, signal.SIGKILL]),
        (signal.SIGTERM, [signal.SIGTERM, signal.SIGKILL]),
        (signal.SIGUSR1, [signal.SIGTERM]),
    ],
)
def test_a_second_one_stops_them_at_once_unless_it_only_asks_for_a_save(
    agent: Led, second: signal.Signals, expected: list[int]
) -> None:
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(second)
    agent.handle_signals()
    assert sent_signals(agent.stage) == expected


def test_two_sigterms_at_once_are_one_wish_and_a_later_one_is_another(agent: Led) -> None:
    now = 100.0
    agent.clock = lambda: now
    for later in (0.0, 1.0, 60.0):
        now = 100.0 + later
        signal.raise_signal(signal.SIGTERM)
        agent.handle_signals()
        assert agent.force_stop == (later == 60.0)
    assert sent_signals(agent.stage) == [signal.SIGTERM, signal.SIGKILL]


def test_an_attempt_ends_when_the_lease_of_its_url_is_late(agent: Led) -> None:
    """Another node may lead the run then, and this one be cut off."""
    agent.stored = Mock(stale_reason="the lease was not renewed", problem=None)
    pause = threading.Timer(1.5, send, (agent.stage.says, exited(0, -9)))
    pause.start()
    ended = agent.run_attempt(0, 1, 1, COMMAND)
    pause.join()
    assert ended.abort_reason == "the lease was not renewed"
    assert SendSignal(signal=int(signal.SIGKILL)) in drain(agent.stage.says)
    agent.stored.upload.assert_called_once_with()


@pytest.mark.parametrize("stops", [False, True])
def test_a_leader_that_lost_the_lease_hands_over_unless_it_was_asked_to_stop(agent: Led, stops: bool) -> None:
    agent.stored = Mock(upload=Mock(side_effect=StoredRunLostError("another process has taken over this run")))
    agent.node_group.min_nodes, agent.node_group.remote_nodes[1] = 1, Mock()
    agent._stops_run = stops
    outcome = agent.supervise(1, COMMAND, 0)
    assert (outcome.code, outcome.message) == (ExitCode.UNFINISHED, "another process has taken over this run")
    assert agent.node_group.hands_over is not stops


@pytest.mark.parametrize(
    ("signals", "min_nodes", "hands_over"),
    [
        ([signal.SIGTERM], 1, True),
        ([signal.SIGTERM, signal.SIGTERM], 1, True),
        ([signal.SIGTERM], 2, False),
        ([signal.SIGINT], 1, False),
        ([signal.SIGTERM, signal.SIGUSR1], 1, False),  # as of another node's request to stop the run
    ],
)
def test_only_a_sigterm_to_the_leader_itself_makes_another_node_lead(
    agent: Led, signals: list[int], min_nodes: int, hands_over: bool
) -> None:
    second_node(agent, agent.stage).send = lambda *_: None  # type: ignore[method-assign]
    agent.node_group.min_nodes = min_nodes
    agent.signals.received += signals
    agent.handle_signals()
    outcome, _ = agent.play([attempt({0: 75, 1: 75})])
    assert (outcome.code, agent.node_group.hands_over) == (ExitCode.UNFINISHED, hands_over)


# --- hangs ------------------------------------------------------------------------------------------------------------


def looking(agent: Led, now: float, silence: float = 600.0) -> AttemptState:
    """Two workers that fell silent at 100 s, worker 1 a sign earlier; it is `now`."""
    agent.clock, agent.recovery = (lambda: now), RecoveryPolicy(hang_timeout_s=silence)
    for rank, signs in enumerate((["data_wait", "forward"], ["data_wait"])):
        pulse = HeartbeatWriter(agent.fork_server.heartbeat_table.fd, rank, clock=lambda: 100.0)
        pulse.step = 7
        for sign in signs:
            pulse.record(sign)
    return AttemptState(2, {agent.node_group.local_node: range(2)}, step_seconds=0.5)


def look(agent: Led, attempt: AttemptState) -> None:
    check_hangs(agent, attempt, AttemptSupervisor(agent, attempt).abort)


def test_a_silent_worker_is_asked_where_it_is_and_told_with_what_it_answers(agent: Led) -> None:
    agent.run.logs.mkdir(exist_ok=True)
    log = agent.run.logs / "attempt-0-rank-1.log"
    log.write_text("printed before\n")
    attempt = looking(agent, now=108.0)
    look(agent, attempt)
    assert sent_signals(agent.stage) == [signal.SIGUSR2]
    log.write_text("printed before\nthe stack\n")
    look(agent, attempt)
    (hang,) = agent.shown
    assert isinstance(hang, HangDetected)
    assert (hang.rank, hang.step, hang.phase, hang.silence_s) == (1, 7, "forward", 8.0)
    assert (hang.is_stopped, hang.stack) == (False, "the stack")
    look(agent, attempt)
    assert len(agent.shown) == 1
    assert attempt.abort_reason is None


def test_a_hang_that_lasts_too_long_ends_the_attempt(agent: Led, tmp_path: Path) -> None:
    attempt = looking(agent, now=108.0, silence=7.0)
    for _ in range(3):
        look(agent, attempt)
    assert sent_signals(agent.stage) == [signal.SIGUSR2, signal.SIGKILL]
    attempt.exit_statuses = {0: -9, 1: -9}
    code, message = decide_outcome(attempt, tmp_path)
    assert code is None
    assert message == "worker 1 has sent no heartbeat for 8 s, in step 7, doing: forward"
    assert (fault_fields(attempt, "why").rank, fault_fields(attempt, "why").cause) == (1, "hang")


def test_a_worker_that_goes_on_is_forgiven(agent: Led) -> None:
    attempt = looking(agent, now=108.0, silence=7.0)
    look(agent, attempt)
    HeartbeatWriter(agent.stage.heartbeat_table.fd, 1, clock=lambda: 107.9).record("forward")
    look(agent, attempt)
    assert attempt.hang is None


# --- preflight --------------------------------------------------------------------------------------------------------


def test_a_node_whose_device_is_gone_trains_nothing(agent: Led) -> None:
    agent.preflight = lambda: [HealthFinding("gpus/count", HealthVerdict.FAIL, "7 of 8 GPUs are left")]
    outcome, numbers = agent.play([])
    assert (outcome.code, outcome.message, numbers) == (ExitCode.UNFIT_NODE, "7 of 8 GPUs are left", [])
    here = agent.node_group.local_node.name
    assert [(each.host, each.exit_code) for each in agent.shown] == [(here, 77)]


def test_whatever_else_looks_bad_is_told_before_each_attempt_and_stops_nothing(agent: Led) -> None:
    found = [
        HealthFinding("disk", HealthVerdict.FAIL, "1 MB left"),
        HealthFinding("memory", HealthVerdict.WARN, "little left"),
    ]
    agent.preflight = lambda: found
    outcome, _ = agent.play([attempt({0: 0}, result={})])
    assert outcome.code is ExitCode.DONE
    assert [event.text for event in agent.shown if isinstance(event, RunWarning)] == ["disk: 1 MB left"]


def test_workers_in_collectives_that_cannot_end_end_the_attempt_with_both_stacks(agent: Led) -> None:
    attempt = looking(agent, now=103.0)
    waits = [
        WaitingInCollective(
            rank=rank,
            pending=(PendingCollective(group="0", ranks=(0, 1), number=4, operation=operation),),
            issued={"0": 4},
            stack=f"stack of {operation}",
        )
        for rank, operation in enumerate(("all_reduce", "broadcast"))
    ]
    supervisor = AttemptSupervisor(agent, attempt)
    supervisor.handle_message(waits[0])
    check_deadlock(agent, attempt, supervisor.abort)
    assert agent.shown == []
    supervisor.handle_message(waits[1])
    check_deadlock(agent, attempt, supervisor.abort)
    (hang,) = agent.shown
    assert (hang.rank, hang.step, hang.phase) == (0, 7, "deadlock with worker 1")
    assert "stack of all_reduce" in hang.stack
    assert "stack of broadcast" in hang.stack
    assert sent_signals(agent.stage) == [signal.SIGKILL]
    attempt.exit_statuses = {0: -9, 1: -9}
    assert fault_fields(attempt, "why").cause == "hang"


def test_a_report_of_a_wait_that_was_not_repeated_proves_nothing(agent: Led) -> None:
    attempt = looking(agent, now=103.0)
    for rank, operation in enumerate(("all_reduce", "broadcast")):
        pending = (PendingCollective(group="0", ranks=(0, 1), number=4, operation=operation),)
        wait = WaitingInCollective(rank=rank, pending=pending, issued={"0": 4}, stack="")
        attempt.waits[rank] = (90.0 if rank else 102.0), wait
    check_deadlock(agent, attempt, AttemptSupervisor(agent, attempt).abort)
    assert agent.shown == []


@pytest.mark.parametrize(("after_s", "num_steps", "is_over"), [(14.0, 0, False), (16.0, 0, True), (16.0, 3, False)])
def test_a_run_that_is_to_stop_before_its_first_step_ends_within_the_grace_time(
    agent: Led, after_s: float, num_steps: int, is_over: bool
) -> None:
    attempt = looking(agent, now=200.0 + after_s)
    agent.stopping, agent.stopping_since, attempt.num_steps = True, 200.0, num_steps
    check_stop(agent, attempt, AttemptSupervisor(agent, attempt).abort)
    assert sent_signals(agent.stage) == ([signal.SIGKILL] if is_over else [])


def test_attempts_of_workers_that_never_met_have_pauses_and_can_be_started_again(
    agent: Led, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    def wait(seconds: float) -> bool:
        pauses.append(seconds)
        return False

    monkeypatch.setattr(agent, "wait", wait)
    ends = [attempt({1: LOST_PEER_STATUS, 0: -9}, killed_ranks={0}) for _ in range(9)]
    outcome, numbers = agent.play(ends)
    assert (outcome.code, numbers, pauses) == (ExitCode.UNFINISHED, [0, 1, 2], [5.0, 10.0])
    assert outcome.message == (
        "worker 1 lost the connection to another worker; no progress in 3 attempts: the workers did not find each other"
    )
