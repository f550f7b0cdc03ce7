"""Costs that were measured on this machine (`phalanx calibrate`), interpolated: the third layer beside data sheets and
fitted curves. A step's operations are summed as the machine would do them one after the other, as a CPU does.

Products: the rate of those that were measured nearest in log m, log n, log k, weighted by distance. What is bound by
memory: seconds against bytes, on logarithmic scales, of the same operation, else of one that is alike. Every operation
costs what Python and autograd take besides.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from phalanx.cluster.description import Measured
from phalanx.plan.profile import Attention, Move, Operation, Product
from phalanx.plan.work import Division, Seconds

NEAREST, POWER = 6, 3.0
"""Measured products that count for another, and how fast their weight falls with distance."""
LIKE = {
    "neg": "clone",
    "sub": "add",
    "div": "mul",
    "rsqrt": "pow",
    "sqrt": "pow",
    "exp": "pow",
    "tanh": "gelu",
    "sigmoid": "silu",
    "mean": "sum",
    "stack": "clone",
    "cat": "clone",
    "ones_like": "zeros",
    "zeros_like": "zeros",
    "new_zeros": "zeros",
    "ones": "zeros",
    "arange": "zeros",
    "nll_loss_backward": "zeros",
    "slice_backward": "zeros",
    "index": "embedding",
    "gather": "embedding",
    "where": "mul",
    "native_dropout": "mul",
    "mul_": "mul_",
    "sub_": "add_",
    "div_": "mul_",
    "copy_": "clone",
    "relu_": "relu",
    "nll_loss_forward": "sum",
    "max_pool2d_with_indices": "relu",
    "max_pool2d_with_indices_backward": "threshold_backward",
}
"""Operations that were not measured, and what they cost like. `clone` in a step copies what was turned around."""
OTHERWISE = "mul"
COPIED = "transposed"
ADAMW, NORM, SCALE, ACCUMULATE = "_fused_adamw_", "clip_norm", "mul_", "add_"
EACH = "eager_op"
ADAMW_BYTES = 28.0


class NotMeasured(ValueError):
    """A probe's file lacks what a prediction needs."""


class Here:
    """What a machine was measured to do, in one precision, with so many processes at once."""

    def __init__(self, measured: Measured, processes: int) -> None:
        self._of = measured
        several = any(each.processes == processes for each in measured.products)
        self._processes = processes if several else 1
        self._crowd = 1.0 if several else float(processes)
        """Where crowds were not measured, cores are shared evenly."""
        self._tables: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for timed in measured.operations:
            if timed.processes == self._processes or not several:
                table = self._tables.setdefault((timed.kind, timed.precision), [])
                table.append((math.log(timed.bytes), math.log(timed.seconds)))
        for table in self._tables.values():
            table.sort()
        self._products: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self._attention = [each for each in measured.operations if each.kind.startswith("attention") and each.flops]
        each = self._tables.get((EACH, "fp32"))
        self.each = math.exp(each[0][1]) if each else (measured.launch_us or 0.0) * 2e-6
        """Seconds of Python and autograd for an operation."""

    def price(self, op: Operation, division: Division) -> Seconds:
        """What an operation costs here. `samples` of the division are numbers, not arrays."""
        if isinstance(op, Product):
            return Seconds(products=self._product(op, division))
        if isinstance(op, Attention):
            return Seconds(attention=self._attend(op, division))
        if isinstance(op, Move):
            return Seconds(memory=self._move(op, division))
        return Seconds()

    def update(self, parameters: float) -> float:
        """Seconds of clipping and an optimizer's step over so many parameters."""
        norm = self.seconds(NORM, "fp32", 4.0 * parameters) + self.seconds(SCALE, "fp32", 8.0 * parameters)
        return norm + self.seconds(ADAMW, "fp32", ADAMW_BYTES * parameters)

    def accumulate(self, parameters: float) -> float:
        """Seconds of adding a micro-batch's gradients to those before."""
        return self.seconds(ACCUMULATE, "fp32", 12.0 * parameters)

    def exchange(self, size: float, ranks: int) -> float:
        """Seconds of adding `size` bytes of gradients over ranks of this machine, with nothing hidden: a CPU's cores
        are busy with either. NotMeasured: no all-reduce was."""
        found = sorted(
            (math.log(each.bytes), math.log(each.seconds))
            for each in self._of.collectives
            if each.kind == "all_reduce" and each.ranks == ranks
        )
        if not found:
            raise NotMeasured(
                f"no all-reduce among {ranks} ranks was measured: run `phalanx calibrate --nproc-per-node {ranks}`"
            )
        return math.exp(_between(found, math.log(max(size, 1.0))))

    def seconds(self, kind: str, precision: str, size: float) -> float:
        """Of an operation bound by memory that moves so many bytes, without Python's part."""
        return self._crowd * math.exp(_between(self._table(kind, precision), math.log(max(size, 1.0))))

    def _table(self, kind: str, precision: str) -> list[tuple[float, float]]:
        for name in (kind, LIKE.get(kind, OTHERWISE), OTHERWISE):
            for as_ in (precision, "fp32"):
                if (table := self._tables.get((name, as_))) is not None:
                    return table
        raise NotMeasured("the probe's file has no operations bound by memory: run `phalanx calibrate` again")

    def _product(self, op: Product, division: Division) -> float:
        dims = {name: getattr(op, name).at(float(division.samples)) for name in ("count", "m", "n", "k")}
        if op.divided:
            dims[op.divided] = max(1.0, dims[op.divided] / float(division.tensor))
        precision = "bf16" if op.width == 2 else "fp32"
        points, rates = self._measured(precision)
        at = np.log([dims["m"], dims["n"], dims["k"]])
        distance = np.sqrt(((points - at) ** 2).sum(axis=1)) + 1e-3
        near = np.argsort(distance)[:NEAREST]
        weights = distance[near] ** -POWER
        rate = math.exp(float((weights * rates[near]).sum() / weights.sum()))
        flops = 2.0 * dims["count"] * dims["m"] * dims["n"] * dims["k"]
        return float(self._crowd * flops / rate + self.each)

    def _measured(self, precision: str) -> tuple[np.ndarray, np.ndarray]:
        """log (m, n, k) of the measured products, and the logarithms of their rates."""
        if precision not in self._products:
            found = [
                each for each in self._of.products if each.precision == precision and each.processes == self._processes
            ]
            if not found:
                raise NotMeasured(f"no products in {precision} were measured: run `phalanx calibrate` again")
            dims = np.log([[each.m, each.n, each.k] for each in found])
            rates = np.log([2.0 * each.m * each.n * each.k / each.seconds for each in found])
            self._products[precision] = dims, rates
        return self._products[precision]

    def _attend(self, op: Attention, division: Division) -> float:
        kind = "attention" if op.phase == "forward" else "attention_backward"
        precision = "bf16" if op.width == 2 else "fp32"
        heads = op.heads / float(division.tensor) if op.divided else float(op.heads)
        samples = op.samples.at(1.0) * float(division.samples)
        flops = op.flops_a_sample * samples * heads / op.heads
        of_kind = [each for each in self._attention if each.kind == kind and each.processes == self._processes]
        found = [each for each in of_kind if each.precision == precision] or of_kind
        if not found:
            raise NotMeasured("no attention was measured: run `phalanx calibrate` again")
        at = np.log([op.queries, op.head_dim, max(1.0, samples * heads)])
        points = np.log([[each.shape[2], each.shape[3], each.shape[0] * each.shape[1]] for each in found])
        rates = np.log([each.flops / each.seconds for each in found])
        distance = np.sqrt((((points - at) * np.array([1.0, 1.0, 0.5])) ** 2).sum(axis=1)) + 1e-3
        weights = distance**-POWER
        rate = math.exp(float((weights * rates).sum() / weights.sum()))
        return self._crowd * flops / rate + self.each

    def _move(self, op: Move, division: Division) -> float:
        size = op.moved.at(float(division.samples)) / float(division.tensor)
        name = op.name
        if name == "clone":
            name = COPIED
        elif op.width == 8 and name == "mul":
            name = "mul_complex"
        precision = "bf16" if op.width == 2 else "fp32"
        return self.seconds(name, precision, size) + self.each


def _between(table: Sequence[tuple[float, float]], at: float) -> float:
    """Linear between the points of a table; beyond its ends: as much slower as there are more bytes, and for fewer
    bytes no quicker than in proportion to their square root, since starting threads stays."""
    index = bisect_left(table, (at, -math.inf))
    if index == 0:
        x, y = table[0]
        return y + 0.5 * (at - x)
    if index == len(table):
        x, y = table[-1]
        return y + (at - x)
    (x0, y0), (x1, y1) = table[index - 1], table[index]
    return y1 if x1 == x0 else y0 + (y1 - y0) * (at - x0) / (x1 - x0)
