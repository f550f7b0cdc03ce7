"""What is in a file by its first bytes: packed text, which is unpacked, and what cannot be text, which is refused."""

import bz2
import gzip
import io
import lzma
import os
import zlib
from pathlib import Path
from typing import Any, BinaryIO

from phalanx.errors import DataError, UsageError
from phalanx.storage.errors import StoreUnavailable
from phalanx.storage.store import open_store
from phalanx.storage.url import is_url, parse_url

HEAD_BYTES = 512
"""Bytes by which a file is known."""
BUFFER_BYTES = 1 << 18
_OBJECT_HEAD_BYTES = 1 << 16
MAX_UNPACKED_BYTES, MAX_UNPACKED_RATIO = 256 << 20, 200
"""Limit of an unpacked file: as many bytes as the first, or its packed size times the second. Text is packed to about a
fifth, the most repetitive logs to a hundredth."""
_COMPRESSION_SIGNATURES = {
    "gzip": (b"\x1f\x8b\x08", (".gz",)),
    "bzip2": (b"BZh", (".bz2",)),
    "xz": (b"\xfd7zXZ\x00", (".xz",)),
    "zstd": (b"\x28\xb5\x2f\xfd", (".zst", ".zstd")),
}
"""First bytes and endings of the names of packed files."""
_GIT_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_BZIP2_BLOCK = b"1AY&SY"
_UNSUPPORTED_FORMATS = {
    b"PK\x03\x04": "a zip archive (or a document in one); unpack it",
    b"PAR1": "a Parquet file; name it as `parquet` (--parquet)",
    _GIT_LFS_POINTER: "a pointer of Git LFS and not the file itself; run `git lfs pull`",
    b"ARROW1": "an Arrow file; name it as `arrow`",
    b"MMIDIDX": "the index of a Megatron token file; name its .bin file as `tokens`",
    b"%PDF-": "a PDF; extract its text",
    b"\x89PNG\r\n": "a PNG image; name its folder as `images`",
    b"\xff\xd8\xff": "a JPEG image; name its folder as `images`",
    b"\xff\xfe": "in UTF-16; convert it: iconv -f UTF-16 -t UTF-8",
    b"\xfe\xff": "in UTF-16; convert it: iconv -f UTF-16 -t UTF-8",
}
"""First bytes of what is no text, what it is and what would help."""


def detect_compression(path: str | Path, first_bytes: bytes) -> str | None:
    """Detect the compression of a file by its first bytes or, where they are unknown, its name."""
    for kind, (magic, _) in _COMPRESSION_SIGNATURES.items():
        if first_bytes.startswith(magic) and (kind != "bzip2" or first_bytes[4:10] == _BZIP2_BLOCK):
            return kind
    name = str(path).lower() if first_bytes else ""
    return next((kind for kind, (_, endings) in _COMPRESSION_SIGNATURES.items() if name.endswith(endings)), None)


def detect_file_compression(path: str | Path) -> str | None:
    """`detect_compression` of a file that lies there."""
    with _open_head(path) as file:
        return detect_compression(path, file.read(HEAD_BYTES))


def _open_head(path: str | Path) -> BinaryIO:
    """A file; of an object its first bytes."""
    if not is_url(path):
        return open(path, "rb")
    url = parse_url(str(path))
    store = open_store(url)
    info = store.head(url.key)
    return io.BytesIO(store.read_range(url.key, 0, min(info.size, _OBJECT_HEAD_BYTES), info.etag))


def stream_size(raw: BinaryIO) -> int:
    """Bytes of an open file or object."""
    position = raw.tell()
    size = raw.seek(0, os.SEEK_END)
    raw.seek(position)
    return size


def open_compressed(raw: BinaryIO, compression: str, path: str | Path) -> BinaryIO:
    """What is packed in an open file, as a stream. Reading it raises DataError where it is `check_expansion`'s."""
    openers: dict[str, Any] = {"gzip": gzip.open, "bzip2": bz2.open, "xz": lzma.open}
    stream = _open_zstd(raw, path) if compression == "zstd" else openers[compression](raw)
    return io.BufferedReader(_Unpacked(stream, stream_size(raw), path), BUFFER_BYTES)


def open_unpacked(raw: BinaryIO, path: str | Path) -> tuple[BinaryIO, str | None]:
    """What is in an open file from its beginning, unpacked; and its compression, if it has one."""
    raw.seek(0)
    compression = detect_compression(path, raw.read(HEAD_BYTES))
    raw.seek(0)
    return (raw if compression is None else open_compressed(raw, compression, path)), compression


def check_expansion(path: str | Path, size: int, unpacked: int) -> None:
    """DataError where so much comes out of `size` bytes as only out of a file that is made to fill memory or disks."""
    if unpacked > max(MAX_UNPACKED_BYTES, MAX_UNPACKED_RATIO * size):
        raise DataError(
            f"{path}: its {size:,} bytes unpack to {unpacked >> 20:,} MiB or more, over {MAX_UNPACKED_RATIO} times as "
            "many, as only a file does that is made to fill memory; where it is meant so, store it unpacked"
        )


class _Unpacked(io.RawIOBase):
    """A stream that is not believed when it does not end."""

    def __init__(self, stream: Any, size: int, path: str | Path):
        self._stream, self._size, self._path, self._given = stream, size, path, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        given: int = self._stream.readinto(buffer)
        self._given += given
        check_expansion(self._path, self._size, self._given)
        return given


def _open_zstd(raw: BinaryIO, path: str | Path) -> Any:
    try:
        import pyarrow
    except ImportError:
        raise UsageError(
            f"{path}: zstd needs the `pyarrow` package: pip install 'phalanx[pyarrow]', or unpack the file"
        ) from None
    return pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), "zstd")


def check_file_format(path: str | Path, kind: str) -> None:
    """DataError when a file is of another kind than its source, as far as its first bytes say. One that cannot be read
    is found out later, with the words for that."""
    try:
        with _open_head(path) as file:
            stream, compression = open_unpacked(file, path)
            first_bytes = stream.read(HEAD_BYTES)
    except StoreUnavailable:
        raise
    except (OSError, EOFError, ValueError, lzma.LZMAError, zlib.error):
        return
    formats = (text for magic, text in _UNSUPPORTED_FORMATS.items() if first_bytes.startswith(magic))
    found_format = next(formats, None)
    if kind not in ("text", "jsonl"):
        found_format = found_format if first_bytes.startswith(_GIT_LFS_POINTER) else None
        if compression is not None and kind not in ("idx", "webdataset"):
            found_format = f"packed by {compression}; unpack it"
    elif first_bytes[257:262] == b"ustar":
        found_format = "a tar archive; name it as `webdataset`, or unpack it"
    elif found_format is None and compression is not None and detect_compression("", first_bytes) is not None:
        found_format = "packed twice; unpack it once"
    if found_format is not None:
        raise DataError(f"{path}: is {found_format}")
    if kind == "jsonl" and first_bytes.lstrip().startswith(b"["):
        raise DataError(
            f"{path}: is an array of JSON, expected one object a line; convert it: jq -c '.[]' {Path(path).name}"
        )
