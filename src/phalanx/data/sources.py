"""Finding the files of a source, and reading documents from them in pieces of bounded size.

Text, packed text, JSON lines, Parquet, Arrow and texts in archives; images are in `images.py`, tokens in
`token_files.py`. Nothing here tokenises or writes. Whatever is read comes as `DocumentChunk`s of at most about a
mebibyte; only a JSON line, some Parquet cells, a batch of Arrow and a text in an archive are in memory as a whole.
"""

import io
import lzma
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from phalanx.data import file_format
from phalanx.data.rows import RAISE_AT_BAD_ROW, BadRowError, BadRows, encode_field, find_column, parse_json
from phalanx.data.source_files import SourceFile, find_files, to_glob_list
from phalanx.data.webdataset import iterate_texts
from phalanx.errors import DataError, ExitCode, PhalanxError, RecipeError, UsageError
from phalanx.safe_files import read_json
from phalanx.storage.errors import StoreUnavailable
from phalanx.storage.store import open_location
from phalanx.storage.url import is_url

CHUNK_BYTES = 1 << 20
CONTEXT_BYTES = 1 << 12
"""Bytes of a document before and behind a chunk, in sight of which it is tokenised."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""UTF-8's byte order mark, which some editors write at the beginning of a file: no text."""
MAX_LINE_BYTES = 1 << 28
"""Bytes of a line of JSON."""
REPETITION_RATIO = 20
"""Text that is packed to less than this part of it repeats itself."""


@dataclass(frozen=True)
class FilePart:
    """A part of a source file: bytes start .. stop - 1, or those row groups of a Parquet file.

    Byte ranges are nominal: the reader of one takes the lines that begin in it, so adjacent parts share no line. Of a
    file of tokens they are tokens start .. stop - 1.
    """

    path: str
    start: int
    stop: int
    disk_bytes: int  # bytes on disk, for balance and progress
    is_last: bool = True  # whether the file ends with this part
    class_label: int = 0  # class of an image
    member: str = ""  # name of an image in an archive, of which this is the range of bytes
    continues: bool = False  # whether a file of tokens begins within a document of the file before


class DocumentChunk(NamedTuple):
    """Some bytes of a document, whether it begins and ends with them, and the bytes on disk read since the last; and
    what stands before and behind them in the document, up to CONTEXT bytes each."""

    data: bytes
    starts_document: bool
    ends_document: bool
    bytes_read: int
    before: bytes = b""
    after: bytes = b""
    place: int | str = ""  # of a record in its file: the byte of its line, or its row


@contextmanager
def translate_read_errors(path: str | Path) -> Iterator[None]:
    """Turn what can go wrong while reading a source file into a DataError that names it."""
    try:
        yield
    except MemoryError:
        raise DataError(f"{path}: a piece of it needs more memory than there is here; divide it") from None
    except StoreUnavailable as error:
        raise PhalanxError(
            f"{path}: the store does not answer ({error.strerror}); run the same command again to continue from here",
            ExitCode.UNFINISHED,
        ) from None
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"{path}: cannot be read to its end ({getattr(error, 'strerror', None) or error})") from None


def split_source_file(file: SourceFile, part_bytes: int) -> list[FilePart]:
    """A file's parts of about `part_bytes` bytes. Packed files stay whole: they can only be read from their
    beginning."""
    count = max(round(file.size / part_bytes), 1)
    if count > 1:
        with translate_read_errors(file.path):
            count = 1 if file_format.detect_file_compression(file.path) is not None else count
    edges = [file.size * number // count for number in range(count + 1)]
    return [FilePart(file.path, start, stop, stop - start, stop == file.size) for start, stop in pairwise(edges)]


def split_parquet_file(file: SourceFile) -> list[FilePart]:
    """A Parquet file's row groups."""
    file_format.check_file_format(file.path, "parquet")
    with translate_read_errors(file.path), open_location(file.path) as raw:
        groups = _open_parquet(raw, file.path).metadata.num_row_groups
    # Weights assume equal row groups: they need only be good enough to balance the work.
    return [FilePart(file.path, group, group + 1, file.size // max(groups, 1)) for group in range(groups)]


def iterate_documents(
    part: FilePart, source_kind: str, field: str, bad_rows: BadRows = RAISE_AT_BAD_ROW
) -> Iterator[DocumentChunk]:
    """The documents that begin in a part of a source of texts (`text`: what lies in the part). Rows that cannot be read
    go to `bad_rows`."""
    with translate_read_errors(part.path), open_location(part.path) as raw:
        if source_kind == "parquet":
            yield from _iterate_parquet(raw, part, field, bad_rows)
            return
        if source_kind in ("arrow", "webdataset"):
            source = (raw, part.path, field, bad_rows)
            is_arrow = source_kind == "arrow"
            counted = 0
            for row, text in _iterate_arrow_texts(*source) if is_arrow else enumerate(iterate_texts(*source)):
                yield from _document(text, raw.tell() - counted, f"row {row}")
                counted = raw.tell()
            yield DocumentChunk(b"", False, False, part.disk_bytes - counted)
            return
        compression = None
        if part.start == 0:
            compression = file_format.detect_compression(part.path, raw.read(file_format.HEAD_BYTES))
        raw.seek(0)
        if compression is not None:
            stream, stop = file_format.open_compressed(raw, compression, part.path), None
        else:
            limit = CHUNK_BYTES if source_kind == "text" else None
            stop = _find_line_start(raw, part.stop, limit)
            raw.seek(_find_line_start(raw, part.start, limit))
            stream = raw
        if source_kind == "text":
            yield from _iterate_text(raw, stream, stop, part)
        else:
            yield from _iterate_jsonl(raw, stream, stop, part.path, field, bad_rows)


def _find_line_start(file: BinaryIO, offset: int, limit: int | None) -> int:
    """Where the first line begins at or behind `offset`; after `limit` bytes without one, the next character."""
    if offset == 0:
        return 0
    file.seek(offset - 1)
    scanned = 0
    while block := file.read(CHUNK_BYTES if limit is None else limit - scanned):
        if (at := block.find(b"\n")) >= 0:
            return offset - 1 + scanned + at + 1
        scanned += len(block)
        if scanned == limit:
            file.seek(offset)
            return offset + next((i for i, byte in enumerate(file.read(4)) if byte & 0xC0 != 0x80), 0)
        if scanned > MAX_LINE_BYTES:
            raise _too_long(f"{file.name}, the line at byte {offset} or before")
    return offset - 1 + scanned


def _iterate_text(
    raw: BinaryIO, stream: BinaryIO, stop: int | None, part: FilePart, marked: bool = True
) -> Iterator[DocumentChunk]:
    """A whole text file, or a part of a plain one, is one document; it is cut behind lines where it can be. `marked`:
    a byte order mark at its beginning is left out."""
    before, start = b"", raw.tell()
    if part.start > 0:
        raw.seek(max(start - CONTEXT_BYTES, 0))
        before = raw.read(start - raw.tell())
    begins, counted_to, read, buffer, is_last_chunk = part.start == 0, start, start, b"", False
    if begins and marked:
        buffer = stream.read(len(BYTE_ORDER_MARK))
        read, buffer = read + len(buffer), buffer.removeprefix(BYTE_ORDER_MARK)
    while True:
        data = stream.read(CHUNK_BYTES + CONTEXT_BYTES - len(buffer))
        buffer, read = buffer + data, read + len(data)
        remaining = len(buffer) if stop is None else stop - (read - len(buffer))  # of this part
        is_last_chunk = remaining <= CHUNK_BYTES or (not data and len(buffer) <= CHUNK_BYTES)
        cut = remaining
        if not is_last_chunk:
            cut = buffer.rfind(b"\n", 0, CHUNK_BYTES) + 1 or _whole_characters_length(buffer[:CHUNK_BYTES])
        now = min(raw.tell(), read) if stop is None else read - len(buffer) + cut
        after = buffer[cut : cut + CONTEXT_BYTES]
        yield DocumentChunk(buffer[:cut], begins, is_last_chunk and part.is_last, now - counted_to, before, after)
        if is_last_chunk:
            return
        before, buffer, begins, counted_to = (before + buffer[:cut])[-CONTEXT_BYTES:], buffer[cut:], False, now


def _whole_characters_length(buffer: bytes) -> int:
    """The length of `buffer` without a UTF-8 character that its end cuts in two."""
    for back in range(1, 4):
        byte = buffer[-back]
        if byte >= 0xC0:
            needed = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(buffer) if back >= needed else len(buffer) - back
        if byte < 0x80:
            break
    return len(buffer)


def _iterate_jsonl(
    raw: BinaryIO, stream: BinaryIO, stop: int | None, path: str, field: str, bad_rows: BadRows
) -> Iterator[DocumentChunk]:
    counted = offset = raw.tell()  # nothing of it was read yet
    while stop is None or offset < stop:
        line = stream.readline(MAX_LINE_BYTES + 1)
        if not line:
            return
        if len(line) > MAX_LINE_BYTES:
            raise _too_long(f"{path}, the line at byte {offset}")
        try:
            text = b"" if line.isspace() else encode_field(parse_json(line), field)
        except BadRowError as error:
            bad_rows.add(error, path, offset)
            text = b""
        yield from _document(text, raw.tell() - counted, offset)
        offset += len(line)
        counted = raw.tell()


def _too_long(where: str) -> DataError:
    return DataError(f"{where}: has more than {MAX_LINE_BYTES >> 20} MiB, the most that a line of JSON may have")


def _document(text: bytes, consumed: int, place: int | str = "") -> Iterator[DocumentChunk]:
    """A document in chunks, as if it were a file: tokens of it take many times its memory."""
    if len(text) <= CHUNK_BYTES:
        yield DocumentChunk(text, True, True, consumed, place=place)
        return
    stream = io.BytesIO(text)
    for chunk in _iterate_text(stream, stream, None, FilePart("", 0, len(text), 0), marked=False):
        yield chunk._replace(bytes_read=consumed if chunk.ends_document else 0, place=place)


def _import_pyarrow(format_name: str) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise UsageError(f"{format_name} sources need the `pyarrow` package: pip install 'phalanx[pyarrow]'") from None
    return pyarrow


def _open_parquet(raw: BinaryIO, path: str) -> Any:
    pyarrow = _import_pyarrow("Parquet")
    try:
        return pyarrow.parquet.ParquetFile(raw, pre_buffer=False, buffer_size=CHUNK_BYTES)
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not a Parquet file ({error})") from None


def _iterate_parquet(raw: BinaryIO, part: FilePart, field: str, bad_rows: BadRows) -> Iterator[DocumentChunk]:
    table = _open_parquet(raw, part.path)
    column = field and find_column(field, table.schema_arrow.names, part.path)
    size, given = file_format.stream_size(raw), 0
    row = sum(table.metadata.row_group(group).num_rows for group in range(part.start))
    for group in range(part.start, part.stop):
        rows, where = max(table.metadata.row_group(group).num_rows, 1), f"{part.path}, row group {group}"
        for batch in _batches(table, group, column, where, size):
            cells = batch.column(0) if column else batch.to_struct_array()
            for number, text in _read_cells(cells, row, column, field, part.path, bad_rows):
                given += len(text)
                file_format.check_expansion(part.path, size, given)
                yield from _document(text, 0, f"row {number}")
            row += batch.num_rows
            yield DocumentChunk(b"", False, False, part.disk_bytes * batch.num_rows // rows)


def _iterate_arrow_texts(raw: BinaryIO, path: str, field: str, bad_rows: BadRows) -> Iterator[tuple[int, bytes]]:
    pyarrow = _import_pyarrow("Arrow")
    is_file = raw.read(len(_FILE_MAGIC)) == _FILE_MAGIC
    raw.seek(max(raw.seek(0, 2) - len(_END_OF_STREAM), 0))
    is_whole = is_file or raw.read() == _END_OF_STREAM
    raw.seek(0)
    try:
        reader = pyarrow.ipc.open_file(raw) if is_file else pyarrow.ipc.open_stream(raw)
        if not is_whole:
            raise DataError(f"{path}: a stream of Arrow that is cut short: its end is missing")
        names, row = reader.schema.names, 0
        column = field and find_column(field, names, path)
        for batch in map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader:
            cells = batch.column(names.index(column)) if column else batch.to_struct_array()
            yield from _read_cells(cells, row, column, field, path, bad_rows)
            row += batch.num_rows
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not a file or stream of Arrow, or cut short ({error})") from None


def _batches(table: Any, group: int, column: str, where: str, size: int) -> Iterator[Any]:
    """Rows of a group, so few at a time that they fit into memory. Of repeated ones a file may hold a single large one,
    and what a group is packed to says whether there are any."""
    import pyarrow

    described = table.metadata.row_group(group)
    columns = [described.column(number) for number in range(described.num_columns)]
    columns = [leaf for leaf in columns if not column or f"{leaf.path_in_schema}.".startswith(f"{column}.")]
    unpacked = sum(leaf.total_uncompressed_size for leaf in columns)
    packed = min(sum(leaf.total_compressed_size for leaf in columns), size)
    file_format.check_expansion(where, packed, unpacked)
    at_once = 256 if unpacked <= CHUNK_BYTES else 16 if unpacked <= REPETITION_RATIO * packed else 1
    try:
        yield from table.iter_batches(batch_size=at_once, row_groups=[group], columns=[column] if column else None)
    except pyarrow.ArrowException as error:
        raise DataError(f"{where}: cannot be read ({error})") from None


def _read_cells(
    cells: Iterable[Any], first_row: int, column: str, field: str, path: str, bad_rows: BadRows
) -> Iterator[tuple[int, bytes]]:
    """The rows and texts of a column's cells, or of whole records, the first of which is in row `first_row`."""
    for row, cell in enumerate(cells, first_row):
        try:
            yield row, encode_field({column: cell.as_py()} if column else cell.as_py(), field)
        except UnicodeDecodeError as error:
            bad_rows.add(BadRowError("not UTF-8", f"text that is not UTF-8 ({error.reason})"), path, f"row {row}")
        except BadRowError as error:
            bad_rows.add(error, path, f"row {row}")


_FILE_MAGIC = b"ARROW1"
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


def find_arrow_files(globs: str | list[str], exclude: str | list[str], base_dir: Path) -> list[SourceFile]:
    """The files of globs, and those of directories in the order of their rows."""
    names: list[str] = []
    for pattern in to_glob_list(globs):
        is_directory = not is_url(pattern) and (base_dir / pattern).is_dir()
        names += _list_directory(base_dir / pattern) if is_directory else [pattern]
    return find_files(names, exclude, base_dir)


def _list_directory(directory: Path) -> list[str]:
    if (directory / "dataset_dict.json").is_file():
        splits = read_json(directory / "dataset_dict.json").get("splits")
        raise RecipeError(f"data.source.arrow: {directory} has the splits {splits}; name one: {directory}/SPLIT")
    if not (directory / "state.json").is_file():
        return [f"{directory}/*.arrow"]
    state = read_json(directory / "state.json")
    if state.get("_indices_data_files"):
        raise DataError(f"{directory}: is a selection of rows; save it again after `flatten_indices()`")
    try:
        return [str(directory / file["filename"]) for file in state["_data_files"]]
    except (KeyError, TypeError):
        raise DataError(f"{directory}/state.json: not the state of a dataset that `save_to_disk` wrote") from None
