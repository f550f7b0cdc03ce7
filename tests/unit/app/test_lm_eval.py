"""Scores of lm-eval's tasks, by a stand-in that writes its files."""

import json
import stat
import sys
from pathlib import Path

import pytest

from phalanx.app.lm_eval import read_scores
from phalanx.cli import main
from phalanx.errors import DataError

STAND_IN = f"""#!{sys.executable}
import json, os, pathlib, sys
assert sys.argv[1:3] == ["-m", "lm_eval"]
given = dict(zip(sys.argv[3::2], sys.argv[4::2]))
directory = pathlib.Path(json.loads(given["--model_args"])["pretrained"])
if given["--tasks"] == "unknown":
    sys.exit("Tasks were not found: unknown")
print("lm-eval prints much")
results = {{
    "gsm8k": {{
        "alias": "gsm8k",
        "exact_match,strict-match": 0.25,
        "exact_match_stderr,strict-match": 0.01,
        "limit,none": float(given["--limit"]),
    }},
    "wikitext": {{
        "alias": "wikitext", "word_perplexity,none": 7.5, "word_perplexity_stderr,none": "N/A",
        "files,none": len(list(directory.glob("*.safetensors"))),
        "chat,none": int("--apply_chat_template" in sys.argv),
    }},
}}
out = pathlib.Path(given["--output_path"]) / "model"
out.mkdir(parents=True)
(out / "results_2026-01-01T00-00-00.000000.json").write_text(json.dumps({{"results": results, "config": {{}}}}))
"""


@pytest.fixture
def python(tmp_path: Path) -> str:
    path = tmp_path / "python"
    path.write_text(STAND_IN)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tiny = pytest.importorskip("tiny_huggingface")
    tiny.save_chat_model(tmp_path / "model", "{{ messages }}")
    return tmp_path / "model"


def test_scores_of_a_directory_are_printed(
    python: str, model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PHALANX_LM_EVAL", python)
    assert main.main(["evaluate", str(model), "--tasks", "gsm8k,wikitext", "--samples", "4"]) == 0
    printed = capfd.readouterr()
    rows = [line.split("  ") for line in printed.out.splitlines()]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert cells == [
        ["task", "metric", "value", "standard error"],
        ["gsm8k", "exact_match (strict-match)", "0.2500", "0.0100"],
        ["gsm8k", "limit", "4.0000"],
        ["wikitext", "word_perplexity", "7.5000"],
        ["wikitext", "files", "1.0000"],
        ["wikitext", "chat", "1.0000"],
    ]
    assert "lm-eval prints much" in printed.err


def test_what_lm_eval_refuses_and_a_missing_one_are_errors(
    python: str, model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["evaluate", str(model), "--tasks", "unknown", "--lm-eval", python]) == 64
    printed = capfd.readouterr().err
    assert "Tasks were not found: unknown" in printed
    assert "ended with exit code 1" in printed
    assert main.main(["evaluate", str(model), "--tasks", "gsm8k", "--lm-eval", "/nowhere/python"]) == 64
    assert "pip install 'lm-eval[hf]" in capfd.readouterr().err


def test_a_file_without_results_is_refused() -> None:
    with pytest.raises(DataError, match="expected `results`"):
        list(read_scores(json.loads('{"config": {}}')))
