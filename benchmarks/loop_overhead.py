"""What a training loop costs beside its own model: Phalanx and its peers against a loop written by hand.

    python benchmarks/loop_overhead.py [--out docs/benchmarks/loop_overhead.md] [--rounds 24] [--bout 0.4]
    python benchmarks/loop_overhead.py --quick

Everyone trains a copy of the same transformer on the same prepared bytes with the same fused AdamW, clipping and
precision: a plain PyTorch loop, Phalanx, Lightning Fabric, Accelerate and Hugging Face's Trainer; in two processes each
with DDP, Phalanx with its own exchange. All live in one process (or world of two) and take turns in short bouts, in
an order that rotates, so that whatever disturbs the machine meets them alike. Bouts are short and rounds many because a
virtual machine's cores change their speed every few seconds.

Phalanx runs as it does in `phalanx train`: the worker's own loop with its feed, guard, stopwatch and seeds, under a
real agent that writes every step's event to events.jsonl and a display; evaluation and checkpoints are not due. The
plain loop reads its loss every step, to be able to print it. Fabric and Accelerate get the plain loop's batches and the
Trainer a loader that hands them out, so that a peer's own loader does not count against it; nobody but Phalanx logs.
"""

import argparse
import contextlib
import copy
import importlib.metadata
import io
import itertools
import json
import logging
import os
import platform
import random
import shlex
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from phalanx.data import open_data, prepare_source
from phalanx.jobs.agent.fork_server_client import ForkServerClient
from phalanx.jobs.agent.leader_agent import LeaderAgent
from phalanx.jobs.agent.leader_state import RecoveryPolicy
from phalanx.observe.progress import make_display, read_run_facts
from phalanx.recipe import Recipe, data_schema, load_recipe
from phalanx.recipe.load import dump_recipe
from phalanx.run import Run
from phalanx.run.event_types import AttemptStarted
from phalanx.run.process_messages import Command, WorkerFinishing
from phalanx.train.reporter import Reporter

PLAIN, PHALANX, TRAINER = "plain loop", "Phalanx", "Trainer"
PEER_PACKAGES = {"Fabric": "lightning", "Accelerate": "accelerate", TRAINER: "transformers"}
NUM_WARMUP_STEPS = 10
NUM_DISCARDED_STEPS = 2
"""First steps of a bout: they find the caches full of the one before."""


@dataclass(frozen=True)
class ModelSize:
    """A model and its batch (of all processes together)."""

    layers: int
    width: int
    heads: int
    sequence: int
    batch: int


MODEL_SIZES = {
    "S": ModelSize(layers=2, width=64, heads=2, sequence=64, batch=8),
    "M": ModelSize(layers=4, width=128, heads=4, sequence=64, batch=8),
    "L": ModelSize(layers=4, width=256, heads=4, sequence=128, batch=4),
    "XL": ModelSize(layers=6, width=256, heads=4, sequence=256, batch=4),
}
Steps = Iterator[object]


# ---- the contenders: each `next` is one step


@dataclass
class LoopTask:
    """What all contenders share."""

    recipe: Recipe
    world: int
    rank: int
    device: torch.device
    has_loss: bool = False
    """Whether the model of plain loop and peers is a `WithLoss`."""

    @property
    def micro_batches(self) -> int:
        """Of this process, in a step: gradients are accumulated over them."""
        micro = self.recipe.batch.micro_size
        return self.samples // micro if isinstance(micro, int) else 1

    def micro(self, x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """A step's samples in micro-batches."""
        yield from zip(x.chunk(self.micro_batches), y.chunk(self.micro_batches), strict=True)

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """A micro-batch's part of the mean loss of a step."""
        loss: Tensor = model(x, y) if self.has_loss else loss_of(model(x), y)
        return loss if self.micro_batches == 1 else loss / self.micro_batches

    @property
    def samples(self) -> int:
        """Of this process, in a step."""
        return self.recipe.batch.global_size // self.world

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Random windows, the usual way."""
        source = self.recipe.data.source
        assert isinstance(source, data_schema.DataSource)
        assert source.prepared is not None
        tokens = np.memmap(Path(source.prepared) / "shard-00000.bin", np.uint8, mode="r")
        chance, length = np.random.default_rng(self.rank), self.recipe.data.seq_len
        while True:
            starts = chance.integers(0, len(tokens) - length - 1, self.samples)
            x = np.stack([tokens[i : i + length].astype(np.int64) for i in starts])
            y = np.stack([tokens[i + 1 : i + 1 + length].astype(np.int64) for i in starts])
            yield torch.from_numpy(x).to(self.device), torch.from_numpy(y).to(self.device)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The same groups and settings as the recipe's."""
        optim, parameters = self.recipe.optimizer, list(model.parameters())
        matrices = {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": optim.weight_decay}
        vectors = {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0}
        return torch.optim.AdamW([matrices, vectors], lr=optim.lr, betas=optim.betas, fused=True)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class WithLoss(nn.Module):
    """A model and its loss, so that both are compiled together."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        self.loss = loss_of

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.model(x), y)


def plain(job: LoopTask, model: nn.Module) -> Steps:
    optimizer = job.optimizer(model)
    wrapped = DistributedDataParallel(model) if job.world > 1 else model
    for batch in job.batches():
        optimizer.zero_grad(set_to_none=True)
        for x, y in job.micro(*batch):
            if job.recipe.precision == "bf16":
                with torch.autocast(job.device.type, dtype=torch.bfloat16):
                    loss = job.loss(wrapped, x, y)
            else:
                loss = job.loss(wrapped, x, y)
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield loss.item()


def fabric(job: LoopTask, model: nn.Module) -> Steps:
    from lightning.fabric import Fabric

    engine = Fabric(
        accelerator=job.device.type,
        devices=job.world,
        strategy="ddp" if job.world > 1 else "auto",
        precision={"fp32": "32-true", "bf16": "bf16-mixed"}[job.recipe.precision],
    )
    engine.launch()
    wrapped, optimizer = engine.setup(model, job.optimizer(model))
    for batch in job.batches():
        optimizer.zero_grad(set_to_none=True)
        for x, y in job.micro(*batch):
            loss = job.loss(wrapped, x, y)
            engine.backward(loss)
        engine.clip_gradients(wrapped, optimizer, max_norm=1.0)
        optimizer.step()
        yield loss.item()


def accelerate(job: LoopTask, model: nn.Module) -> Steps:
    from accelerate import Accelerator

    engine = Accelerator(
        cpu=job.device.type == "cpu", mixed_precision={"fp32": "no", "bf16": "bf16"}[job.recipe.precision]
    )
    wrapped, optimizer = engine.prepare(model, job.optimizer(model))
    for batch in job.batches():
        optimizer.zero_grad(set_to_none=True)
        for x, y in job.micro(*batch):
            loss = job.loss(wrapped, x, y)
            engine.backward(loss)
        engine.clip_grad_norm_(wrapped.parameters(), 1.0)
        optimizer.step()
        yield loss.item()


def phalanx(job: LoopTask, folder: Path, report: Reporter) -> tuple[nn.Module, Steps]:
    """As in a worker. The model is its own; the seed gives it the weights with which everyone starts."""
    from phalanx.train.builder import build_context
    from phalanx.train.distributed.environment import DistEnv
    from phalanx.train.train_context import WorkerProcess
    from phalanx.train.train_state import TrainState
    from phalanx.train.trainer import Trainer

    recipe, run = job.recipe, Run(folder)
    place = DistEnv(job.rank, job.world, job.rank, 0, job.device)
    data = open_data(recipe.data, recipe.evaluation, recipe.seed)
    parts = build_context(WorkerProcess(run, folder, place, report), recipe, data)
    if place.is_rank_zero:
        report.report_event(
            AttemptStarted(
                world_size=job.world,
                attempt=0,
                start_step=0,
                total_steps=recipe.steps,
                device=str(job.device),
                num_micro_batches=parts.accumulator.num_micro_batches,
            )
        )
    trainer = Trainer(parts, TrainState(), {})

    def steps() -> Steps:  # the trainer's loop, with a pause after each step
        with trainer._open_batches() as batches:
            while not trainer.is_done:
                micro_batches, lr = trainer._next_micro_batches(batches), trainer._learning_rate
                trainer.train_step.accumulate(trainer.train_state.step + 1, micro_batches)
                trainer.end_step(trainer.train_step.apply(trainer.train_step.reduce(), lr), lr)
                yield

    return parts.model, steps()


class Loader:
    """What the Trainer takes for a data loader."""

    def __init__(self, batches: Iterator[tuple[Tensor, Tensor]], length: int):
        self.batches, self.length = batches, length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return ({"tokens": x, "labels": y} for x, y in self.batches)


def make_trainer(
    job: LoopTask, model: nn.Module, steps: int, stepped: Callable[[], bool], folder: Path, compiled: bool = False
) -> Any:
    """The Trainer has a loop of its own; it calls `stepped` at the end of each step, and ends when that says False."""
    import transformers

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self) -> Any:
            return Loader(
                (each for batch in job.batches() for each in job.micro(*batch)), (steps + 1) * job.micro_batches
            )

        def compute_loss(self, model: nn.Module, inputs: Any, *_: object, **__: object) -> Tensor:
            x, y = inputs["tokens"], inputs["labels"]
            loss: Tensor = model(x, y) if job.has_loss else loss_of(model(x), y)
            return loss

    class Baton(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = not stepped()

    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=job.samples // job.micro_batches,
        gradient_accumulation_steps=job.micro_batches,
        max_steps=steps + 1,
        max_grad_norm=1.0,
        bf16=job.recipe.precision == "bf16",
        use_cpu=job.device.type == "cpu",
        torch_compile=compiled,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
    )
    optimizer = job.optimizer(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    trainer = Trainer(model, arguments, train_dataset=Unused(), optimizers=(optimizer, schedule), callbacks=[Baton()])
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


class Unused(torch.utils.data.Dataset):
    """The Trainer wants a dataset even where its loader is overridden."""

    def __len__(self) -> int:
        return 1


# ---- taking turns


class TurnSchedule:
    """Whose turn it is: contenders step when they are asked, but for the Trainer, which tells when it has stepped."""

    def __init__(self, names: list[str], steps_per_turn: int, rounds: int):
        order = [names[i % len(names) :] + names[: i % len(names)] for i in range(rounds)]
        self.schedule = [(name, NUM_WARMUP_STEPS) for name in names] + [
            (name, steps_per_turn) for names in order for name in names
        ]
        self.turn_seconds: dict[str, list[list[float]]] = {name: [] for name in names}
        self.steppers: dict[str, Steps] = {}
        self._trainer_seconds: list[float] = []
        self._steps_left = 0
        self._since = 0.0
        self._playing = self._run_schedule()

    def steps_of(self, name: str) -> int:
        return sum(count for owner, count in self.schedule if owner == name)

    def _run_schedule(self) -> Generator[int, list[float], None]:
        """Yields how many steps the Trainer has to take, and is sent how long they took."""
        for name, count in self.schedule:
            if name == TRAINER:
                self.turn_seconds[name].append((yield count))
                continue
            steps, seconds = self.steppers[name], []
            for _ in range(count):
                begun = time.perf_counter()
                next(steps)
                seconds.append(time.perf_counter() - begun)
            self.turn_seconds[name].append(seconds)

    def start(self, trainer: Callable[[], object] | None) -> None:
        """Play all turns; `trainer` runs the Trainer until `trainer_stepped` returns False."""
        self._steps_left = next(self._playing, 0)
        if trainer is not None:
            self._since = time.perf_counter()
            trainer()

    def trainer_stepped(self) -> bool:
        """Take note of one of its steps; at the end of its turn the others have theirs. False when all is done."""
        self._trainer_seconds.append(time.perf_counter() - self._since)
        if len(self._trainer_seconds) == self._steps_left:
            own, self._trainer_seconds = self._trainer_seconds, []
            try:
                self._steps_left = self._playing.send(own)
            except StopIteration:
                return False
        self._since = time.perf_counter()
        return True


# ---- the worker, started by Phalanx's agent, in which all contenders live


def run_competitors(payload: dict[str, Any]) -> None:
    """Let everyone train; the leading process writes the times."""
    from phalanx.train.distributed.environment import dist_env_from_environment
    from phalanx.train.distributed.process_group import init_process_group
    from phalanx.train.model_builder import build_model
    from phalanx.train.reporter import make_reporter
    from phalanx.train.worker import configure_torch

    silence_output()
    folder = Path(payload["folder"])
    recipe = load_recipe(Run(folder).resolved).recipe
    place = dist_env_from_environment()
    configure_torch(recipe, place)
    init_process_group(place)
    if place.world_size == 1:  # peers would take a launcher's variables for a world
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
    job = LoopTask(recipe, place.world_size, place.rank, place.device)
    report = make_reporter(Run(folder), place.is_rank_zero, os.environ["PHALANX_EVENTS_FD"])
    facts = open_data(recipe.data, recipe.evaluation, recipe.seed).info
    model = build_model(recipe.model, facts, folder, recipe.seed, place.device)
    bout = choose_steps_per_turn(job, copy.deepcopy(model), payload["seconds"], payload["bout"])
    names = [PLAIN, PHALANX, *(name for name in PEER_PACKAGES if can_run(name))]
    models = {name: copy.deepcopy(model) for name in names}
    turns = TurnSchedule(names, bout, payload["rounds"])
    trainer = None
    if TRAINER in names:  # where a callback at the end of each step gives the others their turns
        trainer = make_trainer(job, models[TRAINER], turns.steps_of(TRAINER), turns.trainer_stepped, folder)
    makers = {PLAIN: plain, "Fabric": fabric, "Accelerate": accelerate}
    turns.steppers = {name: make(job, models[name]) for name, make in makers.items() if name in names}
    models[PHALANX], turns.steppers[PHALANX] = phalanx(job, folder, report)
    turns.start(None if trainer is None else trainer.train)
    report.close()
    threads = torch.get_num_threads()
    assert threads == recipe.num_threads, "a peer changed the number of threads"
    losses = {name: score(job, models[name]) for name in names}
    if place.is_rank_zero:
        parameters = sum(p.numel() for p in model.parameters())
        result = {"bouts": turns.turn_seconds, "losses": losses, "parameters": parameters, "threads": threads}
        (folder / "times.json").write_text(json.dumps(result))
        report.report_result({"status": "done"})
    report.send_control(WorkerFinishing(rank=place.rank, exit_code=0))


def silence_output() -> None:
    """Keep peers' advice out of the way."""
    warnings.filterwarnings("ignore")
    for name in ("lightning", "transformers", "accelerate", "torch"):
        logging.getLogger(name).setLevel(logging.ERROR)


def choose_steps_per_turn(job: LoopTask, model: nn.Module, seconds: float, max_steps: int) -> int:
    """Steps of a bout, so that the plain loop's takes about `seconds`; alike in all processes."""
    steps = plain(job, model)
    took = []
    for _ in range(NUM_WARMUP_STEPS):
        begun = time.perf_counter()
        next(steps)
        took.append(time.perf_counter() - begun)
    count = torch.tensor(min(max_steps, max(NUM_DISCARDED_STEPS + 3, round(seconds / statistics.median(took)))))
    if job.world > 1:
        dist.broadcast(count, 0)
    return int(count)


@torch.no_grad()
def score(job: LoopTask, model: nn.Module) -> float:
    """Loss on the same few windows for everyone: all should have learned about the same."""
    alike = LoopTask(job.recipe, job.world, 10**6, job.device)
    model.eval()
    return statistics.fmean(loss_of(model(x), y).item() for x, y in itertools.islice(alike.batches(), 8))


# ---- the command


def make_dataset(folder: Path, megabytes: int = 8) -> Path:
    """Words of random letters, some much more frequent than others, as one text file with the byte tokenizer."""
    chance = random.Random(0)
    words = ["".join(chance.choices("etaoinshrdlu", k=chance.randint(1, 9))) for _ in range(4096)]
    weights = [1 / (rank + 1) for rank in range(len(words))]
    (folder / "text.txt").write_text(" ".join(chance.choices(words, weights, k=megabytes * 180_000)))
    return prepare_source(data_schema.DataSource(text="text.txt"), data_schema.DataConfig(), folder, folder / "dataset")


def recipe_of(size: ModelSize, precision: str, world: int, dataset: Path, cores: int) -> Recipe:
    return Recipe.model_validate(
        {
            "model": {"args": {"layers": size.layers, "hidden_size": size.width, "num_heads": size.heads}},
            "data": {"source": {"prepared": str(dataset)}, "seq_len": size.sequence},
            "batch": {"global_size": size.batch, "micro_size": size.batch // world},
            "optimizer": {"lr": 3e-4, "schedule": {"warmup_steps": 0, "decay": "constant"}},
            "steps": 10**9,
            "evaluation": {"every": None, "holdout_fraction": 0},
            "checkpoint": {"every": None},
            "precision": precision,
            "num_threads": max(1, cores // world),
            "compile": False,
            "parallelism": {"replicate": world},
            "memory": {"activation_checkpointing": "none", "chunked_loss": False},
            "grad_sync": {"algorithm": "all-reduce"},
        }
    )


def run_comparison(recipe: Recipe, world: int, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One configuration in workers of its own, under Phalanx's agent."""
    run = Run(folder)
    run.create()
    run.resolved.write_text(dump_recipe(recipe))
    payload = {"folder": str(folder), "seconds": options.bout, "bout": options.steps, "rounds": options.rounds}
    command = Command(function=f"{Path(__file__).stem}:contend", payload=payload)
    display = make_display(io.StringIO(), recipe.steps, read_run_facts(run))
    with (
        ForkServerClient() as fork_server,
        LeaderAgent(run, fork_server, display.show_event, RecoveryPolicy(1)) as agent,
    ):
        outcome = agent.supervise(world, command, 0)
    display.close()
    if outcome.code:
        logs = "\n".join(path.read_text() for path in sorted(run.logs.iterdir()))
        raise SystemExit(f"{logs}\n{outcome.message}")
    events = sum('"kind": "step"' in line for line in run.events.read_text().splitlines())
    result: dict[str, Any] = json.loads((folder / "times.json").read_text())
    assert events == sum(map(len, result["bouts"][PHALANX])), "the agent did not get every event"
    return result


@dataclass(frozen=True)
class ResultRow:
    """One contender in one configuration, times in seconds."""

    name: str
    median: float
    ratio: float  # of the medians over all steps
    rounds: tuple[float, float, float]  # quartiles of the rounds' ratios of mean step times
    loss: float


def rows_of(result: dict[str, Any]) -> list[ResultRow]:
    """Every contender against the plain loop."""
    bouts = {name: [bout[NUM_DISCARDED_STEPS:] for bout in played[1:]] for name, played in result["bouts"].items()}
    medians = {name: statistics.median(itertools.chain(*played)) for name, played in bouts.items()}
    rows = []
    for name, played in bouts.items():
        pairs = zip(played, bouts[PLAIN], strict=True)
        ratios = [statistics.fmean(own) / statistics.fmean(plain) for own, plain in pairs]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        ratio = medians[name] / medians[PLAIN]
        rows.append(ResultRow(name, medians[name], ratio, (low, middle, high), result["losses"][name]))
    return rows


def table(world: int, precision: str, results: dict[str, dict[str, Any]]) -> list[str]:
    processes = "one process" if world == 1 else f"{world} processes"
    threads = next(iter(results.values()))["threads"]
    lines = [f"## {processes}, {precision}, {threads} {'thread' if threads == 1 else 'threads'} each", ""]
    lines += ["| model | | step, ms | of plain: median step | mean step, by round (quartiles) | loss at the end |"]
    lines += ["|---|---|---:|---:|---:|---:|"]
    for name, result in results.items():
        for row in rows_of(result):
            low, middle, high = row.rounds
            size = f"{name}: {result['parameters'] / 1e6:.2f} M" if row.name == PLAIN else ""
            cells = [size, row.name, f"{row.median * 1e3:.2f}", f"{row.ratio:.3f}"]
            cells += [f"{middle:.3f} ({low:.3f} to {high:.3f})", f"{row.loss:.3f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def can_run(name: str) -> bool:
    """Whether a peer is installed; the Trainer does not come with Accelerate, but needs it."""
    return all(installed(package) for package in (PEER_PACKAGES[name], *(["accelerate"] if name == TRAINER else [])))


def installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe_environment(machine: str | None = None) -> str:
    """Date, machine and versions, in a line."""
    versions = ", ".join(f"{p} {installed(p)}" for p in ("torch", "numpy", *PEER_PACKAGES.values()) if installed(p))
    missing = ", ".join(p for p in PEER_PACKAGES.values() if not installed(p))
    told = f"{date.today()}; {machine or cpu_name()}; Python {platform.python_version()}, {versions}."
    return told + (f" Not installed, so not measured: {missing}." if missing else "")


def cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    processors = [line.split(":")[1].strip() for line in cpuinfo if line.startswith("model name")]
    return f"{processors[0] if processors else platform.machine()}, {os.cpu_count()} cores"


def head(options: argparse.Namespace) -> list[str]:
    command = shlex.join(["python", "benchmarks/loop_overhead.py", *sys.argv[1:]])
    fields = {
        name: ", ".join(f"{key} {value}" for key, value in asdict(MODEL_SIZES[name]).items()) for name in options.sizes
    }
    sizes = "; ".join(f"{name}: {field}" for name, field in fields.items())
    return [
        "# Trainer overhead: step time against a plain PyTorch loop",
        "",
        f"`{command}`",
        "",
        describe_environment(),
        f"{options.rounds} rounds of interleaved turns of up to {options.steps} steps or {options.bout} s. *Median "
        "step* compares the medians over all steps; *mean step, by round* is the mean step of a turn over the plain "
        "loop's in the same round (median and quartiles over the rounds), which includes rare costs. `fp32` and "
        f"`bf16` (autocast). Models: {sizes}.",
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the tables to this file, too")
    parser.add_argument("--quick", action="store_true", help="the two small models, three short rounds")
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--sizes", nargs="+", default=["S", "M", "L"], choices=list(MODEL_SIZES))
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--steps", type=int, default=100, help="most steps of a bout")
    parser.add_argument("--bout", type=float, default=0.4, help="seconds of a bout, about")
    options = parser.parse_args()
    if options.quick:
        options.sizes, options.rounds, options.bout = ["S", "M"], 3, 0.5
    paths = [str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))  # where the workers find `run_competitors`
    cores = len(os.sched_getaffinity(0))
    lines = head(options)
    with tempfile.TemporaryDirectory() as name, contextlib.suppress(KeyboardInterrupt):
        dataset = make_dataset(Path(name))
        for world, precision in itertools.product(options.worlds, options.precisions):
            results = {}
            for size in options.sizes:
                recipe = recipe_of(MODEL_SIZES[size], precision, world, dataset, cores)
                results[size] = run_comparison(recipe, world, options, Path(name) / f"{world}-{precision}-{size}")
                print("\n".join(table(world, precision, {size: results[size]})), flush=True)
            lines += table(world, precision, results)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text("\n".join(lines).rstrip() + "\n")


if __name__ == "__main__":
    main()
