"""The planner on sources that took no part: each is left out in turn, all constants are fitted to the rest, and what
was left out is predicted.

    python benchmarks/planner_out_of_sample.py [--validation ../shared/validation]

Constants begin at those of planner/data/stacks.yaml and are drawn to PRIORS, which no row has touched. One step of
Gauss-Newton over all sources, then for each source a solution of the linear problem without it; what was left out is
predicted with the simulation. It takes five minutes on an idle machine and needs no GPU.
"""

import argparse
import csv
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from phalanx.cluster import load_cluster
from phalanx.planner.device_costs import load_stack_data, stack_by_name
from phalanx.planner.scenario import Scenario, SoftwareStack
from planner import KINDS, kind_of, language_runs, p90, regret, vtrain_setup
from planner_validation.llm_predictions import DENSE_LOG_STD, MOE_LOG_STD, Z_90_PERCENT, predict_step_seconds

Constant = tuple[str, str, str]
"""Section of stacks.yaml, its entry, and the key."""
RESIDUAL_LOG_STD, CORRELATION_IN_GROUP, CORRELATION_IN_SOURCE = 0.12, 0.35, 0.15
ROWS_OF_A_GROUP = 8
"""Rows of a source, accelerator and precision that take part in the fit."""
VTRAIN_EVERY = 20
STEP = 0.05
"""Of finite differences, in logarithms."""
PRODUCTS = {"volta": (1.24, 0.08), "ampere": (0.985, 0.08), "hopper": (0.9, 0.08), "blackwell": (0.9, 0.08)}
PRODUCTS["tpu"] = (0.9, 0.2)
FLASH = {"ampere": (0.4, 0.35), "hopper": (0.28, 0.35), "blackwell": (0.28, 0.35), "tpu": (0.28, 0.35)}
OF_STACKS = {
    "compute_factor": (1.0, 0.1),
    "memory_op_speed": (1.0, 0.4),
    "attention_speed": (1.0, 0.35),
    "launch_s": (10e-6, 0.9),
    "step_overhead_s": (0.03, 1.0),
    "comm_factor": (1.0, 0.4),
    "latency_factor": (1.0, 0.4),
}
OF_MEGATRON = {
    "expert_factor": (2.0, 0.5),
    "launches_per_expert_gemm": (3.0, 0.6),
    "routing_sync_s": (60e-6, 0.6),
    "max_tp_overlap": (0.2, 0.3),
}
VARIANTS = {
    ("megatron-deepspeed", "compute_factor"): 0.1,
    ("megatron-deepspeed", "comm_factor"): 0.4,
    ("megatron-graphs", "compute_factor"): 0.1,
    ("megatron-graphs", "expert_factor"): 0.5,
}
"""What stacks have of their own, relative to those that they are like, and its deviation."""


def priors() -> dict[Constant, tuple[float, float]]:
    """Constants with what is usual, and how far they may be from it, as a standard deviation of the logarithm."""
    found: dict[Constant, tuple[float, float]] = {("sustained", "", "exponent"): (0.35, 0.3)}
    found |= {("generations", name, "products"): prior for name, prior in PRODUCTS.items()}
    found |= {("generations", name, "flash"): prior for name, prior in FLASH.items()}
    found |= {("precisions", "", "fp8"): (1.0, 0.2), ("precisions", "", "fp4"): (0.8, 0.3)}
    for stack in ("megatron-2021", "megatron", "xla", "torch"):
        keys = OF_STACKS | (OF_MEGATRON if stack == "megatron" else {})
        found |= {("stacks", stack, key): prior for key, prior in keys.items()}
    del found["stacks", "megatron-2021", "attention_speed"]
    return found | {("variants", stack, key): (1.0, std) for (stack, key), std in VARIANTS.items()}


PRIORS = priors()


def read_constant(constant: Constant) -> float:
    """The value in the loaded stacks.yaml; of variants the ratio to the stack that they are like."""
    section, entry, key = constant
    data = load_stack_data()
    if section == "variants":
        values = data["stacks"][entry]
        return float(values[key] / data["stacks"][values["like"]][key])
    values = data[section][entry] if entry else data[section]
    value = values.get(key, getattr(SoftwareStack(), key, None))
    return float(value[0] if key == "flash" else value)


def write_constants(logs: Mapping[Constant, float]) -> None:
    """Change the loaded stacks.yaml. `logs`: logarithms relative to the priors. Variants come last."""
    data = load_stack_data()
    for (section, entry, key), log in logs.items():
        value = PRIORS[section, entry, key][0] * math.exp(log)
        if section == "variants":
            values = data["stacks"][entry]
            values[key] = value * data["stacks"][values["like"]][key]
            continue
        values = data[section][entry] if entry else data[section]
        values[key] = [value, 0.8 * value] if key == "flash" else min(value, 0.95) if "overlap" in key else value


@dataclass(frozen=True)
class Row:
    """A measured run. `group`: source, accelerator, precision and kind, which share their errors."""

    setup: Scenario
    group: tuple[str, str, str, str]
    step_s: float

    def predict_log(self) -> float:
        """The logarithm of the seconds of a step, with the constants that are loaded."""
        stack = stack_by_name(self.setup.stack.name)
        stack = replace(stack, max_tp_overlap=max(stack.max_tp_overlap, self.setup.stack.max_tp_overlap))
        return math.log(predict_step_seconds(replace(self.setup, stack=stack)))

    def depends_on(self, constant: Constant) -> bool:
        """Whether the constant can change the prediction."""
        section, entry, key = constant
        name = self.setup.stack.name
        if section == "generations":
            return self.setup.cluster.node.accelerator.generation == entry
        if section == "precisions":
            return self.setup.precision == key
        if section == "stacks":
            return entry in (name, load_stack_data()["stacks"][name].get("like"))
        return entry in ("", name)


def weights_of(rows: Sequence[Row]) -> np.ndarray:
    """Weights of rows: those of a group say little that one of them does not, nor do groups of a source."""
    groups = defaultdict(int)
    for row in rows:
        groups[row.group] += 1
    sources = defaultdict(int)
    for source, *_ in groups:
        sources[source] += 1
    return np.array(
        [
            1
            / (1 + CORRELATION_IN_GROUP * (groups[row.group] - 1))
            / (1 + CORRELATION_IN_SOURCE * (sources[row.group[0]] - 1))
            for row in rows
        ]
    )


def linearize(rows: Sequence[Row], logs: Mapping[Constant, float]) -> tuple[np.ndarray, np.ndarray]:
    """Predicted logarithms [n], and their slopes [n, c]."""
    write_constants(logs)
    now = np.array([row.predict_log() for row in rows])
    slopes = np.zeros((len(rows), len(logs)))
    for column, constant in enumerate(logs):
        affected = [index for index, row in enumerate(rows) if row.depends_on(constant)]
        write_constants({**logs, constant: logs[constant] + STEP})
        moved = np.array([rows[index].predict_log() for index in affected])
        slopes[affected, column] = (moved - now[affected]) / STEP
    write_constants(logs)
    return now, slopes


def solve(
    rows: Sequence[Row], logs: Mapping[Constant, float], now: np.ndarray, slopes: np.ndarray
) -> dict[Constant, float]:
    """The most likely constants, if predictions are straight lines around `logs`; large residuals count less."""
    stds = np.array([PRIORS[constant][1] for constant in logs])
    start = np.array(list(logs.values()))
    measured, weights = np.log([row.step_s for row in rows]), weights_of(rows)
    values = start
    for _ in range(25):
        residuals = measured - now - slopes @ (values - start)
        huber = np.minimum(1.0, 2 * RESIDUAL_LOG_STD / np.maximum(np.abs(residuals), 1e-9))
        row_weights = weights * huber / RESIDUAL_LOG_STD**2
        normal = slopes.T @ (slopes * row_weights[:, None]) + np.diag(1 / stds**2)
        values = values + np.linalg.solve(normal, slopes.T @ (row_weights * residuals) - values / stds**2)
    return dict(zip(logs, values.tolist(), strict=True))


def choose_rows(rows: Sequence[Row]) -> list[Row]:
    """At most ROWS_OF_A_GROUP random rows of each group."""
    groups = defaultdict(list)
    for row in rows:
        groups[row.group].append(row)
    numbers = np.random.RandomState(1)
    return [
        members[index] for members in groups.values() for index in numbers.permutation(len(members))[:ROWS_OF_A_GROUP]
    ]


def predict_left_out(rows: Sequence[Row]) -> np.ndarray:
    """For each row the logarithm of its predicted step, by constants to which its source did not contribute."""
    chosen = choose_rows(rows)
    logs = {constant: math.log(read_constant(constant) / usual) for constant, (usual, _) in PRIORS.items()}
    logs = solve(chosen, logs, *linearize(chosen, logs))
    now, slopes = linearize(chosen, logs)
    predicted = np.zeros(len(rows))
    for source in sorted({row.group[0] for row in rows}):
        kept = np.array([row.group[0] != source for row in chosen])
        write_constants(solve([row for row in chosen if row.group[0] != source], logs, now[kept], slopes[kept]))
        for index, row in enumerate(rows):
            if row.group[0] == source:
                predicted[index] = row.predict_log()
    return predicted


def read_rows(folder: Path) -> list[Row]:
    """Published runs, and every VTRAIN_EVERY-th of vTrain's sweep, which counts as a source but not in the headline."""
    rows = []
    for cells, run, setup in language_runs(folder / "published_runs.csv"):
        kind = kind_of(run, setup)
        rows.append(Row(setup, (cells["source"], cells["gpu"], setup.precision, kind), run.step_s or 0.0))
    cluster = load_cluster("dgx-a100")
    with (folder / "vtrain_single.csv").open() as file:
        for cells in list(csv.DictReader(file))[::VTRAIN_EVERY]:
            setup = vtrain_setup(cells, cluster)
            rows.append(Row(setup, ("vTrain", "A100", "bf16", "vTrain"), float(cells["iter_ms"]) / 1e3))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--validation", type=Path, default=Path("../shared/validation"))
    rows = read_rows(parser.parse_args().validation)
    logs = predict_left_out(rows) - np.log([row.step_s for row in rows])
    print("| rows | | median | p90 | median over sources | p90 over sources | in the 90 % interval |")
    print("|---|---|---|---|---|---|---|")
    for kind in (*KINDS, "vTrain"):
        selected = [index for index, row in enumerate(rows) if row.group[3] == kind]
        errors = 100 * np.abs(np.expm1(logs[selected]))
        by_source = defaultdict(list)
        for index, error in zip(selected, errors, strict=True):
            by_source[rows[index].group[:2]].append(float(error))
        width = Z_90_PERCENT * (DENSE_LOG_STD if kind in ("dense", "vTrain") else MOE_LOG_STD)
        print(
            f"| {kind} | {len(selected)} | {np.median(errors):.1f} | {p90(errors.tolist()):.1f} | "
            f"{statistics.median(map(statistics.median, by_source.values())):.1f} | "
            f"{statistics.median(map(p90, by_source.values())):.1f} | {np.mean(np.abs(logs[selected]) < width):.0%} |"
        )
    sweep = [index for index, row in enumerate(rows) if row.group[0] == "vTrain"]
    keys = [
        (rows[i].setup.profile.num_parameters, rows[i].setup.parallelism.world, rows[i].setup.global_batch)
        for i in sweep
    ]
    measured = np.array([rows[i].step_s for i in sweep])
    losses = regret(keys, measured * np.exp(logs[sweep]), measured)
    print(
        f"regret of the best predicted layout, vTrain: median {np.median(losses):.1%}, p90 {p90(losses.tolist()):.1%}"
    )


if __name__ == "__main__":
    main()
