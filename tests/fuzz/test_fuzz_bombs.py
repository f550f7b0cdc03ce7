"""Files of kilobytes that unpack to gigabytes, wherever something is unpacked: refused in a sentence, in little memory.
They are streams of many equal parts, each packed once; the limits are lower here, so that they are reached soon."""

import bz2
import gzip
import lzma
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from mutations import attempt, flipped, hand, mutated, spliced
from phalanx.data import file_format, sources
from small_data import prepare

PART, LEAST = 4 << 20, 16 << 20
pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def low_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_format, "MAX_UNPACKED_BYTES", LEAST)
    monkeypatch.setattr(sources, "MAX_LINE_BYTES", LEAST)


def _zstd(data: bytes) -> bytes:
    import pyarrow

    return bytes(pyarrow.compress(data, codec="zstd", asbytes=True))


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gz": lambda data: gzip.compress(data),
    "bz2": bz2.compress,
    "xz": lambda data: lzma.compress(data, preset=0),
    "zst": _zstd,
}


def refused(folder: Path, source: dict[str, object]) -> str:
    made, said = attempt(lambda: prepare(folder, folder / "out", source))
    assert made is None
    assert not (folder / "out").exists()
    return said


@pytest.mark.parametrize("suffix", PACKERS)
def test_packed_text_without_end_is_refused(tmp_path: Path, suffix: str) -> None:
    pack = PACKERS[suffix]
    (tmp_path / f"a.txt.{suffix}").write_bytes(pack(b"no\n" * (PART // 3)) * 12)
    assert f"a.txt.{suffix}: its " in refused(tmp_path, {"text": f"a.txt.{suffix}"})


@pytest.mark.parametrize("suffix", PACKERS)
def test_a_packed_json_line_without_end_is_refused(tmp_path: Path, suffix: str) -> None:
    pack = PACKERS[suffix]
    (tmp_path / f"a.jsonl.{suffix}").write_bytes(pack(b'{"text": "') + pack(b"a" * PART) * 12)
    assert f"a.jsonl.{suffix}" in refused(tmp_path, {"jsonl": f"a.jsonl.{suffix}"})


def test_a_json_line_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with open(tmp_path / "a.jsonl", "wb") as file:
        file.truncate(4 << 30)
    assert ": has more than 16 MiB" in refused(tmp_path, {"jsonl": "a.jsonl"})


def test_labels_without_end_are_refused(tmp_path: Path) -> None:
    count = 2**32 - 1
    (tmp_path / "images.gz").write_bytes(gzip.compress(struct.pack(">HBBIII", 0, 8, 3, count, 28, 28)))
    labels = gzip.compress(struct.pack(">HBBI", 0, 8, 1, count)) + gzip.compress(bytes(PART), 9) * 8
    (tmp_path / "labels.gz").write_bytes(labels)
    assert "labels.gz: its " in refused(tmp_path, {"idx": {"images": "images.gz", "labels": "labels.gz"}})


@pytest.mark.parametrize("repeated", [False, True], ids=["plain", "dictionary"])
def test_a_parquet_file_of_one_repeated_text_is_refused(tmp_path: Path, repeated: bool) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    if repeated:
        indices = pyarrow.array([0] * 20_000, pyarrow.int32())
        column = pyarrow.DictionaryArray.from_arrays(indices, pyarrow.array(["x" * (2 << 20)]))
    else:
        column = pyarrow.array(["y" * (1 << 20)] * 20)
    parquet.write_table(
        pyarrow.table({"text": column}), tmp_path / "a.parquet", compression="zstd", use_dictionary=repeated
    )
    assert "a.parquet" in refused(tmp_path, {"parquet": "a.parquet"})


@pytest.mark.parametrize("suffix", ["png", "tiff"])
def test_an_image_of_more_pixels_than_memory_holds_is_refused(tmp_path: Path, suffix: str) -> None:
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "pictures" / "class").mkdir(parents=True)
    path = tmp_path / "pictures" / "class" / f"a.{suffix}"
    image.new("1", (14_000, 14_000)).save(path)
    assert "pixels" in refused(tmp_path, {"images": "pictures", "image_size": [8, 8]})


@pytest.mark.parametrize("header", [b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", b"BM"])
def test_sizes_that_a_header_only_claims_are_refused(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "pictures" / "class").mkdir(parents=True)
    suffix = "bmp" if header == b"BM" else "png"
    sizes = struct.pack("<IHHIIiiHHIIiiII", 10**9, 0, 0, 54, 40, 2**31 - 1, 2**31 - 1, 1, 24, 0, 0, 0, 0, 0, 0)
    rest = sizes if suffix == "bmp" else b"\x7f\xff\xff\xff" * 2 + b"\x08\x02\0\0\0" + bytes(100)
    (tmp_path / "pictures" / "class" / f"a.{suffix}").write_bytes(header + rest)
    assert f"a.{suffix}" in refused(tmp_path, {"images": "pictures", "image_size": [8, 8]})


@pytest.mark.parametrize("suffix", PACKERS)
def test_json_lines_are_read_as_they_were_before_they_were_packed(tmp_path: Path, suffix: str) -> None:
    lines = b"".join(b'{"text": "%d"}\n' % number for number in range(2000))
    (tmp_path / f"a.{suffix}").write_bytes(PACKERS[suffix](lines))
    out = prepare(tmp_path, tmp_path / "out", {"jsonl": f"a.{suffix}"})
    text = b"\0".join(b"%d" % number for number in range(2000)) + b"\0"
    assert (out / "shard-00000.bin").read_bytes() == text


def _table() -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = {"text": [f"text {number % 7}" if number % 5 else None for number in range(300)]}
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table(rows), sink, compression="zstd", row_group_size=100)
    return bytes(sink.getvalue())


@pytest.mark.parametrize("suffix", [*PACKERS, "parquet"])
def test_a_changed_packed_file_is_read_or_refused_with_its_name(tmp_path: Path, suffix: str) -> None:
    lines = b"".join(b'{"text": "text %d"}\n' % number for number in range(300))
    content = _table() if suffix == "parquet" else PACKERS[suffix](lines)
    path, kind = tmp_path / f"a.{suffix}", "parquet" if suffix == "parquet" else "jsonl"
    rng = hand(f"packed {suffix}")
    for _ in range(60):
        bad = rng.choice([flipped, spliced, mutated])(content, rng)
        path.write_bytes(bad)
        made, said = attempt(lambda: prepare(tmp_path, tmp_path / "out", {kind: path.name}))
        assert made is not None or path.name in said or "contain no text" in said, (bad, said)
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        shutil.rmtree(tmp_path / "out.partial", ignore_errors=True)
