"""Costs that were measured on this machine (`phalanx calibrate`), interpolated: products by the rates of the nearest in
log m, log n, log k; memory-bound operations by seconds against bytes of the same or a similar operation. The
operations of a step are summed, since a CPU runs one after the other, each with the overhead of Python and autograd.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from phalanx.cluster.spec import Measurements
from phalanx.planner.model_profile import AttentionOp, Gemm, MemoryOp, ProfiledOp
from phalanx.planner.segment_costs import ArrayLike, ComputeTime, ShardSpec

NUM_NEIGHBORS, DISTANCE_EXPONENT = 6, 3.0
"""Measured products that count for another, and how fast their weight falls with distance."""
SIMILAR_OP = {
    "neg": "clone",
    "zeros": "clone",
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
    "ones_like": "clone",
    "zeros_like": "clone",
    "new_zeros": "clone",
    "ones": "clone",
    "arange": "clone",
    "nll_loss_backward": "clone",
    "slice_backward": "clone",
    "where": "mul",
    "native_dropout": "mul",
    "sub_": "add_",
    "div_": "mul_",
    "copy_": "clone",
    "relu_": "relu",
    "native_group_norm": "native_layer_norm",
    "nll_loss_forward": "sum",
    "max_pool2d_with_indices": "relu",
    "max_pool2d_with_indices_backward": "threshold_backward",
}
"""Operations that were not measured, and what they cost like."""
DEFAULT_OP = "mul"
ADAMW_OP, GRAD_NORM_OP, SCALE_OP, ACCUMULATE_OP = "_fused_adamw_", "clip_norm", "mul_", "add_"
EAGER_OVERHEAD_OP = "eager_op"
ADAMW_BYTES_PER_PARAMETER = 28.0


class MissingMeasurementError(ValueError):
    """A probe's file lacks what a prediction needs."""


class MeasuredCosts:
    """Measured costs of a machine, in one precision, with `processes` processes at the same time."""

    def __init__(self, measurements: Measurements, processes: int) -> None:
        self._measurements = measurements
        has_concurrent = any(overhead.processes == processes for overhead in measurements.products)
        self._processes = processes if has_concurrent else 1
        self._core_sharing_factor = 1.0 if has_concurrent else float(processes)
        """Where crowds were not measured, cores are shared evenly."""
        self._tables: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for op in measurements.operations:
            if op.processes == self._processes or not has_concurrent:
                table = self._tables.setdefault((op.kind, op.precision), [])
                table.append((math.log(op.bytes), math.log(op.seconds)))
        for table in self._tables.values():
            table.sort()
        self._gemms: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self._attention_ops = [
            overhead for overhead in measurements.operations if overhead.kind.startswith("attention") and overhead.flops
        ]
        overhead = self._tables.get((EAGER_OVERHEAD_OP, "fp32"))
        self.overhead_s = math.exp(overhead[0][1]) if overhead else (measurements.launch_us or 0.0) * 2e-6
        """Seconds of Python and autograd for an operation."""

    def cost_of(self, op: ProfiledOp, shard: ShardSpec) -> ComputeTime:
        """What an operation costs here, divided in one way: numbers, or arrays of one."""
        if isinstance(op, Gemm):
            return ComputeTime(gemm=self._gemm_seconds(op, shard))
        if isinstance(op, AttentionOp):
            return ComputeTime(attention=self._attention_seconds(op, shard))
        if isinstance(op, MemoryOp):
            return ComputeTime(memory_bound=self._memory_op_seconds(op, shard))
        return ComputeTime()

    def optimizer_seconds(self, num_parameters: float) -> float:
        """Seconds of gradient clipping and an optimizer step over `num_parameters` parameters."""
        norm = self.memory_op_seconds(GRAD_NORM_OP, "fp32", 4.0 * num_parameters) + self.memory_op_seconds(
            SCALE_OP, "fp32", 8.0 * num_parameters
        )
        return norm + self.memory_op_seconds(ADAMW_OP, "fp32", ADAMW_BYTES_PER_PARAMETER * num_parameters)

    def accumulate_seconds(self, parameters: float) -> float:
        """Seconds of adding a micro-batch's gradients to those before."""
        return self.memory_op_seconds(ACCUMULATE_OP, "fp32", 12.0 * parameters)

    def all_reduce_seconds(self, num_bytes: float, ranks: int) -> float:
        """Seconds of adding `num_bytes` bytes of gradients over ranks of this machine, with nothing hidden: a CPU's
        cores are busy with either. NotMeasured: no all-reduce was."""
        points = sorted(
            (math.log(each.bytes), math.log(each.seconds))
            for each in self._measurements.collectives
            if each.ranks == ranks
        )
        if not points:
            raise MissingMeasurementError(
                f"no all-reduce among {ranks} ranks was measured: run `phalanx calibrate --nproc-per-node {ranks}`"
            )
        return math.exp(_interpolate_log(points, math.log(max(num_bytes, 1.0))))

    def memory_op_seconds(self, kind: str, precision: str, num_bytes: float) -> float:
        """Seconds of a memory-bound operation that moves `num_bytes` bytes, without the overhead of Python."""
        return self._core_sharing_factor * math.exp(
            _interpolate_log(self._find_table(kind, precision), math.log(max(num_bytes, 1.0)))
        )

    def _find_table(self, kind: str, precision: str) -> list[tuple[float, float]]:
        for name in (kind, SIMILAR_OP.get(kind, DEFAULT_OP), DEFAULT_OP):
            for as_ in (precision, "fp32"):
                if (table := self._tables.get((name, as_))) is not None:
                    return table
        raise MissingMeasurementError("the calibration has no memory-bound operations: run `phalanx calibrate` again")

    def _gemm_seconds(self, op: Gemm, shard: ShardSpec) -> float:
        dims = {name: getattr(op, name).evaluate(_to_number(shard.samples)) for name in ("count", "m", "n", "k")}
        if op.tp_dim:
            dims[op.tp_dim] = max(1.0, dims[op.tp_dim] / _to_number(shard.tensor))
        precision = "bf16" if op.element_bytes == 2 else "fp32"
        points, rates = self._gemm_points(precision)
        log_dims = np.log([dims["m"], dims["n"], dims["k"]])
        distance = np.sqrt(((points - log_dims) ** 2).sum(axis=1)) + 1e-3
        nearest = np.argsort(distance)[:NUM_NEIGHBORS]
        weights = distance[nearest] ** -DISTANCE_EXPONENT
        rate = math.exp(float((weights * rates[nearest]).sum() / weights.sum()))
        flops = 2.0 * dims["count"] * dims["m"] * dims["n"] * dims["k"]
        return float(self._core_sharing_factor * flops / rate + self.overhead_s)

    def _gemm_points(self, precision: str) -> tuple[np.ndarray, np.ndarray]:
        """log (m, n, k) of the measured products, and the logarithms of their rates."""
        if precision not in self._gemms:
            gemms = [
                each
                for each in self._measurements.products
                if each.precision == precision and each.processes == self._processes
            ]
            if not gemms:
                raise MissingMeasurementError(
                    f"no products in {precision} were measured: run `phalanx calibrate` again"
                )
            dims = np.log([[each.m, each.n, each.k] for each in gemms])
            rates = np.log([2.0 * each.m * each.n * each.k / each.seconds for each in gemms])
            self._gemms[precision] = dims, rates
        return self._gemms[precision]

    def _attention_seconds(self, op: AttentionOp, shard: ShardSpec) -> float:
        kind = "attention" if op.phase == "forward" else "attention_backward"
        precision = "bf16" if op.element_bytes == 2 else "fp32"
        heads = op.num_heads / _to_number(shard.tensor) if op.tp_sharded else float(op.num_heads)
        samples = op.samples.evaluate(1.0) * _to_number(shard.samples)
        flops = op.flops_per_sample * samples * heads / op.num_heads
        ops_of_kind = [each for each in self._attention_ops if each.kind == kind and each.processes == self._processes]
        ops = [each for each in ops_of_kind if each.precision == precision] or ops_of_kind
        if not ops:
            raise MissingMeasurementError("no attention was measured: run `phalanx calibrate` again")
        log_dims = np.log([op.num_queries, op.head_dim, max(1.0, samples * heads)])
        points = np.log([[each.shape[2], each.shape[3], each.shape[0] * each.shape[1]] for each in ops])
        rates = np.log([each.flops / each.seconds for each in ops])
        distance = np.sqrt((((points - log_dims) * np.array([1.0, 1.0, 0.5])) ** 2).sum(axis=1)) + 1e-3
        weights = distance**-DISTANCE_EXPONENT
        rate = math.exp(float((weights * rates).sum() / weights.sum()))
        return self._core_sharing_factor * flops / rate + self.overhead_s

    def _memory_op_seconds(self, op: MemoryOp, shard: ShardSpec) -> float:
        num_bytes = op.unfused_bytes.evaluate(_to_number(shard.samples)) / _to_number(shard.tensor)
        name = "mul_complex" if op.element_bytes == 8 and op.name == "mul" else op.name
        precision = "bf16" if op.element_bytes == 2 else "fp32"
        return self.memory_op_seconds(name, precision, num_bytes) + self.overhead_s


def _to_number(value: ArrayLike) -> float:
    return float(np.asarray(value).item())


def _interpolate_log(table: Sequence[tuple[float, float]], position: float) -> float:
    """Linear between the points of a table; beyond its ends: as much slower as there are more bytes, and for fewer
    bytes no quicker than in proportion to their square root, since starting threads stays."""
    index = bisect_left(table, (position, -math.inf))
    if index == 0:
        x, y = table[0]
        return y + 0.5 * (position - x)
    if index == len(table):
        x, y = table[-1]
        return y + (position - x)
    (x0, y0), (x1, y1) = table[index - 1], table[index]
    return y1 if x1 == x0 else y0 + (y1 - y0) * (position - x0) / (x1 - x0)
