"""Arrow files, and nested fields of Arrow, Parquet and JSON lines: what pyarrow (or datasets itself) writes is read."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from phalanx.cli.main import main
from phalanx.data import sources
from phalanx.errors import DataError, RecipeError
from small_data import all_tokens, manifest_of, prepare

TEXTS = ["one", "zwei ü", "", "a longer one " * 300]
DOCUMENTS = b"".join(text.encode() + b"\0" for text in TEXTS if text)


def write_stream(path: Path, columns: dict[str, Any], rows: int = 2) -> None:
    table = pyarrow.table(columns)
    with pyarrow.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)


def write_saved(directory: Path, parts: list[list[str]]) -> None:
    """What `save_to_disk` writes; the names do not say the order."""
    directory.mkdir(parents=True)
    names = [f"data-{9 - number:05d}-of-00002.arrow" for number in range(len(parts))]
    for name, part in zip(names, parts, strict=True):
        write_stream(directory / name, {"text": part, "id": list(range(len(part)))})
    state = {"_data_files": [{"filename": name} for name in names], "_indices_data_files": None, "_split": "train"}
    (directory / "state.json").write_text(json.dumps(state))
    (directory / "dataset_info.json").write_text("{}")


def test_a_directory_of_datasets_is_read_in_the_order_of_its_state(tmp_path):
    write_saved(tmp_path / "saved", [TEXTS[:1], TEXTS[1:]])
    out = prepare(tmp_path, tmp_path / "out", {"arrow": "saved"})
    assert all_tokens(out).tobytes() == DOCUMENTS
    assert manifest_of(out)["shards"][0]["documents"] == 3


@pytest.mark.parametrize("pattern", ["arrow", "arrow/*.arrow", ["arrow/0.arrow", "arrow/1.arrow"]])
def test_streams_and_files_of_arrow_are_read(tmp_path, pattern):
    (tmp_path / "arrow").mkdir()
    write_stream(tmp_path / "arrow" / "0.arrow", {"text": TEXTS[:3]})
    table = pyarrow.table({"text": TEXTS[3:]})
    with pyarrow.ipc.new_file(tmp_path / "arrow" / "1.arrow", table.schema) as writer:
        writer.write_table(table)
    seen = []
    out = prepare(tmp_path, tmp_path / "out", {"arrow": pattern}, report_progress=seen.append)
    assert all_tokens(out).tobytes() == DOCUMENTS
    assert seen[-1].bytes_done == seen[-1].bytes_total


@pytest.mark.filterwarnings("ignore")  # it pickles with warnings
def test_what_datasets_saves_is_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset(pyarrow.table({"text": TEXTS}), fingerprint="of-a-test").save_to_disk(
        str(tmp_path / "saved"), num_shards=2
    )
    assert all_tokens(prepare(tmp_path, tmp_path / "out", {"arrow": "saved"})).tobytes() == DOCUMENTS


def test_a_directory_of_splits_says_to_name_one(tmp_path):
    write_saved(tmp_path / "saved" / "train", [TEXTS])
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(RecipeError, match=r"has the splits \['train', 'test'\]; name one: .*/saved/SPLIT"):
        prepare(tmp_path, tmp_path / "out", {"arrow": "saved"})


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"_data_files": [], "_indices_data_files": [{"filename": "i.arrow"}]}, "is a selection of rows"),
        ({"files": []}, "not the state of a dataset"),
    ],
)
def test_a_state_that_is_another_is_refused(tmp_path, state, words):
    write_saved(tmp_path / "saved", [TEXTS])
    (tmp_path / "saved" / "state.json").write_text(json.dumps(state))
    with pytest.raises(DataError, match=words):
        prepare(tmp_path, tmp_path / "out", {"arrow": "saved"})


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda data: data[:-8], "cut short: its end is missing"),
        (lambda data: data[: len(data) // 2], "cut short"),
        (lambda data: b"no stream" + data[9:], "not a file or stream of Arrow"),
        (lambda data: b"", "not a file or stream of Arrow"),
        (lambda data: b"ARROW1\0\0" + data, "not a file or stream of Arrow"),
    ],
)
def test_arrow_files_that_are_damaged_end_with_65(tmp_path, monkeypatch, capsys, harm, words):
    monkeypatch.chdir(tmp_path)
    write_stream(tmp_path / "a.arrow", {"text": TEXTS})
    (tmp_path / "a.arrow").write_bytes(harm((tmp_path / "a.arrow").read_bytes()))
    assert main(["data", "prepare", "a.arrow", "--arrow", "--out", "out", "--on-bad-row", "skip"]) == 65
    printed = capsys.readouterr().err
    assert words in printed
    assert printed.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_column_that_is_not_there_is_named(tmp_path):
    write_stream(tmp_path / "a.arrow", {"body": TEXTS})
    with pytest.raises(RecipeError, match="no column 'text'; it has 'body'"):
        prepare(tmp_path, tmp_path / "out", {"arrow": "a.arrow"})


ROWS = [
    {
        "data": {"text": f"text {number}", "id": number},
        "choices": [{"text": f"choice {number}"}, {"text": "another"}],
        "lines": [f"line {number}", "its end"],
        "data.dotted": f"dotted {number}",
    }
    for number in range(5)
]
FIELDS = {
    "data.text": [f"text {number}" for number in range(5)],
    "choices[0].text": [f"choice {number}" for number in range(5)],
    "choices[1].text": ["another"] * 5,
    "lines": [f"line {number}\nits end" for number in range(5)],
    "lines[1]": ["its end"] * 5,
    "data.dotted": [f"dotted {number}" for number in range(5)],
}


def write_rows(path: Path, kind: str) -> None:
    if kind == "jsonl":
        path.write_text("\n".join(map(json.dumps, ROWS)))
    elif kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path, row_group_size=2)
    else:
        write_stream(path, pyarrow.Table.from_pylist(ROWS).to_pydict())


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow"])
def test_nested_fields_and_lists_are_read(tmp_path, kind, field):
    write_rows(tmp_path / "rows", kind)
    out = prepare(tmp_path, tmp_path / "out", {kind: "rows", "text_field": field})
    assert all_tokens(out).tobytes().decode().split("\0")[:-1] == FIELDS[field]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow"])
@pytest.mark.parametrize(
    ("field", "error", "words"),
    [
        ("data.body", RecipeError, "no field 'data.body'; it has 'text', 'id'"),
        ("choices[2].text", RecipeError, r"no field 'choices\[2\]\.text'"),
        ("data", DataError, "'data' should be text, found dict"),
        ("choices", DataError, "'choices' should be text, found list"),
    ],
)
def test_a_nested_field_that_is_not_there_is_named(tmp_path, kind, field, error, words):
    write_rows(tmp_path / "rows", kind)
    with pytest.raises(error, match=words):
        prepare(tmp_path, tmp_path / "out", {kind: "rows", "text_field": field})


def test_a_large_text_of_arrow_is_read_in_chunks(tmp_path):
    text = "many words " * (sources.CHUNK_BYTES // 5)
    write_stream(tmp_path / "a.arrow", {"text": [text, "end"]})
    assert all_tokens(prepare(tmp_path, tmp_path / "out", {"arrow": "a.arrow"})).tobytes() == f"{text}\0end\0".encode()
