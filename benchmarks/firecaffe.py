"""FireCaffe's scaling pictures: what was measured on limited links, the paper's formula, and the planner up to 128.

    python benchmarks/firecaffe.py [POINTS.json] [--out docs/images]

Without POINTS.json only the picture of the paper's own machine is drawn (firecaffe-titan.svg: the planner's replay of
128 K20X, no measurement). POINTS.json is what a benchmark of exchanges on limited links measured, for
firecaffe-links.svg:

    {"workload": "NiN, batch 64 a node",
     "bytes": 26228776,                       of all gradients as they travel
     "link": {"gbit": 1.0, "latency": 1e-4},  of a node's port, one way, and seconds of a message
     "points": [{"nodes": 4, "way": "tree", "step_seconds": 1.9, "compute_seconds": 1.2}, ...]}

`way` is a name of plan.exchanges.WAYS; `compute_seconds` is the same step without exchange. Each node has the same
number of samples on any number of nodes, so a speed-up is nodes x compute / step. Nothing is measured here.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from pictures import Curve, chart

from phalanx.errors import UsageError
from phalanx.plan.exchanges import WAYS, Iteration, iteration, speedup
from phalanx.plan.replay.cnn import server_step, step_of
from phalanx.plan.replay.cnn_rows import Run, read_run

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
    """What was measured with one workload on one kind of link; `bandwidth` in bytes a second."""

    workload: str
    bytes: float
    bandwidth: float
    latency: float
    points: tuple[Point, ...]


def measured_from(value: Any) -> Measured:
    """The content of POINTS.json. UsageError: something is missing, or cannot be."""
    try:
        link, points = value["link"], tuple(Point(**point) for point in value["points"])
        found = Measured(
            str(value["workload"]),
            float(value["bytes"]),
            float(link["gbit"]) * 1e9 / 8,
            float(link["latency"]),
            points,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"the measured points: {error!r}; `--help` shows what they must look like") from None
    if not points:
        raise UsageError("the measured points: there is none")
    for point in points:
        if point.way not in WAYS:
            raise UsageError(f"the measured points: way {point.way!r}, expected one of {', '.join(WAYS)}")
        if min(point.nodes, point.step_seconds, point.compute_seconds) <= 0:
            raise UsageError(f"the measured points: {point}: nodes and seconds must be above 0")
    if min(found.bytes, found.bandwidth) <= 0 or found.latency < 0:
        raise UsageError("the measured points: bytes and gbit must be above 0, and latency not below")
    return found


def formula(found: Measured, way: str, nodes: Sequence[int] = NODES) -> list[tuple[float, float]]:
    """(nodes, speed-up) by the paper: computing, then the exchange, nothing hidden."""
    compute = median(point.compute_seconds for point in found.points)
    steps = [(n, iteration(compute, WAYS[way](found.bytes, n, found.bandwidth, found.latency))) for n in nodes]
    return [(n, n * compute / step.seconds) for n, step in steps]


def links_picture(found: Measured) -> str:
    """Measured points of each way, and the paper's formula for the same link up to 128 nodes."""
    curves = [Curve("as fast as one, times the nodes", [(n, n) for n in NODES], dashed=True)]
    for way in sorted({point.way for point in found.points}):
        name = way.replace("_", " ")
        mine = sorted((point for point in found.points if point.way == way), key=lambda point: point.nodes)
        curves.append(Curve(f"{name}: formula", formula(found, way), dashed=True))
        curves.append(Curve(f"{name}: measured", [(point.nodes, point.speedup) for point in mine], dots=True))
    title = f"{found.workload}; {found.bandwidth * 8 / 1e9:g} Gbit/s a node"
    return chart(curves, title, "nodes", "speed-up", log_y=True)


def titan_curves(model: str) -> Mapping[str, list[tuple[float, float]]]:
    """(devices, speed-up in time to the same accuracy) on the paper's machine at batch 1,024, as `phalanx replay` says
    it: with a reduction tree and with one parameter server."""
    single = titan_run(model, 1, SINGLE[model])
    alone = step_of(single).seconds

    def faster(step: Iteration) -> float:
        return speedup(step, 1024, alone, single.batch) * EPOCHS[model]

    runs = {n: titan_run(model, n, 1024) for n in NODES[1:]}
    return {
        "reduction tree": [(n, faster(step_of(run))) for n, run in runs.items()],
        "parameter server": [(n, faster(server_step(run))) for n, run in runs.items()],
    }


def titan_run(model: str, devices: int, batch: int) -> Run:
    """A row of the paper as replay understands it."""
    row = {"source": "FireCaffe", "model": model, "gpu": "K20X", "n_gpus": str(devices), "interconnect": TITAN}
    return read_run(row | {"comm_scheme": "reduction tree", "global_batch": str(batch), "dataset": "ImageNet-1k"})


def titan_picture() -> str:
    """The planner's curves of both networks on 2 to 128 K20X, and what the paper claims."""
    curves = [Curve("as fast as one, times the devices", [(n, n) for n in NODES], dashed=True)]
    for model, claimed in CLAIMED.items():
        for way, points in titan_curves(model).items():
            curves.append(Curve(f"{model}, {way}: planner", points, dashed=way == "parameter server"))
        curves.append(Curve(f"{model}: paper", list(claimed.items()), dots=True))
    return chart(curves, "FireCaffe on Titan, batch 1,024: claimed and replayed", "K20X", "speed-up", log_y=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("points", type=Path, nargs="?", help="what was measured on limited links")
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    pictures = {"firecaffe-titan.svg": titan_picture()}
    if given.points is not None:
        try:
            value = json.loads(given.points.read_text())
        except (OSError, ValueError) as error:
            raise UsageError(f"{given.points}: {error}") from None
        pictures["firecaffe-links.svg"] = links_picture(measured_from(value))
    for name, picture in pictures.items():
        (given.out / name).write_text(picture)
        print(given.out / name)
    for model in CLAIMED:
        for way, points in titan_curves(model).items():
            print(f"{model}, {way}: " + ", ".join(f"{n:g}: {faster:.1f} x" for n, faster in points))


if __name__ == "__main__":
    main()
