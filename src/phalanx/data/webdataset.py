"""Samples of tar archives as `webdataset` writes them: files with one key, the name up to its first dot."""

import re
import tarfile
from collections.abc import Collection, Iterator
from typing import Any, BinaryIO, NamedTuple

from phalanx.data.file_format import HEAD_BYTES, detect_compression, open_unpacked
from phalanx.data.rows import BadRowError, BadRows, encode_field, parse_json
from phalanx.errors import DataError

_KEY_AND_PART = re.compile(r"((?:.*/|)[^./][^./]*)\.([^/]+)")
_META_NAME = re.compile(r"__[^/]*__($|/)")
_MAX_LABEL = (1 << 32) - 1


class TarMember(NamedTuple):
    """A file of an archive: where it lies in it, and its content where that was asked for."""

    name: str
    offset: int
    size: int
    data: bytes


def is_packed(raw: BinaryIO, path: str) -> bool:
    """Whether an archive is compressed, so that its files cannot be read one by one."""
    raw.seek(0)
    return detect_compression(path, raw.read(HEAD_BYTES)) is not None


def iterate_samples(raw: BinaryIO, path: str, wanted: Collection[str]) -> Iterator[tuple[str, dict[str, TarMember]]]:
    """Each sample of an archive: its key, and its files by what follows the key. The `wanted` ones have their content.
    DataError for an archive that is damaged, or in which the files of a sample do not lie side by side."""
    seen: set[str] = set()
    key, parts = "", dict[str, TarMember]()
    for member, part in _iterate_members(raw, path, wanted):
        if member != key:
            if parts:
                yield key, parts
            if member in seen:
                raise DataError(
                    f"{path}: sample {member!r} is interleaved with others: its files must lie side by side; write the "
                    "archive again in the order of names (tar --sort=name)"
                )
            seen.add(member)
            key, parts = member, {}
        suffix = part.name[len(key) + 1 :].lower()
        if suffix in parts:
            raise DataError(f"{path}: sample {key!r} has {part.name} twice")
        parts[suffix] = part
    if parts:
        yield key, parts


def _iterate_members(raw: BinaryIO, path: str, wanted: Collection[str]) -> Iterator[tuple[str, TarMember]]:
    stream, compression = open_unpacked(raw, path)
    end = 0
    try:
        with tarfile.open(fileobj=stream, mode="r:" if compression is None else "r|") as archive:
            while (info := archive.next()) is not None:
                archive.members = []  # type: ignore[attr-defined] # it keeps them all
                end = info.offset_data + -(-info.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
                match = _KEY_AND_PART.fullmatch(info.name)
                if info.isreg() and match and not _META_NAME.match(info.name):
                    file = archive.extractfile(info) if match[2].lower() in wanted else None
                    data = b"" if file is None else file.read()
                    yield match[1], TarMember(info.name, info.offset_data, info.size, data)
    except tarfile.TarError as error:
        raise DataError(f"{path}: not a tar archive, or cut short ({error})") from None
    if compression is None:
        raw.seek(end)
        is_whole = raw.read(tarfile.BLOCKSIZE) == bytes(tarfile.BLOCKSIZE)
    else:
        is_whole = True
        while stream.read(1 << 20):  # to its checksum
            pass
    if not is_whole:
        raise DataError(f"{path}: a tar archive that is damaged or cut short at byte {end}")


def iterate_texts(raw: BinaryIO, path: str, field: str, bad_rows: BadRows) -> Iterator[bytes]:
    """The text of each sample: `.txt`, else a field of `.json`."""
    for key, parts in iterate_samples(raw, path, ("txt", "json")):
        try:
            yield _read_text(parts, field)
        except BadRowError as error:
            bad_rows.add(error, path, f"sample {key!r}")


def _read_text(parts: dict[str, TarMember], field: str) -> bytes:
    if "txt" in parts:
        try:
            return parts["txt"].data.decode().encode()
        except UnicodeDecodeError as error:
            raise BadRowError("not UTF-8", f"text that is not UTF-8 ({error.reason})") from None
    if "json" in parts:
        return encode_field(parse_json(parts["json"].data), field)
    raise BadRowError("without text", f"has neither .txt nor .json, but {', '.join(f'.{part}' for part in parts)}")


def read_label(parts: dict[str, TarMember]) -> int:
    """The class of an image: the number in `.cls`, or `label` in `.json`. Raises BadRowError where there is none."""
    try:
        if "cls" in parts:
            label: Any = int(parts["cls"].data)
        else:
            label = parse_json(parts["json"].data)
            label = label["label"] if isinstance(label, dict) else label
    except (KeyError, ValueError):
        label = None
    if type(label) is not int or not 0 <= label < _MAX_LABEL:
        raise BadRowError(
            "without a label", "needs its class next to it, a number from 0 in .cls or as `label` in .json"
        )
    return label
