"""Evidence against nodes: what counts by the table, and that to apply it again changes nothing."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.cluster.health.checks.kernel_log import XidAction
from phalanx.run.event_types import Event, HangDetected, StragglerDetected, WorkerFailure, WorkerStarted
from phalanx.run.telemetry_minutes import NodeMinute, Rollups
from phalanx_fleet.evidence import (
    COUNTER_EVIDENCE,
    apply_evidence,
    find_evidence,
    has_errors,
    may_have_errors,
    read_evidence_table,
)
from phalanx_fleet.node_states import NodeState, NodeStates

TABLE = read_evidence_table()
WORKERS = [WorkerStarted(pid=1, rank=0, host="n1", attempt=0), WorkerStarted(pid=2, rank=1, host="n2", attempt=0)]


def minute(time: float = 60.0, xids: tuple[int, ...] = (), **increases: float) -> NodeMinute:
    return NodeMinute(time, 60.0, 60, "n1", Rollups(), {"GPU-a": Rollups({}, increases, xids)})


def texts(minutes: list[NodeMinute], events: list[Event] | None = None) -> list[str]:
    return [each.text for each in find_evidence(minutes, events or [])]


def test_the_table_has_a_row_for_each_kind_and_never_more_than_suspect() -> None:
    kinds = {f"xid-{action}" for action in XidAction} | {kind for kind, _ in COUNTER_EVIDENCE.values()}
    assert set(TABLE) == kinds | {"straggler", "gpu-failed", "unfit-node", "leak", "no-flow", "throttling"}
    assert {rule.state for rule in TABLE.values()} == {NodeState.HEALTHY, NodeState.SUSPECT}


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (31, []),  # the program's fault
        (43, []),
        (48, ["Xid 48 on GPU-a (memory error that could not be corrected): reset the GPU"]),
        (79, ["Xid 79 on GPU-a (GPU fell off the bus): drain the node and look at the GPU"]),
        (99999, []),  # not in the catalog
    ],
)
def test_an_xid_counts_by_its_action_in_the_catalog(number: int, expected: list[str]) -> None:
    assert texts([minute(xids=(number,))]) == expected


def test_an_xid_that_comes_back_on_the_same_gpu_asks_for_more() -> None:
    (text,) = texts([minute(xids=(39,)), minute(120.0, xids=(39,))])
    assert text == "Xid 39 on GPU-a, 2 times (copy engine error): drain the node and have the GPU replaced"


def test_an_xid_on_two_gpus_did_not_come_back() -> None:
    other = NodeMinute(60.0, 60.0, 60, "n1", Rollups(), {"GPU-b": Rollups({}, {}, (39,))})
    assert texts([minute(xids=(39,)), other]) == []


@pytest.mark.parametrize(
    ("column", "count", "expected"),
    [
        (
            "ecc_uncorrected_total",
            1.0,
            ["1 uncorrected memory errors on GPU-a within a minute: drain and test the node"],
        ),
        ("ecc_corrected_total", 100.0, []),
        ("pcie_replays_total", 8.0, []),
        ("pcie_replays_total", 9.0, ["9 PCIe replays on GPU-a within a minute: reseat the GPU, or look at its riser"]),
        ("nvlink_errors_total", 5999.0, []),
        ("nvlink_errors_total", 6000.0, ["6000 NVLink errors on GPU-a within a minute: test the links of the node"]),
    ],
)
def test_errors_count_from_the_figure_in_the_table(column: str, count: float, expected: list[str]) -> None:
    assert texts([minute(**{column: count})]) == expected


def test_only_minutes_with_errors_are_kept() -> None:
    assert has_errors(minute(pcie_replays_total=1.0))
    assert has_errors(minute(xids=(31,)))
    assert not has_errors(minute(energy_joules=1.0, pcie_replays_total=0.0))


@pytest.mark.parametrize(
    "kept",
    [
        minute(pcie_replays_total=1.0),
        minute(ecc_uncorrected_total=0.5),
        minute(xids=(31,)),
        minute(nvlink_errors_total=10),
    ],
)
def test_a_minute_with_errors_is_known_by_its_line(kept: NodeMinute) -> None:
    assert has_errors(kept)
    assert may_have_errors(kept.to_line())


def test_a_minute_without_errors_is_known_by_its_line() -> None:
    clean = minute(pcie_replays_total=0.0, ecc_uncorrected_total=0, nvlink_errors_total=0.0, energy_joules=1.0)
    assert not may_have_errors(clean.to_line())


@pytest.mark.parametrize(
    ("event", "node", "kind"),
    [
        (StragglerDetected(rank=1, host="n2", slowdown=1.6, wait_s_per_step=1.0, wait_fraction=0.5), "n2", "straggler"),
        (StragglerDetected(rank=1, slowdown=1.4, wait_s_per_step=1.0, wait_fraction=0.5), None, None),
        (WorkerFailure(rank=1, cause="gpu_failed", message=""), "n2", "gpu-failed"),
        (WorkerFailure(rank=0, cause="exit_code", exit_code=77, message=""), "n1", "unfit-node"),
        (WorkerFailure(rank=0, cause="exit_code", exit_code=1, message=""), None, None),
        (WorkerFailure(rank=5, cause="gpu_failed", message=""), None, None),  # on an unknown node
        (HangDetected(rank=1, host="n2", step=3, phase="forward", silence_s=9.0, is_stopped=False), None, None),
    ],
)
def test_events_speak_against_the_node_of_their_rank(event: Event, node: str | None, kind: str | None) -> None:
    found = [(each.node, each.kind) for each in find_evidence([], [*WORKERS, event])]
    assert found == ([] if node is None else [(node, kind)])


@pytest.fixture
def states(tmp_path: Path) -> Iterator[NodeStates]:
    times = iter([100.0, 200.0, 300.0, 400.0])
    with NodeStates(tmp_path / "nodes.db", lambda: next(times)) as states:
        yield states


def test_a_healthy_node_becomes_suspect_once(states: NodeStates) -> None:
    evidence = find_evidence([minute(xids=(79,)), minute(xids=(79, 48))], [])
    (change,) = apply_evidence(states, evidence)
    assert (change.node, change.state, change.actor) == ("n1", NodeState.SUSPECT, "evidence")
    assert change.reason.startswith(
        "Xid 79 on GPU-a (GPU fell off the bus): drain the node and look at the GPU; Xid 79"
    )
    assert apply_evidence(states, evidence) == []
    assert len(states.history("n1")) == 1


def test_a_node_that_was_taken_back_becomes_suspect_by_new_evidence_only(states: NodeStates) -> None:
    old = find_evidence([minute(60.0, xids=(79,))], [])
    apply_evidence(states, old)
    states.change("n1", NodeState.HEALTHY, "GPU reseated", "ada")
    assert apply_evidence(states, old) == []
    new = find_evidence([minute(240.0, ecc_uncorrected_total=2.0)], [])
    (change,) = apply_evidence(states, [*old, *new])
    assert change.reason == "2 uncorrected memory errors on GPU-a within a minute: drain and test the node"


@pytest.mark.parametrize("way", [[NodeState.DRAINED], [NodeState.DRAINED, NodeState.TESTING], [NodeState.SUSPECT]])
def test_a_node_that_is_not_healthy_stays_as_it_is(states: NodeStates, way: list[NodeState]) -> None:
    for state in way:
        states.change("n1", state, "why", "ada")
    assert apply_evidence(states, find_evidence([minute(900.0, xids=(79,))], [])) == []


def test_a_reason_names_three_findings_and_is_short(states: NodeStates) -> None:
    devices = {f"GPU-{number}" + "x" * 200: Rollups({}, {}, (79,)) for number in range(5)}
    found = find_evidence([NodeMinute(60.0, 60.0, 60, "n1", Rollups(), devices)], [])
    (change,) = apply_evidence(states, found)
    assert change.reason.endswith("; and 2 more")
    assert len(change.reason) < 520
