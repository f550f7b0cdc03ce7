"""Where a worker's events go: in bunches to the agent, or into the run."""

import json
import socket
from collections.abc import Iterator

import pytest

from made_events import made
from phalanx.run import Event, Run, read_events
from phalanx.run.event_types import (
    CheckpointSaved,
    RunEvent,
    RunWarning,
    StepDone,
    WorkerFailure,
    WorkerStarted,
)
from phalanx.run.messages import drain, receive
from phalanx.run.process_messages import RunResult, WorkerError
from phalanx.train.reporter import AgentReporter, RunReporter, make_reporter


@pytest.fixture
def agent(ends: tuple[socket.socket, socket.socket]) -> Iterator[AgentReporter]:
    """A reporter to the agent, whose end is `ends[1]`."""
    report = AgentReporter(ends[0].fileno(), rank=3, max_delay_s=0.1)
    yield report
    report._socket.close()


def packets(far: socket.socket) -> list[list[int | str]]:
    """What lies there, packet by packet: the steps, or the kinds of other messages."""
    far.setblocking(False)
    found: list[list[int | str]] = []
    while True:
        try:
            messages = receive(far)
        except BlockingIOError:
            return found
        assert messages is not None
        found.append([getattr(message, "step", message.kind) for message in messages])


def test_steps_are_held_back_until_patience_ends(
    ends: tuple[socket.socket, socket.socket], agent: AgentReporter
) -> None:
    for step in (1, 2, 3):
        agent.report_event(made(StepDone, step=step, time=50.0 + 0.04 * step))
    assert packets(ends[1]) == []
    agent.report_event(made(StepDone, step=4, time=50.16))
    assert packets(ends[1]) == [[1, 2, 3, 4]]


@pytest.mark.parametrize("kind", [CheckpointSaved, RunWarning])
def test_any_other_event_goes_out_at_once_behind_the_steps_before_it(
    ends: tuple[socket.socket, socket.socket], agent: AgentReporter, kind: type[RunEvent]
) -> None:
    agent.report_event(made(StepDone, step=1))
    agent.report_event(made(kind))  # type: ignore[arg-type]
    (found,) = packets(ends[1])
    assert len(found) == 2


def test_flush_and_close_send_what_is_held_back_once(
    ends: tuple[socket.socket, socket.socket], agent: AgentReporter
) -> None:
    agent.report_event(made(StepDone, step=1))
    agent.flush()
    agent.report_event(made(StepDone, step=2))
    assert packets(ends[1]) == [[1]]
    agent.close()
    agent.close()
    assert packets(ends[1]) == [[2]]


def test_errors_and_results_go_out_at_once(ends: tuple[socket.socket, socket.socket], agent: AgentReporter) -> None:
    agent.report_error("out of memory", 78)
    agent.report_result({"status": "done"})
    assert list(drain(ends[1])) == [
        WorkerError(rank=3, message="out of memory", exit_code=78),
        RunResult(value={"status": "done"}),
    ]


def test_a_bunch_that_is_too_large_for_a_packet_goes_in_several(
    ends: tuple[socket.socket, socket.socket], agent: AgentReporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phalanx.run.messages.MAX_PACKET_BYTES", 1000)
    for step in range(8):
        agent.report_event(made(StepDone, step=step + 1))
    agent.flush()
    found = packets(ends[1])
    assert len(found) > 1
    assert [step for packet in found for step in packet] == list(range(1, 9))


def test_without_an_agent_the_leading_worker_writes_the_run(run: Run) -> None:
    report = make_reporter(run, is_rank_zero=True, events_fd=None)
    report.report_event(made(StepDone, step=1))
    report.report_error("broken", 65)
    report.report_result({"status": "done"})
    report.close()
    step, failure = read_events(run.events)
    assert isinstance(step, StepDone)
    assert isinstance(failure, WorkerFailure)
    assert (failure.message, failure.cause, failure.exit_code) == ("broken", "exit_code", 65)
    assert json.loads(run.result.read_text()) == {"status": "done", "duration_s": 0.0}


def test_without_an_agent_the_other_workers_write_nothing(run: Run) -> None:
    report = make_reporter(run, is_rank_zero=False, events_fd=None)
    report.report_event(made(StepDone, step=1))
    report.report_error("broken", 65)
    report.report_result({"status": "done"})
    report.close()
    assert not run.events.read_bytes()
    assert not run.result.exists()


def test_the_number_of_the_socket_leads_to_the_agent(run: Run, ends: tuple[socket.socket, socket.socket]) -> None:
    report = make_reporter(run, is_rank_zero=True, events_fd=str(ends[0].fileno()))
    assert isinstance(report, AgentReporter)
    report.report_event(made(WorkerStarted))
    assert packets(ends[1]) == [["worker_started"]]
    report._socket.close()
    assert isinstance(make_reporter(run, is_rank_zero=False, events_fd=None), RunReporter)


def test_without_an_agent_written_events_are_handed_on_and_errors_told_by_any_worker(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[Event] = []
    leading = make_reporter(run, is_rank_zero=True, events_fd=None, show=shown.append)
    leading.report_event(made(StepDone, step=1))
    leading.close()
    assert shown == list(read_events(run.events))
    make_reporter(run, is_rank_zero=False, events_fd=None, show=shown.append).report_error("broken", 65)
    assert len(shown) == 1
    assert capsys.readouterr().err == "error: broken\n"
