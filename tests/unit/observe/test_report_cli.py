"""`phalanx report` and `phalanx compare` as typer commands."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from make_run import healthy
from phalanx.cli.report import compare, report
from phalanx.errors import UsageError
from phalanx.run import Run
from phalanx.run.events import UnknownFormat
from read_trackers import read_tensorboard

app = typer.Typer()
app.command()(report)
app.command()(compare)


def run(*words: object):  # type: ignore[no-untyped-def]
    return CliRunner().invoke(app, [str(word) for word in words])


def test_report_writes_html_and_prints_json(tmp_path: Path) -> None:
    path, page = healthy(tmp_path / "run", total=20, precision="fp32"), tmp_path / "page.html"
    assert run("report", path, "--html", page).output == f"wrote {page}\n"
    assert page.read_text().startswith("<!doctype html>")
    facts = json.loads(run("report", path, "--json").output)
    assert facts["status"] == "done"
    assert [each["recipe_key"] for each in facts["recommendations"]] == ["precision"]


def test_report_sends_a_run_to_a_tracker_and_says_where_it_is(tmp_path: Path) -> None:
    path = healthy(tmp_path / "run", total=20)
    result = run("report", path, "--to", "tensorboard")
    assert result.exit_code == 0
    assert result.stdout == f"{path} is in tensorboard up to step 20: {path / 'tensorboard'}\n"
    assert [step for step, _ in read_tensorboard(Run(path), "train/loss")] == list(range(1, 21))


def test_report_does_not_send_and_report_at_once(tmp_path: Path) -> None:
    result = run("report", healthy(tmp_path / "run", total=20), "--to", "tensorboard", "--json")
    assert isinstance(result.exception, UsageError)
    assert "leave out --html and --json" in str(result.exception)


def test_report_of_no_run_and_a_page_that_cannot_be_written_are_usage_errors(tmp_path: Path) -> None:
    assert isinstance(run("report", tmp_path / "none").exception, UsageError)
    path = healthy(tmp_path / "run", total=5)
    result = run("report", path, "--html", tmp_path / "none" / "page.html")
    assert isinstance(result.exception, UsageError)


@pytest.mark.parametrize("verb", ["report", "compare"])
def test_events_of_a_format_that_is_not_known_are_refused(tmp_path: Path, verb: str) -> None:
    path = healthy(tmp_path / "run", total=5)
    events = path / "events.jsonl"
    first = '{"kind": "log_opened", "time": 1.0, "format": 9, "phalanx_version": "7.0"}\n'
    events.write_text(first + events.read_text())
    found = run(verb, *[path] * (1 + (verb == "compare"))).exception
    assert isinstance(found, UnknownFormat)
    assert str(found).startswith(f"{events}: format 9, written by Phalanx 7.0; this Phalanx")


@pytest.mark.parametrize("option", ["", "--json", "--html"])
def test_compare_prints_text_json_or_a_page(tmp_path: Path, option: str) -> None:
    paths = [healthy(tmp_path / name, total=20) for name in ("one", "two")]
    options = [option, tmp_path / "page.html"] if option == "--html" else [option] if option else []
    result = run("compare", *paths, *options)
    assert result.exit_code == 0
    if option == "--json":
        assert json.loads(result.output)["same_digest"] is True
    elif option == "--html":
        assert (tmp_path / "page.html").exists()
    else:
        assert "Digests are equal" in result.output


def test_importing_the_commands_imports_nothing_heavy() -> None:
    code = "import sys, phalanx.cli.report; heavy = {'torch', 'numpy', 'yaml'}; print(sorted(heavy & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_report_never_imports_torch(tmp_path: Path) -> None:
    path = healthy(tmp_path / "run", total=5)
    code = f"import sys; from pathlib import Path; from phalanx.cli.report import report; report(Path({str(path)!r}));"
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
