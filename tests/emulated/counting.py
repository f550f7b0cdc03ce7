"""What the tests of the emulated GPU run in a process of its own: prints one JSON object."""

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks"), str(Path(__file__).parent)]

import torch  # noqa: E402
from emulator import Counts, held  # noqa: E402

from phalanx.compat import count_graph_breaks  # noqa: E402

STEPS = 3


def blocks(precision: str) -> dict[str, object]:
    """Counts of a compiled forward and backward of two blocks of GPT-2's width."""
    from phalanx.models import transformer
    from phalanx.train.distributed.parallelize import compile_blocks
    from phalanx.train.ops.blocks import find_blocks
    from phalanx.train.ops.float8 import convert_to_float8, find_float8_layers, quantize_weights_once

    model = transformer(vocab_size=512, seq_len=256, layers=2, hidden_size=768, num_heads=12, activation="relu2").cuda()
    if precision == "fp8":
        for layer in find_float8_layers(model, find_blocks(model), min_size=False).values():
            convert_to_float8(layer)
        quantize_weights_once(model)
    compile_blocks(model, list(model.blocks))
    tokens = torch.zeros(2, 256, dtype=torch.int64, device="cuda")

    def run() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(tokens)
        logits.float().sum().backward()

    run()
    before = Counts.now()
    run()
    return {**asdict(Counts.now().since(before)), "breaks": count_graph_breaks()}


def accumulated(casts: str) -> dict[str, object]:
    """Counts of three micro-batches of two compiled blocks and an untied head, the gradients added up: with weights
    cast once (`casts` "once") or by autocast. The first step compiles."""
    from phalanx.models import transformer
    from phalanx.train.distributed.parallelize import compile_blocks
    from phalanx.train.grad_sync.reducer import LocalReducer
    from phalanx.train.ops.blocks import find_blocks
    from phalanx.train.ops.cached_cast_linear import linear_names_in_blocks, use_cached_casts

    model = transformer(
        vocab_size=512, seq_len=256, layers=2, hidden_size=768, num_heads=12, activation="relu2", tie_embeddings=False
    ).cuda()
    names = [*linear_names_in_blocks(model, find_blocks(model)), "head"] if casts == "once" else []
    layers = use_cached_casts(model, names, torch.bfloat16)
    for layer in layers:
        layer.set_accumulate_in_matmul(True)
    compile_blocks(model, list(model.blocks))
    tokens = torch.zeros(2, 256, dtype=torch.int64, device="cuda")

    def run() -> None:
        gradients = LocalReducer(list(model.parameters()), layers)
        model.zero_grad()
        for layer in layers:
            layer.before_step()
        for _ in range(3):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                logits = model(tokens)
            logits.float().sum().backward()
            gradients.end_backward()

    run()
    run()
    before = Counts.now()
    run()
    return {**asdict(Counts.now().since(before)), "breaks": count_graph_breaks()}


SHAPES = {  # title, layers, width, heads, kv_heads, ffn, activation, vocab, tie, sequence, samples, micro-batches
    "gpt2": ("two layers of GPT-2", 2, 768, 12, 12, 3072, "relu2", 50304, True, 1024, 8, 2),
    "llama": ("two layers of Llama-8B", 2, 4096, 32, 8, 14336, "swiglu", 32768, False, 4096, 1, 2),
    "tiny-1": ("tiny, one micro-batch", 2, 64, 2, 2, 128, "relu2", 256, True, 64, 2, 1),
    "tiny-4": ("tiny, four of them", 2, 64, 2, 2, 128, "relu2", 256, True, 64, 2, 4),
}


@contextlib.contextmanager
def training(shape: str, compiled: bool | str) -> Iterator[tuple[int, Iterator[Any]]]:
    """The matrices' parameters of a model of this shape, and its steps in the engine."""
    import gpu
    from loop_overhead import LoopTask, make_dataset, phalanx, silence_output
    from phalanx.run import Run
    from phalanx.train.distributed.environment import dist_env_from_environment
    from phalanx.train.distributed.process_group import init_process_group
    from phalanx.train.reporter import RunReporter
    from phalanx.train.worker import configure_torch

    silence_output()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        case = gpu.Case(*SHAPES[shape])
        recipe = gpu.recipe_of(case, "bf16", make_dataset(folder, megabytes=1), compiled=compiled)
        place = dist_env_from_environment({})
        configure_torch(recipe, place)
        init_process_group(place)
        Run(folder / "run").create()
        _, trained = phalanx(
            LoopTask(recipe, 1, 0, place.device), folder / "run", RunReporter(Run(folder / "run"), is_rank_zero=True)
        )
        yield gpu.matmul_parameters(case) + (0 if case.tie else case.vocab * case.width), iter(trained)


def steps(shape: str) -> dict[str, object]:
    """Counts of an eager step of the engine."""
    with training(shape, compiled=False) as (_, trained):
        for _ in range(STEPS):
            next(trained)
        before = Counts.now()
        next(trained)
        return asdict(Counts.now().since(before))


def compiled(shape: str, how: bool | str = True) -> dict[str, object]:
    """Counts of two compiled steps of the engine, and bytes of the allocators."""
    with training(shape, how) as (parameters, trained):
        for _ in range(STEPS):
            next(trained)
        torch.cuda.reset_peak_memory_stats()
        state = torch.cuda.memory_allocated()
        found, reserved, allocations = [], [], []
        for _ in range(2):
            before = Counts.now()
            next(trained)
            found.append(asdict(Counts.now().since(before)))
            reserved.append(held())
            allocations.append(torch.cuda.memory_stats()["num_device_alloc"])
        peak = torch.cuda.max_memory_allocated()
        return {
            "steps": found,
            "breaks": count_graph_breaks(),
            "parameters": parameters,
            "state": state,
            "peak": peak,
            "held": reserved,
            "allocations": allocations,
        }


def graphs(shape: str) -> dict[str, object]:
    """The same with CUDA graphs."""
    return compiled(shape, "cuda-graphs")


def late(_: str) -> dict[str, object]:
    """What a computation sees of a copy on another stream, with the delay queue: before it waits for it, and after; and
    what arrives of pinned memory that is used again at once."""
    import hostgpu

    hostgpu.install()
    side, sent, done = torch.cuda.Stream(), torch.ones(4).pin_memory(), torch.cuda.Event()
    there = torch.zeros(4, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        there.copy_(sent, non_blocking=True)
        done.record()
    asked = done.query()
    early = float(there.sum())
    done.wait()
    seen = float(there.sum())
    with torch.cuda.stream(side):
        there.copy_(sent, non_blocking=True)
    sent.fill_(3)
    torch.cuda.synchronize()
    return {"asked": asked, "early": early, "seen": seen, "used again": float(there.sum())}


def imports(_: str) -> dict[str, object]:
    """Calls of CUDA by what the fork server imports, and whether CUDA works in a fork afterwards."""
    import os

    calls: list[str] = []
    for name in ("is_available", "device_count", "_lazy_init", "init", "get_device_properties", "current_device"):
        known = getattr(torch.cuda, name)
        setattr(torch.cuda, name, lambda *a, _known=known, _name=name, **k: (calls.append(_name), _known(*a, **k))[1])
    from phalanx.compat import import_torch

    import_torch()
    import phalanx.train.worker  # noqa: F401

    found = list(calls)
    child = os.fork()
    if not child:
        torch.ones(8, device="cuda").sum()
        os._exit(0)
    return {"calls": found, "forked": os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](sys.argv[2])))
