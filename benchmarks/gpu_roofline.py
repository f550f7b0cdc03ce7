"""What a step on one H100 should take on paper, part by part, beside what the planner predicts and what was measured.

    make test-emulated VENV=... # makes an environment with torch's CUDA build
    python benchmarks/gpu_roofline.py [--cases gpt2 1b3 8b-4k 8b-8k] [--ceilings FILE] [--measured FILE ...]

Bytes of the kernels between products are those that the compiled code of one layer reads and writes: torch.compile and
Triton run for real on the emulated GPU (tests/emulated), at full width with two layers and with three. Products, the
loss and the update follow from sizes. What the card keeps up (products, memory, attention) was measured by
benchmarks/gpu_ceilings.py. FLOPs and MFU: benchmarks/gpu.py.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent / "docs/benchmarks"
sys.path[:0] = [str(HERE.parent / "src"), str(HERE), str(HERE.parent / "tests/emulated")]

import gpu  # noqa: E402

PEAK = 989e12
SESSION_MEMORY = 80 * 10**9  # as in gpu_session.py
SMALL_VOCABULARY = 512
"""While bytes are counted: head and loss are not compiled with the blocks."""
UPDATE_BYTES = 32 + 4 + 6
"""Of a parameter in a step: AdamW that also scales, the norm, and a cast to bf16."""
LOGIT_BYTES = 2 * 3
"""Of a logit in a micro-batch, beside what products read and write: read once forward; read and written backward."""
SUM_BYTES = 8
"""Of a weight in each micro-batch but the first: the product that adds to its gradient reads that, too."""
ATTENTION_LIKE = {"8b-8k": "8b-4k"}
"""Cases whose attention was not measured: at the FLOP/s of these."""


def bytes_of_a_step(case: gpu.Case) -> float:
    """Bytes that Triton's kernels read and write in one micro-batch; in a process with the emulated GPU."""
    import torch
    from torch._inductor.runtime import triton_heuristics

    from phalanx.models import transformer
    from phalanx.train.distributed.parallelize import compile_blocks
    from phalanx.train.ops.blocks import find_blocks
    from phalanx.train.ops.cached_cast_linear import linear_names_in_blocks, use_cached_casts

    counted = [0.0]
    run = triton_heuristics.CachingAutotuner.run

    def counting(self: Any, *args: Any, **options: Any) -> Any:
        for name, value in zip(self.fn.arg_names, args, strict=False):
            if isinstance(value, torch.Tensor):
                size = min(value.numel() * value.element_size(), value.untyped_storage().nbytes())
                counted[0] += size * (2 if name.startswith("in_out") else 1)
        return run(self, *args, **options)

    torch.nn.init.normal_ = lambda tensor, *_, **__: tensor  # nothing reads it, and it would take minutes on a CPU
    with torch.device("cuda"):
        model = transformer(seq_len=case.sequence, **gpu.sizes_of(case) | {"vocab_size": SMALL_VOCABULARY})
    for layer in use_cached_casts(model, linear_names_in_blocks(model, find_blocks(model)), torch.bfloat16):
        layer.set_accumulate_in_matmul(True)
    compile_blocks(model, list(model.blocks))
    tokens = torch.zeros(case.samples, case.sequence, dtype=torch.int64, device="cuda")
    for measured in (False, True):
        if measured:
            triton_heuristics.CachingAutotuner.run = counting
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(tokens)
        logits.float().sum().backward()
    return counted[0]


def bytes_of_a_layer(key: str, case: gpu.Case) -> float:
    """What one layer more adds."""
    import emulator

    environment = {**os.environ, **emulator.environment(emulator.build())}
    found = []
    for layers in (2, 3):  # one is no repeated block
        given = json.dumps(asdict(replace(case, layers=layers)))
        command = [sys.executable, __file__, "--count", given]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode:
            raise SystemExit(f"{key}: counting {layers} layers failed\n{done.stderr[-2000:]}")
        found.append(float(done.stdout.splitlines()[-1]))
    return found[1] - found[0]


def parts(key: str, case: gpu.Case, layer_bytes: float, ceilings: dict[str, Any]) -> dict[str, float]:
    """Milliseconds of a step by part."""
    products, memory = ceilings["measured_matmul_tflops"]["bf16"] * 1e12, ceilings["memory"]["copy_gb_per_s"] * 1e9
    weights = gpu.matmul_parameters(case)
    parameters = weights + (0 if case.tie else case.vocab * case.width)
    rows, count = case.samples * case.sequence, case.micro_batches
    attention = ceilings["attention"][ATTENTION_LIKE.get(key, key)]["cudnn"]
    of_one = attention["forward_ms"] + attention["backward_ms"]
    if key in ATTENTION_LIKE:  # rows x sequence: as many rows, and longer sequences
        of_one *= case.sequence / gpu.CASES[ATTENTION_LIKE[key]].sequence
    return {
        "products": 6e3 * weights * case.tokens / products,
        "attention": count * case.layers * of_one,
        "between": 1e3 * count * case.layers * layer_bytes / memory,
        "sums": 1e3 * (count - 1) * SUM_BYTES * weights / memory,
        "loss": 1e3 * count * LOGIT_BYTES * rows * case.vocab / memory,
        "update": 1e3 * UPDATE_BYTES * parameters / memory,
    }


def planned(case: gpu.Case, folder: Path) -> float | None:
    """Milliseconds of a step that `phalanx plan` predicts for the catalogue's H100; None where it refuses."""
    recipe = gpu.recipe_of(case, "bf16", folder / "dataset", True)
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(recipe.model_dump(mode="json", exclude_unset=True)))
    command = [sys.executable, "-m", "phalanx", "plan", str(path), "--cluster", "h100:1", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent / "src")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    return 1e3 * json.loads(done.stdout)["candidates"][0]["step_s"] if done.returncode == 0 else None


def measured(key: str, case: gpu.Case, sessions: list[Path]) -> float | None:
    """Milliseconds of Phalanx's median step in the last of these sessions that has this very case."""
    for path in reversed(sessions):
        entry = json.loads(path.read_text()).get("speed", {}).get(key)
        runs = entry["contenders"].get(gpu.PHALANX, []) if entry and entry["case"] == asdict(case) else []
        times = [seconds for run in runs for seconds in run.get("seconds", [])]
        if times:
            return 1e3 * statistics.median(times)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=list(gpu.CASES), choices=list(gpu.CASES))
    parser.add_argument("--ceilings", type=Path, default=DOCS / "gpu-2026-11-26-h100-2.json")
    parser.add_argument("--measured", type=Path, nargs="+", default=sorted(DOCS.glob("gpu-*-h100-*.json")))
    parser.add_argument("--count", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.count:
        print(bytes_of_a_step(gpu.Case(**json.loads(options.count))))
        return
    ceilings = json.loads(options.ceilings.read_text())["ceilings"]
    names = ("products", "attention", "between", "sums", "loss", "update")
    print(f"| ms a step | GB a layer | {' | '.join(names)} | paper | MFU | planner | measured |")
    print("|---|" + "---:|" * (len(names) + 5))
    with tempfile.TemporaryDirectory() as name:
        gpu.make_dataset(Path(name), megabytes=1)
        for key in options.cases:
            case = gpu.with_layers_that_fit(gpu.CASES[key], SESSION_MEMORY)
            each = bytes_of_a_layer(key, case)
            found = parts(key, case, each, ceilings)
            whole = sum(found.values())
            flops = gpu.flops_per_token(case) * case.tokens
            others = [planned(case, Path(name)), measured(key, case, options.measured)]
            cells = [f"{each / 1e9:.2f}", *(f"{found[part]:.0f}" for part in names), f"{whole:.0f}"]
            cells += [f"{flops / whole * 1e3 / PEAK:.1%}", *("" if ms is None else f"{ms:.0f}" for ms in others)]
            print(f"| {case.title} at {case.sequence:,}, {case.layers} layers | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
