"""What `determinism: elastic` costs over `fixed-world`: step time of the same run under both, in turns.

Runs of the same recipe alternate (world, replicas, world, ...), each a real `phalanx train` under the agent; a run's
figure is the median of its `step` events after the first ten, and the table gives the median over rounds with the
ratio taken round by round.

    python benchmarks/determinism_cost.py [--rounds 5] [--steps 60] [--out docs/benchmarks/determinism_cost.md]
"""

import argparse
import datetime
import os
import platform
import statistics
import tempfile
from pathlib import Path

import torch

import phalanx
from phalanx.cluster import discover_machine
from phalanx.recipe import Recipe
from phalanx.run import Run, read_events
from phalanx.run.event_types import StepDone

BENCHMARK_CASES = [  # processes, micro-batches a process, width
    (1, 8, 256),
    (2, 1, 256),
    (2, 4, 256),
    (2, 6, 128),
]
STEP_COMPONENTS = ("forward", "backward", "grad_sync", "optimizer")


def recipe(text: Path, processes: int, own: int, width: int, exact: str, steps: int) -> Recipe:
    """A run of `processes` x `own` micro-batches of two samples."""
    return Recipe.model_validate(
        {
            "name": "exact",
            "model": {
                "build": "phalanx.models:transformer",
                "args": {"layers": 4, "hidden_size": width, "num_heads": 4},
            },
            "data": {"source": {"text": str(text)}, "seq_len": 128},
            "evaluation": {"every": None},
            "checkpoint": {"every": None},
            "batch": {"global_size": processes * own * 2, "micro_size": 2},
            "precision": "fp32",
            "num_threads": 1,
            "steps": steps,
            "determinism": exact,
        }
    )


def step_seconds(run: Path) -> tuple[float, dict[str, float]]:
    """Median seconds of a step, and of its parts, after ten steps of warm-up."""
    steps = [event for event in read_events(Run(run).events) if isinstance(event, StepDone)][10:]
    parts = {part: statistics.median(getattr(step.breakdown_s, part) for step in steps) for part in STEP_COMPONENTS}
    return statistics.median(step.duration_s for step in steps), parts


def measure(rounds: int, steps: int) -> list[str]:
    """The table's rows."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "text.py")
        text.write_bytes(b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py"))))
        for processes, own, width in BENCHMARK_CASES:
            seconds: dict[str, list[float]] = {"fixed-world": [], "elastic": []}
            exchange: dict[str, list[float]] = {"fixed-world": [], "elastic": []}
            for number in range(rounds):
                for exact in ("fixed-world", "elastic") if number % 2 == 0 else ("elastic", "fixed-world"):
                    run = Path(folder, f"{processes}-{own}-{width}-{exact}-{number}")
                    phalanx.train(recipe(text, processes, own, width, exact, steps), run=run, nproc_per_node=processes)
                    total, parts = step_seconds(run)
                    seconds[exact].append(total)
                    exchange[exact].append(parts["grad_sync"] + parts["backward"])
            ratios = [b / a for a, b in zip(seconds["fixed-world"], seconds["elastic"], strict=True)]
            world, replicas = (statistics.median(seconds[exact]) * 1e3 for exact in ("fixed-world", "elastic"))
            rows.append(
                f"| {processes} | {own} | {width} | {world:.1f} | {replicas:.1f} | {statistics.median(ratios):.3f} "
                f"({min(ratios):.3f} to {max(ratios):.3f}) |"
            )
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    machine = discover_machine()
    page = [
        "# What `determinism: elastic` costs over `determinism: fixed-world`",
        "",
        f"`python benchmarks/determinism_cost.py --rounds {arguments.rounds} --steps {arguments.steps}`, "
        f"{machine.device_name}, "
        f"{machine.physical_cores} cores, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{datetime.date.today()}. Transformer of 4 layers, fp32, one thread a process, micro-batches of 2 x 128 "
        "tokens.",
        "Milliseconds of a step. Ratios are taken round by round (the two runs of a round follow each other); "
        "median (smallest to largest).",
        "",
        "| processes | micro-batches each | width | fixed-world, ms | elastic, ms | elastic / fixed-world |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    page += measure(arguments.rounds, arguments.steps)
    if arguments.out:
        arguments.out.write_text("\n".join(page) + "\n")


if __name__ == "__main__":
    main()
