"""The group of nodes that a leading node opens."""

from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.app.nodes import open_node_group
from phalanx.jobs.agent.node_agent import LEADER_TIMEOUT_S
from phalanx.run.node_env import NodeEnv


def test_a_node_that_took_over_waits_for_nodes_that_notice_the_lost_leader_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PHALANX_TOKEN", "0123456789abcdef" * 2)
    fork_server: Any = SimpleNamespace(control=None, events=None, heartbeat_table=None)
    node_env = NodeEnv(1, 3, ("127.0.0.1", 0), min_nodes=1, num_expected=2, took_over=True)
    with open_node_group(fork_server, node_env, last_call_s=1.0) as group:
        assert group.last_call_s > LEADER_TIMEOUT_S
