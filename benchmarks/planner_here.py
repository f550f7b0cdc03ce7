"""Predictions from `phalanx probe` against real runs on this very machine: several models, one and two processes, fp32
and bf16, with and without accumulation.

    phalanx probe && python benchmarks/planner_here.py [--runs 5]

A reference product is timed before and after each run; a run between which it changed by more than 5 % is thrown away
and done again, up to three times. Counts the median of five runs. Needs a machine with nothing else to do.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from phalanx.cluster import Cluster, this_machine
from phalanx.cluster.probe import time_reference
from phalanx.errors import UsageError
from phalanx.foretelling import foretold_here, probed
from phalanx.recipe import load_recipe

EXAMPLE = Path(__file__).parents[1] / "examples" / "gpt-python.yaml"
PLAIN = ("steps=20", "compile=false", "evaluate.every=null", "checkpoint.every=null", "memory.recompute=none")
SKIPPED = 5
"""Steps that warm up."""
DRIFT = 0.05
WATCHED = 1.5
"""Seconds for which the reference product is repeated: its median must not be that of a short disturbance."""
TRIES = 3
WIDE = ("model.args.layers=3", "model.args.width=512", "model.args.heads=8", "batch.global=8")
DEEP = ("model.args.layers=8", "model.args.width=128", "data.sequence=128", "batch.global=32")
LONG = ("model.args.layers=2", "data.sequence=1024", "batch.global=4")
CASES: list[tuple[str, tuple[str, ...], int]] = [
    ("the example, fp32", ("precision=fp32",), 1),
    ("the example, bf16", ("precision=bf16",), 1),
    ("the example, fp32, 2 processes", ("precision=fp32",), 2),
    ("the example, bf16, 2 processes", ("precision=bf16",), 2),
    ("the example, fp32, 4 micro-batches", ("precision=fp32", "batch.micro=4"), 1),
    ("wide, fp32", ("precision=fp32", *WIDE), 1),
    ("wide, bf16", ("precision=bf16", *WIDE), 1),
    ("deep and narrow, fp32", ("precision=fp32", *DEEP), 1),
    ("long sequences, fp32", ("precision=fp32", *LONG), 1),
    ("squared ReLU, bf16, 2 processes", ("precision=bf16", "model.args.activation=relu2", "model.args.layers=6"), 2),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    given = parser.parse_args()
    here = probed(this_machine())
    if here is None:
        raise UsageError("this machine has not been measured: run `phalanx probe` first")
    print("| run | measured | foretold | off | runs | thrown away |\n|---|---|---|---|---|---|", flush=True)
    off = []
    for name, overrides, world in CASES:
        found, thrown, foretold = [], 0, None
        while len(found) < given.runs and thrown < TRIES * given.runs:
            measured, foretold, drift = once(overrides, world, here)
            if drift > DRIFT:
                thrown += 1
            else:
                found.append(measured)
        if not found or foretold is None:
            print(f"| {name} | | | | 0 | {thrown} |", flush=True)
            continue
        median = statistics.median(found)
        off.append(abs(foretold / median - 1))
        signed = 100 * (foretold / median - 1)
        times = f"{1e3 * median:.0f} ms | {1e3 * foretold:.0f} ms | {signed:+.1f} %"
        print(f"| {name} | {times} | {len(found)} | {thrown} |", flush=True)
    if off:
        print(f"\nlargest {100 * max(off):.1f} %, median {100 * statistics.median(off):.1f} %")


def once(overrides: tuple[str, ...], world: int, here: Cluster) -> tuple[float, float | None, float]:
    """Median seconds of a step of a run, what was foretold, and by how much the reference changed meanwhile."""
    before = reference()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        phalanx = Path(sys.executable).with_name("phalanx")
        command = [phalanx, "train", EXAMPLE, *PLAIN, *overrides, "--run", run, "--nproc", str(world)]
        subprocess.run([str(part) for part in command], check=True, capture_output=True)
        events: list[dict[str, Any]] = [json.loads(line) for line in (run / "events.jsonl").open()]
        steps = [event["seconds"] for event in events if event["kind"] == "step"][SKIPPED:]
        parts = foretold_here(load_recipe(run / "resolved.yaml").recipe, EXAMPLE.parent, here, world)
    drift = abs(reference() / before - 1)
    return statistics.median(steps), None if parts is None else parts.total, drift


def reference() -> float:
    """Seconds of the reference product, in a process of its own."""
    return float(time_reference(this_machine(), elsewhere, WATCHED)["timed"]["seconds"])


def elsewhere(function: str, payload: Any) -> Any:
    """What `module:function(payload)` returns in a process of its own."""
    module, _, name = function.partition(":")
    code = f"import json; from {module} import {name}; print(json.dumps({name}(json.loads({json.dumps(payload)!r}))))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


if __name__ == "__main__":
    main()
