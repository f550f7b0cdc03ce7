"""How fast a CPU trains, rung by rung, and against the best that peers can do on it.

    python benchmarks/cpu.py [--out docs/benchmarks/cpu.md] [--sizes M L] [--rounds 12] [--bout 1.0]
    python benchmarks/cpu.py --quick

The ladder: fp32 eager -> bf16 -> compiled blocks -> fused AdamW -> processes instead of threads. Every rung is
`phalanx train` with one thing more, under real workers. The peers (a plain loop, Lightning Fabric, Accelerate, Hugging
Face's Trainer) get all of that at once, not their defaults: bf16, their own way to compile, fused AdamW, and both all
cores as threads of one process and a process for each core, of which the better one counts.

Each contender has processes of its own, started once and held still (SIGSTOP) while others have their turn, so that
all meet the same weather: short bouts, in an order that rotates. A gain is a ratio of medians over all steps; quartiles
are of the rounds' ratios of medians. The models and batches are those of loop_overhead.py.
"""

import argparse
import contextlib
import importlib
import itertools
import os
import shlex
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from loop_overhead import (
    MODEL_SIZES,
    PEER_PACKAGES,
    PLAIN,
    TRAINER,
    LoopTask,
    accelerate,
    can_run,
    describe_environment,
    fabric,
    make_dataset,
    make_trainer,
    plain,
    recipe_of,
    silence_output,
)
from phalanx.data import open_data
from phalanx.jobs.agent.fork_server_client import ForkServerClient
from phalanx.jobs.agent.trial_workers import TrialWorkers, WorkersFailedError
from phalanx.recipe import Recipe, load_recipe
from phalanx.recipe.load import dump_recipe
from phalanx.run import Run
from phalanx.run.event_types import StepDone, StepPhases
from phalanx.run.process_messages import Command, SendSignal

PHALANX_NAME = "Phalanx"
PEER_LOOPS = {PLAIN: plain, "Fabric": fabric, "Accelerate": accelerate}


@dataclass(frozen=True)
class CpuCompetitor:
    """Who trains, and how."""

    name: str
    precision: str = "bf16"
    compile: bool = True
    fused: bool = True
    processes: int = 1
    threads: int = 1

    @property
    def label(self) -> str:
        optimizer = "fused AdamW" if self.fused else "AdamW in a loop"
        return f"{self.precision}, {'compiled' if self.compile else 'eager'}, {optimizer}, {self.shape}"

    @property
    def shape(self) -> str:
        processes = f"{self.processes} {'process' if self.processes == 1 else 'processes'}"
        return f"{processes} x {self.threads} {'thread' if self.threads == 1 else 'threads'}"

    def recipe(self, size: str, dataset: Path, cores: int) -> Recipe:
        recipe = recipe_of(MODEL_SIZES[size], self.precision, self.processes, dataset, cores)
        return recipe.model_copy(update={"compile": self.compile, "num_threads": self.threads})


def ladder(cores: int) -> list[CpuCompetitor]:
    """Each rung adds one thing to that before it; the last is beside the one before, with the cores divided among
    processes, and the one after it shows what more than one thread gives at all."""
    return [
        CpuCompetitor(PHALANX_NAME, "fp32", compile=False, fused=False, threads=cores),
        CpuCompetitor(PHALANX_NAME, "bf16", compile=False, fused=False, threads=cores),
        CpuCompetitor(PHALANX_NAME, "bf16", compile=True, fused=False, threads=cores),
        CpuCompetitor(PHALANX_NAME, "bf16", compile=True, fused=True, threads=cores),
        CpuCompetitor(PHALANX_NAME, "bf16", compile=True, fused=True, processes=cores),
        CpuCompetitor(PHALANX_NAME, "bf16", compile=True, fused=True),
    ]


def peers(cores: int) -> list[CpuCompetitor]:
    names = [PLAIN, *filter(can_run, PEER_PACKAGES)]
    shapes = [(1, cores)] if cores == 1 else [(1, cores), (cores, 1)]
    return [
        CpuCompetitor(name, processes=processes, threads=threads) for name in names for processes, threads in shapes
    ]


# ---- in the workers


def train_phalanx(payload: dict[str, Any]) -> None:
    """`phalanx train`'s worker, but for the optimizer of the rungs below `fused`."""
    from phalanx.train.optim import container
    from phalanx.train.worker import run_worker

    silence_output()
    if not payload["fused"]:
        container._build_adamw = lambda groups, spec: torch.optim.AdamW(
            groups, lr=spec.lr, betas=spec.betas, fused=False
        )
    run_worker({"run": payload["folder"], "folder": payload["folder"]})


def train_peer(payload: dict[str, Any]) -> None:
    """A peer's loop, each step reported as our workers report theirs."""
    from phalanx.train.distributed.environment import dist_env_from_environment
    from phalanx.train.distributed.process_group import init_process_group
    from phalanx.train.model_builder import build_model
    from phalanx.train.reporter import make_reporter

    silence_output()
    folder = Path(payload["folder"])
    recipe = load_recipe(Run(folder).resolved).recipe
    place = dist_env_from_environment()
    assert isinstance(recipe.num_threads, int)
    torch.set_num_threads(recipe.num_threads)
    init_process_group(place)
    if place.world_size == 1:  # peers would take a launcher's variables for a world
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
    job = LoopTask(recipe, place.world_size, place.rank, place.device)
    report = make_reporter(Run(folder), place.is_rank_zero, os.environ["PHALANX_EVENTS_FD"])
    facts = open_data(recipe.data, recipe.evaluation, recipe.seed).info
    model = build_model(recipe.model, facts, folder, recipe.seed, place.device)
    numbers = itertools.count(1)
    last = time.perf_counter()

    def stepped() -> bool:
        nonlocal last
        now = time.perf_counter()
        if place.is_rank_zero:
            report.report_event(
                StepDone(
                    step=next(numbers),
                    loss=None,
                    grad_norm=None,
                    lr=0.0,
                    units=0,
                    duration_s=now - last,
                    breakdown_s=StepPhases(),
                )
            )
        if torch.get_num_threads() != recipe.num_threads:
            raise RuntimeError(f"{payload['name']} changed the number of threads")
        last = now
        return True

    if payload["name"] == TRAINER:
        make_trainer(job, model, 10**9, stepped, folder, compiled=recipe.compile is True).train()
        return
    # Trainer is told to compile; the others are given a compiled model, as their documentation says.
    if payload["name"] in PEER_PACKAGES:
        importlib.import_module(PEER_PACKAGES[payload["name"]])  # Fabric wants to be there before
    steps = PEER_LOOPS[payload["name"]](job, torch.compile(model) if recipe.compile else model)
    for _ in steps:
        stepped()


# ---- turns


class PausedWorkers(TrialWorkers):
    """Workers that are stopped (SIGSTOP) between their turns."""

    def start(self, fork_server: ForkServerClient) -> None:
        super().start(fork_server)
        fork_server.send(SendSignal(signal=int(signal.SIGSTOP)))

    def run_for(self, seconds: float) -> list[StepDone]:
        """Whole steps of a turn but for the first, since caches hold data of other contenders."""
        self._fork_server.send(SendSignal(signal=int(signal.SIGCONT)))
        steps = self.measure_steps(seconds, min_steps=4)
        self._fork_server.send(SendSignal(signal=int(signal.SIGSTOP)))
        return steps[1:]


def compete(
    contenders: list[CpuCompetitor], size: str, options: argparse.Namespace, folder: Path, dataset: Path, cores: int
) -> tuple[dict[CpuCompetitor, list[list[float]]], dict[CpuCompetitor, str]]:
    """Seconds of steps of every contender by rounds, and why some have none."""
    rounds: dict[CpuCompetitor, list[list[float]]] = {}
    failed: dict[CpuCompetitor, str] = {}
    worlds: dict[CpuCompetitor, PausedWorkers] = {}
    with contextlib.ExitStack() as stack:
        for number, contender in enumerate(contenders):
            run = Run(folder / f"{size}-{number}")
            run.create()
            run.resolved.write_text(dump_recipe(contender.recipe(size, dataset, cores)))
            function = "train_phalanx" if contender.name == PHALANX_NAME else "train_peer"
            payload = {"folder": str(run.path), "name": contender.name, "fused": contender.fused}
            command = Command(function=f"{Path(__file__).stem}:{function}", payload=payload)
            fork_server = stack.enter_context(ForkServerClient())
            world = PausedWorkers(run.logs, contender.processes, command)
            try:
                world.start(fork_server)
            except WorkersFailedError as error:
                failed[contender] = str(error)
                print(f"{contender.name}, {contender.label}: {error}", file=sys.stderr, flush=True)
                continue
            print(f"{contender.name}, {contender.label}: first step after {world.startup_seconds[0]:.1f} s", flush=True)
            worlds[contender], rounds[contender] = world, []
        names = list(worlds)
        for number in range(options.rounds):
            start = number % len(names)
            for contender in names[start:] + names[:start]:
                rounds[contender].append([step.duration_s for step in worlds[contender].run_for(options.bout)])
    return rounds, failed


# ---- the page


def median(rounds: list[list[float]]) -> float:
    return statistics.median(itertools.chain.from_iterable(rounds))


def ratio(old: list[list[float]], new: list[list[float]]) -> str:
    """How many times faster `new` is, with the quartiles of the rounds."""
    pairs = [statistics.median(a) / statistics.median(b) for a, b in zip(old, new, strict=True)]
    low, _, high = statistics.quantiles(pairs, n=4, method="inclusive") if len(pairs) > 1 else pairs * 3
    return f"{median(old) / median(new):.2f} ({low:.2f} to {high:.2f})"


def pages(
    size: str, rounds: dict[CpuCompetitor, list[list[float]]], failed: dict[CpuCompetitor, str], cores: int
) -> list[str]:
    fields = ", ".join(f"{key} {value}" for key, value in asdict(MODEL_SIZES[size]).items())
    rungs = [rung for rung in ladder(cores) if rung in rounds]
    lines = [
        f"## {size}: {fields}",
        "",
        "| configuration | step, ms | x the row before | x the first |",
        "|---|---:|---:|---:|",
    ]
    for before, rung in zip([None, *rungs], rungs, strict=False):
        gained = "" if before is None else ratio(rounds[before], rounds[rung])
        first = "" if before is None else ratio(rounds[rungs[0]], rounds[rung])
        lines.append(f"| {rung.label} | {median(rounds[rung]) * 1e3:.2f} | {gained} | {first} |")
    best = {}
    for contender in sorted(rounds, key=lambda one: median(rounds[one])):
        best.setdefault(contender.name, contender)
    ours = best[PHALANX_NAME]
    lines += ["", "| best of each | how | step, ms | Phalanx is faster by |", "|---|---|---:|---:|"]
    for name, contender in best.items():
        faster = "" if name == PHALANX_NAME else ratio(rounds[contender], rounds[ours])
        lines.append(f"| {name} | {contender.label} | {median(rounds[contender]) * 1e3:.2f} | {faster} |")
    for contender, why in failed.items():
        lines.append(f"| {contender.name} | {contender.label} | failed | {why.splitlines()[0][:160]} |")
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the tables to this file, too")
    parser.add_argument("--quick", action="store_true", help="the smallest model, two short rounds")
    parser.add_argument("--sizes", nargs="+", default=["M", "L", "XL"], choices=list(MODEL_SIZES))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--bout", type=float, default=1.0, help="seconds of a bout, about")
    options = parser.parse_args()
    if options.quick:
        options.sizes, options.rounds, options.bout = ["S"], 2, 0.2
    paths = [str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))  # where the workers find this file
    # Each worker would keep a pool of compilers for itself.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    cores = len(os.sched_getaffinity(0))
    lines = [
        "# CPU: gain of each optimization, and the best configuration of each framework",
        "",
        f"`{shlex.join(['python', 'benchmarks/cpu.py', *sys.argv[1:]])}`",
        "",
        describe_environment(),
        f"{options.rounds} rounds of interleaved turns of {options.bout} s or 3 steps. *x* is a ratio of median step "
        "times (quartiles of the rounds); above 1 is faster. Every contender has its own processes, stopped "
        "between its turns.",
        "",
    ]
    with tempfile.TemporaryDirectory() as name, contextlib.suppress(KeyboardInterrupt):
        dataset = make_dataset(Path(name))
        for size in options.sizes:
            contenders = list(dict.fromkeys([*ladder(cores), *peers(cores)]))  # one core has fewer
            found = compete(contenders, size, options, Path(name), dataset, cores)
            told = pages(size, *found, cores)
            print("\n".join(told), flush=True)
            lines += told
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text("\n".join(lines).rstrip() + "\n")


if __name__ == "__main__":
    main()
