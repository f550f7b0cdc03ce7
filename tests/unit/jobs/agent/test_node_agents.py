"""The leading agent of many nodes: it looks at its workers by the clock, however much the other agents say meanwhile.

Nothing here takes time: agents and selector are stand-ins that share a clock, and each agent sends its workers' signs
once a second, at a moment of its own and a few milliseconds early or late, as real ones do.
"""

import random
import selectors
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from made_events import made
from made_messages import COMMAND
from phalanx.jobs.agent.attempt_supervisor import AttemptSupervisor
from phalanx.jobs.agent.heartbeat_checks import WINDOW_S
from phalanx.jobs.agent.leader_agent import LeaderAgent
from phalanx.jobs.agent.leader_state import RecoveryPolicy
from phalanx.jobs.agent.node_group import HEARTBEAT_INTERVAL_S
from phalanx.run import Event, Run
from phalanx.run.event_types import AttemptStarted, StepDone
from phalanx.run.heartbeat import Heartbeat, HeartbeatTable
from phalanx.run.messages import Message, make_socket_pair
from phalanx.run.process_messages import WorkerExited, WorkersStarted
from settable_clock import SettableClock

HANGS = 40.0
"""When a worker does not come out of its step any more."""
STEP = 0.1
BEGUN = 1000.0


class FakeNode:
    """One node with one worker; `speed`: how many times as long it is busy in a step as the others."""

    def __init__(self, clock: SettableClock, rank: int, speed: float = 1.0):
        self.name, self.rank, self._clock = f"n{rank}", rank, clock
        self._rng = random.Random(rank)
        self.due = clock.now + self._rng.random()
        self.speed = speed
        self.over = self._told = False
        self._known = self._last()

    def _last(self) -> Heartbeat:
        """Its worker's last sign; rank 1 falls silent, and the others wait for it."""
        until = min((self._clock.now - BEGUN), HANGS)
        steps = int(until / STEP)
        count = 10 * steps + (self.rank != 1)
        return Heartbeat(1, count, steps, "forward", BEGUN + until, self.speed * 0.3 * until)

    def sockets(self) -> Sequence[Any]:
        return (self,)

    def send(self, *messages: Message) -> None:
        pass

    def receive(self, sock: Any) -> list[Message]:
        self.due = self._clock.now + HEARTBEAT_INTERVAL_S + self._rng.uniform(-0.002, 0.004)
        self._known = self._last()
        if self.over:
            return [WorkerExited(rank=self.rank, exit_status=-9)]
        if self._told:
            return []
        self._told = True
        if self.rank:
            return [WorkersStarted(attempt=0)]
        return [WorkersStarted(attempt=0), made(AttemptStarted, world_size=2), made(StepDone, duration_s=STEP)]

    def heartbeats(self, ranks: Sequence[int]) -> dict[int, Heartbeat | None]:
        """As far back as they are told."""
        return dict.fromkeys(ranks, self._known)

    def stopped_ranks(self, beats: Mapping[int, Heartbeat | None]) -> set[int]:
        return set()

    def reset(self) -> None:
        pass


def make_crew(nodes: list[FakeNode]) -> Any:
    """A group of these nodes, which no node joins or leaves."""
    return SimpleNamespace(
        num_nodes=1,
        listener_sockets=(),
        hands_over=False,
        nodes=nodes,
        local_node=nodes[0],
        assign_ranks=lambda num_nodes, workers_per_node: {node: range(node.rank, node.rank + 1) for node in nodes},
        accept_joins=list,
        take_departures=list,
        find_timed_out=lambda now: [],
    )


class Stage:
    """What is left of a fork server."""

    def __init__(self) -> None:
        self.heartbeat_table = HeartbeatTable()
        self.control, self.says = make_socket_pair()
        self.events, self.workers = make_socket_pair()

        self.report = print

    def has_exited(self) -> bool:
        return False


def selector_of(clock: SettableClock) -> type:
    class FakeSelector:
        """The next of the nodes to say something, unless patience ends before; each call takes a moment."""

        def __init__(self) -> None:
            self._keys: list[selectors.SelectorKey] = []

        def close(self) -> None:
            pass

        def register(self, sock: Any, events: int) -> None:
            self._keys.append(selectors.SelectorKey(sock, 0, events, None))

        def select(self, timeout: float) -> list[tuple[selectors.SelectorKey, int]]:
            nodes = [key for key in self._keys if isinstance(key.fileobj, FakeNode)]
            first = min(nodes, key=lambda key: key.fileobj.due)
            clock.now = min(max(clock.now, first.fileobj.due), clock.now + timeout) + 1e-5
            assert (clock.now - BEGUN) < HANGS + 120.0, "nothing was told in two minutes"
            return [(key, 1) for key in nodes if key.fileobj.due <= clock.now]

    return FakeSelector


def follow(folder: Path, count: int, until: str, monkeypatch: pytest.MonkeyPatch, slow: int | None = None) -> float:
    """Seconds after which the agent has told an event of this kind."""
    clock, stage, told = SettableClock(BEGUN), Stage(), list[float]()
    nodes = [FakeNode(clock, rank, 2.0 if rank == slow else 1.0) for rank in range(count)]
    run = Run(folder)
    run.create()

    def show(event: Event) -> None:
        if event.kind == until:
            told.append(clock.now - BEGUN)
            for node in nodes:
                node.over = True

    with LeaderAgent(run, stage, show, RecoveryPolicy(1, hang_timeout_s=60.0), clock=clock) as agent:  # type: ignore[arg-type]
        agent.node_group = make_crew(nodes)
        monkeypatch.setattr("phalanx.run.event_loop.selectors.DefaultSelector", selector_of(clock))
        monkeypatch.setattr(AttemptSupervisor, "abort", lambda *_: None)
        agent.run_attempt(0, count, 1, COMMAND)
    for sock in (stage.control, stage.says, stage.events, stage.workers):
        sock.close()
    stage.heartbeat_table.close()
    assert told, f"no {until} was told"
    return told[0]


@pytest.mark.parametrize("count", [2, 4, 16])
def test_a_hang_is_told_within_ten_seconds_on_any_number_of_nodes(
    tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert HANGS + 5.0 < follow(tmp_path, count, "hang", monkeypatch) < HANGS + 10.0


@pytest.mark.parametrize("count", [2, 4, 16])
def test_a_straggler_is_told_within_ten_seconds_of_its_window_on_any_number_of_nodes(
    tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert follow(tmp_path, count, "straggler", monkeypatch, slow=1) < 2 * WINDOW_S + 10.0
