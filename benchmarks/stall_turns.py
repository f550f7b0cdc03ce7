"""Evaluations of jobs of one site, with and without a limit of the swing: how many fall together, how far the power
of the site would fall, and how many steps they wait.

    python benchmarks/stall_turns.py [--jobs 4]

Jobs that start at once train the same recipe on the CPU of this machine, each with the data order of its own seed. The
fleet file gives the node of each job 2.2 kW from idle to full power. Not counted is the evaluation after the last step:
the power of a job that has ended falls in any case.
"""

import argparse
import datetime
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from phalanx.run import Run, read_events
from phalanx.run.event_types import EvaluationDone, RunWarning

EVERY, STEPS = 150, 600
JOB_SWING_KW = 2.2
RECIPE = f"""\
name: turns
model: {{build: "phalanx.models:transformer", args: {{hidden_size: 64, layers: 2, num_heads: 2}}}}
data: {{source: {{text: text.txt}}, seq_len: 64}}
evaluation: {{every: {EVERY}, max_samples: 768, holdout_fraction: 0.5}}
checkpoint: {{every: {EVERY}}}
batch: {{global_size: 32, micro_size: 32}}
precision: fp32
num_threads: 1
compile: false
steps: {STEPS}
"""
FLEET = """\
sites: {{s: {{{limit}}}}}
feeds: {{f: {{site: s}}}}
rows: {{r: {{feed: f}}}}
racks: {{k: {{row: r, node_type: h, names: {host}}}}}
node_types: {{h: {{node: dgx-h100, power: 10 kW, device_power: 700 W, idle: 3 kW, device_idle: 100 W}}}}
power: {{slots: .}}
"""


@dataclass(frozen=True)
class Outcome:
    """What the jobs of one variant did. `most_together`: evaluations at one time."""

    most_together: int
    evaluation_s: float
    waits_steps: list[int]
    num_forced: int
    digests: list[str]


def count_together(spans: Sequence[tuple[float, float]]) -> int:
    """Return how many spans of time overlap at most."""
    marks = sorted([(end, -1) for _, end in spans] + [(begin, 1) for begin, _ in spans])
    most = now = 0
    for _, change in marks:
        now += change
        most = max(most, now)
    return most


def train_together(folder: Path, limit: str, num_jobs: int) -> Outcome:
    """Start the jobs at once and wait for all."""
    (folder / "fleet.yaml").write_text(FLEET.format(limit=limit, host=platform.node()))
    environment = {**os.environ, "PHALANX_CLUSTER": str(folder / "fleet.yaml"), "CUDA_VISIBLE_DEVICES": ""}
    runs = [Run(folder / f"run-{number}") for number in range(num_jobs)]
    train = [sys.executable, "-m", "phalanx", "train", str(folder / "recipe.yaml")]
    commands = [[*train, "--run", str(run.path), f"seed={number}"] for number, run in enumerate(runs)]
    logs = [(folder / f"log-{number}").open("w") for number in range(num_jobs)]
    processes = [
        subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        for command, log in zip(commands, logs, strict=True)
    ]
    for process, log in zip(processes, logs, strict=True):
        if process.wait() != 0:
            raise SystemExit(Path(log.name).read_text())
        log.close()
    done: list[EvaluationDone] = []
    num_forced = 0
    for run in runs:
        events = list(read_events(run.events))
        done += [event for event in events if isinstance(event, EvaluationDone) and event.step < STEPS]
        num_forced += sum(isinstance(event, RunWarning) and "without a slot" in event.text for event in events)
    return Outcome(
        count_together([(event.time - event.duration_s, event.time) for event in done]),
        statistics.median(event.duration_s for event in done),
        [event.step % EVERY for event in done],
        num_forced,
        [str((run.read_json(run.result) or {})["digest"]) for run in runs],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=4)
    num_jobs = parser.parse_args().jobs
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, {datetime.date.today()}")
    print(f"{num_jobs} jobs of {JOB_SWING_KW} kW swing, evaluations and saves every {EVERY} of {STEPS} steps\n")
    print(
        "| max_swing | evaluations together | swing kW | evaluation s | steps waited, median, most | without a slot |"
    )
    print("|---|---|---|---|---|---|")
    digests = []
    for limit_kw in (None, 5.0, 3.0):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 20_000)
            (folder / "recipe.yaml").write_text(RECIPE)
            found = train_together(folder, "" if limit_kw is None else f"max_swing: {limit_kw:g} kW", num_jobs)
        digests.append(found.digests)
        print(
            f"| {'none' if limit_kw is None else f'{limit_kw:g} kW'} | {found.most_together} | "
            f"{found.most_together * JOB_SWING_KW:.1f} | {found.evaluation_s:.2f} | "
            f"{statistics.median(found.waits_steps):.0f}, {max(found.waits_steps)} | {found.num_forced} |"
        )
    print(f"\nweights bit-identical in all variants: {all(each == digests[0] for each in digests)}")


if __name__ == "__main__":
    main()
