"""All nodes of a job measure each other: some as threads on this machine's loopback, and what is said of whom."""

import socket
import threading
from functools import partial
from itertools import combinations
from typing import Any

import pytest

from phalanx.cluster.health import HealthFinding, HealthVerdict, link_bandwidth, pairwise_bandwidth
from phalanx.cluster.health.link_bandwidth import LinkMeasurement
from phalanx.cluster.health.pairwise_bandwidth import (
    NodePlacement,
    evaluate_node_links,
    placement_from_environment,
    round_robin_pairs,
)
from phalanx.errors import UsageError

NAMES = {0: "n0", 1: "n1", 2: "n2", 3: "n3"}


@pytest.mark.parametrize("nodes", [2, 3, 4, 7, 16])
def test_everybody_meets_everybody_once_and_nobody_two_at_once(nodes: int) -> None:
    met = []
    for matches in round_robin_pairs(nodes):
        busy = [node for pair in matches for node in pair]
        assert len(busy) == len(set(busy))
        met += [tuple(sorted(pair)) for pair in matches]
    assert sorted(met) == list(combinations(range(nodes), 2))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


def together(places: list[NodePlacement]) -> dict[int, list[HealthFinding]]:
    """What each node found, all at once."""
    found: dict[int, list[HealthFinding]] = {}

    def one(place: NodePlacement) -> None:
        found[place.node_rank] = pairwise_bandwidth.measure_all_pairs(place)

    threads = [threading.Thread(target=one, args=(place,)) for place in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return found


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements that take no time to speak of."""
    monkeypatch.setattr(pairwise_bandwidth, "measure_link", partial(link_bandwidth.measure_link, seconds=0.02))
    monkeypatch.setattr(pairwise_bandwidth, "JOIN_TIMEOUT_S", 20.0)


def places(count: int, token: bytes = b"words") -> list[NodePlacement]:
    leader = ("127.0.0.1", free_port())
    return [NodePlacement(node, count, leader, token) for node in range(count)]


def test_three_nodes_measure_all_three_links() -> None:
    found = together(places(3))
    assert set(found) == {0, 1, 2}
    for (one,) in found.values():
        assert one.check == "link-bandwidth"
        assert "to 2 other nodes" in one.reason


def test_a_node_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairwise_bandwidth, "JOIN_TIMEOUT_S", 1.0)
    found = together(places(3)[:2])
    assert "node 2 did not come within 1 s" in found[0][0].reason


def test_a_node_without_the_token_is_kept_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairwise_bandwidth, "JOIN_TIMEOUT_S", 1.0)
    leader, other = places(2)
    found = together([leader, NodePlacement(1, 2, other.leader, b"guessed")])
    assert found[0][0].verdict is HealthVerdict.ERROR
    assert "node 1 did not come" in found[0][0].reason
    assert found[1][0].verdict is HealthVerdict.ERROR


def test_without_a_leader_a_node_is_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairwise_bandwidth, "JOIN_TIMEOUT_S", 0.3)
    ((found,),) = together(places(2)[1:]).values()
    assert found.verdict is HealthVerdict.ERROR
    assert "does not lead" in found.reason


def said(node: int, nodes: int, rates: dict[tuple[int, int], float | str]) -> HealthFinding:
    """Of a node, where every link that is not given carries 1 GB/s."""
    whole: dict[tuple[int, int], LinkMeasurement | str] = {}
    for pair in combinations(range(nodes), 2):
        value = rates.get(pair, 1e9)
        whole[pair] = value if isinstance(value, str) else LinkMeasurement(1e-4, value, value)
    (found,) = evaluate_node_links(node, {each: NAMES[each] for each in range(nodes)}, whole, [])
    return found


def test_nodes_that_are_alike_are_fine() -> None:
    assert {said(node, 4, {}).verdict for node in range(4)} == {HealthVerdict.PASS}


def test_a_node_whose_links_are_all_slow_is_bad_and_the_others_only_say_so() -> None:
    slow: dict[tuple[int, int], float | str] = {(0, 3): 3e8, (1, 3): 3e8, (2, 3): 3e8}
    found = [said(node, 4, slow) for node in range(4)]
    assert [each.verdict for each in found] == [
        HealthVerdict.PASS,
        HealthVerdict.PASS,
        HealthVerdict.PASS,
        HealthVerdict.FAIL,
    ]
    assert found[0].reason == (
        "1.00 GB/s to 3 other nodes, as fast as the link between others; slow by their own fault: n3 (300 MB/s)"
    )
    assert found[3].reason == "300 MB/s to 3 other nodes, 70% below the median of the 3 links between others"


def test_a_slow_node_is_found_by_the_only_link_that_is_not_its_own() -> None:
    slow: dict[tuple[int, int], float | str] = {(0, 2): 3e8, (1, 2): 3e8}
    assert [said(node, 3, slow).verdict for node in range(3)] == [
        HealthVerdict.PASS,
        HealthVerdict.PASS,
        HealthVerdict.FAIL,
    ]


def test_one_slow_link_of_three_is_no_nodes_own_fault() -> None:
    found = [said(node, 3, {(1, 2): 1e7}).verdict for node in range(3)]
    assert found == [HealthVerdict.PASS, HealthVerdict.WARN, HealthVerdict.WARN]


def test_no_node_leaves_before_all_have_settled() -> None:
    settled, left = [], []
    lock = threading.Lock()

    def one(place: NodePlacement) -> None:
        pairwise_bandwidth.measure_all_pairs(place, lambda: settled.append(place.node_rank))
        with lock:
            left.append(sorted(settled))

    threads = [threading.Thread(target=one, args=(place,)) for place in places(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert left == [[0, 1, 2]] * 3


def test_one_slow_link_is_a_warning_to_both_ends() -> None:
    found = [said(node, 4, {(1, 2): 3e8}) for node in range(4)]
    assert [each.verdict for each in found] == [
        HealthVerdict.PASS,
        HealthVerdict.WARN,
        HealthVerdict.WARN,
        HealthVerdict.PASS,
    ]
    assert "slow to n2 (300 MB/s)" in found[1].reason


def test_a_node_that_most_cannot_reach_is_no_pass() -> None:
    found = [said(node, 3, {(0, 2): "timed out", (1, 2): "timed out"}) for node in range(3)]
    assert [each.verdict for each in found] == [HealthVerdict.WARN, HealthVerdict.WARN, HealthVerdict.ERROR]
    assert "no link to n2 (timed out)" in found[0].reason


WORDS = "words that nobody guesses"
ENGINE = {"PHALANX_NODE_RANK": "1", "PHALANX_NUM_NODES": "2", "PHALANX_LEADER_ADDR": "n0:4000", "PHALANX_TOKEN": WORDS}


def test_the_engine_says_where_a_node_stands() -> None:
    assert placement_from_environment(ENGINE) == NodePlacement(1, 2, ("n0", 4000), WORDS.encode())


@pytest.mark.parametrize(
    "changed",
    [
        {"PHALANX_NODE_RANK": "2"},
        {"PHALANX_NUM_NODES": "1", "PHALANX_NODE_RANK": "0"},
        {"PHALANX_LEADER_ADDR": "n0"},
        {"PHALANX_NODE_RANK": "x"},
    ],
)
def test_what_the_engine_cannot_have_said_is_told(changed: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="--network"):
        placement_from_environment({**ENGINE, **changed})


def test_outside_of_a_job_there_are_no_pairs() -> None:
    with pytest.raises(UsageError, match="PHALANX_NUM_NODES"):
        placement_from_environment({"PHALANX_TOKEN": WORDS})
