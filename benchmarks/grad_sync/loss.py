"""What an exchange costs in accuracy: held-out loss after as many samples as synchronous fp32, paired by seed.

    python benchmarks/grad_sync/loss.py --strategies bf16 average:sync_every=10,sync_dtype=int8 [--also KEY=VALUE ...]
        [--seeds 0 1 2] [--nproc-per-node 2] [--recipe examples/gpt-python.yaml] [--set KEY=VALUE ...] [--steps 300]
        [--since 0] [--out loss.json]

Each run is `phalanx train` of the recipe, for real, on this machine's processes without any limit of links: speed does
not matter here. The reference of each seed is `grad_sync.algorithm=all-reduce determinism=fixed-world`; all others have
`determinism=off`, and what `--also` says. All have fp32, one thread a process, the same micro-batch, and what `--set`
says. The loss is that of the last evaluation, at the last step. With `--since` all runs of a seed share the reference's
steps until then, and its weights: where training only begins, one rounded number may decide whether a network learns at
all for a while, and what that does to a loss hides what rounding costs.
"""

import argparse
import datetime
import json
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_args

import torch

from phalanx.recipe.schema import GradCompression, LocalSgdMethod
from phalanx.run import Run, read_events
from phalanx.run.event_types import AttemptStarted, EvaluationDone
from phalanx.train.checkpoint.format import format_checkpoint_name

REPOSITORY_ROOT = Path(__file__).resolve().parents[2]
REFERENCE_NAME = "all-reduce, determinism: fixed-world"
COMMON_OVERRIDES = ("precision=fp32", "num_threads=1", "compile=false", "batch.micro_size=4")
TIME_LIMIT_H = 2.0
"""After which a run counts as hanging."""


class RunFailed(Exception):
    """A run that did not end with a score: what it said last."""


def overrides(strategy: str | None, also: Sequence[str]) -> list[str]:
    """Those of an algorithm, a compression or a method of local SGD, after whose name there may be other keys of the
    recipe's part: `average:sync_every=10,sync_dtype=int8`; None: the reference."""
    if strategy is None:
        return ["grad_sync.algorithm=all-reduce", "determinism=fixed-world"]
    name, _, keys = strategy.partition(":")
    part, kind = "grad_sync", "algorithm"
    if name in get_args(LocalSgdMethod):
        part, kind = "local_sgd", "method"
    elif name in get_args(GradCompression):
        kind = "compression"
    own = [f"{part}.{key}" for key in keys.split(",") if key]
    return [f"{part}.{kind}={name}", "determinism=off", *own, *also]


def loss_of(
    recipe: Path, given: Sequence[str], seed: int, steps: int, nproc: int, folder: Path, since: int = 0
) -> float:
    """The last held-out loss of a run with these overrides, which begins, or goes on after step `since`. RunFailed when
    it has none at its last step."""
    values = [*COMMON_OVERRIDES, f"seed={seed}", f"steps={steps}", *given]
    command = [sys.executable, "-m", "phalanx", "train", str(recipe), *values]
    command += ["--run", str(folder), "--nproc-per-node", str(nproc), *(["--force"] if since else [])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIME_LIMIT_H * 3600)
    except subprocess.TimeoutExpired:
        raise RunFailed(f"not done after {TIME_LIMIT_H:g} hours") from None
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise RunFailed(f"exit {done.returncode}: {said[-1] if said else 'no word'}")
    events = list(read_events(Run(folder).events))
    began = [event.start_step for event in events if isinstance(event, AttemptStarted)]
    if began[:1] != [since]:
        raise RunFailed(f"{folder}: began after step {began}, not {since}")
    scores = [event for event in events if isinstance(event, EvaluationDone)]
    if not scores or scores[-1].step != steps or scores[-1].loss is None:
        raise RunFailed(f"{folder}: no finite score at step {steps}")
    return float(scores[-1].loss)


def saving(since: int) -> list[str]:
    """Overrides by which a run can be taken up again after this step."""
    return [f"checkpoint.every={since}", "checkpoint.keep=1000"] if since else []


def back_to(since: int, reference: Path, folder: Path) -> None:
    """Make a run that goes on from where the reference was after this step."""
    (folder / "checkpoints").mkdir(parents=True)
    for name in ("recipe.yaml", "resolved.yaml", f"checkpoints/{format_checkpoint_name(since)}"):
        copy = shutil.copytree if (reference / name).is_dir() else shutil.copy
        copy(reference / name, folder / name)


def table(losses: Mapping[str, Mapping[int, float]], failed: Mapping[str, str]) -> list[str]:
    """Lines of Markdown: the losses by seed, and how far they are above the reference's of the same seed."""
    reference = losses[REFERENCE_NAME]
    seeds = list(reference)
    lines = [
        "| exchange | " + " | ".join(f"seed {seed}" for seed in seeds) + " | above synchronous fp32, by seed | mean |",
        "|---|" + "---:|" * (len(seeds) + 2),
    ]
    for name, by_seed in losses.items():
        above = [by_seed[seed] / reference[seed] - 1 for seed in seeds]
        told = " | ".join(f"{by_seed[seed]:.4f}" for seed in seeds)
        lines.append(f"| {name} | {told} | {', '.join(f'{a:+.2%}' for a in above)} | {statistics.mean(above):+.2%} |")
    for name, why in failed.items():
        lines.append(f"| {name} | failed: {why.replace('|', '/')} |" + " |" * (len(seeds) + 1))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--strategies", nargs="+", required=True, help="NAME or NAME:KEY=VALUE,..., keys of grad_sync or local_sgd"
    )
    parser.add_argument("--also", nargs="+", default=[], metavar="KEY=VALUE", help="overrides besides")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--nproc-per-node", type=int, default=2)
    parser.add_argument("--recipe", type=Path, default=REPOSITORY_ROOT / "examples" / "gpt-python.yaml")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="overrides of all runs", dest="given")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--since", type=int, default=0, metavar="STEP", help="until when runs of a seed are one")
    parser.add_argument("--out", type=Path, help="write all losses to this file, as JSON")
    options = parser.parse_args()
    if not 0 <= options.since < options.steps:
        parser.error(f"--since {options.since}: expected a step before the last, {options.steps}, or 0")
    losses: dict[str, dict[int, float]] = {}
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="phalanx-loss-") as scratch:
        for number, strategy in enumerate([None, *options.strategies]):
            name = strategy or REFERENCE_NAME
            found: dict[int, float] = {}
            try:
                for seed in options.seeds:
                    folder = Path(scratch) / f"{number}-{seed}"
                    since = 0 if strategy is None else options.since
                    if since:
                        back_to(since, Path(scratch) / f"0-{seed}", folder)
                    given = [*options.given, *overrides(strategy, options.also), *saving(options.since)]
                    found[seed] = loss_of(options.recipe, given, seed, options.steps, options.nproc, folder, since)
                    print(f"{name}, seed {seed}: {found[seed]:.4f}", file=sys.stderr, flush=True)
                losses[name] = found
            except RunFailed as error:
                if strategy is None:
                    raise SystemExit(f"the reference: {error}") from None
                failed[name] = str(error)
    command = shlex.join(["python", "benchmarks/grad_sync/loss.py", *sys.argv[1:]])
    machine = f"{os.cpu_count()} cores ({platform.machine()}), torch {torch.__version__}"
    print(f"`{command}`, {datetime.date.today().isoformat()}, {machine}.")
    print("", *table(losses, failed), sep="\n")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({"losses": losses, "failed": failed}, indent=1) + "\n")


if __name__ == "__main__":
    main()
