"""What becomes of Slurm's words about nodes. The real Slurm: tests/cluster/test_slurm_nodes.py."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from phalanx.errors import UsageError
from phalanx.jobs.backends.base import NodeService
from phalanx.jobs.backends.slurm.backend import SlurmBackend
from phalanx.jobs.backends.slurm.programs import NODE_COLUMNS, count_gpus, parse_nodes


def line(name: str, state: str = "idle", gres: str = "gpu:2", user: str = "Unknown", reason: str = "none") -> str:
    """A line as sinfo prints it."""
    values = {"name": name, "host": name, "state": state, "gres": gres, "user": user, "reason": reason}
    return "".join(values[column].ljust(width) for column, (_, width) in NODE_COLUMNS.items())


@pytest.mark.parametrize(
    ("state", "service"),
    [
        ("idle", NodeService.OPEN),
        ("idle~", NodeService.OPEN),  # powered down until a job needs it
        ("mixed", NodeService.OPEN),
        ("allocated", NodeService.OPEN),
        ("completing", NodeService.OPEN),
        ("drained", NodeService.DRAINED),
        ("drained*", NodeService.DRAINED),
        ("draining", NodeService.DRAINED),
        ("failing", NodeService.DRAINED),
        ("idle*", NodeService.DOWN),
        ("down*", NodeService.DOWN),
        ("unknown", NodeService.DOWN),
        ("powering_down", NodeService.DOWN),
    ],
)
def test_each_state_says_whether_jobs_start_there(state: str, service: NodeService) -> None:
    (node,) = parse_nodes(line("n1", state), "")
    assert (node.state, node.service) == (state, service)


@pytest.mark.parametrize(
    ("gres", "count"),
    [
        ("(null)", 0),
        ("gpu:2", 2),
        ("gpu", 1),
        ("gpu:h100:8(S:0-1)", 8),
        ("nic:4,gpu:a100:4(S:0),gpu:v100:2", 6),
        ("gpu:h100:8(S:0,3-5),nic:2", 8),
    ],
)
def test_gpus_are_counted_in_generic_resources(gres: str, count: int) -> None:
    assert count_gpus(gres) == count


def test_a_node_of_two_partitions_is_one_node_with_the_jobs_of_all_users() -> None:
    nodes = parse_nodes("\n".join([line("n1"), line("n1"), line("n2")]), "7 n[1-2]\n8_1 n2\n")
    assert [(node.name, node.jobs) for node in nodes] == [("n1", ("7",)), ("n2", ("7", "8_1"))]


def test_a_reason_names_the_user_that_gave_it() -> None:
    (node,) = parse_nodes(line("n1", "drained", user="ada(1000)", reason="fan is loud, x=1"), "")
    assert node.reason == "fan is loud, x=1 (ada)"


@pytest.mark.parametrize("text", ["Invalid user id", "Access/permission denied"])
def test_a_user_without_the_right_is_told_what_is_needed(tmp_path: Path, text: str) -> None:
    def refuse(argv: Sequence[str]) -> tuple[int, str, str]:
        return 1, "", f"slurm_update error: {text}\n"

    with pytest.raises(UsageError, match=r"n1: Slurm refuses it to your user; it takes root, .*adminlevel=admin"):
        SlurmBackend(refuse, tmp_path).drain_node("n1", "hot", "ada")
