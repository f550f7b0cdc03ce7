"""Which node leads a run that may train on fewer nodes than it has."""

import json
import shutil
from pathlib import Path

import pytest

from phalanx.run import Run
from phalanx.run.leader_address import (
    claim_leadership,
    lock_leadership,
    read_leader_address,
    write_leader_address,
)

OLD, NEW = ("10.0.0.1", 4711), ("10.0.0.2", 4711)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path / "run")
    run.create()
    write_leader_address(run, OLD, 0)
    return run


def test_the_first_node_that_claims_a_run_without_a_leader_leads_it(run: Run) -> None:
    lost = read_leader_address(run)
    assert lost is not None
    assert claim_leadership(run, lost, NEW, 1)
    assert not claim_leadership(run, lost, ("10.0.0.3", 4711), 2)  # it has another leader now
    leader = read_leader_address(run)
    assert leader is not None
    assert (leader.address, leader.node_rank, leader.term) == (NEW, 1, 1)


def test_a_run_with_a_leader_cannot_be_claimed(run: Run) -> None:
    lost = read_leader_address(run)
    assert lost is not None
    with lock_leadership(run) as leads:
        assert leads
        assert not claim_leadership(run, lost, NEW, 1)
    assert read_leader_address(run) == lost


def test_the_address_of_a_leader_that_took_over_is_written_once(run: Run) -> None:
    lost = read_leader_address(run)
    assert lost is not None
    assert claim_leadership(run, lost, NEW, 1)
    written = run.leader.read_text()
    write_leader_address(run, NEW, 1)
    assert run.leader.read_text() == written


def test_a_copy_of_a_run_has_no_leader(run: Run, tmp_path: Path) -> None:
    shutil.copytree(run.path, tmp_path / "copy")
    assert read_leader_address(Run(tmp_path / "copy")) is None


def test_a_damaged_address_is_none(run: Run) -> None:
    run.leader.write_text(json.dumps({"host": "a", "port": "b"}))
    assert read_leader_address(run) is None


def test_a_run_that_is_out_of_reach_cannot_be_claimed(run: Run) -> None:
    lost = read_leader_address(run)
    assert lost is not None
    shutil.rmtree(run.path)
    assert not claim_leadership(run, lost, NEW, 1)
