"""Replay of published language models: what rows say, why some cannot be predicted, calibration, and a sample."""

import csv
import math
import statistics
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from planner_validation.cells import CannotPredict
from planner_validation.llm_predictions import PREDICTION_COLUMNS, predict_rows
from planner_validation.llm_rows import PublishedRun, count_shape_parameters, flops_per_token, parse_run
from planner_validation.llm_scenarios import cluster_of, scenario_of, stack_of

TABLE = Path(__file__).parents[4] / "shared" / "validation" / "published_runs.csv"
needs_table = pytest.mark.skipif(
    not TABLE.exists(), reason=f"published runs are not in this checkout: {TABLE} is absent"
)
LLAMA = {
    "source": "torchtitan benchmarks",
    "model": "Llama-3-8B",
    "params_B": "8.03",
    "layers": "32",
    "hidden": "4096",
    "heads": "32",
    "ffn_hidden": "14336",
    "vocab": "128256",
    "seq_len": "8192",
    "global_batch_seqs": "64",
    "gpu": "H100-80GB-SXM",
    "n_gpus": "64",
    "tp": "1",
    "pp": "1",
    "cp": "1",
    "ep": "1",
    "dp": "64",
    "fsdp": "zero3",
    "micro_batch": "1",
    "recompute": "selective",
    "precision": "bf16",
    "tflops_per_gpu": "",
    "mfu_pct": "",
    "tokens_per_sec_per_gpu": "6000",
    "step_time_s": "",
    "note": "kv_heads=8",
}
TINY = {"layers": "2", "hidden": "256", "heads": "4", "ffn_hidden": "1024", "vocab": "1000", "seq_len": "256"}
TINY |= {"params_B": "", "note": ""}


def row(**changes: str) -> dict[str, str]:
    return {**LLAMA, **changes}


def run(**changes: str) -> PublishedRun:
    return parse_run(row(**changes))


def one(**changes: str) -> dict[str, Any]:
    (answer,) = predict_rows([row(**changes)])
    return answer


PIPELINE = {"tp": "2", "pp": "4", "dp": "8", "fsdp": ""}
CELLS: list[tuple[dict[str, str], str, Any]] = [
    *(({"fsdp": text}, "zero", zero) for text, zero in (("zero3", 3), ("zero-1", 1), ("ZeRO2", 2), ("true", 3))),
    *(({"fsdp": text}, "zero", zero) for text, zero in (("hsdp", 3), ("false", 1), ("", 1))),
    ({"params_B": ""}, "shape.gated", True),  # by its narrow feed-forward
    ({"params_B": "", "ffn_hidden": "16384"}, "shape.gated", False),
    ({"params_B": "", "ffn_hidden": "16384", "note": "mlp=gated"}, "shape.gated", True),
    ({}, "shape.head_dim", 128),
    ({"hidden": "2560", "heads": "32"}, "shape.head_dim", 80),
    ({"hidden": "2500", "heads": "25"}, "shape.head_dim", 104),  # padded to the next eight
    ({"hidden": "1500", "heads": "50"}, "shape.head_dim", 64),  # and 64 at least
    ({}, "shape.num_kv_heads", 8),
    ({"note": ""}, "shape.num_kv_heads", 32),
    ({"note": "kv_heads=5"}, "shape.num_kv_heads", 32),  # which do not divide the heads
    ({**PIPELINE, "note": "vpp=2"}, "virtual_stages", 2),
    ({**PIPELINE, "note": "vpp=5(layers)"}, "virtual_stages", 5),
    ({**PIPELINE, "note": "vpp=80"}, "virtual_stages", 1),  # more than there are layers
    ({"note": "vpp=2"}, "virtual_stages", 1),  # no pipeline
    # a whole share as the micro-batch of a pipeline is one sample; one that does not divide is the next that does
    ({"pp": "8", "dp": "8", "fsdp": "", "global_batch_seqs": "128", "micro_batch": "16"}, "micro_size", 1),
    ({"global_batch_seqs": "384", "micro_batch": "4"}, "micro_size", 3),
    ({"note": "net=8xHDR200"}, "network_gbps", 200.0),  # gigabytes a second of a node
    ({"note": "net=8x400Gb IB"}, "network_gbps", 400.0),
    ({"note": "net=400Gbps/node"}, "network_gbps", 50.0),
    ({"note": "net=slow"}, "network_gbps", None),
]


@pytest.mark.parametrize(("changes", "attribute", "expected"), CELLS)
def test_a_cell_is_read(changes: dict[str, str], attribute: str, expected: object) -> None:
    assert attrgetter(attribute)(run(**changes)) == expected


def test_a_gated_and_untied_shape_is_that_of_its_number_of_parameters() -> None:
    shape = run().shape
    assert (shape.gated, shape.tie_embeddings) == (True, False)
    assert count_shape_parameters(shape) == pytest.approx(8.03e9, rel=0.01)


def test_a_plain_shape_is_that_of_its_number_of_parameters() -> None:
    gpt = {"layers": "96", "hidden": "12288", "heads": "96", "vocab": "51200", "note": "", "params_B": "174.6"}
    for width in ("49152", "49151"):  # whatever the width suggests
        shape = run(**gpt, ffn_hidden=width).shape
        assert not shape.gated
        assert count_shape_parameters(shape) == pytest.approx(174.6e9, rel=0.01)


def test_a_row_without_a_vocabulary_takes_that_of_its_family() -> None:
    assert run(vocab="").shape.vocab_size == 128256
    assert run(vocab="", model="GPT-3").shape.vocab_size == 51200
    with pytest.raises(CannotPredict, match="vocab is empty"):
        run(vocab="", model="my model")


def test_long_samples_of_bert_are_partly_padding() -> None:
    short, long = run(model="BERT-large", seq_len="128"), run(model="BERT-large", seq_len="512")
    assert (short.padding_share, run().padding_share) == (0, 0)
    assert 0.35 < long.padding_share < 0.45
    assert scenario_of(long, "").profile.units_per_sample < 512


def test_a_mixture_of_experts_is_read_from_the_note() -> None:
    shape = run(note="moe=experts:64/topk:6/moe_ffn:1408/shared:2/dense_layers:1", ffn_hidden="").shape
    assert (shape.num_experts, shape.top_k, shape.expert_hidden_size) == (64, 6, 1408)
    assert (shape.shared_expert_hidden_size, shape.dense_layers, shape.gated) == (2 * 1408, 1, True)


def test_a_pipeline_with_virtual_stages_and_an_odd_number_of_micro_batches_is_predicted() -> None:
    virtual = one(**TINY | {"layers": "8", "note": "vpp=2"}, tp="1", pp="4", dp="16", fsdp="", global_batch_seqs="96")
    assert virtual["why_not"] is None
    assert virtual["predicted_step_time_s"] > 0


def test_a_network_in_the_note_replaces_the_usual_one() -> None:
    usual, noted = cluster_of(run()), cluster_of(run(note="net=100Gbps"))
    assert noted.node.scale_out.gbps * noted.node.scale_out.ports == pytest.approx(12.5)
    assert noted.devices == usual.devices == 64


def test_the_layout_is_that_of_the_row() -> None:
    layout = scenario_of(run(tp="4", pp="2", dp="8", fsdp="", note="kv_heads=8"), "my notebook").parallelism
    assert (layout.tensor, layout.pipeline, layout.replicate, layout.shard) == (4, 2, 8, 1)
    assert scenario_of(run(), "my notebook").parallelism.shard == 64


# --- what was measured ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "attention", "again"),
    [("model", 1.0, 0.0), ("model, causal-halved", 0.5, 0.0), ("hardware", 1.0, 1 / 3)],
)
def test_a_rate_gives_a_step_time_by_the_convention_that_counts_it(kind: str, attention: float, again: float) -> None:
    found = run(tokens_per_sec_per_gpu="", tflops_per_gpu="400", note=f"kv_heads=8;tflops_kind={kind}")
    embedding = 4096 * 128256
    blocks = 6 * (count_shape_parameters(found.shape) - 2 * embedding) + attention * 12 * 32 * 4096 * 8192
    flops = blocks * (1 + again) + 6 * embedding
    assert flops_per_token(found.shape, kind) == pytest.approx(flops)
    assert found.step_s == pytest.approx(8192 * flops / 400e12)


def test_a_mixture_counts_only_the_experts_that_are_used() -> None:
    moe = "moe=experts:64/topk:4/moe_ffn:1408/shared:0/dense_layers:0"
    few, all_ = (run(note=note, ffn_hidden="").shape for note in (moe, moe.replace("topk:4", "topk:64")))
    idle = 6 * 3 * 4096 * 60 * 1408 * 32
    assert flops_per_token(all_, "") - flops_per_token(few, "") == pytest.approx(idle)


# --- why not ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"note": "task=LoRA"}, "task=LoRA"),
        ({"tp": "", "pp": "", "dp": "", "fsdp": ""}, "the layout is not given"),
        ({"ep": "8"}, "does not tell the number of experts"),
        ({"global_batch_seqs": "32"}, "global_batch_seqs = 32 is less than the 64 groups"),
        ({"gpu": "Abacus-3000"}, "Abacus-3000"),
        ({"layers": ""}, "layers is empty"),
        ({"n_gpus": "-8"}, "n_gpus = -8: expected a whole number"),
        ({"seq_len": "8.5"}, "seq_len = 8.5: expected a whole number"),
        ({"note": "moe=experts:8/topk:many"}, "moe=experts:8/topk:many in note: expected whole numbers"),
        ({"tp": "5", "fsdp": ""}, "does not divide n_gpus = 64"),
        ({"gpu": "A100-80GB", "precision": "fp8"}, "A100-80GB has no arithmetic in fp8"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_row_that_cannot_be_predicted_says_why(changes: Mapping[str, str], why: str) -> None:
    answer = one(**changes)
    assert why in answer["why_not"]
    assert all(answer[name] is None for name in PREDICTION_COLUMNS if name != "why_not")


# --- predictions ------------------------------------------------------------------------------------------------------


def test_a_prediction_has_all_columns_and_they_fit_together() -> None:
    answer = one()
    assert set(answer) == set(PREDICTION_COLUMNS)
    step = answer["predicted_step_time_s"]
    assert answer["predicted_low_s"] < step < answer["predicted_high_s"]
    assert answer["predicted_tokens_per_sec_per_gpu"] == pytest.approx(8192 / step)
    assert answer["error_pct"] == pytest.approx(100 * (step / run().step_s - 1))  # type: ignore[operator]
    assert 1 < answer["predicted_speedup"] < 64
    assert 10 < answer["predicted_memory_gib"] < 80


# --- calibration ------------------------------------------------------------------------------------------------------


def marked(factor: float, **changes: str) -> list[dict[str, str]]:
    """Two rows for calibration whose steps took `factor` times as long as foretold."""
    found = []
    for batch in ("64", "128"):
        plain = one(**changes, global_batch_seqs=batch)
        time = str(factor * plain["predicted_step_time_s"])
        found.append(row(**changes, global_batch_seqs=batch, step_time_s=time, calibrate="1"))
    return found


def ratio(rows: list[dict[str, str]], **changes: str) -> float:
    """By how much a prediction is longer with `rows` before it."""
    alone = one(**changes)["predicted_step_time_s"]
    return float(predict_rows([*rows, row(**changes)])[-1]["predicted_step_time_s"] / alone)


def test_slower_rows_slow_down_other_rows_of_their_source_and_accelerator() -> None:
    assert 1.05 < ratio(marked(1.2), n_gpus="32", dp="32", seq_len="4096") < 1.25


@pytest.mark.parametrize("changes", [{"source": "another lab"}, {"gpu": "A100-80GB"}])
def test_other_sources_and_accelerators_stay_as_they_were(changes: Mapping[str, str]) -> None:
    assert ratio(marked(1.2), **changes) == 1.0


def test_a_row_that_is_predicted_never_sees_its_own_measurement() -> None:
    first, second = (predict_rows([*marked(1.2), row(step_time_s=time)])[-1] for time in ("1.0", "9.0"))
    assert first["predicted_step_time_s"] == second["predicted_step_time_s"]
    assert first["error_pct"] != second["error_pct"]


def test_calibration_narrows_the_interval_and_distance_widens_it() -> None:
    def width(answer: Mapping[str, Any]) -> float:
        return math.log(answer["predicted_high_s"] / answer["predicted_low_s"])

    large = row(n_gpus="1024", dp="1024", global_batch_seqs="1024")
    near, far = predict_rows([*marked(1.0), row(), large])[-2:]
    assert width(near) < width(one())
    assert width(near) < width(far)


# --- what was published -----------------------------------------------------------------------------------------------


@needs_table
def test_every_16th_dense_row_is_within_15_percent_by_the_median() -> None:
    with TABLE.open(newline="") as lines:
        rows = [each for each in csv.DictReader(lines) if "moe=" not in each["note"]][::16]
    wrong = [abs(each["error_pct"]) for each in predict_rows(rows) if each["error_pct"] is not None]
    assert len(wrong) > 25
    assert statistics.median(wrong) <= 15


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (("Megatron-LM Sept-2020 weak scaling", 0, 8, "hopper"), "megatron-2021"),
        (("BigScience BLOOM-176B prequel benchmarks", 1, 8, "ampere"), "megatron-deepspeed"),
        (("NVIDIA NeMo performance summary", 0, 8, "hopper"), "megatron"),
        (("MaxText README (TPU)", 0, 8, "hopper"), "xla"),
        (("torchtitan benchmarks", 0, 8, "hopper"), "torch"),
        (("DeepSpeed ZeRO-3 on Azure", 0, 8, "hopper"), "megatron-2021"),
        (("NVIDIA Megatron-Bridge", 1, 8, "blackwell", "26.08"), "megatron-graphs"),
        (("NVIDIA Megatron-Bridge", 1, 8, "blackwell", "26.04"), "megatron"),
        (("NVIDIA Megatron-Bridge", 1, 8, "hopper", "26.08"), "megatron"),
        (("my notebook", 3, 8, "hopper"), "torch"),
        (("my notebook", 1, 1, "hopper"), "torch"),
        (("my notebook", 1, 8, "hopper"), "megatron"),
        (("my notebook", 3, 1, "tpu"), "xla"),
    ],
)
def test_a_stack_is_recognised_by_source_release_and_generation_else_by_the_layout(given: Any, name: str) -> None:
    assert stack_of(*given).name == name
