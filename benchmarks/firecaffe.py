"""FireCaffe's scaling pictures: what is measured on limited links, the formulas, and the planner up to 128.

    python benchmarks/firecaffe.py [--measure] [--results build/firecaffe.json] [--out docs/images]

With `--measure` benchmarks/grad_sync/run.py is run first (as root; seven minutes): NiN and GoogLeNet on 2, 4 and
8 nodes behind links of 1 Gbit/s, gradients summed through a parameter server and up a reduction tree, all after
backward as FireCaffe did it, and by what `phalanx train` does by itself; a step without exchange is that of one node.
Its results are kept in the file. Without, those of the file are drawn, where it is there: firecaffe-WORKLOAD.svg; and
always the picture of the paper's own machine: firecaffe-titan.svg, the planner's replay of 128 K20X, no measurement.

Each node has the same number of samples on any number of nodes, so a speed-up is nodes x compute / step.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parent / "grad_sync"))

from phalanx.errors import UsageError
from pictures import Curve, chart
from planner_validation.allreduce_algorithms import COST_BY_ALGORITHM, DataParallelStep, overlap_step, speedup
from planner_validation.convnet_predictions import predict_server_step, predict_step
from planner_validation.convnet_rows import ConvnetRun, parse_run
from plot import speed

RUN = Path(__file__).resolve().parent / "grad_sync" / "run.py"
MEASURED = ("nin-8", "googlenet-8")
LINK = "1gbit"
WAY_OF = {
    "parameter-server-whole": "parameter-server",
    "binomial-tree-whole": "binomial-tree",
    "all-reduce-1mib": "all-reduce",
}
"""Ways by `planner_validation.allreduce_algorithms` of the contenders that grad_sync/run.py measures."""
TOLD = {
    "parameter-server": "parameter server",
    "binomial-tree": "reduction tree",
    "all-reduce": "all-reduce in buckets, during backward",
}
NODES = tuple(2**power for power in range(8))
"""1 to 128."""
TITAN = "Titan (Cray XK7, 1 K20X per node, Gemini 3D torus)"
CLAIMED = {"NiN": {32: 23.0, 128: 39.0}, "GoogLeNet": {32: 20.0, 128: 47.0}}
"""The paper's speed-ups at batch 1,024, in time to the same accuracy: those of 128 are its abstract's, those of 32 are
remembered from its tables."""
EPOCHS = {"NiN": 1.0, "GoogLeNet": 64 / 72}
"""Epochs of the run on one GPU over those at batch 1,024; remembered from the same tables."""
SINGLE = {"NiN": 256, "GoogLeNet": 32}
"""Batches of the runs on one GPU."""


@dataclass(frozen=True)
class Point:
    """A measured step of `nodes` nodes, seconds with and without its exchange."""

    nodes: int
    way: str
    step_seconds: float
    compute_seconds: float

    @property
    def speedup(self) -> float:
        """Over one node that exchanges nothing."""
        return self.nodes * self.compute_seconds / self.step_seconds


@dataclass(frozen=True)
class Measured:
    """What was measured with one workload on one kind of link; `bandwidth` in bytes a second, `bytes` of all gradients
    as they travel."""

    workload: str
    told: str
    bytes: float
    bandwidth: float
    points: tuple[Point, ...]


def measured_from(value: Any) -> list[Measured]:
    """The results of benchmarks/grad_sync/run.py, by workload and link. UsageError: something is missing, or cannot
    be."""
    groups: dict[tuple[str, str], list[Any]] = {}
    try:
        for case in value["cases"]:
            groups.setdefault((case["workload"], case["link"]), []).append(case)
        found = [_measured(link, cases) for (_, link), cases in groups.items()]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"these are no results of {RUN.name} with limited links: {error!r}") from None
    if not any(each.points for each in found):
        raise UsageError(f"the results hold none of {', '.join(WAY_OF)}")
    for each in found:
        if any(min(point.nodes, point.step_seconds, point.compute_seconds) <= 0 for point in each.points):
            raise UsageError(f"the results of {each.workload}: nodes and seconds must be above 0")
    return found


def _measured(link: str, cases: Sequence[Any]) -> Measured:
    points = []
    for case in cases:
        seconds = {row["name"]: float(row["seconds"]) for row in case["rows"]}
        points += [
            Point(int(case["nodes"]), way, seconds[name], seconds["none"])
            for name, way in WAY_OF.items()
            if name in seconds
        ]
    first = cases[0]
    return Measured(first["workload"], first["told"], float(first["bytes"]), speed(link) * 1e6 / 8, tuple(points))


def formula(found: Measured, way: str, nodes: Sequence[int] = NODES) -> list[tuple[float, float]]:
    """(nodes, speed-up) by the planner's formula: computing, then the exchange, nothing hidden, as the paper has it.
    What is exchanged during backward is hidden behind that, which is taken to be two thirds of computing."""
    compute = median(point.compute_seconds for point in found.points)
    hidden = 2 / 3 * compute if way == "all-reduce" else 0.0
    steps = [
        (n, overlap_step(compute, COST_BY_ALGORITHM[way](found.bytes, n, found.bandwidth, 0.0), hidden)) for n in nodes
    ]
    return [(n, n * compute / step.step_s) for n, step in steps]


def links_picture(found: Measured) -> str:
    """Measured points of each way, and its formula for the same link up to 128 nodes."""
    curves = [Curve("as fast as one, times the nodes", [(n, n) for n in NODES], dashed=True)]
    for way in sorted({point.way for point in found.points}):
        mine = sorted((point for point in found.points if point.way == way), key=lambda point: point.nodes)
        curves.append(Curve(f"{TOLD[way]}: formula", formula(found, way), dashed=True))
        curves.append(Curve(f"{TOLD[way]}: measured", [(1, 1.0), *((p.nodes, p.speedup) for p in mine)], dots=True))
    title = f"{found.told}; {found.bandwidth * 8 / 1e9:g} Gbit/s a node"
    return chart(curves, title, "nodes", "speed-up", log_y=True)


def table(found: Measured) -> list[str]:
    """Lines of Markdown: speed-ups measured, and by formula."""
    lines = [f"### {found.told}, {found.bandwidth * 8 / 1e9:g} Gbit/s", "", "| way | nodes | measured | formula |"]
    lines.append("|---|---:|---:|---:|")
    for point in sorted(found.points, key=lambda point: (point.way, point.nodes)):
        ((_, expected),) = formula(found, point.way, [point.nodes])
        lines.append(f"| {TOLD[point.way]} | {point.nodes} | {point.speedup:.2f} x | {expected:.2f} x |")
    return [*lines, ""]


def titan_curves(model: str) -> Mapping[str, list[tuple[float, float]]]:
    """(devices, speed-up in time to the same accuracy) on the paper's machine at batch 1,024, as replay.py says: with
    a reduction tree and with one parameter server."""
    single = titan_run(model, 1, SINGLE[model])
    alone = predict_step(single).step_s

    def faster(step: DataParallelStep) -> float:
        return speedup(step, 1024, alone, single.batch) * EPOCHS[model]

    runs = {n: titan_run(model, n, 1024) for n in NODES[1:]}
    return {
        "reduction tree": [(n, faster(predict_step(run))) for n, run in runs.items()],
        "parameter server": [(n, faster(predict_server_step(run))) for n, run in runs.items()],
    }


def titan_run(model: str, devices: int, batch: int) -> ConvnetRun:
    """A row of the paper as replay understands it."""
    row = {"source": "FireCaffe", "model": model, "gpu": "K20X", "n_gpus": str(devices), "interconnect": TITAN}
    return parse_run(row | {"comm_scheme": "reduction tree", "global_batch": str(batch), "dataset": "ImageNet-1k"})


def titan_picture() -> str:
    """The planner's curves of both networks on 2 to 128 K20X, and what the paper claims."""
    curves = [Curve("as fast as one, times the devices", [(n, n) for n in NODES], dashed=True)]
    for model, claimed in CLAIMED.items():
        for way, points in titan_curves(model).items():
            curves.append(Curve(f"{model}, {way}: planner", points, dashed=way == "parameter server"))
        curves.append(Curve(f"{model}: paper", list(claimed.items()), dots=True))
    return chart(curves, "FireCaffe on Titan, batch 1,024: claimed and replayed", "K20X", "speed-up", log_y=True)


def measure(into: Path) -> None:
    """Run the benchmark of exchanges; UsageError when it does not end well, after what it said."""
    into.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(RUN), "--links", LINK, "--workloads", *MEASURED, "--nodes", "2", "4", "8"]
    command += ["--strategies", *WAY_OF, "--steps", "2", "--warmup", "1", "--rounds", "3", "--out", str(into)]
    if code := subprocess.run(command).returncode:
        raise UsageError(f"{RUN.name} ended with {code}")


def results_in(path: Path) -> list[Measured]:
    """What the file holds."""
    try:
        return measured_from(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: {error}") from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="measure first")
    parser.add_argument("--results", type=Path, default=Path("build/firecaffe.json"), help="of what was measured")
    parser.add_argument("--out", type=Path, default=Path("docs/images"), help="folder for the pictures")
    given = parser.parse_args()
    if given.measure:
        measure(given.results)
    given.out.mkdir(parents=True, exist_ok=True)
    pictures = {"titan": titan_picture()}
    for found in results_in(given.results) if given.results.is_file() else ():
        pictures[found.workload] = links_picture(found)
        print("\n".join(table(found)))
    for name, picture in pictures.items():
        path = given.out / f"firecaffe-{name}.svg"
        path.write_text(picture)
        print(path)
    for model in CLAIMED:
        for way, points in titan_curves(model).items():
            print(f"{model}, {way}: " + ", ".join(f"{n:g}: {faster:.1f} x" for n, faster in points))


if __name__ == "__main__":
    try:
        main()
    except UsageError as error:
        raise SystemExit(f"error: {error}") from None
