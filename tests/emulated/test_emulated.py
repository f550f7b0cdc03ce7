"""Facts of the GPU path that can be counted without a GPU: `make test-emulated`."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.run.event_types import AttemptStarted, StepDone

if not torch.version.cuda:
    pytest.skip("needs torch's CUDA build: make test-emulated", allow_module_level=True)

from emulator import ROCM, build, environment

from phalanx.recipe import load_recipe
from phalanx.run import Run, read_events

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
    found = counted(emulated, "steps", f"tiny-{micro_batches}")
    assert (found["waits"], found["copies_from"]) == (1, 1)


@dataclass(frozen=True)
class Most:
    """What a step of two micro-batches may take: kernels of torch's own and of the compiler (they depend on what it
    fuses), and bytes."""

    launches: int
    triton: int
    state: float  # bytes a parameter between two steps
    activations: int  # bytes at the peak above that


@pytest.mark.parametrize(
    ("shape", "layers", "matrices", "most"),
    [
        # fp32 weights, gradients and two moments: 16 bytes a parameter; and 2 for a linear layer's weight in bf16.
        ("gpt2", 2, 6, Most(175, 66, 19.6, 2_200_000_000)),
        ("llama", 2, 7, Most(260, 78, 17.8, 1_900_000_000)),
    ],
)
def test_a_compiled_step_takes_no_more_than_it_needs(
    emulated: dict[str, str], shape: str, layers: int, matrices: int, most: Most
) -> None:
    found = counted(emulated, "compiled", shape)
    first, second = found["steps"]
    assert first == second
    assert found["breaks"] == 0
    assert first["products"] == 2 * 3 * (layers * matrices + 1)  # micro-batches; forward and two of the backward
    assert (first["waits"], first["copies_from"]) == (1, 1)
    assert first["copies_to"] == 2 * 2  # tokens and targets of each micro-batch
    assert first["launches"] <= most.launches
    assert first["triton"] <= most.triton
    assert 16 <= found["state"] / found["parameters"] <= most.state
    assert found["peak"] - found["state"] <= most.activations
    assert found["held"][0] == found["held"][1]  # the allocators asked the driver for nothing
    assert found["held"][1][1] <= 4096  # pinned


def test_cuda_graphs_take_all_kernels_of_blocks(emulated: dict[str, str]) -> None:
    """Four micro-batches of two blocks; a wait, or a copy from memory that is not pinned, while they are captured would
    be an error."""
    found = counted(emulated, "graphs", "tiny-4")
    first, second = found["steps"]
    assert first == second
    assert first["graphs"] == 4 * 2 * 2  # forward and backward
    assert first["products"] == 4 * 3  # the head
    assert first["replayed"] >= 4 * 2 * 3 * 6 + first["graphs"]  # products, and at least a kernel in each
    assert (first["waits"], first["copies_from"]) == (1, 1)
    assert found["held"][0] == found["held"][1]


def test_late_copies_show_a_missing_wait_and_pinned_memory_that_is_used_again(emulated: dict[str, str]) -> None:
    found = counted({**emulated, "NULLGPU_DELAY": "1"}, "late", "")
    assert found == {"asked": False, "early": 0.0, "seen": 4.0, "used again": 12.0}
    assert counted(emulated, "late", "") == {"asked": True, "early": 4.0, "seen": 4.0, "used again": 4.0}


def test_the_suites_own_count_of_waits_passes(emulated: dict[str, str]) -> None:
    """torch raises at a wait; what is computed is not looked at."""
    file = HERE.parent / "unit/train/test_synchronization.py"
    paths = os.pathsep.join([str(HERE.parent), emulated.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-W", "default", "-p", "no:cacheprovider", str(file)]
    environment = {**emulated, "PYTHONPATH": paths}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "1 passed" in done.stdout


NEED_KERNELS = {
    "train/ops/test_cross_entropy_kernel.py": "calls Triton's kernels, which do nothing here",
    "models/test_models_norm_rotate.py": "calls Triton's kernels, which do nothing here",
    "models/test_models_attention.py": "compares what compiled kernels of attention compute",
}
"""Files of tests marked `gpu` that only a GPU can run. Kernels of the first two run in Triton's interpreter below."""


def test_the_suites_tests_that_need_a_gpu_pass_on_one_that_computes_as_the_cpu(emulated: dict[str, str]) -> None:
    """Eager: torch.compile does nothing here."""
    unit = HERE.parent / "unit"
    files = [path for path in sorted(unit.rglob("test_*.py")) if "mark.gpu" in path.read_text()]
    assert NEED_KERNELS.keys() <= {str(path.relative_to(unit)) for path in files}
    files = [path for path in files if str(path.relative_to(unit)) not in NEED_KERNELS]
    computing = {**os.environ, **environment(build(), host=True)}
    paths = os.pathsep.join([str(HERE), str(HERE.parent), computing["PYTHONPATH"], str(HERE.parents[1] / "src")])
    options = ["-q", "-m", "gpu", "-W", "default", "-p", "no:cacheprovider", "-p", "computing"]
    command = [sys.executable, "-m", "pytest", *options, *map(str, files)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**computing, "PYTHONPATH": paths}, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " failed" not in done.stdout
    assert "skipped" not in done.stdout.splitlines()[-1]


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


@pytest.mark.slow
def test_a_session_measures_kernels_and_expandable_segments(emulated: dict[str, str], tmp_path: Path) -> None:
    """Figures are garbage; libraries that are not installed are listed, and a kernel that cannot run loses no other."""
    session = HERE.parents[1] / "benchmarks/gpu_session.py"
    command = [sys.executable, str(session), "--out", str(tmp_path), "--emulate", "--phases", "kernels", "segments"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "session.json").read_text())
    assert not found.get("failed"), found["failed"]
    for part, ways in found["kernels"]["shapes"]["toy"].items():
        ours = [way for name, way in ways.items() if name.startswith("Phalanx") or name == "SDPA, flash"]
        assert all(way["ms"] > 0 for way in [*ours, ways.get("inductor", {"ms": 1})]), part
    assert "cuDNN" in found["kernels"]["shapes"]["toy"]["attention"]["SDPA, cuDNN"]["failed"]
    assert "flash_attn_interface" in found["kernels"]["missing"]
    runs = found["segments"]["runs"]
    assert all(run["reserved_bytes"] >= run["memory_bytes"] > 0 for run in runs.values())
    assert "| expandable segments | " in done.stdout


@pytest.mark.slow
def test_a_session_trains_a_recipe_without_settings_and_compares_bits(emulated: dict[str, str], tmp_path: Path) -> None:
    session = HERE.parents[1] / "benchmarks/gpu_session.py"
    command = [sys.executable, str(session), "--out", str(tmp_path), "--emulate", "--phases", "default", "bits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=560, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "session.json").read_text())
    assert not found.get("failed"), found["failed"]
    assert found["default"]["report"]["exit"] == found["default"]["exit"] == 0
    assert found["default"]["tokens_per_s"] > 0
    assert "compile" in found["default"]["chosen"]
    assert [run["exit"] for run in found["bits"]["runs"].values()] == [0, 0], found["bits"]["runs"]


SEGMENTS = """
import torch
from phalanx.train.distributed.environment import dist_env_from_environment
from phalanx.train.distributed.process_group import init_process_group
init_process_group(dist_env_from_environment())
held = torch.ones(1 << 20, device="cuda")
print(*{segment["is_expandable"] for segment in torch.cuda.memory_snapshot()})
"""


@pytest.mark.parametrize(
    ("setting", "expandable"),
    [
        ({}, "True"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "False"),
        ({"NULLGPU_NO_MAPPING": "cuMemCreate"}, "False"),
        ({"NULLGPU_NO_MAPPING": "cuMemSetAccess"}, "False"),
    ],
)
def test_a_worker_expands_segments_unless_the_allocator_is_configured_or_the_driver_cannot(
    emulated: dict[str, str], setting: dict[str, str], expandable: str
) -> None:
    command = [sys.executable, "-c", SEGMENTS]
    done = subprocess.run(command, capture_output=True, text=True, env=emulated | setting, timeout=120, check=False)
    assert done.stdout.strip() == expandable, done.stderr[-2000:]


RECIPE = """
name: tiny
model: {build: "phalanx.models:transformer", args: {layers: 1, hidden_size: 32, num_heads: 2}}
data: {source: {text: "*.txt"}, seq_len: 16}
batch: {global_size: 2}
evaluation: {every: null, holdout_fraction: 0}
steps: 2
checkpoint: {every: null}
"""


def trained(emulated: dict[str, str], folder: Path, *overrides: str) -> tuple[int, str, Run]:
    """The exit code and errors of `phalanx train`, and its run."""
    (folder / "words.txt").write_text("a few words of no meaning, and some more of them, again and again. " * 40)
    (folder / "recipe.yaml").write_text(RECIPE)
    run = Run(folder / "run")
    command = [
        sys.executable,
        "-m",
        "phalanx",
        "train",
        str(folder / "recipe.yaml"),
        *overrides,
        "--run",
        str(run.path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=emulated, timeout=280, check=False)
    return done.returncode, done.stderr, run


def devices(run: Run) -> tuple[str, str, str]:
    """Where the worker trained, what the resolved recipe says, and on which machine."""
    (start,) = (event.device for event in read_events(run.events) if isinstance(event, AttemptStarted))
    return start, load_recipe(run.resolved).recipe.device, json.loads(run.cluster.read_text())["device"]


def test_a_recipe_for_the_cpu_leaves_a_gpu_alone(emulated: dict[str, str], tmp_path: Path) -> None:
    code, errors, run = trained(emulated, tmp_path, "device=cpu")
    assert (code, devices(run)) == (0, ("cpu", "cpu", "cpu")), errors
    last = [event for event in read_events(run.events) if isinstance(event, StepDone)][-1]
    assert last.loss > 1  # kernels of the emulated GPU do nothing: it would be 0


def test_a_gpu_with_rocms_properties_trains_as_cuda_and_is_no_hopper(emulated: dict[str, str], tmp_path: Path) -> None:
    amd = {**emulated, **ROCM}
    code, errors, run = trained(amd, tmp_path, "precision=bf16")
    assert (code, devices(run)) == (0, ("cuda:0", "cuda", "cuda")), errors
    cluster = json.loads(run.cluster.read_text())
    assert cluster["device_name"] == "AMD Instinct MI300X"
    assert "fp8" not in cluster["measured_matmul_tflops"]
    code, errors, _ = trained(amd, tmp_path, "precision=fp8")
    assert code == 78
    assert "AMD Instinct MI300X (AMD's formats of fp8, such as e4m3fnuz on MI300, are others) has none" in errors
