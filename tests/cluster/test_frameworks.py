"""Real programs of each framework, two processes each, started by `phalanx jobs`' launcher on one node and on two."""

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from phalanx.run.authentication import reserve_port

PROGRAMS = Path(__file__).parent / "programs"
INTERPRETER = os.environ.get("PHALANX_TEST_FRAMEWORKS", sys.executable)
"""A Python that has the frameworks, where they are not beside the tests' own."""


def has(module: str) -> bool:
    """Whether that Python can import a module."""
    if sys.executable == INTERPRETER:
        return importlib.util.find_spec(module) is not None
    return subprocess.run([INTERPRETER, "-c", f"import {module}"], capture_output=True, check=False).returncode == 0


def needs(module: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not has(module), reason=f"SKIPPED: {module} is not installed (PHALANX_TEST_FRAMEWORKS)")


def launch(framework: str, each: int, command: Sequence[str], **variables: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "phalanx.jobs.frameworks.launcher", framework, str(each), "--", *command],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def on_one_node(framework: str, program: str, each: int = 2, python: str = INTERPRETER) -> tuple[int, list[str], str]:
    with launch(framework, each, [python, str(PROGRAMS / program)]) as process:
        out, errors = process.communicate(timeout=120)
    return process.returncode, out.splitlines(), errors


def on_two_nodes(tmp_path: Path, command: Sequence[str], each: int = 1) -> list[tuple[int, str, str]]:
    """Two launchers on this machine, as two nodes would run them: code, output and errors of each."""
    token = tmp_path / "token"
    token.write_text("0123456789abcdef" * 4)
    token.chmod(0o600)
    with reserve_port() as reserved:
        leader = f"127.0.0.1:{reserved.getsockname()[1]}"
        shared = {"PHALANX_NUM_NODES": "2", "PHALANX_LEADER_ADDR": leader, "PHALANX_TOKEN_FILE": str(token)}
        processes = [launch("torch", each, command, **shared, PHALANX_NODE_RANK=str(node)) for node in (1, 0)]
        found = []
        for process in reversed(processes):
            out, errors = process.communicate(timeout=60)
            found.append((process.returncode, out, errors))
    return found


def test_pytorch_sums_over_two_processes() -> None:
    code, lines, errors = on_one_node("torch", "torch_sum.py", python=sys.executable)
    assert code == 0, errors
    assert sorted(lines) == ["0| sum 3 of 2", "1| sum 3 of 2"]


def test_pytorch_sums_over_two_nodes(tmp_path: Path) -> None:
    first, second = on_two_nodes(tmp_path, [sys.executable, str(PROGRAMS / "torch_sum.py")], each=1)
    assert first == (0, "0| sum 3 of 2\n", "")
    assert second == (0, "1| sum 3 of 2\n", "")


@needs("jax")
def test_jax_sums_over_two_processes() -> None:
    code, lines, errors = on_one_node("jax", "jax_sum.py")
    assert code == 0, errors
    assert {"0| sum 3 of 2", "1| sum 3 of 2"} <= set(lines)


@needs("tensorflow")
def test_tensorflow_sums_over_two_processes() -> None:
    code, lines, errors = on_one_node("tensorflow", "tensorflow_sum.py")
    assert code == 0, errors
    assert {"0| sum 3 of 2", "1| sum 3 of 2"} <= set(lines)


@needs("mpi4py")
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="SKIPPED: mpirun (Open MPI) is not installed")
def test_mpi_sums_over_two_processes() -> None:
    code, lines, errors = on_one_node("mpi", "mpi_sum.py")
    assert code == 0, errors
    assert "".join(lines) == "sum 3 of 2" * 2  # mpirun may put both before their line ends


def test_when_one_process_fails_all_end_with_its_code() -> None:
    program = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(7)\ntime.sleep(300)"
    begun = time.monotonic()
    with launch("torch", 2, [sys.executable, "-c", program]) as process:
        process.communicate(timeout=30)
    assert process.returncode == 7
    assert time.monotonic() - begun < 20


def test_when_one_node_fails_the_other_ends_with_its_code(tmp_path: Path) -> None:
    program = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(93)\ntime.sleep(300)"
    found = on_two_nodes(tmp_path, [sys.executable, "-c", program])
    assert [code for code, _, _ in found] == [93, 93]


def test_a_program_that_is_not_there_is_told_without_a_traceback() -> None:
    with launch("torch", 1, ["/nowhere/program"]) as process:
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 64
    assert errors == "error: /nowhere/program: No such file or directory\n"
