"""Usage over all runs: device-hours, goodput, energy and cost, by owner."""

import os
import pwd
import shutil
from pathlib import Path

import pytest

from make_run import Maker, healthy, troubled
from phalanx.cluster.spec import Prices
from phalanx.observe.goodput import compute_device_time
from phalanx.observe.history import read_history
from phalanx.run.telemetry_minutes import NodeEnergy, NodeMinute, Rollups
from phalanx.serve import run_accounts
from phalanx.serve.cluster_page import USAGE_PERIODS, find_group, find_user, render_cluster, sum_usage
from phalanx.serve.run_accounts import AccountReader
from phalanx.serve.run_index import RunIndex, run_id
from settable_clock import SettableClock

NOW = 2e9


def index_of(folder: Path) -> RunIndex:
    index = RunIndex([folder])
    index.update()
    return index


def read_all(reader: AccountReader) -> None:
    while reader.update_one():
        pass


def test_accounts_are_the_device_time_of_reports(tmp_path: Path) -> None:
    paths = [healthy(tmp_path / "a"), troubled(tmp_path / "b")]
    index = index_of(tmp_path)
    reader = AccountReader(index)
    read_all(reader)
    for path in paths:
        expected = compute_device_time(read_history(path / "events.jsonl"))
        found = reader.accounts[run_id(path)]
        assert (found.device_s, found.productive_s) == (expected.allocated_s, expected.productive_s)
    (usage,) = sum_usage(index.rows, reader.accounts, lambda row: "all", USAGE_PERIODS["all"], NOW).values()
    assert usage.num_runs == 2
    assert usage.goodput is not None
    assert 0.5 < usage.goodput < 1


def test_runs_of_other_times_are_left_out(tmp_path: Path) -> None:
    old = healthy(tmp_path / "old")
    healthy(tmp_path / "new")
    os.utime(old / "events.jsonl", (1e9, 1e9))
    index = index_of(tmp_path)
    reader = AccountReader(index)
    read_all(reader)
    now = index.rows[run_id(tmp_path / "new")].last_written_at + 1
    (usage,) = sum_usage(index.rows, reader.accounts, lambda row: "all", USAGE_PERIODS["day"], now).values()
    assert usage.num_runs == 1


def test_a_run_that_grows_is_read_again_later_and_one_that_ended_at_once(tmp_path: Path) -> None:
    maker = Maker(tmp_path / "run", total=10)
    maker.start()
    maker.steps(1, 3)
    clock, index = SettableClock(0.0), index_of(tmp_path)
    reader = AccountReader(index, clock=clock)
    read_all(reader)
    maker.steps(4, 6)
    index.update()
    assert not reader.update_one()
    clock.now += run_accounts.LIVE_INTERVAL_S
    assert reader.update_one()
    maker.steps(7, 10)
    maker.end()
    index.update()
    assert reader.update_one()


def test_accounts_are_kept_for_the_next_server(tmp_path: Path) -> None:
    healthy(tmp_path / "runs" / "a")
    index, file = index_of(tmp_path / "runs"), tmp_path / "cache" / "accounts.json"
    first = AccountReader(index, file)
    read_all(first)
    first.save()
    second = AccountReader(index, file)
    second.load()
    assert second.accounts == first.accounts
    assert not second.update_one()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1, "accounts": {"a": {}}}', '{"format": 9}'])
def test_a_damaged_cache_is_read_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "accounts.json").write_text(text)
    reader = AccountReader(index_of(tmp_path), tmp_path / "accounts.json")
    reader.load()
    assert reader.accounts == {}


def test_a_cache_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    healthy(tmp_path / "runs" / "a")
    (tmp_path / "file").write_text("")
    reader = AccountReader(index_of(tmp_path / "runs"), tmp_path / "file" / "accounts.json")
    read_all(reader)
    reader.save()
    assert len(reader.accounts) == 1


@pytest.mark.parametrize(
    "damage", [b"\x00" * 100, b'{"kind": "log_opened", "format": 9, "phalanx_version": "9", "time": 1}\n']
)
def test_a_run_that_cannot_be_read_counts_as_nothing(tmp_path: Path, damage: bytes) -> None:
    run = healthy(tmp_path / "a")
    (run / "events.jsonl").write_bytes(damage)
    reader = AccountReader(index_of(tmp_path))
    read_all(reader)
    assert reader.accounts[run_id(run)].device_s == 0


def test_a_run_that_vanishes_keeps_nothing_from_being_read(tmp_path: Path) -> None:
    healthy(tmp_path / "a")
    healthy(tmp_path / "b")
    reader = AccountReader(index_of(tmp_path))
    shutil.rmtree(tmp_path / "a")
    read_all(reader)
    assert len(reader.accounts) == 2


def test_energy_counts_accelerators_where_the_run_has_all_of_a_node(tmp_path: Path) -> None:
    for name, world in (("whole", 2), ("shared", 1)):
        maker = Maker(tmp_path / name, world=world)
        maker.start()
        text = (maker.path / "events.jsonl").read_text().replace('"device": "cpu"', '"device": "cuda"')
        (maker.path / "events.jsonl").write_text(text)
        (maker.path / "telemetry").mkdir()
        minute = NodeMinute(60.0, 60.0, 60, "n1", Rollups(), {}, False, NodeEnergy(1000.0, 2, 10.0, 60.0))
        (maker.path / "telemetry" / "n1.jsonl").write_bytes(minute.to_line())
    reader = AccountReader(index_of(tmp_path))
    read_all(reader)
    assert reader.accounts[run_id(tmp_path / "whole")].energy_j == 1010.0
    assert reader.accounts[run_id(tmp_path / "shared")].energy_j == 10.0


def test_the_page_names_owners_and_costs(tmp_path: Path) -> None:
    healthy(tmp_path / "a")
    index = index_of(tmp_path)
    reader = AccountReader(index)
    assert "1 run not read yet" in render_cluster(index.rows, reader.accounts, Prices(), "all", NOW)
    read_all(reader)
    (row,) = index.rows.values()
    page = render_cluster(index.rows, reader.accounts, Prices(device_hour=3600.0, currency="<EUR>"), "all", NOW)
    assert find_user(row) == pwd.getpwuid(os.getuid()).pw_name
    assert f"<td>{find_user(row)}</td>" in page
    assert f"<td>{find_group(row)}</td>" in page
    device_s = reader.accounts[run_id(tmp_path / "a")].device_s
    assert f"{device_s:.4g} &lt;EUR&gt;" in page
