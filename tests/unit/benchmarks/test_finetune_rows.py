"""Published fine-tuning runs: the memory that is predicted for a few of each kind, and the rows that are refused."""

from typing import Any

import pytest

from phalanx.formatting import BYTES_PER_GIB
from phalanx.planner.finetune_memory import estimate_finetune_memory
from planner_validation.cells import CannotPredict
from planner_validation.finetune_rows import parse_finetune_row

Cells = dict[str, Any]
COLUMNS = """
    source date model params_B layers hidden heads kv_heads ffn_hidden vocab method lora_rank lora_targets base_dtype
    optimizer optimizer_bits seq_len micro_batch grad_accum packing activation_checkpointing attention loss gpus
    parallelism peak_memory_gib memory_kind tokens_per_sec step_time_s kind note
""".split()  # noqa: SIM905


def model(*sizes: Any) -> Cells:
    names = ("params_B", "layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab")
    return dict(zip(names, sizes, strict=True))


MISTRAL_7B = model(7.242, 32, 4096, 32, 8, 14336, 32000)
DEFAULTS: Cells = {
    "base_dtype": "bf16",
    "grad_accum": 1,
    "packing": "yes",
    "activation_checkpointing": "full",
    "attention": "flash",
    "loss": "full",
    "gpus": 1,
    "parallelism": "none",
    "memory_kind": "allocated",
    "kind": "measured",
}
IBM: Cells = {
    **MISTRAL_7B,
    "source": "IBM fms-acceleration reference benchmarks",
    "date": "2025-02-07",
    "optimizer": "adamw_torch",
    "seq_len": 4096,
    "micro_batch": 4,
    "note": "framework=none;stack=torch_2.4.1+peft_0.13.2+transformers_4.48",
}
LORA: Cells = {"method": "lora", "lora_rank": 16, "lora_targets": "q k v o"}
QLORA: Cells = {**LORA, "method": "qlora", "base_dtype": "nf4"}
PUBLISHED: dict[str, tuple[float, float, Cells]] = {
    # measured GiB, tolerance, cells
    "full": (67.46, 0.01, {**IBM, "method": "full", "optimizer_bits": 16}),
    "LoRA": (24.87, 0.01, {**IBM, **LORA}),
    "QLoRA with fused kernels": (
        12.14,
        0.02,
        {
            **IBM,
            **QLORA,
            "date": "2024-12-02",
            "loss": "fused",
            "note": "framework=accelerated-peft-bnb-foak-liger;stack=transformers_4.45",
        },
    ),
    "QLoRA of 70B, two shards": (
        43.48,
        0.02,
        {
            **IBM,
            **QLORA,
            **model(68.977, 80, 8192, 64, 8, 28672, 32000),
            "micro_batch": 2,
            "gpus": 2,
            "parallelism": "fsdp1",
            "note": "framework=baseline-peft-bnb;stack=transformers_4.48",
        },
    ),
    "LoRA without checkpointing": (
        35.5,
        0.01,
        {
            **model(13.016, 40, 5120, 40, 40, 13824, 32000),
            **LORA,
            "source": "LitGPT resource tables and config hub",
            "date": "2023-10-20",
            "lora_rank": 8,
            "lora_targets": "q v",
            "optimizer": "adamw",
            "optimizer_bits": 16,
            "seq_len": 1304,
            "micro_batch": 1,
            "activation_checkpointing": "none",
            "loss": "chunked",
        },
    ),
    "full, compiled, in slices": (
        24.9,
        0.01,
        {
            **model(3.213, 28, 3072, 24, 8, 8192, 128256),
            "source": "torchtune README and tutorials",
            "method": "full",
            "optimizer": "adamw",
            "optimizer_bits": 16,
            "seq_len": 4096,
            "micro_batch": 2,
            "loss": "chunked",
            "note": "compile=yes",
        },
    ),
    "DPO with a reference model": (
        48.97,
        0.03,
        {
            **model(1.0, 26, 1152, 4, 1, 6912, 262144),
            "source": "TRL release notes, pull requests and notebooks",
            "date": "2026",
            "method": "dpo",
            "seq_len": 8192,
            "micro_batch": 1,
            "memory_kind": "unknown",
        },
    ),
    "QLoRA of 34B, state on two devices": (
        23.05,
        0.06,
        {
            **model(34.389, 60, 7168, 56, 8, 20480, 64000),
            **QLORA,
            "source": "Answer.AI FSDP+QLoRA benchmarks",
            "date": "2024-03-14",
            "lora_rank": 64,
            "lora_targets": "all-linear",
            "optimizer": "adamw",
            "seq_len": 2048,
            "micro_batch": 2,
            "gpus": 2,
            "parallelism": "fsdp1",
            "memory_kind": "reserved",
        },
    ),
}


def row(cells: Cells) -> dict[str, str]:
    return dict.fromkeys(COLUMNS, "") | {name: str(value) for name, value in (DEFAULTS | cells).items()}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_peaks_are_predicted(name: str) -> None:
    measured, tolerance, cells = PUBLISHED[name]
    parsed = parse_finetune_row(row({**cells, "peak_memory_gib": measured}))
    predicted = getattr(estimate_finetune_memory(parsed.run), parsed.counter) / BYTES_PER_GIB
    assert predicted == pytest.approx(measured, rel=tolerance)


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"peak_memory_gib": ""}, "no peak is stated"),
        ({"seq_len": ""}, "seq_len is not stated"),
        ({"lora_rank": ""}, "lora_rank is not stated"),
        ({"params_B": 9}, "the sizes do not give the number of parameters"),
        ({"tokens_per_sec": 1000, "step_time_s": 8}, "tokens per second and step time contradict the length"),
        ({"base_dtype": "mxfp4"}, "base_dtype mxfp4 is not modelled"),
        ({"note": "suspect=too_low"}, "the row contradicts its source"),
    ],
)
def test_rows_that_say_too_little_or_contradict_themselves_are_refused(cells: Cells, reason: str) -> None:
    with pytest.raises(CannotPredict, match=reason):
        parse_finetune_row(row({**IBM, **LORA, "peak_memory_gib": 24.87, **cells}))


def test_adapters_need_no_reference_model() -> None:
    cells = {**IBM, **LORA, "method": "dpo", "note": "tuning=lora", "peak_memory_gib": 24.87}
    run = parse_finetune_row(row(cells)).run
    assert (run.adapter_rank, run.sequences_per_sample, run.frozen_models) == (16, 2, ())
