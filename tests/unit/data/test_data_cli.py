"""`phalanx data`: what it prints and the codes it leaves with."""

import json

import pytest

from phalanx.cli.main import main
from phalanx.data import PrepareProgress, prepare_plan
from phalanx.data import prepare as prepare_module
from phalanx.jobs.spec import Job
from small_data import contents, write_texts


@pytest.fixture
def texts(tmp_path, monkeypatch):
    monkeypatch.chdir(write_texts(tmp_path / "texts", {f"{n}.txt": f"text {n}\n" * 2000 for n in range(10)}))
    return tmp_path


def data(*words):
    return main(["data", *map(str, words)])


def test_prepare_verify_inspect(texts, capsys):
    out = texts / "out"
    assert data("prepare", "*.txt", "--exclude", "[5-9].txt", "--out", out, "--json") == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["num_documents"], made["count"], made["begins"][:7]) == (5, 5 * 14_001, "text 0\n")
    assert data("verify", out) == 0
    assert capsys.readouterr().out.startswith(f"ok  {out}: 1 shard, 70.0 kB")
    assert data("verify", "--json", out) == 0
    assert json.loads(capsys.readouterr().out)["fingerprint"] == made["fingerprint"]
    assert data("inspect", out, "--tokens", 12) == 0
    printed = capsys.readouterr().out
    assert "fingerprint   " + made["fingerprint"] in printed
    assert printed.endswith("\n\ntext 0\ntext \n")


def test_jobs_prepare_the_parts_of_a_dataset(texts, capsys, monkeypatch):
    monkeypatch.setattr(prepare_plan, "MIN_PIECE_BYTES", 10_000)
    out = texts / "out"
    options = ["--exclude", "9.txt", "--on-bad-row", "skip", "--out", str(out), "--workers", "1"]
    jobs: list[Job] = []
    monkeypatch.setattr("phalanx.app.submit.submit_jobs", lambda _, requests, __: jobs.extend(r.job for r in requests))
    assert data("prepare", "*.txt", *options, "--on", "local", "--tasks", "3") == 0
    assert [job.name for job in jobs] == ["prepare-out.0", "prepare-out.1", "prepare-out.2"]
    for job in jobs:
        assert not out.exists()
        assert main(list(job.command[4:])) == 0
    assert data("prepare", "*.txt", *options[:4], "--out", texts / "whole") == 0
    assert contents(out) == contents(texts / "whole")


def test_jobs_for_files_that_are_not_there_are_not_submitted(texts, capsys):
    assert data("prepare", "none*.txt", "--out", texts / "out", "--on", "local", "--tasks", "2") == 78
    assert "'none*.txt' matches no file" in capsys.readouterr().err


def test_json_lines_and_a_trained_tokenizer(texts, capsys):
    write_texts(texts / "texts", {"a.jsonl": '{"body": "some words and some more words"}\n' * 50})
    words = ["a.jsonl", "--jsonl", "--text-field", "body", "--tokenizer", "bpe:260", "--out", texts / "out", "--json"]
    assert data("prepare", *words) == 0
    assert json.loads(capsys.readouterr().out)["vocab_size"] == 260


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "give one source"),
        (["*.txt", "--part", "3/2"], "expected I/N"),
        (["*.txt", "--on", "slurm"], "--tasks N"),
        (["*.txt", "--tasks", "2"], "--on BACKEND"),
        (["*.txt", "--part", "1/2", "--out", "/proc/x"], "/proc/x: cannot be written"),
        (["*.txt", "--images", "x"], "give one source"),
        (["--images", "x"], "--image-size 224 224"),
        (["*.txt", "--jsonl", "--parquet"], "give one of them"),
        (["*.txt", "--tokenizer", "bpe:many"], "a BPE has 257 to 10,000,000 tokens"),
        (["*.txt", "--out", "."], "already exists"),
    ],
)
def test_wrong_usage_is_64(texts, capsys, words, told):
    assert data("prepare", "--out", texts / "out", *words) == 64
    assert told in capsys.readouterr().err
    assert not (texts / "out").exists()


PICTURES = ["--images", "i", "--image-size", "4", "4"]
IDX = ["--idx", "a", "b"]


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (
            ["*.txt", "--text-field", "body"],
            "--text-field is for jsonl, parquet, arrow, webdataset, and the source is text",
        ),
        (["*.txt", "--image-size", "4", "4"], "--image-size is for images, webdataset, and the source is text"),
        ([*IDX, "--image-size", "4", "4"], "--image-size is for images, webdataset, and the source is idx"),
        (
            [*IDX, "--text-field", "body"],
            "--text-field is for jsonl, parquet, arrow, webdataset, and the source is idx",
        ),
        (
            [*PICTURES, "--exclude", "x"],
            "--exclude is for text, jsonl, parquet, arrow, tokens, webdataset, and the source is images",
        ),
        ([*PICTURES, "--tokenizer", "bpe:300"], "--tokenizer is for text, and the source has images"),
    ],
)
def test_options_that_a_source_does_not_use_are_refused(capsys, words, option):
    assert data("prepare", "--out", "o", *words) == 64
    assert option in capsys.readouterr().err


def test_a_glob_without_files_is_78(texts, capsys):
    assert data("prepare", "*.rst", "--out", texts / "out") == 78
    assert "'*.rst' matches no file" in capsys.readouterr().err


def test_a_damaged_dataset_is_65(texts, capsys):
    data("prepare", "*.txt", "--out", texts / "out")
    shard = texts / "out" / "shard-00000.bin"
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    assert data("verify", texts / "out") == 65
    error = capsys.readouterr().err
    assert "shard-00000.bin block 2 (bytes 131072 to 140009): the checksum differs" in error
    assert "Traceback" not in error


def test_ctrl_c_is_75_and_says_how_to_go_on(texts, capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare_plan, "MIN_PIECE_BYTES", 30_000)
    monkeypatch.setattr(prepare_module, "_commit_dataset", interrupted)
    with pytest.raises(SystemExit) as left:
        data("prepare", "*.txt", "--out", texts / "out")
    assert left.value.code == 75
    assert "run the same command again to resume" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.chdir(texts / "texts")
    monkeypatch.setattr(prepare_plan, "MIN_PIECE_BYTES", 30_000)
    assert data("prepare", "*.txt", "--out", texts / "out") == 0


def test_without_a_terminal_progress_is_a_line_every_few_seconds(capsys):
    from phalanx.cli.data import _ProgressLines

    lines = _ProgressLines("preparing")
    for second in range(12):
        lines(PrepareProgress(second * 10**6, 10**7, 1000 * second, float(second)))
    lines(PrepareProgress(0, 0, 0, 13.0, "waiting"))
    assert capsys.readouterr().err.splitlines() == [
        "preparing  5.00 MB of 10.0 MB  5,000 done  1.00 MB/s",
        "preparing  10.0 MB of 10.0 MB  10,000 done  1.00 MB/s",
        "waiting",
    ]
