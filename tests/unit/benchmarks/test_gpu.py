"""benchmarks/gpu.py without a GPU: its FLOP rule, and the whole of it at toy size."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from torch import device, nn

import gpu

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.mark.parametrize(
    ("case", "layers", "sequence", "full", "half"),
    [("gpt2", 12, 1024, 0.855, 0.798), ("1b3", 24, 1024, 8.47, 8.17), ("8b-4k", 32, 4096, 51.5, 48.2)],
)
def test_flops_a_token_are_the_published_ones(case: str, layers: int, sequence: int, full: float, half: float) -> None:
    shape = replace(gpu.CASES[case], layers=layers, sequence=sequence)
    assert gpu.flops_per_token(shape) / 1e9 == pytest.approx(full, rel=0.002)
    assert gpu.flops_per_token(shape, causal_half=True) / 1e9 == pytest.approx(half, rel=0.002)


def test_the_rule_counts_the_weights_of_the_model_that_is_built() -> None:
    case = replace(gpu.TOYS["8b-4k"], layers=3)
    model = gpu.plain_model(gpu.recipe_of(case, "bf16", Path("data"), compiled=False), device("cpu"))
    linear = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    assert gpu.matmul_parameters(case) == linear


def test_more_memory_fits_more_layers() -> None:
    found = [gpu.with_layers_that_fit(gpu.CASES["8b-4k"], size * 10**9).layers for size in (24, 80, 140)]
    assert found == sorted(found)
    assert 4 <= found[1] <= 16


@pytest.mark.slow
def test_it_runs_at_toy_size_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "gpu.md"
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--toy", "--cases", "8b-8k", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    page = out.read_text()
    assert page.count("| Phalanx | ") == 1
    assert page.count("| Phalanx, fp8 | | | | | | | | precision: fp8 needs") == 1
    assert "nvidia-ml-py is not installed" in page
