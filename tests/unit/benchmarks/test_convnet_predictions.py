"""Replay of published convolutional networks: FireCaffe's headline, what rows say, no leaks, and the whole table."""

import csv
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from phalanx.models.convnets import googlenet, nin
from planner_validation.convnet_costs import find_convnet
from planner_validation.convnet_predictions import predict_rows
from planner_validation.convnet_rows import parse_run

TABLE = Path(__file__).parents[4] / "shared" / "validation" / "published_cnn_runs.csv"
needs_table = pytest.mark.skipif(
    not TABLE.exists(), reason=f"published runs are not in this checkout: {TABLE} is absent"
)

TITAN = {
    "source": "FireCaffe abstract",
    "gpu": "K20X",
    "n_gpus": "128",
    "interconnect": "Titan (Cray XK7, 1 K20X per node, Gemini 3D torus)",
    "comm_scheme": "MPI allreduce reduction tree",
    "global_batch": "1024",
}
P100 = {
    "source": "some benchmark",
    "model": "ResNet-50",
    "gpu": "P100",
    "n_gpus": "8",
    "interconnect": "DGX-1 NVLink",
    "global_batch": "512",
}


def one(row: Mapping[str, str], **changes: str) -> dict[str, Any]:
    return predict_rows([dict(row) | changes])[0]


def table() -> list[dict[str, str]]:
    with TABLE.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    ("model", "epochs", "baseline", "published"), [("GoogLeNet", "72", "64", 47.0), ("NiN", "47", "47", 39.0)]
)
def test_firecaffes_headline_speed_ups_are_within_five_percent(
    model: str, epochs: str, baseline: str, published: float
) -> None:
    found = one(TITAN, model=model, epochs=epochs, baseline_epochs=baseline)
    assert found["predicted_speedup"] == pytest.approx(published, rel=0.05)
    assert found["parameter_server_speedup"] < 10  # what the paper's tree is about


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model": "MSFT-Speech"}, "unknown network 'MSFT-Speech'"),
        ({"gpu": ""}, "no device given"),
        ({"gpu": "abacus"}, "unknown device 'abacus'"),
        ({"n_gpus": "B/64"}, "n_gpus='B/64' is no number of devices"),
        ({"n_gpus": "inf"}, "n_gpus='inf' is no number of devices"),
    ],
    ids=str,
)
def test_a_row_that_cannot_be_predicted_says_why(changes: dict[str, str], why: str) -> None:
    found = one(P100, **changes)
    assert found["why_not"] == why
    assert found["predicted_step_time_s"] is None


def test_errors_compare_step_times_before_rates_before_speed_ups() -> None:
    found = one(P100, step_time_s="0.3", images_per_sec="1", speedup="1")
    assert found["error_of"] == "step_time_s"
    assert found["error_pct"] == pytest.approx(100 * (found["predicted_step_time_s"] / 0.3 - 1))
    assert one(P100, images_per_sec="1700", speedup="1")["error_of"] == "images_per_sec"
    assert one(P100, speedup="7")["error_of"] == "speedup"


def test_a_speed_up_is_over_the_run_that_is_marked_as_baseline() -> None:
    eight = P100 | {"note": "baseline"}
    many = P100 | {"n_gpus": "256", "global_batch": "16384", "interconnect": "Big Basin 8xP100, 50 Gb/s Ethernet"}
    over_one, over_eight = one(many), predict_rows([many, eight])[0]
    ratio = over_one["predicted_speedup"] / over_eight["predicted_speedup"]
    assert ratio == pytest.approx(one(eight)["predicted_speedup"], rel=1e-3)


def test_rows_to_calibrate_by_change_their_own_source_and_gpu_only() -> None:
    slow = P100 | {"n_gpus": "1", "global_batch": "64", "step_time_s": "0.4", "calibrate": "1"}
    others = [P100, P100 | {"source": "another"}, P100 | {"gpu": "V100"}]
    before, after = predict_rows(others), predict_rows([slow, *others])[1:]
    assert after[0]["predicted_step_time_s"] > 1.2 * before[0]["predicted_step_time_s"]
    assert after[0]["calibrated"] == 1
    assert after[1:] == before[1:]


@pytest.mark.parametrize(
    ("row", "a_node", "outer"),
    [
        (P100, 8, 50.0),
        (P100 | {"interconnect": "128 servers x4, 25 Gbit RoCE"}, 4, 3.125),
        (P100 | {"gpu": "K80", "interconnect": "EC2 p2.8xlarge x N, 20Gb/s (aggregated placement)"}, 8, 2.5),
        (P100 | {"interconnect": "InfiniBand EDR"}, 8, 12.5),
    ],
    ids=lambda value: value["interconnect"] if isinstance(value, dict) else str(value),
)
def test_networks_are_read_from_what_a_row_says(row: dict[str, str], a_node: int, outer: float) -> None:
    network = parse_run(row).network
    assert network.devices_per_node == a_node
    assert network.inter_node_link[0] == pytest.approx(outer * 0.6e9)


@pytest.mark.parametrize(
    ("gpu", "note", "precision"),
    [
        ("A100-80GB", "AMP, DALI", "fp16"),
        ("A100-80GB", "TF32", "tf32"),
        ("A100-80GB", "", "tf32"),
        ("V100", "", "fp32"),
        ("V100", "MLPerf", "fp16"),
        ("P100", "MLPerf", "fp32"),
        ("TPUv3 chip", "", "bf16"),
    ],
)
def test_precision_is_what_a_row_says_or_what_everyone_used(gpu: str, note: str, precision: str) -> None:
    assert parse_run(P100 | {"gpu": gpu, "note": note}).precision == precision


@pytest.mark.parametrize(("build", "name"), [(nin, "NiN"), (googlenet, "GoogLeNet")])
def test_counts_of_networks_that_ship_are_those_of_the_modules(build: Any, name: str) -> None:
    counted: list[float] = []

    def count(layer: nn.Module, _: Any, out: torch.Tensor) -> None:
        per_element = layer.weight[0].numel() if isinstance(layer, nn.Conv2d | nn.Linear) else 0
        counted.append(out.numel() * per_element)

    with torch.device("meta"):
        model, images = build().eval(), torch.empty(1, 3, 224, 224)
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            layer.register_forward_hook(count)
    model(images)
    known = find_convnet(name)
    assert known is not None
    assert known.forward_flops == pytest.approx(2 * sum(counted), rel=2e-3)
    assert known.parameters == pytest.approx(sum(weight.numel() for weight in model.parameters()), rel=1e-3)


@pytest.mark.parametrize(
    ("name", "gflops", "millions"),
    [("ResNet-50", 7.7, 25.6), ("ResNet-152", 22.6, 60.2), ("VGG16", 30.9, 138.4), ("InceptionV3", 11.4, 23.8)],
)
def test_counts_are_those_that_papers_print(name: str, gflops: float, millions: float) -> None:
    known = find_convnet(name)
    assert known is not None
    assert known.forward_flops / 1e9 == pytest.approx(gflops, rel=0.02)
    assert known.parameters / 1e6 == pytest.approx(millions, rel=0.01)


@needs_table
def test_the_published_table_is_predicted_without_having_seen_it() -> None:
    rows = table()
    errors = [abs(found["error_pct"]) for found in predict_rows(rows) if found["error_pct"] is not None]
    assert len(errors) > 140
    assert statistics.median(errors) <= 15


@needs_table
def test_nine_of_ten_measured_steps_lie_in_the_predicted_range() -> None:
    rows = table()
    inside = [
        found["predicted_low_s"] <= float(row["step_time_s"]) <= found["predicted_high_s"]
        for row, found in zip(rows, predict_rows(rows), strict=True)
        if row["step_time_s"] and found["predicted_low_s"]
    ]
    assert statistics.mean(inside) >= 0.85
