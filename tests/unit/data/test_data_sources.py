"""Finding files and reading documents: globs, packed files, JSON lines, Parquet; large files in parts."""

import bz2
import gzip
import json
import lzma
import os
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.data import prepare as prepare_module
from phalanx.data import sources
from phalanx.data.source_files import find_files, stat_source_file
from phalanx.data.sources import CHUNK_BYTES, FilePart, iterate_documents, split_source_file
from phalanx.errors import DataError, ExitCode, PhalanxError, RecipeError, UsageError
from phalanx.run.call_process import CallProcess
from small_data import all_tokens, manifest_of, prepare, write_texts


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


def test_an_excluded_directory_is_not_entered(tree, monkeypatch):
    entered = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: entered.append(Path(path).name) or scandir(path))
    assert names(find_files("**/*.txt", "**/skip/**", tree)) == ["a.txt", "b.txt", "c.txt"]
    assert "er" in entered
    assert "skip" not in entered


def test_a_folder_with_a_glob_character_in_its_name_is_searched(tmp_path):
    write_texts(tmp_path / "we[i]rd", {"a.txt": "a"})
    write_texts(tmp_path / "we[i]rd", {"b.txt": "b", "c.txt": "c"})
    assert names(find_files("*.txt", "[!ac].txt", tmp_path / "we[i]rd")) == ["a.txt", "c.txt"]


def test_a_glob_without_files_is_named(tree):
    with pytest.raises(RecipeError, match=r"'\*\.rst' matches no file \(in .*tree\)") as error:
        find_files(["*.txt", "*.rst"], [], tree)
    assert error.value.code == 78
    with pytest.raises(RecipeError, match=r"matches no file that is not excluded \(2 are\)"):
        find_files("*.txt", "**", tree)
    with pytest.raises(RecipeError, match=r"matches no file that is not excluded \(3 are\)"):
        find_files("**/[b-d].txt", ["b.txt", "deep/**"], tree)


@pytest.mark.parametrize("packer", [bytes, gzip.compress])
@pytest.mark.parametrize("text", [b"", b"a", b"one\ntwo \xef\xbb\xbf\n", b"line\n" * (CHUNK_BYTES // 2)])
def test_a_byte_order_mark_at_the_beginning_of_a_text_file_is_left_out(tmp_path, text, packer):
    path = tmp_path / "a.txt"
    path.write_bytes(packer(b"\xef\xbb\xbf" + text))
    size = path.stat().st_size
    chunks = [
        chunk
        for part in split_source_file(stat_source_file(path), CHUNK_BYTES)
        for chunk in iterate_documents(part, "text", "text")
    ]
    assert b"".join(chunk.data for chunk in chunks) == text
    if packer is bytes:
        assert sum(chunk.bytes_read for chunk in chunks) == size


@pytest.mark.parametrize("length", [1, CHUNK_BYTES + 1])
def test_a_byte_order_mark_in_a_field_of_json_stays(tmp_path, length):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "\ufeff" + "a" * length}))
    size = (tmp_path / "a.jsonl").stat().st_size
    chunks = iterate_documents(FilePart(str(tmp_path / "a.jsonl"), 0, size, size), "jsonl", "text")
    assert b"".join(chunk.data for chunk in chunks) == b"\xef\xbb\xbf" + b"a" * length


def test_a_folder_is_named_with_what_would_match(tmp_path):
    (tmp_path / "odd.txt").mkdir()
    with pytest.raises(RecipeError, match=r"'odd.txt' matches no file: .*/odd\.txt is a folder; name the files in it"):
        find_files("odd.txt", [], tmp_path)
    os.mkfifo(tmp_path / "odd-pipe.txt")
    write_texts(tmp_path, {"odder.txt": "a"})
    assert names(find_files("odd*.txt", [], tmp_path)) == ["odder.txt"]


def test_links_upwards_bring_a_file_once(tree):
    for name in ("deep/up", "deep/er/up", "deep/er/top"):
        (tree / name).symlink_to(".." if name.endswith("up") else tree)
    assert names(find_files("**/*.txt", [], tree)) == ["a.txt", "b.txt", "c.txt", "d.txt"]


def test_many_links_among_folders_end(tmp_path):
    for number in range(12):
        write_texts(tmp_path / f"d{number}", {"a.txt": str(number)})
    for one in range(12):
        for other in range(12):
            (tmp_path / f"d{one}" / f"to{other}").symlink_to(f"../d{other}")
    assert len(find_files("**/*.txt", [], tmp_path)) == 12


def test_a_file_with_several_names_is_found_once(tree):
    (tree / "z.txt").symlink_to("a.txt")
    (tree / "y.txt").hardlink_to(tree / "b.txt")
    (tree / "other").symlink_to("deep")
    assert names(find_files(["*.txt", "other/er/*.txt", "deep/**/*.txt"], [], tree)) == [
        "a.txt", "b.txt", "c.txt", "d.txt"
    ]  # fmt: skip


def test_linked_folders_elsewhere_are_searched(tree, tmp_path):
    write_texts(tmp_path / "elsewhere", {"in/f.txt": "f"})
    (tree / "linked").symlink_to(tmp_path / "elsewhere")
    assert names(find_files("linked/**/*.txt", [], tree)) == ["f.txt"]
    assert "f.txt" in names(find_files("**/*.txt", [], tree))


@pytest.mark.parametrize("name", ["data[1].txt", "what?.txt", "a*b.txt", "[x]/c.txt"])
def test_a_name_that_exists_is_no_pattern(tmp_path, name):
    write_texts(tmp_path, {name: "this", "data1.txt": "other", "x/c.txt": "other"})
    assert [file.path for file in find_files(name, [], tmp_path)] == [str(tmp_path / name)]
    assert str(tmp_path / name) not in [file.path for file in find_files("**/*.txt", name, tmp_path)]


def test_text_files_become_documents_with_a_separator_behind_each(tmp_path):
    write_texts(tmp_path, {"a.txt": "one", "b.txt": "", "c.txt": "zwei\n", "d.txt": b"\xff\x00\xfe"})
    out = prepare(tmp_path, tmp_path / "out", {"text": "*.txt"})
    assert text_of(out) == b"one\0zwei\n\0\xff\0\xfe\0"
    manifest = manifest_of(out)
    assert (manifest["shards"][0]["documents"], manifest["shards"][0]["count"], manifest["vocab"]) == (3, 14, 256)


def zstd(data):
    return pyarrow.compress(data, codec="zstd", asbytes=True)


@pytest.mark.parametrize(
    ("suffix", "packer"),
    [
        (".gz", gzip.compress),
        (".xz", lzma.compress),
        (".bz2", bz2.compress),
        (".zst", zstd),
        (".GZ", gzip.compress),
        ("", bz2.compress),
        ("", zstd),
        (".dump", lzma.compress),
    ],
)
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


@pytest.mark.parametrize("kind", ["text", "jsonl"])
@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"PK\x03\x04\x14\x00", "is a zip archive"),
        (b"PAR1\x15\x04", "is a Parquet file; name it as `parquet`"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "is a pointer of Git LFS .* `git lfs pull`"),
        ("words".encode("utf-16"), "is in UTF-16; convert it: iconv"),
        (b"%PDF-1.7\n", "is a PDF"),
        (b"x" * 257 + b"ustar\x0000", "is a tar archive"),
        (gzip.compress(b"x" * 257 + b"ustar\x0000", mtime=0), "is a tar archive"),
        (bz2.compress(gzip.compress(b"words", mtime=0)), "is packed twice"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path, kind, data, words):
    write_texts(tmp_path, {"a.txt": data})
    with pytest.raises(DataError, match=rf"a\.txt: {words}"):
        prepare(tmp_path, tmp_path / "out", {kind: "*"})
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"


@pytest.mark.parametrize(
    ("name", "data", "source", "words"),
    [
        ("a.x", LFS_POINTER, {"parquet": "a.x"}, r"a\.x: is a pointer of Git LFS"),
        ("a.x", LFS_POINTER, {"idx": {"images": "a.x", "labels": "a.x"}}, r"a\.x: is a pointer of Git LFS"),
        (
            "a.parquet.gz",
            gzip.compress(b"PAR1", mtime=0),
            {"parquet": "*"},
            r"a\.parquet\.gz: is packed by gzip; unpack it",
        ),
        ("a.parquet", b"no", {"parquet": "*"}, r"a\.parquet: not a Parquet file"),
        ("a.txt.zst", zstd(bytes(range(256)) * 100)[:-20], {"text": "*"}, r"a\.txt\.zst: cannot be read to its end"),
        *(
            ("a.json", text, {"jsonl": "*"}, r"a\.json: is an array of JSON, .* jq -c '\.\[\]' a\.json")
            for text in (b'[\n{"text": "a"}\n]', b'[{"text": "a"},\n{"text": "b"}]', b"[" + b'{"text": "a"},' * 90)
        ),
    ],
)
def test_a_file_of_another_kind_is_named(tmp_path, name, data, source, words):
    write_texts(tmp_path, {name: data})
    with pytest.raises(DataError, match=words):
        prepare(tmp_path, tmp_path / "out", source)


def test_json_lines_give_the_named_field(tmp_path):
    lines = [{"body": "one"}, {"body": ""}, {"body": "zwei ü\n"}, {"body": "\ud800"}]
    write_texts(tmp_path, {"a.jsonl": "\n".join(map(json.dumps, lines)) + "\n\n"})
    out = prepare(tmp_path, tmp_path / "out", {"jsonl": "*.jsonl", "text_field": "body"})
    assert text_of(out) == "one\0zwei ü\n\0\ud800\0".encode(errors="surrogatepass")
    assert manifest_of(out)["shards"][0]["documents"] == 3


@pytest.mark.parametrize(
    ("line", "error", "words"),
    [
        ("{broken", DataError, "line 2: not JSON"),
        ("[1]", DataError, "line 2: expected a JSON object, found list"),
        (
            '{"body": "x", "id": 1}',
            RecipeError,
            r"no field 'text'; it has 'body', 'id'\. Name it in data.source.text_field",
        ),
        ('{"text": 7}', DataError, "'text' should be text, found int"),
        ("[" * 100_000, DataError, "line 2: not JSON that can be read: it is nested too deeply"),
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
    write_parquet(tmp_path / "a.parquet", {"text": [*texts, ""], "id": list(range(1001))}, 300)
    out = prepare(tmp_path, tmp_path / "out", {"parquet": "*.parquet"})
    assert text_of(out).decode().split("\0")[:-1] == texts
    assert sum(shard["documents"] for shard in manifest_of(out)["shards"]) == 1000


def test_a_parquet_file_without_the_column_says_what_it_has(tmp_path):
    write_parquet(tmp_path / "a.parquet", {"body": ["x"], "id": [1]}, 10)
    with pytest.raises(RecipeError, match="no column 'text'; it has 'body', 'id'"):
        prepare(tmp_path, tmp_path / "out", {"parquet": "*.parquet"})


@pytest.mark.parametrize("tokenizer", ["bytes", {"bpe": 300}])
def test_parquet_without_rows_holds_no_text(tmp_path, tokenizer):
    write_parquet(tmp_path / "a.parquet", {"text": pyarrow.array([], pyarrow.string())}, 10)
    with pytest.raises(RecipeError, match="contain no text"):
        prepare(tmp_path, tmp_path / "out", {"parquet": "*.parquet"}, tokenizer)


def test_parquet_text_that_is_no_utf8_is_named(tmp_path):
    broken = pyarrow.array([b"caf\xe9"]).cast(pyarrow.binary()).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": broken}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet, row 0: text that is not UTF-8"):
        prepare(tmp_path, tmp_path / "out", {"parquet": "*.parquet"})


def test_without_pyarrow_the_message_says_what_to_install(tmp_path, monkeypatch):
    write_parquet(tmp_path / "a.parquet", {"text": ["x"]}, 10)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError, match=r"pip install 'phalanx\[pyarrow\]'"):
        prepare(tmp_path, tmp_path / "out", {"parquet": "*.parquet"})


def joined(path, parts, kind="text", field="text"):
    chunks = [chunk for part in parts for chunk in iterate_documents(part, kind, field)]
    assert sum(chunk.starts_document for chunk in chunks) == sum(chunk.ends_document for chunk in chunks)
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
    file = stat_source_file(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "CHUNK_BYTES", chunk)
        chunks = joined(
            path, split_source_file(file, max(file.size // pieces, 1)) if file.size else [FilePart(str(path), 0, 0, 0)]
        )
    assert b"".join(chunk.data for chunk in chunks) == path.read_bytes()
    for piece in chunks:
        piece.data.decode()  # no character is cut in two
    assert [chunk.starts_document for chunk in chunks].count(True) == 1
    assert chunks[-1].ends_document


@given(texts=st.lists(st.text(max_size=60), max_size=30), pieces=st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_the_parts_of_a_jsonl_file_have_every_line_once(tmp_path_factory, texts, pieces):
    path = tmp_path_factory.getbasetemp() / "lines.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    file = stat_source_file(path)
    parts = split_source_file(file, max(file.size // pieces, 1)) if file.size else []
    chunks = joined(path, parts, "jsonl")
    assert [chunk.data for chunk in chunks] == [text.encode(errors="replace") for text in texts]
    assert sum(chunk.bytes_read for chunk in chunks) == file.size


def test_a_file_that_vanishes_is_an_error_that_names_it(tmp_path):
    with pytest.raises(DataError, match=r"gone\.txt: cannot be read"):
        list(iterate_documents(FilePart(str(tmp_path / "gone.txt"), 0, 5, 5), "text", ""))


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_long_document_is_read_in_chunks_that_are_the_whole(tmp_path, kind):
    text = "".join(f"line {number}\n" for number in range(400_000))
    if kind == "jsonl":
        write_texts(tmp_path, {"a": json.dumps({"text": text}) + '\n{"text": "b"}\n'})
    else:
        pyarrow.parquet.write_table(pyarrow.table({"text": [text, "b"]}), tmp_path / "a")
    assert text_of(prepare(tmp_path, tmp_path / "out", {kind: "a"})) == text.encode() + b"\0b\0"
    part = FilePart(str(tmp_path / "a"), 0, 1 if kind == "parquet" else (tmp_path / "a").stat().st_size, 1)
    found = list(iterate_documents(part, kind, "text"))
    assert max(len(chunk.data) for chunk in found) <= CHUNK_BYTES
    assert sum(chunk.starts_document for chunk in found) == sum(chunk.ends_document for chunk in found) == 2


def test_a_process_that_prepares_and_was_killed_is_said_to_be(tmp_path, monkeypatch):
    """As when memory is short."""
    write_texts(tmp_path, {f"{name}.txt": "x" * (5 << 20) for name in "ab"})

    class Killed(CallProcess):
        def __init__(self, lock):
            super().__init__(lock)
            self.process.kill()

    monkeypatch.setattr(prepare_module, "CallProcess", Killed)
    with pytest.raises(
        PhalanxError, match=r"was killed by SIGKILL \(possibly out of memory\).* run the same command again"
    ) as refused:
        prepare(tmp_path, tmp_path / "out", {"text": "*.txt"}, num_workers=2)
    assert refused.value.code == ExitCode.UNFINISHED
