"""No byte of a checkpoint can change without being found, and the file is named."""

import json
import math
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from checkpoints import same_bits, save, state
from phalanx.errors import DataError
from phalanx.train.checkpoint.format import (
    CheckpointManifest,
    CorruptCheckpointError,
    _manifest_hash,
    list_checkpoints,
    read_manifest,
)
from phalanx.train.checkpoint.load import find_newest_good, load_tensors, verify_checkpoint

FILES = ["MANIFEST.json", "MANIFEST.xxh3", "rank-00000.safetensors"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("good"), 60, state())


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / checkpoint.name))


def flip(file: Path, position: int, bit: int) -> None:
    with open(file, "r+b") as f:
        f.seek(position)
        byte = f.read(1)[0]
        f.seek(position)
        f.write(bytes([byte ^ (1 << bit)]))


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_anywhere_in_any_file_is_found_and_named(copy: Path, name: str) -> None:
    rng = random.Random(name)
    file = copy / name
    size = file.stat().st_size
    places = [0, size - 1, *(rng.randrange(size) for _ in range(60))]
    for position in places:
        bit = rng.randrange(8)
        flip(file, position, bit)
        for read in (verify_checkpoint, load_tensors):
            with pytest.raises(CorruptCheckpointError) as caught:
                read(copy)
            assert caught.value.file == file, f"bit {bit} of byte {position}"
        flip(file, position, bit)
    verify_checkpoint(copy)


@pytest.mark.parametrize("is_torn", [True, False])
@pytest.mark.parametrize("name", FILES)
def test_a_torn_or_missing_file_is_found_and_named(copy: Path, name: str, is_torn: bool) -> None:
    content = (copy / name).read_bytes()
    (copy / name).unlink()
    if is_torn:
        (copy / name).write_bytes(content[: len(content) * 2 // 3])
    with pytest.raises(CorruptCheckpointError, match="." if is_torn else rf"{name}: missing") as caught:
        verify_checkpoint(copy)
    assert caught.value.file == copy / name


def test_a_data_file_with_bytes_too_many_is_found(copy: Path) -> None:
    with open(copy / FILES[2], "ab") as file:
        file.write(b"\0")
    with pytest.raises(CorruptCheckpointError, match=r"has [\d,]+ bytes, its manifest says"):
        load_tensors(copy, ["scalar"])


def rewrite(checkpoint: Path, change: dict[str, object]) -> None:
    """A manifest whose hashes are right and whose content is not."""
    value = json.loads((checkpoint / "MANIFEST.json").read_text()) | change
    content = json.dumps(value).encode()
    (checkpoint / "MANIFEST.json").write_bytes(content)
    (checkpoint / "MANIFEST.xxh3").write_bytes(_manifest_hash(content))


def test_a_format_of_the_future_is_an_error_and_no_reason_to_take_an_older_checkpoint(copy: Path) -> None:
    rewrite(copy, {"format": 2})
    with pytest.raises(DataError, match=r"MANIFEST.json: checkpoint format 2; this Phalanx reads format 1"):
        find_newest_good(copy.parent, lambda *_: None)


BAD_PIECE = {"file": FILES[2], "bytes": [0, 4], "offset": [], "extent": []}


@pytest.mark.parametrize(
    "change",
    [
        {"files": 3},
        {"surprise": 1},
        {"tensors": {"w": {"dtype": "F31", "shape": [], "pieces": [BAD_PIECE]}}},
        {"tensors": {"w": {"dtype": "F32", "shape": [2], "pieces": [BAD_PIECE]}}},
        {"tensors": {"w": {"dtype": "F32", "shape": [], "pieces": []}}},
        {"tensors": {"w": {"dtype": "F32", "shape": [], "pieces": [BAD_PIECE | {"file": "../other"}]}}},
        {"tensors": {"w": {"dtype": "F32", "shape": [], "pieces": [BAD_PIECE | {"file": "other.safetensors"}]}}},
        {"tensors": {"w": {"dtype": "F32", "shape": [], "pieces": [BAD_PIECE | {"bytes": [-4, 0]}]}}},
        {"tensors": {"w": {"dtype": "F32", "shape": [], "pieces": [BAD_PIECE | {"bytes": [0, 8]}]}}},
        {"files": {FILES[2]: {"bytes": 9_000_000, "chunks": ["00"]}}},
    ],
    ids=lambda change: json.dumps(change)[:60],
)
def test_a_malformed_manifest_is_an_error_that_names_it(copy: Path, change: dict[str, object]) -> None:
    rewrite(copy, change)
    with pytest.raises(CorruptCheckpointError, match=r"MANIFEST\.json: malformed manifest"):
        read_manifest(copy)


def test_a_manifest_that_is_no_json_is_an_error_that_names_it(copy: Path) -> None:
    (copy / "MANIFEST.json").write_bytes(b"[1")
    (copy / "MANIFEST.xxh3").write_bytes(_manifest_hash(b"[1"))
    with pytest.raises(CorruptCheckpointError, match=r"MANIFEST\.json: malformed manifest"):
        read_manifest(copy)


@pytest.mark.parametrize("name", FILES)
def test_the_checkpoint_before_is_used_and_the_bad_one_reported(tmp_path: Path, name: str) -> None:
    old, new = state(seed=1, big=1000), state(seed=2, big=1000)
    save(tmp_path, 20, old)
    path = save(tmp_path, 40, new)
    flip(path / name, (path / name).stat().st_size // 2, 3)
    rejected: list[tuple[str, str]] = []
    found = find_newest_good(tmp_path, lambda path, file, reason: rejected.append((path.name, file)))
    assert rejected == [("step-000000040", name)]
    assert found == tmp_path / "step-000000020"
    loaded = load_tensors(found)
    assert all(same_bits(loaded[key], old[key]) for key in old)


def test_without_a_good_checkpoint_there_is_none(tmp_path: Path) -> None:
    assert find_newest_good(tmp_path / "none", lambda *_: None) is None
    path = save(tmp_path, 20, state(big=10))
    (path / FILES[2]).unlink()
    rejected: list[str] = []
    assert find_newest_good(tmp_path, lambda path, file, reason: rejected.append(f"{file}: {reason}")) is None
    assert rejected == ["rank-00000.safetensors: missing"]


def unreadable(file: Path) -> None:
    """In its place a file that gives EIO when it is read: the beginning of a process's memory is not mapped."""
    file.unlink()
    file.symlink_to("/proc/self/mem")


def test_a_checkpoint_that_storage_cannot_read_is_passed_over_for_the_one_before(tmp_path: Path) -> None:
    save(tmp_path, 20, state(big=10))
    unreadable(save(tmp_path, 40, state(big=10)) / "MANIFEST.json")
    rejected: list[str] = []
    found = find_newest_good(tmp_path, lambda path, file, reason: rejected.append(reason))
    assert found == tmp_path / "step-000000020"
    assert rejected == ["Input/output error"]


def test_where_storage_can_read_no_checkpoint_nobody_knows_whether_there_is_one(tmp_path: Path) -> None:
    unreadable(save(tmp_path, 20, state(big=10)) / "MANIFEST.json")
    with pytest.raises(OSError, match="Input/output error"):
        find_newest_good(tmp_path, lambda *_: None)
    lost = tmp_path / "lost"
    lost.symlink_to(lost)
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        list_checkpoints(lost)


def record(pieces: list[tuple[tuple[int, ...], tuple[int, ...]]], shape: tuple[int, ...]) -> dict[str, object]:
    """A manifest of one tensor of bytes, in these blocks: offset and extent."""
    found, at = [], 0
    for offset, extent in pieces:
        end = at + math.prod(extent)
        found.append({"file": "rank-00000.safetensors", "bytes": [at, end], "offset": offset, "extent": extent})
        at = end
    tensors = {"t": {"dtype": "U8", "shape": shape, "pieces": found}}
    return {"files": {"rank-00000.safetensors": {"bytes": at, "chunks": ["0"] * -(-at // 1024)}}, "tensors": tensors}


def manifest(pieces: list[tuple[tuple[int, ...], tuple[int, ...]]], shape: tuple[int, ...]) -> CheckpointManifest:
    return CheckpointManifest.model_validate({**record(pieces, shape), "chunk_bytes": 1024, "meta": {}})


@pytest.mark.timeout(20)
def test_many_pieces_side_by_side_in_any_dimension_are_read_soon() -> None:
    count = 20_000
    for dimension in range(3):
        shape = tuple(count if each == dimension else 1 for each in range(3))
        pieces = [(tuple(n if each == dimension else 0 for each in range(3)), (1, 1, 1)) for n in range(count)]
        assert manifest(pieces, shape).nbytes == count


def test_pieces_in_a_grid_and_in_a_pinwheel_fill_a_tensor() -> None:
    grid = [((a, b, c), (2, 3, 1)) for a in (0, 2) for b in (0, 3, 6) for c in range(4)]
    manifest(grid, (4, 9, 4))
    pinwheel = [((0, 0), (2, 1)), ((0, 1), (1, 2)), ((1, 2), (2, 1)), ((2, 0), (1, 2)), ((1, 1), (1, 1))]
    manifest(pinwheel, (3, 3))


@pytest.mark.parametrize(
    "pieces",
    [
        [((0, 0), (2, 2)), ((1, 1), (2, 2)), ((0, 2), (1, 1))],
        [((0, 0), (1, 3)), ((0, 0), (1, 3)), ((2, 0), (1, 3))],
        [((0, 0), (3, 1)), ((0, 1), (3, 1))],
    ],
)
def test_pieces_that_overlap_or_leave_a_gap_are_refused(pieces: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    with pytest.raises(ValueError, match="do not hold each element exactly once"):
        manifest(pieces, (3, 3))


def test_tensors_that_are_the_same_bytes_of_a_file_are_refused() -> None:
    value = record([((0,), (4,))], (4,))
    tensors = value["tensors"]
    assert isinstance(tensors, dict)
    with pytest.raises(ValueError, match=r"tensors t and u are the same bytes of rank-00000.safetensors"):
        CheckpointManifest.model_validate(
            {**value, "tensors": {**tensors, "u": tensors["t"]}, "chunk_bytes": 1024, "meta": {}}
        )


@pytest.mark.parametrize("file", ["../../etc/hostname", "/etc/hostname", "a/b", "..", ""])
def test_a_manifest_names_no_file_outside_of_its_folder(file: str) -> None:
    value = {**record([((0,), (4,))], (4,)), "files": {file: {"bytes": 4, "chunks": ["0"]}}}
    with pytest.raises(ValueError, match="String should"):
        CheckpointManifest.model_validate({**value, "meta": {}, "chunk_bytes": 1024})


@pytest.mark.parametrize("change", [{"chunk_bytes": 1 << 62}, {"shape": [0] * 65}, {"shape": [0, 10**30]}])
def test_sizes_that_no_checkpoint_has_are_refused(change: dict[str, Any]) -> None:
    value = {**record([], (0,)), "meta": {}, "chunk_bytes": change.get("chunk_bytes", 1024)}
    if "shape" in change:
        value["tensors"] = {"t": {"dtype": "U8", "shape": change["shape"], "pieces": []}}
    with pytest.raises(ValueError, match="validation error"):
        CheckpointManifest.model_validate(value)


@pytest.mark.parametrize("name", ["MANIFEST.json", "MANIFEST.xxh3", "rank-00000.safetensors"])
@pytest.mark.timeout(20)
def test_a_pipe_or_a_device_in_the_place_of_a_file_is_refused(copy: Path, name: str) -> None:
    (copy / name).unlink()
    os.mkfifo(copy / name)
    with pytest.raises(CorruptCheckpointError, match=f"{name}: expected a file, found a pipe"):
        verify_checkpoint(copy)
    (copy / name).unlink()
    (copy / name).symlink_to("/dev/zero")
    with pytest.raises(CorruptCheckpointError, match=f"{name}: expected a file, found a device"):
        verify_checkpoint(copy)
