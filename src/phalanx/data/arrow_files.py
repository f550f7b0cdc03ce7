"""Rows of Arrow files: a directory that Hugging Face `datasets` saved (`save_to_disk`), or streams of Arrow."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from phalanx.data.source_files import SourceFile, find_files, to_glob_list
from phalanx.data.text_fields import find_column
from phalanx.errors import DataError, RecipeError, UsageError
from phalanx.safe_files import read_json
from phalanx.storage.url import is_url

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


def iterate_arrow_batches(raw: BinaryIO, path: str, field: str) -> Iterator[tuple[str, Any]]:
    """The column that holds a field: its name, and its cells in batches."""
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError:
        raise UsageError("Arrow sources need the `pyarrow` package: pip install 'phalanx[pyarrow]'") from None
    is_file = raw.read(len(_FILE_MAGIC)) == _FILE_MAGIC
    raw.seek(max(raw.seek(0, 2) - len(_END_OF_STREAM), 0))
    is_whole = is_file or raw.read() == _END_OF_STREAM
    raw.seek(0)
    try:
        reader = pyarrow.ipc.open_file(raw) if is_file else pyarrow.ipc.open_stream(raw)
        if not is_whole:
            raise DataError(f"{path}: a stream of Arrow that is cut short: its end is missing")
        names = reader.schema.names
        column = find_column(field, names, path)
        for batch in map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader:
            yield column, batch.column(names.index(column))
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not a file or stream of Arrow, or cut short ({error})") from None
