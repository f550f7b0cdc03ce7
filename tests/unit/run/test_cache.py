"""What is remembered between starts."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from phalanx.run import lock
from phalanx.run.cache import load_or_measure

KEY = {"threads": 2}


class Counter:
    """Stands for measuring, and counts how often it was needed."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> dict[str, Any]:
        self.calls += 1
        return {"rate": self.calls}


def test_what_was_measured_is_not_measured_again_the_same_day(tmp_path: Path) -> None:
    measure = Counter()
    assert load_or_measure("trials", KEY, measure, folder=tmp_path) == {"rate": 1}
    assert load_or_measure("trials", KEY, measure, folder=tmp_path) == {"rate": 1}
    assert {path.suffix for path in (tmp_path / "trials").iterdir()} == {".json", ".lock"}


def test_another_key_or_kind_is_measured(tmp_path: Path) -> None:
    measure = Counter()
    for kind, key in (("trials", KEY), ("trials", {"threads": 1}), ("other", KEY)):
        load_or_measure(kind, key, measure, folder=tmp_path)
    assert measure.calls == 3


def test_after_a_day_it_is_measured_again(tmp_path: Path) -> None:
    measure = Counter()
    load_or_measure("trials", KEY, measure, folder=tmp_path)
    later = time.time() + 2 * 86400
    assert load_or_measure("trials", KEY, measure, folder=tmp_path, now=lambda: later) == {"rate": 2}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"value": {"rate": 9}, "key": {}}', '{"key": {"threads": 2}}'])
def test_a_torn_or_foreign_file_is_measured_anew_and_replaced(tmp_path: Path, text: str) -> None:
    measure = Counter()
    load_or_measure("trials", KEY, measure, folder=tmp_path)
    (path,) = (tmp_path / "trials").glob("*.json")
    path.write_text(text)
    assert load_or_measure("trials", KEY, measure, folder=tmp_path) == {"rate": 2}
    assert load_or_measure("trials", KEY, measure, folder=tmp_path) == {"rate": 2}


def test_a_cache_that_cannot_be_written_costs_only_measuring(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert load_or_measure("trials", KEY, Counter(), folder=tmp_path / "file") == {"rate": 1}


def test_who_asks_while_another_measures_gets_the_same_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measuring, waited = threading.Event(), threading.Event()
    monkeypatch.setattr(lock.time, "sleep", lambda seconds: waited.set())

    def measure_slowly() -> dict[str, Any]:
        measuring.set()
        assert waited.wait(10)
        return {"rate": 1}

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(load_or_measure, "fp8", KEY, measure_slowly, folder=tmp_path)
        assert measuring.wait(10)
        assert load_or_measure("fp8", KEY, lambda: {"rate": 2}, folder=tmp_path) == first.result() == {"rate": 1}
