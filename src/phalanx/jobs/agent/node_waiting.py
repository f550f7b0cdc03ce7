"""Wait until all nodes of a run have joined its leader, and follow them until it starts workers."""

from functools import partial

from phalanx.deadline import Deadline, format_clock_time
from phalanx.jobs.agent.leader_state import LeaderState
from phalanx.run.event_loop import EventLoop
from phalanx.run.lock import is_wanted

CHECK_INTERVAL_S = 1.0
"""Seconds between checks of whether the run is to stop, independent of the nodes that join."""
REJOIN_TIMEOUT_S = 60.0
"""Seconds that the leader waits for a lost node to rejoin; after that the run must be restarted on another node."""


def wait_for_nodes(leader: LeaderState, timeout_s: float) -> str | None:
    """Wait until all nodes have joined.

    Returns None, or a sentence when nodes are missing after `timeout_s` or the run is to stop. A node that reported
    that it leaves, or its replacement, may still join, but the wait for it is shorter.
    """
    leader.node_group.is_supervised = True
    leader.accept_joins()
    deadline = Deadline(_format_nodes(leader.node_group.missing_nodes), timeout_s, leader.warn, leader.clock)
    if leader.node_group.missing_nodes:
        deadline.announce()
    with EventLoop() as loop:
        loop.add_reader(leader.signals.wake_socket, leader.signals.clear_wake)
        for sock in leader.node_group.listener_sockets:
            loop.add_reader(sock, partial(sock.recv, 4096))
        while leader.node_group.missing_nodes:
            leader.handle_signals()
            if leader.stopping:
                return "; ".join(
                    (
                        f"asked to stop before {_format_nodes(leader.node_group.missing_nodes)} joined",
                        *leader.list_departure_reasons(),
                    )
                )
            if is_wanted(leader.run):  # the backend has started the run again, since this node may be cut off
                return (
                    f"another start of this run waits for it, and {_format_nodes(leader.node_group.missing_nodes)} "
                    "is not here"
                )
            leader.report_departures()
            if (
                any(index in leader.departures for index in leader.node_group.missing_nodes)
                and deadline.limit_s > deadline.waited_s + REJOIN_TIMEOUT_S
            ):
                deadline.limit_s = deadline.waited_s + REJOIN_TIMEOUT_S
                leader.warn(
                    f"waiting for it, or another in its place, until {format_clock_time(REJOIN_TIMEOUT_S)}; then "
                    f"this ends with 75"
                )
            deadline.what = _format_nodes(leader.node_group.missing_nodes)
            if deadline.check_expired():
                return _describe_missing(leader, deadline)
            loop.run_once(CHECK_INTERVAL_S)
            for _, old in leader.accept_joins():
                if old is not None:
                    old.connection.close()
    return None


def _describe_missing(leader: LeaderState, deadline: Deadline) -> str:
    """Return why the run cannot continue, and what to do."""
    missing_text = _format_nodes(leader.node_group.missing_nodes)
    restart_hint = f"start again, with {missing_text} on another machine if that one is unfit"
    return "; ".join(
        (
            f"{missing_text} did not come within {deadline.limit_s:.0f} s",
            *leader.list_departure_reasons(),
            restart_hint,
        )
    )


def _format_nodes(missing: list[int]) -> str:
    return f"node {missing[0]}" if len(missing) == 1 else f"nodes {', '.join(map(str, missing))}"
