"""Accuracy against batch: Network-in-Network on Fashion-MNIST, with and without scaling of the learning rate.

    python benchmarks/large_batch.py [--out docs/benchmarks] [--samples 163840] [--width 24]
        [--batches 64 256 1024 4096] [--seeds 0 1 2]

Every run sees the same number of samples (the larger the batch, the fewer the steps), begins with its seed's weights,
and decays its rate in a straight line to 0. Without scaling all have the learning rate of the smallest batch; with it
that rises by optimizer.lr_scaling, linear or sqrt, over the first quarter of the run. The network is that of
examples/firecaffe/nin.yaml, narrower. The gradient noise scale is what `phalanx report` tells of each run.

One process and one thread, each run in a run directory of its own below --runs (default a temporary one). What the page
tells of time is what the machine was doing meanwhile; accuracies do not depend on it.
"""

import argparse
import os
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from textwrap import fill

import numpy as np

import phalanx
from phalanx.cluster import discover_machine
from phalanx.errors import PhalanxError
from phalanx.observe.history import read_history
from phalanx.recipe import load_resolved_recipe
from phalanx.run import Run, read_events
from phalanx.run.event_types import EvaluationDone, StepDone
from phalanx.train.lr_schedule import peak_learning_rate
from pictures import Curve, chart

RECIPE = Path(__file__).parents[1] / "examples" / "firecaffe" / "nin.yaml"
WAYS = ("none", "linear", "sqrt")
SIZE = 43
"""Pixels to a side; the least that the network takes."""

READING = "\n## Reading\n"
"""From here on the page is written by hand, and kept."""


@dataclass(frozen=True)
class Result:
    """One run of one seed. `noise` is the gradient noise scale in samples as last estimated, None before there was an
    estimate."""

    batch: int
    way: str
    steps: int
    rate: float
    loss: float | None
    accuracy: float | None
    noise: float | None
    estimates: int
    seconds: float
    skipped: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    parser.add_argument("--runs", type=Path, help="where to keep the runs")
    parser.add_argument("--samples", type=int, default=163_840, help="training samples of each run")
    parser.add_argument("--width", type=int, default=24, help="maps of the first convolution; the paper's are 96")
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of the smallest batch")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    given = parser.parse_args()
    batches = sorted(given.batches)
    if given.samples % batches[-1] or any(batch % batches[0] for batch in batches):
        parser.error("--samples must be a multiple of the largest batch, and each batch one of the smallest")
    with tempfile.TemporaryDirectory(prefix="phalanx-large-batch-") as folder:
        results = []
        for batch in batches:
            for way in WAYS if batch > batches[0] else WAYS[:1]:
                runs = [(given.runs or Path(folder)) / f"{way}-{batch}-{seed}" for seed in given.seeds]
                each = zip(runs, given.seeds, strict=True)
                results.append([trained(run, batch, way, batches[0], seed, given) for run, seed in each])
                print(line(results[-1]), flush=True)
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out.parent / "images").mkdir(parents=True, exist_ok=True)
    (given.out.parent / "images" / "large-batch.svg").write_text(picture(results))
    text = page(results, given)
    target = given.out / "large_batch.md"
    _, heading, reading = (target.read_text() if target.is_file() else "").partition(READING)
    target.write_text(text + heading + reading)
    print(f"\n{text}")


def trained(run: Path, batch: int, way: str, base: int, seed: int, given: argparse.Namespace) -> Result:
    """One run from its beginning to its end, or what an earlier call left of it."""
    steps = given.samples // batch
    # Eight micro-batches or more: the noise scale compares one of them with the whole batch.
    values = [
        f"batch.global_size={batch}",
        f"batch.micro_size={max(min(batch // 8, 32), batch // 16)}",
        f"steps={steps}",
    ]
    values += [f"model.args.size={SIZE}", f"model.args.base_channels={given.width}", f"optimizer.lr={given.lr}"]
    values += ["optimizer.schedule.decay=linear", "optimizer.schedule.min_lr_ratio=0", f"seed={seed}"]
    values += [
        "precision=fp32",
        "compile=false",
        "num_threads=1",
        "memory.activation_checkpointing=none",
        "checkpoint.keep=1",
    ]
    values += [f"evaluation.every={steps}", "evaluation.max_samples=10000", "checkpoint.in_memory_every=null"]
    if way == "none":
        values += ["optimizer.lr_scaling=null"]
    else:
        values += [f"optimizer.lr_scaling.{key}={value}" for key, value in (("rule", way), ("base_batch_size", base))]
        values += [f"optimizer.lr_scaling.warmup_steps={steps // 4}"]
    try:
        phalanx.train(RECIPE, values, run=run, nproc_per_node=1)
    except PhalanxError as error:  # a run that diverges is a result, and its events tell it
        print(f"{way}, batch {batch}, seed {seed}: {error}", flush=True)
    where = Run(run)
    scales = read_history(where.events).steps.noise_scale
    noise = [float(value) for value in scales[np.isfinite(scales)]]
    scored = [event for event in read_events(where.events) if isinstance(event, EvaluationDone) and event.step == steps]
    last = scored[-1] if scored else None
    return Result(
        batch,
        way,
        steps,
        peak_learning_rate(load_resolved_recipe(where.resolved)),
        None if last is None else last.loss,
        None if last is None else last.metrics.get("accuracy"),
        noise[-1] if noise else None,
        len(noise),
        float((where.read_json(where.result) or {}).get("duration_s", 0.0)),
        sum(isinstance(event, StepDone) and bool(event.skip_reason) for event in read_events(where.events)),
    )


def line(results: Sequence[Result]) -> str:
    """A row of the table, of one batch and way with every seed."""
    first = results[0]
    by_seed = ", ".join("-" if each.accuracy is None else f"{each.accuracy:.1%}" for each in results)
    accuracy, loss = mean(each.accuracy for each in results), mean(each.loss for each in results)
    scores = ("-" if accuracy is None else f"{accuracy:.1%}", by_seed, "-" if loss is None else f"{loss:.3f}")
    noise = ", ".join(
        "-" if each.noise is None else f"{float(f'{each.noise:.2g}'):g} ({each.estimates})" for each in results
    )
    seconds = sum(each.seconds for each in results)
    cells = (first.batch, first.steps, first.way, f"{first.rate:.3g}", *scores, noise, f"{seconds:.0f}")
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def mean(values: Iterable[float | None]) -> float | None:
    """Over seeds that ended with a score; None where none did."""
    known = [value for value in values if value is not None]
    return statistics.mean(known) if known else None


def picture(results: Sequence[Sequence[Result]]) -> str:
    """Accuracy against batch, the mean over seeds, a curve for each way."""
    first = [each for each in results if each[0].way == "none"][:1]
    curves = []
    for way in WAYS:
        mine = first * (way != "none") + [each for each in results if each[0].way == way]
        scored = [(float(each[0].batch), mean(result.accuracy for result in each)) for each in mine]
        points = [(batch, 100 * accuracy) for batch, accuracy in scored if accuracy is not None]
        curves.append(Curve("no scaling" if way == "none" else f"{way} scaling", points, dots=True))
    title = "NiN on Fashion-MNIST: accuracy after the same number of samples"
    return chart(curves, title, "batch, samples a step", "accuracy, %")


def page(results: Sequence[Sequence[Result]], given: argparse.Namespace) -> str:
    """The Markdown page of what was run."""
    machine, seconds = discover_machine(), sum(each.seconds for seeds in results for each in seeds)
    smallest, batches = min(given.batches), " ".join(str(batch) for batch in sorted(given.batches))
    seeds = " ".join(str(seed) for seed in given.seeds)
    command = f"python benchmarks/large_batch.py --samples {given.samples} --width {given.width} --lr {given.lr:g}"
    setting = (
        f"{date.today()}; {machine.device_name}, {os.cpu_count()} cores, of which one thread was used; "
        f"{seconds / 60:.1f} "
        "minutes of training; on a busy machine, so do not read speeds from it."
    )
    size = (
        f"Small: Network-in-Network with {given.width} maps in its first convolution (the paper's has 96) on "
        f"Fashion-MNIST, images enlarged from 28 to {SIZE} pixels a side; {given.samples:,} samples a run, which is "
        f"{given.samples / 60_000:.2g} epochs. SGD with momentum 0.9 and weight decay 0.0005; the rate "
        f"of batch {smallest} is {given.lr:g}, falling linearly to 0; scaled rates rise over the first "
        "quarter of the run. Scored on all 10,000 test images; guessing has 10%. Accuracies and losses are means over "
        "the seeds."
    )
    warning = (
        "The noise scale, in samples, is a running estimate over the whole run, with a new one every eighth step: the "
        "last one of each seed, in brackets how many. Of runs with few steps it says little, and it is small while a "
        "network has learned little."
    )
    return "\n".join(
        [
            "# Accuracy against batch, with and without scaling of the learning rate",
            "",
            f"`{command} --seeds {seeds} --batches {batches}`",
            "",
            *(f"{fill(text, 120)}\n" for text in (setting, size)),
            "![accuracy against batch](../images/large-batch.svg)",
            "",
            "| batch | steps | scaling | highest rate | accuracy | by seed | validation loss | noise scale | s |",
            "|---:|---:|---|---:|---:|---:|---:|---:|---:|",
            *(line(result) for result in results),
            "",
            fill(warning, 120),
            "",
        ]
    )


if __name__ == "__main__":
    main()
