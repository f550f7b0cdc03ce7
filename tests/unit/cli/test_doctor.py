"""`phalanx doctor` with checks that are made up: what it prints, writes and refuses, and its exit codes."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phalanx.cli import main
from phalanx.cluster.health import HealthFinding, HealthVerdict, runner
from phalanx.cluster.health.runner import NodeHealthReport

FINE = HealthFinding("memory", HealthVerdict.PASS, "much is free", {"available": 12})
UNSURE = HealthFinding("clock", HealthVerdict.UNKNOWN, "not known")
SMALL = HealthFinding("disk/run", HealthVerdict.WARN, "runs/x: 5.0 of 99.0 GiB free")
BROKEN = HealthFinding("gpus/gpu1", HealthVerdict.FAIL, "it does not answer")
HUNG = HealthFinding("matmul", HealthVerdict.ERROR, "it did not finish within 120 s")


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """As before."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the checks find what is given."""

    def make(*findings: HealthFinding) -> None:
        made = NodeHealthReport("node7", 1000.0, 2.5, findings)
        monkeypatch.setattr(runner, "run_checks", lambda site, checks, progress: made)

    return make


def doctor(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main.main(["doctor", *(str(word) for word in words)])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize(
    ("findings", "code"),
    [((FINE, UNSURE), 0), ((FINE, SMALL), 0), ((FINE, BROKEN), 77), ((FINE, HUNG), 77)],
)
def test_a_machine_is_unfit_when_anything_is_bad_or_unfinished(
    findings: tuple[HealthFinding, ...], code: int, says: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    says(*findings)
    assert doctor(capsys)[0] == code


def test_the_page_shows_each_finding_and_what_comes_of_them(says: Any, capsys: pytest.CaptureFixture[str]) -> None:
    says(FINE, SMALL, BROKEN)
    assert doctor(capsys)[1].splitlines() == [
        "PASS     memory     much is free",
        "WARN     disk/run   runs/x: 5.0 of 99.0 GiB free",
        "FAIL     gpus/gpu1  it does not answer",
        "",
        "node7: NOT FIT to train (1 FAIL, 1 WARN, 1 PASS), checked in 2.5 s",
    ]


def test_quietly_an_unfit_machine_says_what_is_not_right(says: Any, capsys: pytest.CaptureFixture[str]) -> None:
    says(FINE, BROKEN)
    lines = doctor(capsys, "--quiet")[1].splitlines()
    assert lines[0].split() == ["FAIL", "gpus/gpu1", "it", "does", "not", "answer"]
    assert lines[1].startswith("node7: NOT FIT")
    assert len(lines) == 2


def test_json_is_one_line_with_the_verdict_and_all_figures(says: Any, capsys: pytest.CaptureFixture[str]) -> None:
    says(FINE, HUNG)
    code, out, _ = doctor(capsys, "--json")
    (line,) = out.splitlines()
    value = json.loads(line)
    assert (code, value["node"], value["verdict"], value["fit"]) == (77, "node7", "ERROR", False)
    assert value["findings"][0]["figures"] == {"available": 12}


def nodes(folder: Path, **seconds: float) -> list[Path]:
    """Reports of nodes whose reference product takes so long."""
    paths = []
    for name, value in seconds.items():
        pace = HealthFinding("matmul", HealthVerdict.PASS, "", {"device": "H100", "time_s": value})
        path = folder / f"{name}.json"
        path.write_text(json.dumps(NodeHealthReport(name, 1000.0, 1.0, (pace,)).as_json()) + "\n")
        paths.append(path)
    return paths


def test_of_three_nodes_the_slow_one_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = doctor(capsys, "--compare", "--quiet", *nodes(tmp_path, n1=0.010, n2=0.010, n3=0.015))
    assert code == 77
    assert out.splitlines() == [
        "n3  FAIL     fleet/matmul  33% below the median of 3 nodes",
        "1 of 3 nodes are NOT FIT to train: n3",
    ]


def test_a_comparison_has_its_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _, out, _ = doctor(capsys, "--compare", "--json", *nodes(tmp_path, n1=0.010, n2=0.010, n3=0.015))
    assert {each["node"]: each["fit"] for each in json.loads(out)["nodes"]} == {"n1": True, "n2": True, "n3": False}


def test_reports_of_several_nodes_may_be_lines_of_one_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    both = tmp_path / "all.jsonl"
    both.write_text("".join(path.read_text() for path in nodes(tmp_path, n1=0.010, n2=0.010)))
    assert doctor(capsys, "--compare", both)[1].splitlines()[-1] == "all 2 nodes are fit to train"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "memroy"], "no check 'memroy'; did you mean 'memory'?"),
        (["--skip", "zzz"], "no check 'zzz'. There are: versions"),
        (["--quick", "--only", "matmul"], "--quick leaves out those that measure"),
        (["report.json"], "reports need --compare"),
        (["--compare"], "--compare needs the reports"),
        (["--compare", "nowhere.json"], "nowhere.json: No such file"),
        (["--compare", "torn.json"], "torn.json:1: expected a report"),
        (["--compare", "other.json"], "other.json:1: expected a report"),
        (["--compare", "twice.json"], "twice.json:2: node n1 is in twice.json already"),
    ],
)
def test_what_cannot_be_is_told(
    words: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (one,) = nodes(tmp_path, n1=0.01)
    Path("torn.json").write_text('{"format": 1, "node"')
    Path("other.json").write_text("[1, 2]")
    Path("twice.json").write_text(one.read_text() * 2)
    code, out, err = doctor(capsys, *words)
    assert (code, out) == (64, "")
    assert message in err


def test_a_quick_look_at_this_machine_imports_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from phalanx.cli.main import main; from phalanx.cluster.health.runner import HEALTH_CHECKS, "
        "run_check_in_process\n"
        "from phalanx.cluster.health import CheckContext\n"
        f"site = CheckContext(__import__('pathlib').Path({str(tmp_path)!r})).as_json()\n"
        "[run_check_in_process({'check': each.name, 'site': site}) for each in HEALTH_CHECKS if not "
        "each.is_benchmark]\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_checks_of_this_very_machine_can_be_chosen(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = doctor(capsys, "--json", "--only", "ulimits", "--only", "disk", "--run", tmp_path)
    assert [each["check"] for each in json.loads(out)["findings"]] == ["ulimits", "disk/run", "disk/cache", "disk/temp"]
    assert code in (0, 77)


def test_with_a_recipe_its_storage_is_measured(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    recipe = tmp_path / "small.yaml"
    recipe.write_text("data: {source: {text: 'nowhere/*.txt'}}")
    upload = f"checkpoint.upload.to=file://{tmp_path}/store"
    code, out, _ = doctor(capsys, recipe, upload, "--run", tmp_path / "run", "--only", "storage", "--json")
    findings = {each["check"]: each for each in json.loads(out)["findings"]}
    assert code == 77
    assert {name: each["verdict"] for name, each in findings.items()} == {
        "storage/run": "PASS",
        "storage/checkpoint.upload.to": "PASS",
        "storage/data.source": "FAIL",
    }
    assert findings["storage/checkpoint.upload.to"]["figures"]["write_gbps"] > 0
    assert list(tmp_path.iterdir()) == [recipe]


def test_of_a_run_at_a_url_the_store_is_measured_and_the_disk_of_its_scratch(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHALANX_CACHE_DIR", str(tmp_path / "cache"))
    url = f"file://{tmp_path}/store/run"
    _, out, _ = doctor(capsys, "--run", url, "--only", "storage", "--only", "disk", "--json")
    findings = {each["check"]: each for each in json.loads(out)["findings"]}
    assert findings["storage/run"]["verdict"] == "PASS"
    assert findings["storage/run"]["reason"].startswith(f"{url}: write ")
    assert findings["disk/run"]["reason"].startswith(str(tmp_path / "cache"))
