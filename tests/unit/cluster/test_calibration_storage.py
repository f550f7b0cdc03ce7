"""Measuring a folder, on a real one, with a clock of our own where that decides."""

import itertools
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from phalanx.cluster.calibration import location_speed
from phalanx.errors import UsageError


def test_a_folder_is_written_and_read_and_left_empty(tmp_path: Path) -> None:
    write_gbps, read_gbps = location_speed.measure_storage(
        tmp_path, max_bytes=10**8, seconds=0.2, clock=time.perf_counter
    )
    assert write_gbps > 0
    assert read_gbps is None or read_gbps > 0
    assert list(tmp_path.iterdir()) == []


def test_a_slow_disk_is_written_less(tmp_path: Path) -> None:
    ticks = itertools.count()
    write_gbps, _ = location_speed.measure_storage(
        tmp_path, max_bytes=10**8, seconds=1.0, clock=lambda: float(next(ticks))
    )  # 32 MiB in a second
    assert write_gbps == pytest.approx(location_speed.BLOCK_BYTES / 1e9)


def test_an_interruption_leaves_nothing(tmp_path: Path) -> None:
    ticks = itertools.count()

    def clock() -> float:
        if next(ticks) == 2:
            raise KeyboardInterrupt
        return 0.0

    with pytest.raises(KeyboardInterrupt):
        location_speed.measure_storage(tmp_path, max_bytes=10**8, seconds=1.0, clock=clock)
    assert list(tmp_path.iterdir()) == []


def test_room_is_asked_for_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(location_speed.shutil, "disk_usage", lambda folder: SimpleNamespace(free=10**8))
    with pytest.raises(UsageError, match=r"needs 141 MB, 100 MB are free; choose another --dir"):
        location_speed.check_free_space(tmp_path, quick=True)
