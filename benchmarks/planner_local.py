"""Predictions from `phalanx calibrate` against real runs on this machine: several models, one and two processes, fp32
and bf16, with and without accumulation.

    phalanx calibrate && python benchmarks/planner_local.py [--runs 5] [--rows 1 2 3]

A run begins when a reference product takes what it took in the probe, give or take 5 %, and waits until then. One after
which the product differs by more than 5 % from before is thrown away and done again, up to three times. Counts the
median of five runs. Needs a machine with nothing else to do, at least at times; where others work on its host a row may
take ten minutes, and `--rows` does some of them.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from phalanx.autoconfig.resolve import load_calibrated_cluster, predict_step
from phalanx.cluster import Cluster, discover_machine
from phalanx.cluster.calibration.timing import RunInProcess, time_reference_gemm
from phalanx.cluster.health.checks.matmul import baseline_seconds
from phalanx.cluster.health.runner import CheckProcess
from phalanx.errors import UsageError
from phalanx.recipe import load_resolved_recipe
from phalanx.run import read_events
from phalanx.run.event_types import StepDone

EXAMPLE_RECIPE = Path(__file__).parents[1] / "examples" / "gpt-python.yaml"
BASE_OVERRIDES = (
    "steps=20",
    "compile=false",
    "evaluation.every=null",
    "checkpoint.every=null",
    "memory.activation_checkpointing=none",
)
NUM_WARMUP_STEPS = 5
"""Steps that warm up."""
MAX_DRIFT = 0.05
REFERENCE_DURATION_S = 1.5
"""Seconds for which the reference product is repeated: its median must not be that of a short disturbance."""
REFERENCE_TIMEOUT_S = 60.0
"""Seconds in which the process that times it must answer."""
MAX_IDLE_CHECKS = 200
"""How often one looks whether the machine is quiet before it is said that it is not."""
MAX_TRIES = 3
WIDE_OVERRIDES = ("model.args.layers=3", "model.args.hidden_size=512", "model.args.num_heads=8", "batch.global_size=8")
DEEP_OVERRIDES = ("model.args.layers=8", "model.args.hidden_size=128", "data.seq_len=128", "batch.global_size=32")
LONG_OVERRIDES = ("model.args.layers=2", "data.seq_len=1024", "batch.global_size=4")
Case = tuple[str, tuple[str, ...], int]
BENCHMARK_CASES: list[Case] = [
    ("the example, fp32", ("precision=fp32",), 1),
    ("the example, bf16", ("precision=bf16",), 1),
    ("the example, fp32, 2 processes", ("precision=fp32",), 2),
    ("the example, bf16, 2 processes", ("precision=bf16",), 2),
    ("the example, fp32, 4 micro-batches", ("precision=fp32", "batch.micro_size=4"), 1),
    ("wide, fp32", ("precision=fp32", *WIDE_OVERRIDES), 1),
    ("wide, bf16", ("precision=bf16", *WIDE_OVERRIDES), 1),
    ("deep and narrow, fp32", ("precision=fp32", *DEEP_OVERRIDES), 1),
    ("long sequences, fp32", ("precision=fp32", *LONG_OVERRIDES), 1),
    ("squared ReLU, bf16, 2 processes", ("precision=bf16", "model.args.activation=relu2", "model.args.layers=6"), 2),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument(
        "--rows", type=int, nargs="+", choices=range(1, len(BENCHMARK_CASES) + 1), help="of the table, from 1"
    )
    given = parser.parse_args()
    cases = [BENCHMARK_CASES[row - 1] for row in given.rows] if given.rows else BENCHMARK_CASES
    here = load_calibrated_cluster(discover_machine())
    if here is None or here.measured is None:
        raise UsageError("this machine has not been measured: run `phalanx calibrate` first")
    with CheckProcess() as helper:
        compare(cases, here, given.runs, partial(helper.call, timeout_s=REFERENCE_TIMEOUT_S))


def compare(cases: list[Case], local_cluster: Cluster, runs: int, elsewhere: RunInProcess) -> None:
    print("| run | measured | foretold | off | runs | thrown away |\n|---|---|---|---|---|---|", flush=True)
    off = []
    for name, overrides, world in cases:
        found: list[float] = []
        thrown, foretold = 0, None
        while len(found) < runs and thrown < MAX_TRIES * runs:
            measured, foretold, drift = run_case(overrides, world, local_cluster, elsewhere)
            if drift > MAX_DRIFT:
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


def run_case(
    overrides: tuple[str, ...], world: int, local_cluster: Cluster, elsewhere: RunInProcess
) -> tuple[float, float | None, float]:
    """Median seconds of a step of a run, what was foretold, and by how much the reference changed meanwhile."""
    before = wait_until_idle(local_cluster, elsewhere)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        phalanx = Path(sys.executable).with_name("phalanx")
        command = [
            phalanx,
            "train",
            EXAMPLE_RECIPE,
            *BASE_OVERRIDES,
            *overrides,
            "--run",
            run,
            "--nproc-per-node",
            str(world),
        ]
        subprocess.run([str(part) for part in command], check=True, capture_output=True)
        done = [event.duration_s for event in read_events(run / "events.jsonl") if isinstance(event, StepDone)]
        recipe = load_resolved_recipe(run / "resolved.yaml")
        micro_size, checkpointing = recipe.batch.micro_size, recipe.memory.activation_checkpointing
        parts = predict_step(recipe, micro_size, checkpointing, EXAMPLE_RECIPE.parent, local_cluster, world)
    drift = abs((1 + measure_slowdown(local_cluster, elsewhere)) / (1 + before) - 1)
    return statistics.median(done[NUM_WARMUP_STEPS:]), None if parts is None else parts.total, drift


def wait_until_idle(local_cluster: Cluster, elsewhere: RunInProcess) -> float:
    """Wait until the machine is as fast as it was in the probe; what share of its time the reference takes longer."""
    for _ in range(MAX_IDLE_CHECKS):
        if abs(share := measure_slowdown(local_cluster, elsewhere)) <= MAX_DRIFT:
            return share
    raise UsageError(
        f"in {MAX_IDLE_CHECKS} looks the machine was never as fast as in the probe: probe and run it when it rests"
    )


def measure_slowdown(local_cluster: Cluster, elsewhere: RunInProcess) -> float:
    """By what share the reference product takes longer now than in the probe."""
    baseline = baseline_seconds(local_cluster.measured)
    if baseline is None:
        raise UsageError("the probe has no reference product: run `phalanx calibrate` again")
    return float(time_reference_gemm(discover_machine(), elsewhere, REFERENCE_DURATION_S)["seconds"]) / baseline - 1


if __name__ == "__main__":
    main()
