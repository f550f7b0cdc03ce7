"""Replay of published data-parallel training of convolutional networks: a prediction beside each row of a table.

    step = t(B / n) x (1 + s sqrt(2 ln n)) + exchange that computing does not hide

t is `convnets.compute_seconds`, exchanges are those of `exchanges` over the row's network. Every constant belongs
to hardware or software, none to a row or a source:

- in `convnets`: 16 fitted to single-device figures of other sources than the validation folder's table;
- here and in `cnn_rows`: STRAGGLE, fitted to 26 scaling figures, likewise of others; HIDDEN, INSIDE, OUTSIDE and
  DECODE, set beforehand from what is said beside them, none fitted;
- of one machine: TITAN_IMAGE_SECONDS and `cnn_rows.GEMINI_GB_PER_S`, for FireCaffe's K20X: the time of an image from
  the paper's own single-GPU rows, and one effective rate of the network for its five runs on many GPUs.

Rows with 1 in a column `calibrate` set two constants for their source and gpu: a factor for computing, and one for
rates of memory and network. Both are pulled towards 1, since two rows say little; other rows do not touch them.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from planner_validation.allreduce_algorithms import (
    COST_BY_ALGORITHM,
    DataParallelStep,
    hierarchical,
    overlap_step,
    parameter_server,
    speedup,
)
from planner_validation.cells import CannotPredict, Row
from planner_validation.convnet_costs import compute_seconds, gpu_generation
from planner_validation.convnet_rows import ConvnetRun, parse_positive, parse_run

TITAN_IMAGE_SECONDS: Mapping[str, float] = MappingProxyType(
    {"NiN": 8.32e-3, "GoogLeNet with auxiliary heads": 22.1e-3, "AlexNet grouped": 4.05e-3}
)
"""A K20X with Caffe of 2015, forward and backward of one image: FireCaffe's rows of one GPU, hours by epochs of
1,281,167 images (139.2 h and 47, 504 h and 64, 144 h and 100); unverified: remembered from the paper."""
TITAN_GPU_NAME = "NVIDIA K20X"
IMAGENET_IMAGES = 1_281_167
STRAGGLER_SPREAD = 0.019
"""s: spread of step times among devices, as a share; the slowest of n is expected s sqrt(2 ln n) above the mean. Fitted
to 26 scaling figures of NVIDIA DeepLearningExamples on 2 to 16 devices: MXNet ResNet-50 (DGX-1, DGX-2, DGX A100) and
PyTorch ResNeXt-101 (DGX-1, DGX A100)."""
OVERLAPPABLE_COMPUTE_SHARE = 0.5
"""Share of computing beside which gradients can travel: most of backward, two thirds of it, less the first gradient."""
DECODED_IMAGES_PER_CORE_S = 200.0
"""JPEG images a second that one host core decodes and crops, about 5 ms each; unverified: from memory."""
KNOWN_LOG_STD, UNKNOWN_LOG_STD, CALIBRATED_LOG_STD, TITAN_LOG_STD = 0.18, 0.45, 0.11, 0.08
"""Standard deviation of the logarithm of computing time: of generations and stacks that constants were fitted for, of
others, after calibration, and on Titan."""
NETWORK_UNCERTAINTY_FACTOR = 2.0
"""By how much exchanges may be faster or slower than predicted, one time in ten."""
MAX_LOG_FACTOR = math.log(10)
"""How far calibration may move either factor: what is measured ten times off is a slip of the pen."""
Z_90_PERCENT = 1.64


@dataclass(frozen=True)
class ComputeNetworkFactors:
    """Factors of one source and gpu: of the time that computing takes, and of the rates of memory and network."""

    compute: float = 1.0
    bandwidth: float = 1.0
    num_rows: int = 0


def predict_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """A prediction for each row, in order. Keys, None where there is nothing to say: predicted_step_time_s,
    predicted_speedup, predicted_images_per_sec, predicted_train_time_h, predicted_low_s and predicted_high_s (of the
    step time; nine of ten measurements should lie between), parameter_server_speedup (had one server held all
    weights), error_pct and error_of (the column that it compares: step time, else images a second, else speed-up, else
    hours of training), assumed, calibrated (rows that the two factors were fitted to), why_not."""
    # csv.DictReader leaves None where a line is short, and has a key None where it is long
    rows = [{key: value or "" for key, value in row.items() if key} for row in rows]
    runs = [_parse_row(row) for row in rows]
    fits = _fit_factors_by_source(rows, runs)
    return [_predict_row(rows, runs, at, fits[_source_and_gpu(rows[at])]) for at in range(len(rows))]


def predict_step(run: ConvnetRun, fit: ComputeNetworkFactors = ComputeNetworkFactors()) -> DataParallelStep:
    """One step of a run. ValueError: its device lacks a figure."""
    compute = compute_seconds_of(run, fit)
    return overlap_step(
        compute,
        grad_sync_seconds_of(run, fit),
        OVERLAPPABLE_COMPUTE_SHARE * compute if run.overlaps_communication else 0.0,
    )


def compute_seconds_of(run: ConvnetRun, fit: ComputeNetworkFactors = ComputeNetworkFactors()) -> float:
    """Seconds until the slowest device has its gradients, and real images were decoded for it."""
    each = run.batch / run.devices
    own = TITAN_IMAGE_SECONDS.get(run.convnet.name) if run.device.name == TITAN_GPU_NAME else None
    if own is None:
        mean = compute_seconds(run.convnet, run.device, run.precision, each, run.stack, fit.compute, fit.bandwidth)
    else:
        mean = fit.compute * own * each
    slowest = mean * (1.0 + STRAGGLER_SPREAD * math.sqrt(2.0 * math.log(run.devices)))
    if run.decodes_images and run.network.cores_per_node:
        return max(
            slowest,
            each
            * min(run.network.devices_per_node, run.devices)
            / (DECODED_IMAGES_PER_CORE_S * run.network.cores_per_node),
        )
    return slowest


def grad_sync_seconds_of(run: ConvnetRun, fit: ComputeNetworkFactors = ComputeNetworkFactors()) -> float:
    """Seconds of an exchange of all gradients: in a node first where there are several with several devices."""
    algorithm, size, network = run.algorithm, _gradient_bytes(run), run.network
    inner = (network.intra_node_link[0] * fit.bandwidth, network.intra_node_link[1])
    outer = (network.inter_node_link[0] * fit.bandwidth, network.inter_node_link[1])
    if run.devices <= network.devices_per_node:
        return COST_BY_ALGORITHM[algorithm](size, run.devices, *inner) if run.devices > 1 else 0.0
    nodes = math.ceil(run.devices / network.devices_per_node)
    if algorithm == "parameter_server" and network.devices_per_node == 1:
        return parameter_server(size, nodes, *outer)
    # with several devices a node, frameworks that were measured had their servers spread over all nodes
    between = "sharded-parameter-server" if algorithm == "parameter_server" else algorithm
    return hierarchical(size, nodes, network.devices_per_node, inner, outer, COST_BY_ALGORITHM[between])


def predict_server_step(run: ConvnetRun, fit: ComputeNetworkFactors = ComputeNetworkFactors()) -> DataParallelStep:
    """The same step, had every device sent its gradients to one server over one port (FireCaffe's comparison)."""
    compute = compute_seconds_of(run, fit)
    crosses = run.network.inter_node_link if run.devices > run.network.devices_per_node else run.network.intra_node_link
    grad_sync_s = parameter_server(_gradient_bytes(run), run.devices, crosses[0] * fit.bandwidth, crosses[1])
    return overlap_step(
        compute, grad_sync_s, OVERLAPPABLE_COMPUTE_SHARE * compute if run.overlaps_communication else 0.0
    )


def _gradient_bytes(run: ConvnetRun) -> float:
    return run.convnet.gradient_bytes / (2 if run.precision in ("fp16", "bf16") else 1)


def _parse_row(row: Row) -> ConvnetRun | str:
    try:
        run = parse_run(row)
        predict_step(run)
    except (CannotPredict, ValueError) as error:
        return str(error)
    return run


def _source_and_gpu(row: Row) -> tuple[str, str]:
    return row.get("source", ""), row.get("gpu", "")


def _find_baseline(
    rows: Sequence[Row], runs: Sequence[ConvnetRun | str], at: int
) -> tuple[ConvnetRun, float | None] | None:
    """What a row's speed-up is over, and the epochs that it took: the run of the same source, network and device that
    is marked as such, by the word baseline or a speed-up of 1; else one device with as many images as each has."""
    run = runs[at]
    if isinstance(run, str):
        return None
    marked = []
    for row, other in zip(rows, runs, strict=True):
        if isinstance(other, str) or _source_and_gpu(row) != _source_and_gpu(rows[at]) or other.devices >= run.devices:
            continue
        is_baseline = parse_positive(row.get("speedup")) == 1.0 or "baseline" in row.get("note", "").casefold()
        if is_baseline and (other.convnet, other.precision) == (run.convnet, run.precision):
            marked.append((other, other.epochs))
    if marked:
        same_network = [
            one for one in marked if one[0].network == run.network and one[0].decodes_images == run.decodes_images
        ]
        return min(same_network or marked, key=lambda one: one[0].devices)
    return replace(run, devices=1, batch=run.batch / run.devices), run.baseline_epochs


def _predict_speedup(
    run: ConvnetRun, step: DataParallelStep, base: tuple[ConvnetRun, float | None], fit: ComputeNetworkFactors
) -> float:
    """In time to the same result where both numbers of epochs are known, else in images a second."""
    one, epochs = base
    faster = speedup(step, run.batch, predict_step(one, fit).step_s, one.batch)
    epochs = run.baseline_epochs or epochs
    return faster * epochs / run.epochs if run.epochs and epochs else faster


def _predict_row(
    rows: Sequence[Row], runs: Sequence[ConvnetRun | str], at: int, fit: ComputeNetworkFactors
) -> dict[str, Any]:
    keys = (
        *("predicted_step_time_s", "predicted_speedup", "predicted_images_per_sec", "predicted_train_time_h"),
        *("predicted_low_s", "predicted_high_s", "parameter_server_speedup", "error_pct", "error_of", "assumed"),
    )
    found: dict[str, Any] = dict.fromkeys(keys)
    run, base = runs[at], _find_baseline(rows, runs, at)
    if isinstance(run, str) or base is None:
        return found | {"calibrated": 0, "why_not": run if isinstance(run, str) else None}
    step = predict_step(run, fit)
    low, high = _prediction_interval(run, fit)
    rate = run.batch / step.step_s
    found |= {
        "predicted_step_time_s": step.step_s,
        "predicted_speedup": _predict_speedup(run, step, base, fit),
        "predicted_images_per_sec": rate,
        "predicted_train_time_h": run.epochs * IMAGENET_IMAGES / rate / 3600.0 if run.epochs else None,
        "predicted_low_s": low,
        "predicted_high_s": high,
        "parameter_server_speedup": _predict_speedup(run, predict_server_step(run, fit), base, fit),
        "assumed": run.assumption or None,
    }
    compared = (
        ("step_time_s", "predicted_step_time_s"),
        ("images_per_sec", "predicted_images_per_sec"),
        ("speedup", "predicted_speedup"),
        ("train_time_h", "predicted_train_time_h"),
    )
    for column, key in compared:
        true = parse_positive(rows[at].get(column))
        # a step of unknown batch cannot be compared, but images a second can
        if true is not None and found[key] is not None and not (column == "step_time_s" and run.assumption):
            found |= {"error_pct": 100.0 * (found[key] / true - 1.0), "error_of": column}
            break
    return found | {"calibrated": fit.num_rows, "why_not": None}


def _prediction_interval(run: ConvnetRun, fit: ComputeNetworkFactors) -> tuple[float, float]:
    titan = run.device.name == TITAN_GPU_NAME and run.convnet.name in TITAN_IMAGE_SECONDS
    known = run.stack == "cudnn5" and gpu_generation(run.device) not in ("later", "TPU")
    known = known or run.device.name.startswith("NVIDIA A100")
    spread = (
        TITAN_LOG_STD if titan else CALIBRATED_LOG_STD if fit.num_rows else KNOWN_LOG_STD if known else UNKNOWN_LOG_STD
    )
    wide = NETWORK_UNCERTAINTY_FACTOR ** (0.5 if titan or fit.num_rows else 1.0)
    factor = math.exp(Z_90_PERCENT * spread)
    ends = []
    for faster in (factor, 1.0 / factor):
        compute = compute_seconds_of(run, fit) / faster
        grad_sync_s = grad_sync_seconds_of(run, fit) / (wide if faster > 1.0 else 1.0 / wide)
        ends.append(
            overlap_step(
                compute, grad_sync_s, OVERLAPPABLE_COMPUTE_SHARE * compute if run.overlaps_communication else 0.0
            ).step_s
        )
    return ends[0], ends[1]


def _fit_factors_by_source(
    rows: Sequence[Row], runs: Sequence[ConvnetRun | str]
) -> dict[tuple[str, str], ComputeNetworkFactors]:
    chosen: dict[tuple[str, str], list[tuple[ConvnetRun, float]]] = defaultdict(list)
    for row, run in zip(rows, runs, strict=True):
        if row.get("calibrate", "").strip() not in ("1", "1.0", "true") or isinstance(run, str):
            continue
        seconds, rate = parse_positive(row.get("step_time_s")), parse_positive(row.get("images_per_sec"))
        if seconds is None or run.assumption:
            seconds = None if rate is None else run.batch / rate
        if seconds is not None:
            chosen[_source_and_gpu(row)].append((run, seconds))
    return defaultdict(ComputeNetworkFactors, {group: _fit_factors(known) for group, known in chosen.items()})


def _fit_factors(known: Sequence[tuple[ConvnetRun, float]]) -> ComputeNetworkFactors:
    """The likeliest two factors, where a prediction with them is still 5 % off, and before anything is measured they
    scatter by 25 and 35 % about 1. A search on a grid that moves to its best point, and halves there."""

    def misfit(compute: float, bandwidth: float) -> float:
        fit = ComputeNetworkFactors(math.exp(compute), math.exp(bandwidth))
        far = sum((math.log(predict_step(run, fit).step_s / true) / 0.05) ** 2 for run, true in known)
        return far + (compute / 0.25) ** 2 + (bandwidth / 0.35) ** 2

    best, width = (0.0, 0.0), 0.25
    while width > 1e-3:
        around = [(best[0] + i * width, best[1] + j * width) for i in (-1, 0, 1) for j in (-1, 0, 1)]
        around = [factors for factors in around if max(map(abs, factors)) <= MAX_LOG_FACTOR]
        nearest = min(around, key=lambda factors: misfit(*factors))
        if nearest == best:
            width /= 2
        best = nearest
    return ComputeNetworkFactors(math.exp(best[0]), math.exp(best[1]), len(known))
