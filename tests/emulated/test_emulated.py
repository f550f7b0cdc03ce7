"""Facts of the GPU path that can be counted without a GPU: `make test-emulated`."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.version.cuda:
    pytest.skip("needs torch's CUDA build: make test-emulated", allow_module_level=True)

from emulator import build, environment

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def emulated() -> dict[str, str]:
    return {**os.environ, **environment(build())}


def counted(emulated: dict[str, str], what: str, argument: str) -> dict[str, Any]:
    command = [sys.executable, str(HERE / "counting.py"), what, argument]
    done = subprocess.run(command, capture_output=True, text=True, env=emulated, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_blocks_compile_without_a_graph_break_and_as_many_products_as_they_need(
    emulated: dict[str, str], precision: str
) -> None:
    found = counted(emulated, "blocks", precision)
    assert found["breaks"] == 0
    assert found["products"] == 3 * (2 * 6 + 1)  # forward, two of the backward; six a block, and the head
    assert found["waits"] == found["copies_from"] == 0
    assert found["triton"] <= (32 if precision == "bf16" else 48) * 2


def test_weights_are_cast_once_a_step_and_their_gradients_added_up_by_products(emulated: dict[str, str]) -> None:
    once, autocast = (counted(emulated, "accumulated", casts) for casts in ("once", "autocast"))
    assert (once["breaks"], once["waits"], once["copies_from"]) == (0, 0, 0)
    layers, micro_batches = 2 * 6 + 1, 3
    assert once["products"] == autocast["products"] == micro_batches * 3 * layers
    # casts of weights and of their gradients were kernels of Triton, sums launches of their own
    assert once["triton"] <= autocast["triton"] - micro_batches * 2 * (layers - 1)
    assert once["launches"] <= autocast["launches"] - (micro_batches - 1) * layers


@pytest.mark.parametrize("micro_batches", ["1", "4"])
def test_the_host_waits_once_a_step_however_many_micro_batches_it_has(
    emulated: dict[str, str], micro_batches: str
) -> None:
    found = counted(emulated, "steps", micro_batches)
    assert (found["waits"], found["copies_from"]) == (1, 1)


def test_the_suites_own_count_of_waits_passes(emulated: dict[str, str]) -> None:
    """torch raises at a wait; what is computed is not looked at."""
    file = HERE.parent / "unit/train/test_train_synchronisation.py"
    paths = os.pathsep.join([str(HERE.parent), emulated.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-W", "default", "-p", "no:cacheprovider", str(file)]
    environment = {**emulated, "PYTHONPATH": paths}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "1 passed" in done.stdout


def test_what_the_fork_server_imports_leaves_cuda_to_its_children(emulated: dict[str, str]) -> None:
    assert counted(emulated, "imports", "") == {"calls": [], "forked": 0}


@pytest.mark.parametrize("kernel", ["norm_rotate", "cross_entropy"])
def test_kernels_compute_what_torchs_operations_do(kernel: str) -> None:
    """In Triton's interpreter, on the CPU."""
    command = [sys.executable, str(HERE / "interpreted.py"), kernel]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "1"}, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert max(json.loads(done.stdout.splitlines()[-1])) < 1e-5
