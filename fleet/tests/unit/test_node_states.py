"""Nodes from healthy to suspect, drained, under test and back."""

import sqlite3
import threading
from pathlib import Path

import pytest

from full_disk import full_disk
from phalanx.errors import UsageError
from phalanx_fleet.node_states import NodeState, NodeStates


def test_a_node_goes_its_way_and_its_history_has_actors_and_reasons(tmp_path: Path) -> None:
    times = iter([1.0, 2.0, 3.0, 4.0])
    with NodeStates(tmp_path / "fleet.db", lambda: next(times)) as nodes:
        assert nodes.find("n1") is None
        nodes.change("n1", NodeState.SUSPECT, "Xid 79", "agent")
        nodes.change("n1", NodeState.DRAINED, "Xid 79 again", "ada")
        nodes.change("n1", NodeState.TESTING, "GPU reseated", "ada")
        nodes.change("n1", NodeState.HEALTHY, "all checks pass", "doctor")
    with NodeStates(tmp_path / "fleet.db") as nodes:
        found = nodes.history("n1")
        assert [(each.state, each.actor, each.time) for each in found] == [
            ("suspect", "agent", 1.0),
            ("drained", "ada", 2.0),
            ("testing", "ada", 3.0),
            ("healthy", "doctor", 4.0),
        ]
        assert nodes.newest() == {"n1": found[-1]}


@pytest.mark.parametrize(
    ("way", "state"),
    [
        ([], NodeState.TESTING),
        ([NodeState.SUSPECT], NodeState.SUSPECT),
        ([NodeState.DRAINED], NodeState.SUSPECT),
        ([NodeState.DRAINED, NodeState.TESTING], NodeState.SUSPECT),
    ],
)
def test_a_way_that_there_is_not_is_refused_and_changes_nothing(
    tmp_path: Path, way: list[NodeState], state: NodeState
) -> None:
    with NodeStates(tmp_path / "fleet.db") as nodes:
        for each in way:
            nodes.change("n1", each, "why", "ada")
        before = nodes.history("n1")
        with pytest.raises(UsageError, match=rf"n1: is \w+.*it can become .*, not {state}"):
            nodes.change("n1", state, "why", "ada")
        assert nodes.history("n1") == before


def test_a_change_needs_a_reason(tmp_path: Path) -> None:
    with NodeStates(tmp_path / "fleet.db") as nodes, pytest.raises(UsageError, match="say why it becomes drained"):
        nodes.change("n1", NodeState.DRAINED, " ", "ada")


def test_of_many_that_drain_a_node_at_once_one_does(tmp_path: Path) -> None:
    refused = []

    def drain() -> None:
        with NodeStates(tmp_path / "fleet.db") as nodes:
            try:
                nodes.change("n1", NodeState.DRAINED, "why", "ada")
            except UsageError as error:
                refused.append(str(error))

    threads = [threading.Thread(target=drain) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with NodeStates(tmp_path / "fleet.db") as nodes:
        assert len(nodes.history("n1")) == 1
    assert len(refused) == 7
    assert all("n1: is drained" in text for text in refused)


@pytest.mark.parametrize("content", [b"not a database, whatever it is called" * 100, None])
def test_a_file_that_is_no_table_is_said(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "fleet.db"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(UsageError, match=r"fleet\.db: not a table of nodes"):
        NodeStates(path)


def test_a_directory_that_may_not_be_written_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **more: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    problem = r"cannot be opened \(.*Permission denied\); name a directory .* PHALANX_STATE_DIR"
    with NodeStates(tmp_path / "fleet.db") as nodes, pytest.raises(UsageError, match=problem):
        nodes.change("n1", NodeState.SUSPECT, "why", "ada")


def test_to_ask_makes_no_file_and_sees_one_that_another_process_made(tmp_path: Path) -> None:
    path = tmp_path / "state" / "fleet.db"
    with NodeStates(path) as asking, NodeStates(path) as changing:
        assert (asking.find("n1"), asking.newest(), asking.history("n1")) == (None, {}, [])
        assert list(tmp_path.iterdir()) == []
        changing.change("n1", NodeState.SUSPECT, "Xid 79", "evidence")
        assert list(asking.newest()) == ["n1"]


def test_only_a_healthy_node_is_changed_where_that_is_asked_for(tmp_path: Path) -> None:
    with NodeStates(tmp_path / "fleet.db") as nodes:
        assert nodes.change_healthy("n1", NodeState.SUSPECT, "Xid 79", "evidence") is not None
        assert nodes.change_healthy("n1", NodeState.DRAINED, "Xid 79", "evidence") is None
        assert [each.state for each in nodes.history("n1")] == [NodeState.SUSPECT]


def test_a_later_format_is_refused(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "fleet.db") as db:
        db.execute("PRAGMA user_version=9")
    with pytest.raises(UsageError, match="format 9; this version of Phalanx knows 1"):
        NodeStates(tmp_path / "fleet.db")


def test_a_full_disk_is_no_reason_to_move_the_table_away(tmp_path: Path) -> None:
    with full_disk(), pytest.raises(UsageError, match=r"fleet.db: the table of nodes cannot be used \(disk"):
        NodeStates(tmp_path / "fleet.db").change("n1", NodeState.DRAINED, "fan", "root")
