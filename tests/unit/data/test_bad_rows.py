"""Rows that cannot be read: named by the first error, or skipped, counted by kind, and reported."""

import gzip
import json
from pathlib import Path

import PIL.Image
import pyarrow
import pyarrow.parquet
import pytest

from phalanx.app.prepare_run import describe_data
from phalanx.cli.main import main
from phalanx.data import inspect_dataset, prepare_plan
from phalanx.data.prepare import prepare_source
from phalanx.errors import DataError, RecipeError
from phalanx.recipe import Recipe
from phalanx.recipe.data_schema import DataConfig
from small_data import all_tokens, contents, opened, prepare, write_texts

GOOD = '{"text": "good"}'
BAD_LINES = {
    "not JSON": ["{broken", "[" * 100_000],
    "without a JSON object": ["[1]", '"text"'],
    "without the field": ['{"body": "x"}'],
    "without text": ['{"text": null}', '{"text": 7}', '{"text": [1]}'],
    "not UTF-8": [b'{"text": "caf\xe9"}'],
}


def prepare_skipping(folder: Path, out: Path, source: dict[str, object], num_workers: int = 1) -> Path:
    data = DataConfig.model_validate({"source": source, "on_bad_row": "skip"})
    return prepare_source(data.source, data, folder, out, num_workers=num_workers)  # type: ignore[arg-type]


def skipped(out: Path) -> dict[str, dict[str, object]]:
    return json.loads((out / "skipped.json").read_text())["kinds"]


def bad_lines() -> list[bytes]:
    lines = [line if isinstance(line, bytes) else line.encode() for kind in BAD_LINES.values() for line in kind]
    return [line for bad in lines for line in (GOOD.encode(), bad)]


def test_skipped_lines_are_counted_by_kind_with_their_numbers(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(bad_lines()))
    out = prepare_skipping(tmp_path, tmp_path / "out", {"jsonl": "a.jsonl"})
    assert all_tokens(out).tobytes() == b"good\0" * (len(bad_lines()) // 2)
    line = 0
    for kind, lines in BAD_LINES.items():
        numbers = [line := line + 2 for _ in lines]
        places = [f"{tmp_path}/a.jsonl, line {number}" for number in numbers]
        assert skipped(out)[kind] == {"count": len(lines), "first": places}
    assert inspect_dataset(out)["num_skipped_rows"] == sum(map(len, BAD_LINES.values()))


def test_skipping_depends_on_neither_workers_nor_the_good_rows(tmp_path, monkeypatch):
    lines = [GOOD if number % 7 else "{broken" for number in range(3000)]
    write_texts(tmp_path, {"a.jsonl": "\n".join(lines), "good.jsonl": "\n".join(filter(GOOD.__eq__, lines))})
    good = prepare(tmp_path, tmp_path / "good", {"jsonl": "good.jsonl"})
    monkeypatch.setattr(prepare_plan, "MIN_PIECE_BYTES", 10_000)
    outs = [prepare_skipping(tmp_path, tmp_path / f"out{n}", {"jsonl": "a.jsonl"}, n) for n in (1, 2)]
    assert contents(outs[0]) == contents(outs[1])
    assert all_tokens(outs[0]).tobytes() == all_tokens(good).tobytes()
    first = [f"{tmp_path}/a.jsonl, line {line}" for line in (1, 8, 15)]
    assert skipped(outs[0]) == {"not JSON": {"count": 429, "first": first}}


@pytest.mark.parametrize("line", [2, 40_000])
@pytest.mark.parametrize("packed", [True, False])
def test_an_error_names_the_line_and_the_way_to_skip_it(tmp_path, monkeypatch, line, packed):
    monkeypatch.setattr(prepare_plan, "MIN_PIECE_BYTES", 10_000)
    lines = [GOOD] * 50_000
    lines[line - 1] = "{broken"
    data = "\n".join(lines).encode()
    (tmp_path / "a.jsonl").write_bytes(gzip.compress(data) if packed else data)
    words = rf"a\.jsonl, line {line}: not JSON \(.*\) \(data\.on_bad_row: skip leaves such rows out\)"
    with pytest.raises(DataError, match=words):
        prepare(tmp_path, tmp_path / "out", {"jsonl": "a.jsonl"})


def test_rows_of_parquet_have_numbers_in_their_file(tmp_path):
    texts = ["x"] * 50 + [None] + ["x"] * 9
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet", row_group_size=20)
    with pytest.raises(DataError, match=r"a\.parquet, row 50: 'text' should be text, found null"):
        prepare(tmp_path, tmp_path / "out", {"parquet": "a.parquet"})
    out = prepare_skipping(tmp_path, tmp_path / "out", {"parquet": "a.parquet"})
    assert skipped(out) == {"without text": {"count": 1, "first": [f"{tmp_path}/a.parquet, row 50"]}}
    assert all_tokens(out).tobytes() == b"x\0" * 59


def test_a_source_of_bad_rows_only_is_refused(tmp_path):
    write_texts(tmp_path, {"a.jsonl": '{"body": 1}\n' * 5})
    places = "; ".join(rf".*a\.jsonl, line {line}" for line in (1, 2, 3))
    with pytest.raises(
        RecipeError, match=rf"contain no text; skipped 5 rows: 5 without the field \({places}; \.\.\.\)"
    ):
        prepare_skipping(tmp_path, tmp_path / "out", {"jsonl": "a.jsonl"})


def test_images_that_cannot_be_decoded_are_skipped(tmp_path):
    (tmp_path / "images" / "red").mkdir(parents=True)
    PIL.Image.new("RGB", (8, 6), "red").save(tmp_path / "images" / "red" / "a.png")
    write_texts(tmp_path, {"images/red/b.png": "no picture"})
    out = prepare_skipping(tmp_path, tmp_path / "out", {"images": "images", "image_size": [4, 4]})
    assert skipped(out) == {"not images": {"count": 1, "first": [f"{tmp_path}/images/red/b.png"]}}


def test_storage_that_fails_is_never_skipped(tmp_path, monkeypatch):
    (tmp_path / "images" / "red").mkdir(parents=True)
    PIL.Image.new("RGB", (8, 6), "red").save(tmp_path / "images" / "red" / "a.png")

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("phalanx.data.images.open_location", fail)
    with pytest.raises(DataError, match=r"a\.png: cannot be read to its end"):
        prepare_skipping(tmp_path, tmp_path / "out", {"images": "images", "image_size": [4, 4]})


def test_skipped_rows_are_in_the_warning_and_in_the_facts_of_a_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path, {"a.jsonl": f"{GOOD}\n" * 20 + "{broken\n"})
    assert main(["data", "prepare", "a.jsonl", "--jsonl", "--on-bad-row", "skip", "--out", "out"]) == 0
    printed = capsys.readouterr()
    assert f"warning: skipped 1 row: 1 not JSON ({tmp_path}/a.jsonl, line 21)" in printed.err
    assert "skipped rows  1" in printed.out
    recipe = Recipe.model_validate({"data": {"source": {"prepared": str(tmp_path / "out")}}})
    assert "1 bad row skipped" in describe_data(opened(tmp_path / "out"), recipe)


def test_a_dataset_that_skipped_nothing_has_no_list(tmp_path):
    write_texts(tmp_path, {"a.jsonl": GOOD})
    out = prepare_skipping(tmp_path, tmp_path / "out", {"jsonl": "a.jsonl"})
    assert not (out / "skipped.json").exists()
    assert inspect_dataset(out)["num_skipped_rows"] is None
