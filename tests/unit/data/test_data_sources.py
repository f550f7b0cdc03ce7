"""Finding files and reading documents: globs, packed files, JSON lines, Parquet; large files in parts."""

import gzip
import json
import lzma
import sys

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_data import all_tokens, manifest_of, prepare, write_texts

from phalanx.data import sources
from phalanx.data.sources import Part, documents, find_files, split_file, stat_file
from phalanx.errors import DataError, RecipeError, UsageError


def text_of(folder):
    return all_tokens(folder).tobytes()


def names(files):
    return [file.path.rsplit("/", 1)[1] for file in files]


@pytest.fixture
def tree(tmp_path):
    files = {
        "b.txt": "b",
        "a.txt": "a",
        "deep/er/c.txt": "c",
        "deep/skip/d.txt": "d",
        "deep/e.md": "e",
        ".hidden.txt": "h",
    }
    return write_texts(tmp_path / "tree", files)


def test_globs_are_sorted_one_by_one_and_name_a_file_once(tree):
    assert names(find_files("**/*.txt", [], tree)) == ["a.txt", "b.txt", "c.txt", "d.txt"]
    assert names(find_files(["deep/**/*.md", "*.txt", "**/*.txt"], [], tree)) == [
        "e.md", "a.txt", "b.txt", "c.txt", "d.txt"
    ]  # fmt: skip


@pytest.mark.parametrize("exclude", ["deep/skip/*", "**/skip/**", ["deep/s?ip/*.txt"], "**/[d-f].txt"])
def test_excluded_files_are_left_out(tree, exclude):
    assert names(find_files("**/*.txt", exclude, tree)) == ["a.txt", "b.txt", "c.txt"]


def test_a_star_does_not_cross_folders(tree):
    assert names(find_files("**/*.txt", "*.txt", tree)) == ["c.txt", "d.txt"]


def test_a_folder_with_a_glob_character_in_its_name_is_searched(tmp_path):
    write_texts(tmp_path / "we[i]rd", {"a.txt": "a"})
    write_texts(tmp_path / "we[i]rd", {"b.txt": "b", "c.txt": "c"})
    assert names(find_files("*.txt", "[!ac].txt", tmp_path / "we[i]rd")) == ["a.txt", "c.txt"]


def test_a_glob_without_files_is_named(tree):
    with pytest.raises(RecipeError, match=r"'\*\.rst' matches no file \(looked in .*tree\)") as error:
        find_files(["*.txt", "*.rst"], [], tree)
    assert error.value.code == 78
    with pytest.raises(RecipeError, match=r"matches no file that is not excluded \(2 are\)"):
        find_files("*.txt", "**", tree)


def test_text_files_become_documents_with_a_separator_behind_each(tmp_path):
    write_texts(tmp_path, {"a.txt": "one", "b.txt": "", "c.txt": "zwei\n", "d.txt": b"\xff\x00\xfe"})
    out = prepare(tmp_path, tmp_path / "out", {"text": "*.txt"})
    assert text_of(out) == b"one\0zwei\n\0\xff\0\xfe\0"
    manifest = manifest_of(out)
    assert (manifest["shards"][0]["documents"], manifest["shards"][0]["count"], manifest["vocab"]) == (3, 14, 256)


@pytest.mark.parametrize(("suffix", "packer"), [(".gz", gzip.compress), (".xz", lzma.compress)])
def test_packed_text_is_what_it_was_before_it_was_packed(tmp_path, suffix, packer):
    text = "".join(f"line {number}\n" for number in range(300_000)).encode()
    write_texts(tmp_path, {f"a.txt{suffix}": packer(text)})
    assert text_of(prepare(tmp_path, tmp_path / "out", {"text": "*"})) == text + b"\0"


@pytest.mark.parametrize(("suffix", "packer"), [(".gz", gzip.compress), (".xz", lzma.compress)])
@pytest.mark.parametrize(
    "harm", [lambda data: data[:-20], lambda data: b"plain text", lambda data: data[:30] + b"?" * 40 + data[70:]]
)
def test_a_damaged_packed_file_is_named(tmp_path, suffix, packer, harm):
    write_texts(tmp_path, {f"a.txt{suffix}": harm(packer(bytes(range(256)) * 100))})
    with pytest.raises(DataError, match=rf"a\.txt{suffix}: cannot be read to its end"):
        prepare(tmp_path, tmp_path / "out", {"text": "*"})
    assert not (tmp_path / "out").exists()


def test_json_lines_give_the_named_field(tmp_path):
    lines = [{"body": "one"}, {"body": ""}, {"body": "zwei ü\n"}, {"body": None}, {"body": "\ud800"}]
    write_texts(tmp_path, {"a.jsonl": "\n".join(map(json.dumps, lines)) + "\n\n"})
    out = prepare(tmp_path, tmp_path / "out", {"jsonl": "*.jsonl", "field": "body"})
    assert text_of(out) == "one\0zwei ü\n\0?\0".encode()
    assert manifest_of(out)["shards"][0]["documents"] == 3


@pytest.mark.parametrize(
    ("line", "error", "words"),
    [
        ("{broken", DataError, "the line at byte 16: not JSON"),
        ("[1]", DataError, "the line at byte 16: expected a JSON object, found list"),
        (
            '{"body": "x", "id": 1}',
            RecipeError,
            r"no field 'text'; it has 'body', 'id'\. Name it in data\.source\.field",
        ),
        ('{"text": 7}', DataError, "'text' should be text, found int"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, error, words):
    write_texts(tmp_path, {"a.jsonl": '{"text":"good"}\n' + line})
    with pytest.raises(error, match=words):
        prepare(tmp_path, tmp_path / "out", {"jsonl": "a.jsonl"})


def write_parquet(path, columns, rows_in_group):
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=rows_in_group)


def test_parquet_gives_the_named_column(tmp_path):
    texts = [f"document {number}" for number in range(1000)]
    write_parquet(tmp_path / "a.parquet", {"text": [*texts, None, ""], "id": list(range(1002))}, 300)
    out = prepare(tmp_path, tmp_path / "out", {"parquet": "*.parquet"})
    assert text_of(out).decode().split("\0")[:-1] == texts
    assert sum(shard["documents"] for shard in manifest_of(out)["shards"]) == 1000


def test_a_parquet_file_without_the_column_says_what_it_has(tmp_path):
    write_parquet(tmp_path / "a.parquet", {"body": ["x"], "id": [1]}, 10)
    with pytest.raises(RecipeError, match="no column 'text'; it has 'body', 'id'"):
        prepare(tmp_path, tmp_path / "out", {"parquet": "*.parquet"})


def test_a_file_that_is_not_parquet_is_named(tmp_path):
    write_texts(tmp_path, {"a.parquet": "no"})
    with pytest.raises(DataError, match=r"a\.parquet: not a Parquet file"):
        prepare(tmp_path, tmp_path / "out", {"parquet": "*.parquet"})


def test_without_pyarrow_the_message_says_what_to_install(tmp_path, monkeypatch):
    write_parquet(tmp_path / "a.parquet", {"text": ["x"]}, 10)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError, match=r"pip install 'phalanx\[pyarrow\]'"):
        prepare(tmp_path, tmp_path / "out", {"parquet": "*.parquet"})


def joined(path, parts, kind="text", field="text"):
    chunks = [chunk for part in parts for chunk in documents(part, kind, field)]
    assert sum(chunk.begins for chunk in chunks) == sum(chunk.ends for chunk in chunks)
    return chunks


@given(
    lines=st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\n"), max_size=60), max_size=30),
    pieces=st.integers(1, 12),
    chunk=st.integers(8, 100),
)
@settings(max_examples=80, deadline=None)
def test_the_parts_of_a_text_file_are_the_file_cut_at_characters(tmp_path_factory, lines, pieces, chunk):
    path = tmp_path_factory.getbasetemp() / "text.txt"
    path.write_bytes("\n".join(lines).encode())
    file = stat_file(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "CHUNK", chunk)
        chunks = joined(
            path, split_file(file, max(file.size // pieces, 1)) if file.size else [Part(str(path), 0, 0, 0)]
        )
    assert b"".join(chunk.data for chunk in chunks) == path.read_bytes()
    for piece in chunks:
        piece.data.decode()  # no character is cut in two
    assert [chunk.begins for chunk in chunks].count(True) == 1
    assert chunks[-1].ends


@given(texts=st.lists(st.text(max_size=60), max_size=30), pieces=st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_the_parts_of_a_jsonl_file_have_every_line_once(tmp_path_factory, texts, pieces):
    path = tmp_path_factory.getbasetemp() / "lines.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    file = stat_file(path)
    parts = split_file(file, max(file.size // pieces, 1)) if file.size else []
    chunks = joined(path, parts, "jsonl")
    assert [chunk.data for chunk in chunks] == [text.encode(errors="replace") for text in texts]
    assert sum(chunk.consumed for chunk in chunks) == file.size


def test_a_file_that_vanishes_is_an_error_that_names_it(tmp_path):
    with pytest.raises(DataError, match=r"gone\.txt: cannot be read"):
        list(documents(Part(str(tmp_path / "gone.txt"), 0, 5, 5), "text", ""))
