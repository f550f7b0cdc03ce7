"""The states of nodes that all operators of a site share, and nodes in repair in the power budget."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from fake_nodes import FakeNodeBackend
from phalanx.cli.main import main
from phalanx.errors import UsageError
from phalanx_fleet.fleet_file import node_states_path, open_node_states
from phalanx_fleet.node_list import drain_node, undrain_node
from phalanx_fleet.node_states import NodeState, NodeStates
from phalanx_fleet.power.committed_power import list_budgets
from phalanx_fleet.power.control import find_in_repair, load_power_fleet, open_guard, open_links, read_nodes

FLEET = """\
name: demo
state_dir: site
sites: {s: {budget: 40 kW}}
feeds: {f: {site: s}}
rows: {w: {feed: f}}
racks: {"r[1-2]": {row: w, node_type: dgx, nodes: 2}}
node_types: {dgx: {node: dgx-h100}}
"""
OPERATORS_GID = 54321
DRAIN_20_NODES = """
import os, sys
from pathlib import Path
from phalanx_fleet.node_states import NodeState
from phalanx_fleet.fleet_file import open_node_states
open_node_states(Path(sys.argv[1]))  # Python's library may be readable by root only: import all now
fleet, user, uid, gid = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
if os.getuid() == 0:
    os.setgroups([gid]); os.setgid(uid); os.setuid(uid)
os.umask(0o077)
print("ready", flush=True)
sys.stdin.readline()
for number in range(20):
    with open_node_states(Path(fleet)) as states:
        states.change(f"{user}-{number}", NodeState.DRAINED, f"fan {number}", user)
"""


@pytest.fixture
def fleet() -> Iterator[Path]:
    """A fleet file that other users can read, with the directory of its site; tmp_path is for one user."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fleet.yaml"
        path.write_text(FLEET)
        (path.parent / "site").mkdir()
        if os.getuid() == 0:
            os.chown(path.parent / "site", -1, OPERATORS_GID)
        (path.parent / "site").chmod(0o2770)
        path.chmod(0o644)
        path.parent.chmod(0o755)
        yield path


def start_operator(fleet: Path, user: str, uid: int) -> "subprocess.Popen[str]":
    arguments = [sys.executable, "-c", DRAIN_20_NODES, str(fleet), user, str(uid), str(OPERATORS_GID)]
    return subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_two_users_that_drain_nodes_at_once_lose_nothing(fleet: Path) -> None:
    """As root they are two users of the system with one group; else two processes of one user."""
    with start_operator(fleet, "ada", 54322) as ada, start_operator(fleet, "bob", 54323) as bob:
        for process in (ada, bob):
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in (ada, bob):
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
    assert (ada.returncode, bob.returncode) == (0, 0)
    with open_node_states(fleet) as states:
        found = states.newest()
    assert {(name, each.actor, each.reason) for name, each in found.items()} == {
        (f"{user}-{number}", user, f"fan {number}") for user in ("ada", "bob") for number in range(20)
    }
    assert min(each.time for each in found.values()) > 1.7e9


def test_commands_share_the_states_of_the_site_of_a_fleet_file(
    fleet: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backend = FakeNodeBackend()
    monkeypatch.setattr("phalanx.jobs.backends.base.open_backend", lambda name: backend)
    monkeypatch.setenv("PHALANX_STATE_DIR", str(tmp_path / "ada"))
    assert main(["nodes", "drain", "n2", "--reason", "fan", "--on", "slurm", "--fleet", str(fleet)]) == 0
    monkeypatch.setenv("PHALANX_STATE_DIR", str(tmp_path / "bob"))
    monkeypatch.setenv("PHALANX_FLEET", str(fleet))
    assert main(["nodes", "drain", "n2", "--reason", "new fan", "--repair", "--on", "slurm"]) == 0
    assert capsys.readouterr().out.splitlines() == ["drained n2", "in repair: n2"]
    with open_node_states(fleet) as states:
        assert [(each.state, each.reason) for each in states.history("n2")] == [
            ("drained", "fan"),
            ("repair", "new fan"),
        ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", [0o770, 0o2777, None])
def test_a_directory_that_a_group_cannot_share_is_refused_with_the_command_that_makes_one(
    fleet: Path, mode: int | None
) -> None:
    site = fleet.parent / "site"
    site.rmdir() if mode is None else site.chmod(mode)
    with pytest.raises(UsageError, match=rf"state_dir: {site}: expected .*`install -d -g GROUP -m 2770 {site}`"):
        open_node_states(fleet)


def test_a_fleet_file_without_a_directory_has_the_states_of_its_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHALANX_STATE_DIR", str(tmp_path))
    (tmp_path / "fleet.yaml").write_text(FLEET.replace("state_dir: site\n", ""))
    assert node_states_path(tmp_path / "fleet.yaml") == tmp_path / "nodes.db" == node_states_path(None)


def test_a_node_goes_through_repair_and_back(tmp_path: Path) -> None:
    backend = FakeNodeBackend()
    with NodeStates(tmp_path / "nodes.db") as states:
        drain_node(backend, states, "n1", "new fan", "ada", for_repair=True)  # type: ignore[arg-type]
        assert states.list_in_repair() == {"n1"}
        with pytest.raises(UsageError, match="n1: is repair already"):
            drain_node(backend, states, "n1", "new fan", "bob", for_repair=True)  # type: ignore[arg-type]
        drain_node(backend, states, "n1", "done", "ada")  # type: ignore[arg-type]
        assert (states.list_in_repair(), backend.nodes["n1"].service) == (frozenset(), "drained")
        undrain_node(backend, states, "n1", "tested", "ada")  # type: ignore[arg-type]
        assert [each.state for each in states.history("n1")] == ["drained", "repair", "drained", "healthy"]


def test_a_node_in_repair_counts_at_its_maximum_and_gets_no_orders(fleet: Path) -> None:
    found = load_power_fleet(fleet)
    links = open_links(found, is_fake=True, is_read_only=False)
    try:
        reading = read_nodes(found, links)
        guard = open_guard(found, links, reading, takes_over=False)
        with open_node_states(fleet) as states:
            states.change("r1-1", NodeState.DRAINED, "new fan", "ada")
            states.change("r1-1", NodeState.REPAIR, "new fan", "ada")
        status = guard.step(0.0)
        assert "r1-1: in repair; counted at its maximum" in status.notices
        assert "r1-1" not in status.silent_nodes
        assert guard.bound_caps(0.0)[0] == [None] * 8
        again = read_nodes(found, links)
        assert (again.bounds_w[0], None in again.bounds_w[1]) == ([None] * 8, False)
        assert "r1-1 is in repair: counted at its maximum" in again.notices
        assert list_budgets(found.tree)[0] == 40_000.0
    finally:
        links.close()


def test_a_table_that_cannot_be_read_leaves_nodes_in_repair_as_they_were(fleet: Path) -> None:
    found = load_power_fleet(fleet)
    links = open_links(found, is_fake=True, is_read_only=False)
    try:
        with open_node_states(fleet) as states:
            states.change("r1-1", NodeState.DRAINED, "new fan", "ada")
            states.change("r1-1", NodeState.REPAIR, "new fan", "ada")
        guard = open_guard(found, links, read_nodes(found, links), takes_over=False)
        node_states_path(fleet).write_bytes(b"damaged" * 1000)
        with pytest.raises(UsageError, match="not a table of nodes"):
            find_in_repair(found)
        assert any("nodes in repair are taken as they were" in text for text in guard.step(0.0).notices)
        assert guard.bound_caps(0.0)[0] == [None] * 8
    finally:
        links.close()
