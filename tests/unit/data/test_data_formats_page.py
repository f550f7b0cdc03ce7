"""docs/reference/data-formats.md: each example is prepared from files that other code wrote."""

import gzip
import io
import json
import re
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import PIL.Image
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
import tokenizers
from ruamel.yaml import YAML

from phalanx.cli.main import main
from phalanx.data import prepare_source
from phalanx.recipe.data_schema import SOURCE_KINDS, DataConfig
from small_data import all_tokens, manifest_of

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "data-formats.md"
TEXT = "a row"
TOKENS = np.array([5, 6, 0, 7, 8, 9, 0])


def write_saved(folder: Path) -> None:
    (folder / "saved" / "train").mkdir(parents=True)
    table = pyarrow.table({"text": [TEXT]})
    with pyarrow.ipc.new_stream(folder / "saved" / "train" / "data-00000-of-00001.arrow", table.schema) as writer:
        writer.write_table(table)
    state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}
    (folder / "saved" / "train" / "state.json").write_text(json.dumps(state))


def write_megatron(folder: Path) -> None:
    TOKENS.astype("<i4").tofile(folder / "corpus_text_document.bin")
    lengths, pointers, edges = np.array([3, 4], "<i4"), np.array([0, 12], "<i8"), np.arange(3, dtype="<i8")
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 4, 2, 3)
    index = header + lengths.tobytes() + pointers.tobytes() + edges.tobytes()
    (folder / "corpus_text_document.idx").write_bytes(index)


def write_llm_c(folder: Path) -> None:
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(TOKENS)
    (folder / "fineweb_train_000001.bin").write_bytes(header.tobytes() + TOKENS.astype("<u2").tobytes())


def write_tar(path: Path, members: dict[str, bytes], mode: str) -> None:
    with tarfile.open(path, mode) as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def write_photos(folder: Path) -> None:
    stream = io.BytesIO()
    PIL.Image.new("RGB", (8, 8), "red").save(stream, "PNG")
    write_tar(folder / "photos-0.tar", {"0.png": stream.getvalue(), "0.cls": b"1"}, "w")


BAD_ROWS = "\n".join([f'{{"text": "{TEXT}"}}', '{"text": null}', '{"text": no}', "", '{"text": 7}'])
WRITERS: dict[str, Callable[[Path], object]] = {
    "answers": lambda folder: (folder / "answers.jsonl").write_text(json.dumps({"choices": [{"text": TEXT}]})),
    "pages.parquet": lambda folder: pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([{"page": {"paragraphs": [TEXT]}}]), folder / "pages.parquet"
    ),
    "saved": write_saved,
    "corpus": write_megatron,
    "fineweb": write_llm_c,
    "openwebtext": lambda folder: TOKENS.astype("<u2").tofile(folder / "openwebtext.bin"),
    "photos": write_photos,
    "pages.tar": lambda folder: write_tar(folder / "pages.tar.gz", {"0.txt": TEXT.encode()}, "w:gz"),
    "rows": lambda folder: (folder / "rows.jsonl").write_text(BAD_ROWS),
}


@pytest.mark.parametrize("example", re.findall(r"^```yaml\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL))
def test_each_example_of_the_page_is_what_it_says(tmp_path: Path, example: str) -> None:
    names = [name for name in WRITERS if name in example]
    assert len(names) == 1
    WRITERS[names[0]](tmp_path)
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"<|endoftext|>": 0, **{str(n): n for n in range(1, 20)}}, unk_token="1")
    )
    words.add_special_tokens(["<|endoftext|>"])
    words.save(str(tmp_path / "tokenizer.json"))
    data = DataConfig.model_validate(YAML(typ="safe").load(example)["data"])
    assert not isinstance(data.source, list)
    out = prepare_source(data.source, data, tmp_path, tmp_path / "out", num_workers=1)
    if data.source.has_images:
        shard = manifest_of(out)["shards"][0]
        assert (out / shard["file"]).read_bytes() == struct.pack("<I", 1) + bytes([255, 0, 0]) * 64
    elif data.source.kind == "tokens":
        assert all_tokens(out).tolist() == TOKENS.tolist()
    else:
        assert all_tokens(out).tobytes() == f"{TEXT}\0".encode()


def test_each_kind_of_source_is_in_the_table_of_the_page() -> None:
    table = PAGE.read_text().split("\n\n")[2]
    assert {kind for kind in SOURCE_KINDS if f"`{kind}: " in table} == set(SOURCE_KINDS)


def test_bad_rows_are_printed_as_on_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(BAD_ROWS)
    for options, code, start in (([], 65, "error: "), (["--on-bad-row", "skip"], 0, "warning: ")):
        assert main(["data", "prepare", "rows.jsonl", "--jsonl", *options, "--out", f"out{code}"]) == code
        printed = capsys.readouterr().err.replace(f"{tmp_path}/", "")
        assert next(line for line in printed.splitlines() if line.startswith(start)) in PAGE.read_text()


def test_a_packed_text_of_json_is_read(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(gzip.compress(BAD_ROWS.encode()))
    data = DataConfig.model_validate({"source": {"jsonl": "rows.jsonl"}, "on_bad_row": "skip"})
    assert not isinstance(data.source, list)
    out = prepare_source(data.source, data, tmp_path, tmp_path / "out", num_workers=1)
    assert json.loads((out / "skipped.json").read_text())["kinds"]["not JSON"]["first"] == [
        f"{tmp_path}/rows.jsonl, line 3"
    ]
