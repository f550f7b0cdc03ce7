"""The node-local copies of objects."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.errors import UsageError
from phalanx.storage.cache import CACHE_LIMIT_VARIABLE, ENTRY_FILE, localize
from phalanx.storage.store import Store


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PHALANX_CACHE_DIR", str(tmp_path / "cache"))
    directory = tmp_path / "bucket" / "model"
    (directory / "sub").mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "sub" / "weights.bin").write_bytes(b"w" * 1000)
    return tmp_path / "bucket"


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keys that were downloaded."""
    keys: list[str] = []
    download = Store.download
    monkeypatch.setattr(Store, "download", lambda *args: (keys.append(args[1].key), download(*args))[1])
    return keys


def test_a_path_stays_as_it_is(tmp_path: Path) -> None:
    assert localize(tmp_path) == tmp_path
    assert localize("runs/x") == Path("runs/x")


def test_a_directory_is_downloaded_once(bucket: Path, downloads: list[str]) -> None:
    copy = localize(f"file://{bucket}/model")
    assert (copy / "sub" / "weights.bin").read_bytes() == b"w" * 1000
    assert copy.name == "model"
    assert localize(f"file://{bucket}/model") == copy
    assert len(downloads) == 2


def test_only_objects_of_the_patterns_are_downloaded(bucket: Path, downloads: list[str]) -> None:
    copy = localize(f"file://{bucket}/model", ["*.json"])
    assert [path.name for path in copy.iterdir()] == ["config.json"]
    assert len(downloads) == 1


def test_an_object_that_changes_is_downloaded_again(bucket: Path) -> None:
    before = localize(f"file://{bucket}/model/config.json")
    (bucket / "model" / "config.json").write_text('{"new": 1}')
    assert localize(f"file://{bucket}/model/config.json").read_text() == '{"new": 1}'
    assert before.read_text() == "{}"


def test_a_damaged_copy_is_downloaded_again(bucket: Path, downloads: list[str]) -> None:
    copy = localize(f"file://{bucket}/model/sub/weights.bin")
    copy.write_bytes(b"x" * 1000)
    assert localize(f"file://{bucket}/model/sub/weights.bin").read_bytes() == b"w" * 1000
    assert len(downloads) == 2


def test_a_copy_that_was_not_finished_is_made_again(bucket: Path) -> None:
    copy = localize(f"file://{bucket}/model")
    (copy.parent.parent / ENTRY_FILE).unlink()
    (copy / "sub" / "weights.bin").write_bytes(b"half")
    assert (localize(f"file://{bucket}/model") / "sub" / "weights.bin").read_bytes() == b"w" * 1000


def test_what_is_not_used_gives_way_to_what_is_needed(bucket: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_LIMIT_VARIABLE, str(1500 / 2**30))
    code = f"from phalanx.storage.cache import localize; localize('file://{bucket}/model/sub/weights.bin')"
    subprocess.run([sys.executable, "-c", code], check=True)  # a process that ended uses nothing
    (bucket / "other").write_bytes(b"o" * 1200)
    localize(f"file://{bucket}/other")
    kept = list((Path(os.environ["PHALANX_CACHE_DIR"]) / "store").glob(f"*/{ENTRY_FILE}"))
    assert len(kept) == 1
    (bucket / "third").write_bytes(b"t" * 1200)
    with pytest.raises(UsageError, match="do not fit into the cache"):
        localize(f"file://{bucket}/third")


def test_a_url_of_nothing_is_one_sentence(bucket: Path) -> None:
    with pytest.raises(UsageError, match="no object has this key"):
        localize(f"file://{bucket}/nothing")
