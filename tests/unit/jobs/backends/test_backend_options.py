"""Options of backends in help texts and docs, and what the docs say that each backend can do."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.cli import main
from phalanx.errors import UsageError
from phalanx.jobs.backends.base import BACKEND_CLASSES, OPTION_CLASSES, Backend, list_option_help, open_backend
from phalanx.jobs.backends.slurm.sbatch_options import parse_options
from phalanx.jobs.spec import Job

HOW_TO = Path(__file__).parents[4] / "docs" / "how-to"
MATRICES = {
    "local": ("jobs.md", "### Compatibility"),
    "slurm": ("slurm.md", "## Compatibility"),
    "ray": ("ray-and-kubernetes.md", "### Compatibility on Ray"),
    "kubernetes": ("ray-and-kubernetes.md", "### Compatibility on Kubernetes"),
}


@pytest.mark.parametrize("command", [["train"], ["jobs", "submit"]])
def test_help_lists_each_option_of_each_backend(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([*command, "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for backend in OPTION_CLASSES:
        assert f"Backend options with --on {backend}:" in shown
        for option in list_option_help(backend):
            note = f" [{option.note}]" if option.note else ""
            assert f"-o {option.name}={option.value_type} {option.help}{note}" in shown


def test_help_of_a_command_without_backend_options_lists_none(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["jobs", "cancel"], ["plan"]):
        assert main.main([*command, "--help"]) == 0
        assert "Backend options" not in capsys.readouterr().out


def test_the_list_needs_neither_torch_nor_a_client_library() -> None:
    code = (
        "import sys; from phalanx.jobs.backends.base import *\n"
        "count = sum(1 for backend in OPTION_CLASSES for _ in list_option_help(backend))\n"
        "print(count, sorted({'torch', 'ray', 'kubernetes'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"[1-9]\d* \[\]\n", done.stdout)


def test_defaults_are_those_that_a_job_gets(tmp_path: Path) -> None:
    defaults = {option.name: option.default for backend in OPTION_CLASSES for option in list_option_help(backend)}
    job = Job("a", ("true",), tmp_path)
    assert str(parse_options(job, (24, 5)).max_requeues) == defaults["max-requeues"]
    assert defaults["exclusive"] == "no"
    assert not [option for option in parse_options(job, (24, 5)).sbatch_options if option.startswith("--exclusive")]
    request = open_backend("ray").render(job)
    assert '"max_restarts": 10' in str(request).replace("\\", "")
    assert defaults["max-restarts"] == "10"
    with pytest.raises(UsageError, match="image=REGISTRY/NAME:TAG"):
        open_backend("kubernetes").render(job)
    assert [option.name for option in list_option_help("kubernetes") if option.is_required] == ["image"]


def read_matrix(backend: str) -> dict[str, str]:
    """The compatibility matrix of a backend's page, by feature."""
    page, heading = MATRICES[backend]
    text = (HOW_TO / page).read_text().partition(f"\n{heading}\n")[2]
    return dict(re.findall(r"^\| ([a-z-]+) \| (.+) \|$", re.split(r"^#", text, flags=re.M)[0], flags=re.M)[1:])


@pytest.mark.parametrize("backend", BACKEND_CLASSES)
def test_the_page_of_each_backend_says_what_it_can_do(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHALANX_STATE_DIR", str(tmp_path))
    matrix = read_matrix(backend)
    assert list(matrix) == ["logs", "cancel", "requeue", "arrays", "containers", "multi-node"]
    options = {option.name for option in list_option_help(backend)} if backend in OPTION_CLASSES else set()
    assert ("job array" in matrix["arrays"]) is (type(open_backend(backend)).render_array is not Backend.render_array)
    assert ("-o" in matrix["containers"]) is any(name.endswith("image") for name in options)
    assert {name for text in matrix.values() for name in re.findall(r"`-o ([a-z-]+)", text)} <= options
    assert matrix["multi-node"].startswith("no" if backend == "local" else "yes")
