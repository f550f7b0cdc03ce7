"""Time from the command to the end of the first step: cold, with an empty cache, and warm, by phase.

    python benchmarks/start.py [RECIPE] [--rounds 5]

Cold is a first start: nothing is prepared or measured; files may be in the page cache. A warm one follows with the same
cache. Each is `phalanx train RECIPE steps=1`, without evaluation. Printed are medians, with the fastest and the slowest
whole time:

    command    until `phalanx` has read the recipe and looks at the machine
    load       until torch is imported, and what the recipe names is found
    data       to prepare the data, and for what is chosen without a trial
    trace      memory and FLOPs of the model, from a trace
    trials     times of micro-batches, and the matmul rate
    worker     the rest until the first step begins: files of the run, the model
    step       the first step
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from data import cpu_name, installed
from phalanx.run import Run, read_events
from phalanx.run.event_types import RecipeResolved, StepDone

EXAMPLE = Path(__file__).parents[1] / "examples" / "gpt-python.yaml"
PHASES = ("command", "load", "data", "trace", "trials", "worker", "step")


def start_once(recipe: Path, folder: Path, cache: Path) -> dict[str, float]:
    """Seconds by phase of one start."""
    run = Run(Path(tempfile.mkdtemp(dir=folder)) / "run")
    command = [sys.executable, "-m", "phalanx", "train", str(recipe), "steps=1", "evaluation.every=null"]
    start_time = time.time()
    subprocess.run(
        [*command, "--run", str(run.path)],
        env={**os.environ, "PHALANX_CACHE_DIR": str(cache)},
        stderr=subprocess.DEVNULL,
        check=True,
    )
    events = list(read_events(run.events))
    resolved = next(event for event in events if isinstance(event, RecipeResolved))
    step = next(event for event in events if isinstance(event, StepDone))
    phases = {"load": resolved.load_s, "trace": resolved.trace_s, "trials": resolved.trials_s}
    phases["data"] = resolved.duration_s - sum(phases.values())
    phases["command"] = resolved.time - resolved.duration_s - start_time
    phases["step"] = step.duration_s
    return phases | {"worker": step.time - start_time - sum(phases.values())}


def format_row(name: str, starts: Sequence[dict[str, float]]) -> str:
    totals = [sum(phases.values()) for phases in starts]
    cells = [f"{statistics.median(phases[name] for phases in starts):.2f}" for name in PHASES]
    total = f"{statistics.median(totals):.2f} ({min(totals):.2f} to {max(totals):.2f})"
    return f"| {name} | {' | '.join(cells)} | {total} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", type=Path, default=EXAMPLE)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    cold, warm = [], []
    with tempfile.TemporaryDirectory() as name:
        for turn in range(options.rounds):
            cache = Path(name) / f"cache-{turn}"
            cold.append(start_once(options.recipe, Path(name), cache))
            warm.append(start_once(options.recipe, Path(name), cache))
    print(
        f"`python {' '.join(sys.argv)}` on {date.today()}: {cpu_name()}, {os.cpu_count()} cores, load {load:.1f} at "
        f"the start; torch {installed('torch')}. Seconds, medians of {options.rounds}."
    )
    print(f"\n| start | {' | '.join(PHASES)} | to the first step |")
    print(f"|---|{'---:|' * (len(PHASES) + 1)}")
    print(format_row("cold", cold))
    print(format_row("warm", warm))


if __name__ == "__main__":
    main()
