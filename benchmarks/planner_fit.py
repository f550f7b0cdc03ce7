"""The constants of planner/data/stacks.yaml, set to published step times; and how right they are where they were not
set.

    python benchmarks/planner_fit.py [--validation ../shared/validation] [--folds 3] [--fit]

A third of the sources is left out in turn, the constants are set on the rest, and those left out are predicted: this is
what `phalanx plan` can be trusted with on a cluster that nobody has told it about. With --fit the constants from all
sources are printed as well, by their path in the file, to be put there by hand. Priors are what is plausible before any
run is seen; each source, accelerator and precision counts alike, whatever its number of rows. Eight minutes on two
cores.
"""

import argparse
import re
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.planner import device_costs
from planner import language_runs
from planner_validation.fit_constants import fit_map
from planner_validation.llm_predictions import predict_step_seconds
from planner_validation.llm_scenarios import scenario_of

PRIORS: list[tuple[str, float, float]] = [
    (r"generations\.(?!other)\w+\.products", 0.88, 0.25),
    (r"generations\.(?!other)\w+\.flash\.0", 0.28, 0.40),
    (r"precisions\.\w+", 1.00, 0.20),
    (r"stacks\.(megatron|megatron-2021|torch|xla)\.computing", 1.00, 0.08),
    (r"stacks\.megatron-2021\.memory", 1.80, 0.35),
    (r"stacks\.(megatron|torch|xla)\.memory", 1.10, 0.35),
    (r"stacks\.megatron\.flash", 1.50, 0.25),
    (r"stacks\.(megatron|megatron-2021|torch|xla)\.launch", 8e-6, 0.50),
    (r"stacks\.(megatron|megatron-2021|torch|xla)\.step_seconds", 0.040, 0.80),
    (r"stacks\.megatron-2021\.communicating", 1.50, 0.40),
    (r"stacks\.(megatron|torch|xla)\.communicating", 0.80, 0.40),
    (r"stacks\.megatron\.tensor_hidden", 0.40, 0.50),
    (r"stacks\.megatron\.experts", 1.10, 0.15),
    (r"stacks\.megatron\.expert_launches", 6.0, 0.70),
    (r"stacks\.megatron\.routing", 100e-6, 1.00),
]
"""Which constants are set, what is usual for them, and by how much their logarithm may differ from that. Not set: those
of `other` hardware, and those of `phalanx`, whose own runs set them."""
BACKWARD = 0.8
"""Of fused attention: rate backward over forward, for all hardware alike."""
LARGEST = 0.95
"""Of shares."""
EACH = 10
"""Rows of one source, accelerator and precision that take part in a fit; a random choice of them."""
ROUNDS = 5

Row = tuple[dict[str, str], Any, Any]
Constants = Mapping[str, float]
_rows: list[Row] = []
"""All rows; here so that forked workers have them."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--validation", type=Path, default=Path("../shared/validation"))
    parser.add_argument("--folds", type=int, default=3)
    parser.add_argument("--fit", action="store_true")
    given = parser.parse_args()
    _rows.extend(language_runs(given.validation / "published_runs.csv"))
    with ProcessPoolExecutor(2, mp_context=get_context("fork")) as pool:
        if given.folds:
            held_out(pool, given.folds)
        if given.fit:
            found = fitted(pool, range(len(_rows)))
            print(f"\non all sources{told(found, pool, range(len(_rows)))}")
            for name, value in found.items():
                print(f"{name}: {value:.3g}")


def held_out(pool: ProcessPoolExecutor, folds: int) -> None:
    """Predict each source with constants that were set without it."""
    sources = sorted({row["source"] for row, _, _ in _rows})
    order = np.random.RandomState(1).permutation(len(sources))
    predicted: dict[int, float] = {}
    for fold in range(folds):
        left_out = {sources[at] for at in order[fold::folds]}
        learn = [at for at, (row, _, _) in enumerate(_rows) if row["source"] not in left_out]
        rest = [at for at, (row, _, _) in enumerate(_rows) if row["source"] in left_out]
        predicted |= dict(zip(rest, predict(pool, fitted(pool, learn), rest), strict=True))
    everything = sorted(predicted)
    print(f"{folds} folds of sources{errors(everything, [predicted[at] for at in everything])}")


def errors(rows: Sequence[int], predicted: Sequence[float]) -> str:
    """Median and ninth decile of dense models and of the rest, over rows and over sources with their accelerators."""
    lines = ""
    for kind in ("dense", "experts and fp4"):
        alone: list[float] = []
        by: dict[tuple[str, str], list[float]] = defaultdict(list)
        for at, value in zip(rows, predicted, strict=True):
            row, run, setup = _rows[at]
            if (kind == "dense") is bool(run.shape.experts or setup.precision == "fp4"):
                continue
            alone.append(abs(value / run.measured - 1))
            by[row["source"], row["gpu"]].append(alone[-1])
        over = [statistics.median(each) for each in by.values()]
        lines += f"\n  {kind}: {len(alone)} rows {shares(alone)}; {len(over)} sources {shares(over)}"
    return lines


def shares(values: Sequence[float]) -> str:
    return f"median {100 * np.median(values):.1f} %, p90 {100 * np.quantile(values, 0.9):.1f} %"


def told(constants: Constants, pool: ProcessPoolExecutor, rows: Sequence[int]) -> str:
    return errors(rows, predict(pool, constants, rows))


def fitted(pool: ProcessPoolExecutor, rows: Sequence[int]) -> dict[str, float]:
    """The constants that explain some rows best."""
    chosen = _sampled(rows)
    groups = [_group(_rows[at][0], _rows[at][2]) for at in chosen]
    weights = np.array([min(1.0, 4.0 / groups.count(group)) for group in groups])
    names = {name: prior for name in device_costs.list_constants() if (prior := _prior(name)) is not None}
    usual = np.log([centre for centre, _ in names.values()])
    measured = np.log([_rows[at][1].measured for at in chosen])

    def constants(moved: np.ndarray) -> dict[str, float]:
        return dict(zip(names, np.exp(usual + moved).tolist(), strict=True))

    def predicted(moved: np.ndarray) -> np.ndarray:
        return np.log(predict(pool, constants(moved), chosen))

    spreads = np.array([spread for _, spread in names.values()])
    _, best = fit_map(predicted, measured, spreads, np.zeros(len(names)), weights, ROUNDS)
    return constants(best)


def _prior(name: str) -> tuple[float, float] | None:
    return next(((centre, spread) for pattern, centre, spread in PRIORS if re.fullmatch(pattern, name)), None)


def _sampled(rows: Sequence[int]) -> list[int]:
    numbers = np.random.RandomState(0)
    by: dict[Any, list[int]] = defaultdict(list)
    for at in rows:
        by[_group(_rows[at][0], _rows[at][2])].append(at)
    return sorted(members[index] for members in by.values() for index in numbers.permutation(len(members))[:EACH])


def _group(row: Mapping[str, str], setup: Any) -> tuple[str, str, str]:
    return row["source"], row["gpu"], setup.precision


def predict(pool: ProcessPoolExecutor, constants: Constants, rows: Sequence[int]) -> list[float]:
    """Seconds of a step of each row."""
    halves = [rows[::2], rows[1::2]]
    even, odd = pool.map(_predict, [constants] * 2, halves)
    found = dict(zip([*halves[0], *halves[1]], [*even, *odd], strict=True))
    return [found[at] for at in rows]


def _predict(constants: Constants, rows: Sequence[int]) -> list[float]:
    with _using(constants):
        return [predict_step_seconds(scenario_of(_rows[at][1], _rows[at][0]["source"])) for at in rows]


@contextmanager
def _using(constants: Constants) -> Any:
    """Other constants than those of the file."""
    shipped = device_costs.load_stack_data
    changed = deepcopy(shipped())
    for name, value in constants.items():
        *way, last = name.split(".")
        inner: Any = changed
        for key in way:
            inner = inner[key]
        if isinstance(inner, list):
            inner[:] = [min(LARGEST, value), min(LARGEST, BACKWARD * value)]
        else:
            inner[last] = min(LARGEST, value) if last == "tensor_hidden" else value
    device_costs.load_stack_data = lambda: changed  # type: ignore[assignment]
    try:
        yield
    finally:
        device_costs.load_stack_data = shipped


if __name__ == "__main__":
    main()
