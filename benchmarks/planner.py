"""Accuracy of the planner: published and measured runs replayed, tables and pictures written to docs/benchmarks.

    python benchmarks/planner.py [--validation ../shared/validation] [--out docs/benchmarks]

Zero-shot: with the constants of planner/data/stacks.yaml, which were set on these very sources (no row has one of its
own; docs/explanation/planner.md says how); calibrated: two random rows of each source and accelerator fit the stack's
constants, all others are predicted, in many draws. The sweep of one 8-GPU node (vTrain) is cross-validated. It takes
about five minutes on two cores and needs no GPU.
"""

import argparse
import csv
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.cluster import load_cluster
from phalanx.errors import UsageError
from phalanx.planner.device_costs import stack_by_name
from phalanx.planner.scenario import Scenario
from phalanx.recipe.schema import Parallelism
from pictures import scatter
from planner_validation import convnet_predictions
from planner_validation.cells import CannotPredict
from planner_validation.fit_constants import MeasuredRun, fit_stack_constants, scale_stack
from planner_validation.llm_predictions import predict_step_seconds
from planner_validation.llm_rows import DecoderShape, PublishedRun, parse_run
from planner_validation.llm_scenarios import profile_of_shape, scenario_of

DRAWS = 20
"""With five the median over sources still moved by half a percent from one handful to the next."""
FOLDS = 5
KINDS = ("dense", "experts", "fp4")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--validation", type=Path, default=Path("../shared/validation"))
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    given = parser.parse_args()
    if not (given.validation / "published_runs.csv").is_file():
        raise UsageError(f"--validation {given.validation}: there is no published_runs.csv")
    pictures = given.out.parent / "images"
    for folder in (given.out, pictures):
        folder.mkdir(parents=True, exist_ok=True)
    runs = language_runs(given.validation / "published_runs.csv")
    zero, two = zero_shot(runs), two_rows(runs)
    sweep = vtrain(given.validation / "vtrain_single.csv")
    convnets = convnet_errors(given.validation / "published_cnn_runs.csv")
    (pictures / "planner-zero-shot.svg").write_text(draw(zero, "zero-shot, step time in seconds"))
    (pictures / "planner-vtrain.svg").write_text(draw(sweep["points"], "one 8-GPU node, cross-validated, seconds"))
    text = page(zero, two, sweep, convnets)
    target = given.out / "planner.md"
    target.write_text(spliced(target.read_text() if target.is_file() else "", text))
    print(text)


Point = tuple[str, str, str, float, float]
"""Source, accelerator, kind, measured and predicted seconds."""


def language_runs(path: Path) -> list[tuple[dict[str, str], PublishedRun, Scenario]]:
    """The rows that can be predicted and were measured."""
    found = []
    for row in csv.DictReader(path.open()):
        try:
            run = parse_run(row)
            if run.step_s is not None:
                found.append((row, run, scenario_of(run, row["source"])))
        except CannotPredict:
            continue
    return found


def kind_of(run: PublishedRun, setup: Scenario) -> str:
    return "experts" if run.shape.num_experts else "fp4" if setup.precision == "fp4" else "dense"


def zero_shot(runs: Sequence[Any]) -> list[Point]:
    """Every row with the constants that are shipped."""
    return [
        (row["source"], row["gpu"], kind_of(run, setup), run.step_s, predict_step_seconds(setup))
        for row, run, setup in runs
    ]


def two_rows(runs: Sequence[Any]) -> list[Point]:
    """All other rows of a source and accelerator after two random ones set its constants; DRAWS of them."""
    _runs.extend(runs)
    with ProcessPoolExecutor(mp_context=get_context("fork")) as pool:
        return [point for points in pool.map(_drawn, range(DRAWS)) for point in points]


_runs: list[Any] = []
"""All runs; here so that forked workers have them."""


def _drawn(draw: int) -> list[Point]:
    groups = defaultdict(list)
    for each in _runs:
        groups[each[0]["source"], each[0]["gpu"]].append(each)
    numbers, points = np.random.RandomState(draw), []
    for (source, gpu), members in groups.items():
        if len(members) < 4:
            continue
        order = numbers.permutation(len(members))
        chosen = [members[index] for index in order[:2]]
        factors = fit_stack_constants(
            [MeasuredRun(setup, run.step_s) for _, run, setup in chosen], predict_step_seconds
        )
        for index in order[2:]:
            _, run, setup = members[index]
            points.append(
                (source, gpu, kind_of(run, setup), run.step_s, predict_step_seconds(scale_stack(setup, factors)))
            )
    return points


def vtrain(path: Path) -> dict[str, Any]:
    """The sweep over layouts of one node: errors by cross-validation, and what choosing by prediction costs."""
    rows = list(csv.DictReader(path.open()))
    cluster = load_cluster("dgx-a100")
    setups = [vtrain_setup(row, cluster) for row in rows]
    truth = np.array([float(row["iter_ms"]) / 1e3 for row in rows])
    fold = np.random.RandomState(0).randint(0, FOLDS, len(rows))
    guess = np.zeros(len(rows))
    for number in range(FOLDS):
        learn = [MeasuredRun(setups[i], truth[i]) for i in np.flatnonzero(fold != number)[::6]]
        factors = fit_stack_constants(learn, predict_step_seconds)
        for index in np.flatnonzero(fold == number):
            guess[index] = predict_step_seconds(scale_stack(setups[index], factors))
    plain = np.array([predict_step_seconds(setup) for setup in setups])
    coarse = [(row["hidden"], row["layers"], row["num_gpus"]) for row in rows]
    fine = [(*key, row["global_batch"]) for key, row in zip(coarse, rows, strict=True)]
    batch = np.array([float(row["global_batch"]) for row in rows])
    return {
        "points": [("vTrain", "A100", "dense", t, g) for t, g in zip(truth, guess, strict=True)],
        "zero": np.abs(plain / truth - 1),
        "cross": np.abs(guess / truth - 1),
        "spearman": spearman(guess, truth),
        "regret": {
            "model and GPUs": regret(coarse, guess / batch, truth / batch),
            "model, GPUs and batch": regret(fine, guess, truth),
        },
    }


def vtrain_setup(row: dict[str, str], cluster: Any) -> Scenario:
    """A row of vTrain's sweep: Megatron of 2022 with full recomputation, no fused attention, no divided optimizer."""
    value = {
        name: int(row[name])
        for name in ("layers", "hidden", "heads", "seq", "dp", "tp", "pp", "micro_batch", "global_batch")
    }
    shape = DecoderShape(
        layers=value["layers"],
        hidden_size=value["hidden"],
        num_heads=value["heads"],
        num_kv_heads=value["heads"],
        head_dim=value["hidden"] // value["heads"],
        ffn_hidden_size=4 * value["hidden"],
        gated=False,
        vocab_size=51200,  # GPT-2's, padded as Megatron pads it
        seq_len=value["seq"],
        tie_embeddings=True,
    )
    layout = Parallelism(replicate=value["dp"], tensor=value["tp"], pipeline=value["pp"])
    using = stack_by_name("megatron-2021")
    return Scenario(
        profile_of_shape(shape),
        cluster,
        layout,
        value["micro_batch"],
        value["global_batch"],
        "bf16",
        "full",
        0,
        1,
        using,
    )


def regret(groups: Sequence[Any], guess: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """For each group: measured time of what is predicted to be best, over the best that was measured, less one."""
    members = defaultdict(list)
    for key, g, t in zip(groups, guess, truth, strict=True):
        members[key].append((g, t))
    return np.array([min(each)[1] / min(t for _, t in each) - 1 for each in members.values() if len(each) > 1])


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Correlation of ranks."""
    ranks = [np.argsort(np.argsort(each)) for each in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


def convnet_errors(path: Path) -> list[tuple[str, str, float]]:
    """Source, gpu and absolute error in percent of convolutional networks, with the constants that are shipped."""
    rows = list(csv.DictReader(path.open()))
    answers = convnet_predictions.predict_rows(rows)
    return [
        (row["source"], row["gpu"], abs(answer["error_pct"]))
        for row, answer in zip(rows, answers, strict=True)
        if answer["error_pct"] is not None
    ]


# --- tables and pictures ------------------------------------------------------------------------------------------


def page(zero: list[Point], two: list[Point], sweep: dict[str, Any], convnets: Sequence[Any]) -> str:
    lines = [
        f"Made by `python benchmarks/planner.py` on {date.today()}; errors are of step times, absolute, in percent.",
        "",
        "| rows | | median | p90 | median over sources | p90 over sources |",
        "|---|---|---|---|---|---|",
    ]
    for name, points in (("zero-shot", zero), ("two rows calibrate", two)):
        for kind in KINDS:
            wrong = [error(p) for p in points if p[2] == kind]
            by = [[error(p) for p in group] for (_, _, k), group in grouped(points) if k == kind]
            medians, tails = [statistics.median(each) for each in by], [p90(each) for each in by]
            lines.append(
                f"| {name}, {kind} | {len(wrong)} | {statistics.median(wrong):.1f} | {p90(wrong):.1f} | "
                f"{statistics.median(medians):.1f} | {statistics.median(tails):.1f} |"
            )
    lines += [
        "",
        "![predicted against measured](../images/planner-zero-shot.svg)",
        "",
        "| source | accelerator | kind | rows | zero-shot median | p90 | two rows: median | p90 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    after = dict(grouped(two))
    for key, points in grouped(zero):
        wrong = [error(p) for p in points]
        then = [error(p) for p in after.get(key, [])]
        told = f"{statistics.median(then):.1f} | {p90(then):.1f}" if then else " | "
        lines.append(
            f"| {' | '.join(key)} | {len(wrong)} | {statistics.median(wrong):.1f} | {p90(wrong):.1f} | {told} |"
        )
    cross, plain = sweep["cross"], sweep["zero"]
    lines += [
        "",
        "## One node of eight A100, 1,440 layouts (vTrain)",
        "",
        f"Cross-validated ({FOLDS} folds): median {100 * np.median(cross):.1f} %, "
        f"p90 {100 * np.quantile(cross, 0.9):.1f} %, "
        f"Spearman {sweep['spearman']:.3f}; zero-shot median {100 * np.median(plain):.1f} %.",
        "",
        "| the best predicted layout of each | groups | regret: median | p90 |",
        "|---|---|---|---|",
        *(
            f"| {name} | {len(found)} | {100 * np.median(found):.1f} % | {100 * np.quantile(found, 0.9):.1f} % |"
            for name, found in sweep["regret"].items()
        ),
        "",
        "![predicted against measured, vTrain](../images/planner-vtrain.svg)",
        "",
        "## Convolutional networks, zero-shot",
        "",
        "| source | gpu | rows | median | p90 |",
        "|---|---|---|---|---|",
    ]
    members: dict[tuple[str, str], list[float]] = defaultdict(list)
    for source, gpu, wrong_by in convnets:
        members[source, gpu].append(wrong_by)
    for (source, gpu), found in sorted(members.items()):
        lines.append(f"| {source} | {gpu} | {len(found)} | {statistics.median(found):.1f} | {p90(found):.1f} |")
    everything = [wrong_by for _, _, wrong_by in convnets]
    lines.append(f"| all | | {len(everything)} | {statistics.median(everything):.1f} | {p90(everything):.1f} |")
    return "\n".join(lines) + "\n"


def error(point: Point) -> float:
    return abs(100 * (point[4] / point[3] - 1))


def grouped(points: Iterable[Point]) -> list[tuple[tuple[str, str, str], list[Point]]]:
    found = defaultdict(list)
    for point in points:
        found[point[:3]].append(point)
    return sorted(found.items())


def p90(values: Sequence[float]) -> float:
    return float(np.quantile(values, 0.9))


BEGIN, END = "<!-- made by benchmarks/planner.py -->", "<!-- end -->"


def spliced(page_before: str, text: str) -> str:
    """The page with what this script makes exchanged, and what people wrote around it kept."""
    if BEGIN not in page_before:
        return f"# Accuracy of the planner\n\n{BEGIN}\n{text}{END}\n"
    head, _, rest = page_before.partition(BEGIN)
    return f"{head}{BEGIN}\n{text}{END}{rest.partition(END)[2]}"


def draw(points: Sequence[Point], title: str) -> str:
    """Predicted against measured, by kind."""
    kinds = {kind: [point[3:] for point in points if point[2] == kind] for kind in KINDS}
    return scatter(kinds, title, "measured", "predicted", log=True)


if __name__ == "__main__":
    main()
