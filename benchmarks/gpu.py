"""How fast one GPU trains, in tokens a second, MFU and joules a token, beside peers on the same card in the same run.

    python benchmarks/gpu.py [--out FILE] [--cases gpt2 1b3 8b-4k 8b-8k] [--rounds 2] [--seconds 20]
    python benchmarks/gpu.py --toy                     # everything at toy size on the CPU, to see that it works

Models: GPT-2 124M at 1,024 tokens, a 1.3 B (24 x 2048) at 2,048, and as many layers of Llama-8B's shape as fit at 4,096
and 8,192. Phalanx in bf16 and fp8, compiled, beside a loop in the manner of nanoGPT, Lightning Fabric, Accelerate and
Hugging Face's Trainer (bf16 autocast, fused AdamW, model and loss in one torch.compile, 4 micro-batches a step), each
where it is installed. Each contender of each
round is one process, so that it has the whole memory and the same start; the order rotates.

FLOPs a token: 6 x matmul parameters (the head included, the input embedding not) + 12 x layers x width x sequence, the
full attention; with causal-half, 6 x instead. Recomputation does not count. MFU is over the data sheet's dense bf16
peak, for fp8 too; `of ceiling` is over the best bf16 matmul that this very card did in this run.
"""

import argparse
import contextlib
import gc
import importlib
import itertools
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from loop_overhead import (
    PEER_PACKAGES,
    PLAIN,
    TRAINER,
    LoopTask,
    WithLoss,
    accelerate,
    can_run,
    describe_environment,
    fabric,
    installed,
    make_dataset,
    make_trainer,
    phalanx,
    plain,
    silence_output,
)
from phalanx.cluster import Machine, discover_machine, find_data_sheet, measure_matmul
from phalanx.compat import set_deterministic
from phalanx.errors import PhalanxError
from phalanx.recipe import Recipe
from phalanx.recipe.devices import check_device
from phalanx.run import Run

FP8 = "Phalanx, fp8"
DETERMINISTIC = "Phalanx, deterministic"
PHALANX = "Phalanx"
LOOPS = {PLAIN: plain, "Fabric": fabric, "Accelerate": accelerate}
STATE_BYTES = 16
LEFT = 1 << 30
"""Bytes of GPU memory that a contender may leave behind in its process."""
WARM_UP = 3
TRACED = 2
IDLE_US = 5.0
"""Between two kernels, for the GPU to count as idle: launches that were queued follow sooner."""


@dataclass(frozen=True)
class Case:
    """A model and its batch: `samples` of `sequence` tokens in a micro-batch. `layers` 0: as many as fit."""

    title: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    ffn: int
    activation: str
    vocab: int
    tie: bool
    sequence: int
    samples: int
    micro_batches: int = 4
    """In a step: gradients are accumulated over them."""

    @property
    def tokens(self) -> int:
        """In a step."""
        return self.samples * self.micro_batches * self.sequence


CASES = {
    "gpt2": Case("GPT-2 124M", 12, 768, 12, 12, 3072, "relu2", 50304, True, 1024, 32),
    "1b3": Case("1.3 B (24 x 2048)", 24, 2048, 16, 16, 8192, "relu2", 50304, True, 2048, 8),
    "8b-4k": Case("layers of Llama-8B", 0, 4096, 32, 8, 14336, "swiglu", 128256, False, 4096, 2),
    "8b-8k": Case("layers of Llama-8B", 0, 4096, 32, 8, 14336, "swiglu", 128256, False, 8192, 1),
}
TOYS = {
    "gpt2": Case("toy GPT-2", 2, 32, 2, 2, 128, "relu2", 256, True, 32, 2),
    "1b3": Case("toy of 1.3 B", 3, 32, 2, 2, 128, "relu2", 256, True, 64, 2),
    "8b-4k": Case("toy of Llama-8B", 0, 64, 4, 2, 192, "swiglu", 512, False, 64, 2),
    "8b-8k": Case("toy of Llama-8B", 0, 64, 4, 2, 192, "swiglu", 512, False, 128, 1),
}


def matmul_parameters(case: Case) -> int:
    """Weights of all linear layers and of the head; the input embedding is a look-up."""
    head = case.width // case.heads
    attention = 2 * case.width**2 + 2 * case.width * case.kv_heads * head
    feed_forward = (3 if case.activation == "swiglu" else 2) * case.width * case.ffn
    return case.layers * (attention + feed_forward) + case.vocab * case.width


def flops_per_token(case: Case, causal_half: bool = False) -> float:
    """The rule at the top of this file."""
    return 6.0 * matmul_parameters(case) + (6 if causal_half else 12) * case.layers * case.width * case.sequence


def with_layers_that_fit(case: Case, memory: int) -> Case:
    """As many layers as training state and activations leave room for in 6/10 of the memory; the rest is for logits,
    what a compiler keeps, and peers that need more. A rule of thumb, alike for all contenders."""
    if case.layers:
        return case
    one = Case(**{**asdict(case), "layers": 1})
    outside = STATE_BYTES * (2 - case.tie) * case.vocab * case.width
    tokens = case.samples * case.sequence
    kept = tokens * (20 * case.width + 6 * case.ffn)  # bytes of activations in bf16, of a layer
    layer = STATE_BYTES * (matmul_parameters(one) - case.vocab * case.width) + kept
    return Case(**{**asdict(case), "layers": max(1, int((0.6 * memory - outside) / layer))})


# ---- one contender, in a process of its own


def sizes_of(case: Case) -> dict[str, Any]:
    """The arguments of `transformer`, but for those that are filled in from the data."""
    return {
        "layers": case.layers,
        "hidden_size": case.width,
        "num_heads": case.heads,
        "num_kv_heads": case.kv_heads,
        "ffn_hidden_size": case.ffn,
        "activation": case.activation,
        "vocab_size": case.vocab,
        "tie_embeddings": case.tie,
    }


def recipe_of(case: Case, precision: str, dataset: Path, compiled: bool, deterministic: bool = False) -> Recipe:
    return Recipe.model_validate(
        {
            "model": {"args": sizes_of(case)},
            "data": {"source": {"prepared": str(dataset)}, "seq_len": case.sequence},
            "batch": {"global_size": case.samples * case.micro_batches, "micro_size": case.samples},
            "optimizer": {"lr": 3e-4, "schedule": {"warmup_steps": 100, "decay": "constant"}},
            "steps": 10**9,
            "evaluation": {"every": None, "holdout_fraction": 0},
            "checkpoint": {"every": None},
            "precision": precision,
            "num_threads": max(1, (os.cpu_count() or 1) // 2),
            "compile": compiled,
            "parallelism": {"replicate": 1},
            "memory": {"activation_checkpointing": "none", "chunked_loss": False},
            "determinism": "fixed-world" if deterministic else "off",
            "grad_sync": {"algorithm": "all-reduce"},
        }
    )


class Meter:
    """Times steps and counts joules, after a warm-up, until `seconds` have gone by. `waits`: the loop does not read its
    loss in each step, so that the host runs ahead of the GPU."""

    def __init__(self, seconds: float, waits: bool = False):
        self.seconds = seconds
        self.waits = waits and torch.cuda.is_available()
        self.counter = EnergyCounter()
        self.times: list[float] = []
        self.joules: float | None = None
        self.began = 0.0
        self._steps = 0
        self._last = 0.0

    def stepped(self) -> bool:
        """A step has ended, so far as the host knows: the GPU may still be at its update. False when that was the
        last."""
        if self.waits:
            torch.cuda.synchronize()
        now = time.perf_counter()
        self._steps += 1
        if self._steps == WARM_UP:
            self._energy = self.counter.joules()
        elif self._steps > WARM_UP:
            self.times.append(now - self._last)
        self._last = time.perf_counter()
        if self._steps == WARM_UP:
            self.began = self._last
        if len(self.times) < 3 or sum(self.times) < self.seconds:
            return True
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        after = self.counter.joules()
        if after is not None and self._energy is not None:
            self.joules = after - self._energy
        return False


class EnergyCounter:
    """The card's own counter of energy since its driver was loaded; without nvidia-ml-py there is none."""

    def __init__(self) -> None:
        self._handle = None
        if torch.cuda.is_available() and installed("nvidia-ml-py"):
            import pynvml

            with contextlib.suppress(pynvml.NVMLError):  # no library in this container: no energy
                pynvml.nvmlInit()
                uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
                self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)

    def joules(self) -> float | None:
        if self._handle is None:
            return None
        import pynvml

        return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1000


def contend(task: dict[str, Any]) -> dict[str, Any]:
    """Train as one contender, and measure."""
    from phalanx.train.distributed.environment import dist_env_from_environment
    from phalanx.train.distributed.process_group import init_process_group
    from phalanx.train.reporter import RunReporter
    from phalanx.train.worker import configure_torch

    silence_output()
    begun = time.perf_counter()
    case, name, folder = Case(**task["case"]), task["name"], Path(task["folder"])
    precision, dataset = "fp8" if name == FP8 else "bf16", Path(task["dataset"])
    recipe = recipe_of(case, precision, dataset, task["compile"], deterministic=name == DETERMINISTIC)
    place = dist_env_from_environment({})
    job = LoopTask(recipe, 1, 0, place.device)
    meter = Meter(task["seconds"], waits=name == TRAINER)
    if name in (PHALANX, FP8, DETERMINISTIC):
        check_device(recipe, place.device.type, *(card() if place.device.type == "cuda" else ("a CPU", None)))
        configure_torch(recipe, place)
        init_process_group(place)
        _, steps = phalanx(job, folder, RunReporter(Run(folder), is_rank_zero=True))
    else:
        torch.set_float32_matmul_precision("high")
        assert isinstance(recipe.num_threads, int)
        torch.set_num_threads(recipe.num_threads)
        init_process_group(place)  # for the same allocator, with segments that expand
        model = WithLoss(plain_model(recipe, place.device))
        job.has_loss = True
        if name == TRAINER:
            make_trainer(job, model, 10**6, meter.stepped, folder, compiled=task["compile"]).train()
            return result_of(meter, case)
        if name in PEER_PACKAGES:
            importlib.import_module(PEER_PACKAGES[name])  # Fabric wants to be there before anything is compiled
        steps = LOOPS[name](job, compiled(model, whole=task.get("whole", True)) if task["compile"] else model)
    first = 0.0
    for _ in steps:
        first = first or time.perf_counter() - begun
        if not meter.stepped():
            break
    result = {**result_of(meter, case), "first_step_s": first}
    if task.get("kernels"):
        result |= kernels_of(steps)
    return result


def card() -> tuple[str, tuple[int, int]]:
    """Name and compute capability of the GPU."""
    return torch.cuda.get_device_name(), torch.cuda.get_device_capability()


def compiled(model: WithLoss, whole: bool) -> nn.Module:
    """Model and loss compiled together, or (what torchtitan does: it takes seconds, not minutes) each block and the
    loss."""
    if whole:
        return cast(nn.Module, torch.compile(model))
    model.model.blocks_are_compiled = True
    for block in model.model.blocks:
        block.compile(dynamic=False)
    model.loss = torch.compile(model.loss, dynamic=False)
    return model


def kernels_of(steps: Iterator[object], most: int = 25) -> dict[str, Any]:
    """Milliseconds of the longest kernels of a step, with how often they ran, and of all of them; how long the GPU was
    idle, and between which kernels. Of several more steps, since the GPU may begin one while the host waits."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as traced:
        begun = time.perf_counter()
        for _ in range(TRACED):
            next(iter(steps))
        torch.cuda.synchronize()
        took = time.perf_counter() - begun
    totals: dict[str, list[float]] = {}
    on_gpu = [event for event in traced.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    for event in on_gpu:
        entry = totals.setdefault(event.name[:100], [0.0, 0])
        entry[0] += event.device_time_total / 1e3 / TRACED
        entry[1] += 1 / TRACED
    longest = sorted(totals.items(), key=lambda item: -item[1][0])
    spans = sorted((event.time_range.start, event.time_range.end, event.name[:60]) for event in on_gpu)
    gaps, end = [], spans[0][1] if spans else 0.0
    for (_, _, before), (start, finish, name) in itertools.pairwise(spans):
        if start - end > IDLE_US:
            gaps.append([round((start - end) / 1e3, 3), before, name])
        end = max(end, finish)
    table = [[name, round(ms, 3), round(count)] for name, (ms, count) in longest[:most]]
    idle = {"idle_ms": sum(gap for gap, _, _ in gaps) / TRACED, "gaps": sorted(gaps, reverse=True)[:most]}
    all_ms = sum(ms for ms, _ in totals.values())
    return {"kernels": table, "kernels_ms": all_ms, "traced_step_ms": took * 1e3 / TRACED, **idle}


def plain_model(recipe: Recipe, device: torch.device) -> nn.Module:
    """The same module that Phalanx trains."""
    from phalanx.models import transformer

    torch.manual_seed(0)
    with device:
        return transformer(seq_len=recipe.data.seq_len, **recipe.model.args)


def result_of(meter: Meter, case: Case) -> dict[str, Any]:
    tokens = case.tokens
    joules = None if meter.joules is None else meter.joules / (tokens * len(meter.times))
    found = {"began": meter.began, "seconds": meter.times, "joules_per_token": joules, "memory_bytes": None}
    if torch.cuda.is_available():
        found |= {"memory_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved()}
    return found


def child(task: dict[str, Any]) -> None:
    """Run one task and leave its result, or why there is none, in its file."""
    Path(task["result"]).write_text(json.dumps(attempt(task)))


def attempt(task: dict[str, Any]) -> dict[str, Any]:
    """The result of a task, or why there is none."""
    try:
        return measure_matmul(**task["matmul"]) if "matmul" in task else contend(task)
    except PhalanxError as error:
        return {"refused": str(error)}
    except torch.OutOfMemoryError as error:
        return {"refused": f"out of memory: {str(error).split('.')[0]}"}


def series(tasks: list[dict[str, Any]], result: Path, seconds: float) -> None:
    """Run tasks one after the other in this process, each with the memory to itself; after each, `result` holds what is
    known. None begins after so many `seconds`, or in a process whose memory is not free again."""
    begun, found = time.monotonic(), []
    for task in tasks:
        if time.monotonic() - begun > seconds:
            break
        set_deterministic(False)
        torch._dynamo.reset()
        try:
            found.append(attempt(task))
        except Exception as error:  # noqa: BLE001 the others must not be lost with it
            found.append({"refused": f"failed: {str(error)[:300]}"})
        gc.unfreeze()  # a run freezes what it begins with, and what is frozen is never collected
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        temporary = result.with_suffix(".new")
        temporary.write_text(json.dumps(found))
        temporary.replace(result)
        if torch.cuda.is_available() and torch.cuda.memory_allocated() > LEFT:
            break  # the next begins in a process of its own


# ---- the run


def run_child(
    task: dict[str, Any], folder: Path, patience: float, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The result of a task in a fresh process."""
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--child", json.dumps({**task, "result": str(result)})]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=patience, env=environment)
    except subprocess.TimeoutExpired:
        return {"refused": f"took longer than {patience:.0f} s"}
    if not result.is_file():
        lines = done.stderr.strip().splitlines()
        why = lines[-1][:200] if lines else f"exit code {done.returncode}"
        return {"refused": f"failed: {why}", "log": done.stderr[-3000:]}
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def compete(case: Case, options: argparse.Namespace, folder: Path, dataset: Path) -> dict[str, list[dict[str, Any]]]:
    """Every contender's results, one a round; one that was refused is not asked again."""
    names = [PLAIN, PHALANX, FP8, *filter(can_run, PEER_PACKAGES)]
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for number in range(options.rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            if any("refused" in result for result in results[name]):
                continue
            place = folder / f"{number}-{name}".replace(" ", "-").replace(",", "")
            Run(place).create()
            task = {"case": asdict(case), "name": name, "folder": str(place), "dataset": str(dataset)}
            task |= {"seconds": options.seconds, "compile": not options.toy}
            results[name].append(run_child(task, folder, 1800.0))
            print(f"{case.title} at {case.sequence}, {name}: {brief(results[name][-1], case)}", flush=True)
    return results


def brief(result: dict[str, Any], case: Case) -> str:
    if "refused" in result:
        return str(result["refused"])
    return f"{case.tokens / statistics.median(result['seconds']):,.0f} tokens/s"


def table(
    case: Case, results: dict[str, list[dict[str, Any]]], sheet: float | None, ceiling: float | None
) -> list[str]:
    """A case's rows; `sheet` and `ceiling` in TFLOP/s."""
    tokens = case.tokens
    full, half = flops_per_token(case), flops_per_token(case, causal_half=True)
    lines = [
        f"## {case.title} at {case.sequence:,}: {case.layers} layers, {tokens:,} tokens a step",
        "",
        f"{full / 1e9:.3f} GFLOP a token with full attention, {half / 1e9:.3f} causal-half.",
        "",
        "| | tokens/s | of the plain loop | MFU, full | MFU, causal-half | of ceiling | J/token | memory, GB | |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    rates = {
        name: tokens / statistics.median(itertools.chain.from_iterable(one["seconds"] for one in found))
        for name, found in results.items()
        if found and not any("refused" in one for one in found)
    }
    for name, found in results.items():
        if name not in rates:
            why = next((one["refused"] for one in found if "refused" in one), "not run")
            lines.append(f"| {name} | | | | | | | | {str(why).splitlines()[0]} |")
            continue
        rate = rates[name]
        joules = [one["joules_per_token"] for one in found if one["joules_per_token"] is not None]
        memory = [one["memory_bytes"] for one in found if one["memory_bytes"] is not None]
        cells = [f"{rate:,.0f}", f"{rate / rates[PLAIN]:.3f}" if PLAIN in rates else ""]
        cells += [share(rate * full, sheet), share(rate * half, sheet), share(rate * full, ceiling)]
        cells += [f"{statistics.median(joules):.2e}" if joules else "", f"{max(memory) / 1e9:.1f}" if memory else ""]
        lines.append(f"| {name} | {' | '.join(cells)} | |")
    return [*lines, ""]


def share(flops: float, tflops: float | None) -> str:
    return "" if not tflops else f"{flops / (tflops * 1e12):.1%}"


def head(options: argparse.Namespace, machine: Machine, sheet: float | None, ceiling: dict[str, float]) -> list[str]:
    rule = " ".join(__doc__.split("\n\n")[-1].split())
    rates = ", ".join(f"{name} {rate:,.4g}" for name, rate in ceiling.items())
    peaks = "not on a data sheet that is known here" if sheet is None else f"{sheet:,.4g} TFLOP/s in bf16 on paper"
    energy = "" if installed("nvidia-ml-py") else " Energy is left out: nvidia-ml-py is not installed."
    return [
        "# How fast one GPU trains",
        "",
        f"`{shlex.join(['python', 'benchmarks/gpu.py', *sys.argv[1:]])}`",
        "",
        describe_environment(f"{machine.device_name}, {machine.device_memory_bytes / 1e9:.0f} GB"),
        f"Peak: {peaks}. Measured matmul ceiling in TFLOP/s: {rates}. {options.rounds} rounds of {options.seconds} s, "
        f"a process for each contender, medians over all steps.{energy}",
        "",
        rule,
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the tables to this file, too")
    parser.add_argument("--toy", action="store_true", help="toy sizes, no compilation; runs on a CPU")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20.0, help="of measured steps for each contender and round")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--series", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.series:
        series(**{**(given := json.loads(options.series)), "result": Path(given["result"])})
        return
    if options.child:
        child(json.loads(options.child))
        return
    machine = discover_machine()
    if machine.device != "cuda" and not options.toy:
        raise SystemExit("no GPU here; --toy runs everything at toy size on the CPU")
    if options.toy:
        options.rounds, options.seconds = 1, 0.1
    paper = find_data_sheet(machine)
    sheet = None if paper is None else paper.tflops.get("bf16")
    with tempfile.TemporaryDirectory() as name, contextlib.suppress(KeyboardInterrupt):
        folder = Path(name)
        matmul: dict[str, Any] = {"device": machine.device, "threads": machine.physical_cores}
        if options.toy:
            matmul |= {"seconds": 0.05, "sizes": [256]}
        ceiling = run_child({"matmul": matmul}, folder, 600.0)
        lines = head(options, machine, sheet, ceiling)
        print("\n".join(lines), flush=True)
        dataset = make_dataset(folder, megabytes=1 if options.toy else 64)
        for key in options.cases:
            memory = 10**7 if options.toy else machine.device_memory_bytes
            case = with_layers_that_fit((TOYS if options.toy else CASES)[key], memory)
            told = table(case, compete(case, options, folder, dataset), sheet, ceiling.get("bf16"))
            print("\n".join(told), flush=True)
            lines += told
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text("\n".join(lines).rstrip() + "\n")


if __name__ == "__main__":
    main()
