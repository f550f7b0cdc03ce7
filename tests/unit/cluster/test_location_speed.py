"""Measuring the paths and URLs of a recipe: what is measured, and that nothing is left."""

import itertools
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from http_objects import serve_objects
from phalanx.cluster.calibration import location_speed
from phalanx.cluster.calibration.location_speed import PART_BYTES, measure_location
from phalanx.cluster.health import CheckContext, HealthFinding, HealthVerdict
from phalanx.cluster.health.runner import HEALTH_CHECKS, HealthCheck, check_storage, run_storage_check
from phalanx.recipe.locations import StorageLocation

PROBE_NAME = ".probe-of-a-test"


@pytest.fixture(autouse=True)
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(location_speed, "MAX_REPEATS", 10)
    monkeypatch.setattr(location_speed, "BANDWIDTH_S", 0.1)


def place(location: str | Path, is_written: bool = False) -> StorageLocation:
    return StorageLocation("run", str(location), is_written)


def check_location(location: StorageLocation) -> HealthFinding:
    (finding,) = check_storage(CheckContext(Path(), locations=(location,), probe_name=PROBE_NAME))
    return finding


def everything(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


@pytest.mark.parametrize(("scheme", "operations"), [("", {"fsync", "rename"}), ("file://", {"PUT", "GET"})])
def test_a_place_that_is_written_has_all_figures_and_nothing_is_left(
    scheme: str, operations: set[str], tmp_path: Path
) -> None:
    speed = measure_location(place(f"{scheme}{tmp_path}/made/later", True), PROBE_NAME)
    assert min(speed.write_gbps or 0, speed.files_per_s or 0) > 0
    assert set(speed.latencies_s) == operations
    assert all(0 < median <= p99 for median, p99 in speed.latencies_s.values())
    assert everything(tmp_path) == set()


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_place_that_is_only_read_is_measured_by_what_is_there(scheme: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(PART_BYTES))
    (tmp_path / "empty.txt").touch()
    before = everything(tmp_path)
    os.chmod(tmp_path, 0o500)
    speed = measure_location(place(f"{scheme}{tmp_path}"), PROBE_NAME)
    assert speed.write_gbps is speed.files_per_s is None
    assert (speed.read_gbps or 0) > 0
    assert everything(tmp_path) == before


def test_a_few_bytes_have_latencies_and_no_bandwidth(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(1000))
    speed = measure_location(place(tmp_path), PROBE_NAME)
    assert speed.read_gbps is None
    assert set(speed.latencies_s) == {"GET"}


def test_an_object_of_a_web_server_is_read_by_ranges(tmp_path: Path) -> None:
    (tmp_path / "data.bin").write_bytes(bytes(3 * PART_BYTES // 2))
    with serve_objects(tmp_path) as (address, requests):
        speed = measure_location(place(f"{address}/data.bin"), PROBE_NAME)
    assert (speed.read_gbps or 0) > 0
    assert {request.partition(" ")[0] for request in requests} == {"HEAD", "GET"}


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_an_interruption_leaves_nothing(scheme: str, tmp_path: Path) -> None:
    for turn in range(2, 30, 3):
        ticks = itertools.count()

        def clock(ticks: Iterator[int] = ticks, turn: int = turn) -> float:
            if (tick := next(ticks)) == turn:
                raise KeyboardInterrupt
            return tick * 1e-3

        with pytest.raises(KeyboardInterrupt):
            measure_location(place(f"{scheme}{tmp_path}", True), PROBE_NAME, clock)
        assert everything(tmp_path) == set()


@pytest.mark.parametrize(
    ("location", "is_written", "reason"),
    [
        ("/nowhere/data", False, "/nowhere/data: No such file or directory"),
        ("/proc/run", True, "/proc: No such file or directory"),
        ("file:///nowhere/data", False, "file:///nowhere/data: no object has this key, and none has a key below it"),
        ("https://host/x", True, "https://host/x: nothing can be written there; expected an s3://, gs:// or az:// URL"),
    ],
)
def test_what_cannot_be_used_fails_with_its_name(location: str, is_written: bool, reason: str) -> None:
    finding = check_location(place(location, is_written))
    assert (finding.check, finding.verdict, finding.reason) == ("storage/run", HealthVerdict.FAIL, reason)


def test_a_measurement_that_was_killed_leaves_nothing_and_names_the_place(tmp_path: Path) -> None:
    context = CheckContext(tmp_path, probe_name=PROBE_NAME)
    (tmp_path / PROBE_NAME).mkdir()
    (tmp_path / PROBE_NAME / "0").touch()
    hanging = next(each for each in HEALTH_CHECKS if each.name == "storage")
    hanging = HealthCheck("storage", hanging.run_check, timeout_s=0.001)
    (finding,) = run_storage_check(hanging, replace(context, locations=(place(tmp_path, True),)))
    assert finding.verdict is HealthVerdict.ERROR
    assert finding.reason.startswith(f"{tmp_path}: it did not finish within")
    assert everything(tmp_path) == set()


def test_a_context_arrives_as_it_was_sent(tmp_path: Path) -> None:
    context = CheckContext(tmp_path, uid=7, expected_devices=8, locations=(place("s3://b/c", True),))
    assert CheckContext.from_json(context.as_json()) == context
