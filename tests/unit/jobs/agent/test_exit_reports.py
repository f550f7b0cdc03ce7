"""The agent of a node that does not lead: when it takes its fork server for lost."""

import io
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from made_messages import start_workers
from phalanx.jobs.agent.attempt import EXIT_REPORT_TIMEOUT_S
from phalanx.jobs.agent.node_agent import NodeAgent, _ForkServerGone
from phalanx.jobs.agent.node_group import LocalNode
from phalanx.run.heartbeat import HeartbeatTable, HeartbeatWriter
from phalanx.run.messages import make_socket_pair
from phalanx.run.node_env import NodeEnv


@pytest.fixture
def node() -> Iterator[LocalNode]:
    (control, control_far), (events, events_far), table = make_socket_pair(), make_socket_pair(), HeartbeatTable()
    yield LocalNode(control, events, table)
    for each in (control, control_far, events, events_far, table):
        each.close()


def record_heartbeat_and_end(table: HeartbeatTable) -> None:
    """In a child that has ended when this returns: its exit is not reported yet."""
    pid = os.fork()
    if not pid:
        HeartbeatWriter(table.fd, 0).record("ending")
        os._exit(0)
    os.waitpid(pid, 0)


def test_workers_that_end_in_the_first_second_have_time_for_their_exits_to_be_reported(
    tmp_path: Path, node: LocalNode
) -> None:
    with NodeAgent(NodeEnv(1, 2, ("127.0.0.1", 1)), b"token", io.StringIO()) as agent:
        agent._expect(start_workers("f", {}, tmp_path), node)
        record_heartbeat_and_end(node.heartbeat_table)
        agent._check_exits(node, 1000.0)
        agent._check_exits(node, 999.0 + EXIT_REPORT_TIMEOUT_S)
        with pytest.raises(_ForkServerGone):
            agent._check_exits(node, 1000.0 + EXIT_REPORT_TIMEOUT_S)
