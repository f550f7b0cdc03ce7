"""From a row of a table of published fine-tuning runs (shared/validation/finetune.csv) to what is to be predicted, and
why a row cannot be. What a row leaves open follows from its software at its date; nothing follows from its figures.
"""

from dataclasses import dataclass, replace
from typing import Literal

from phalanx.planner.finetune_memory import (
    ALL_LINEAR,
    BYTES_PER_LOGIT,
    BaseDtype,
    DecoderSizes,
    FineTuning,
    FineTuningStack,
    with_preference_pairs,
)
from planner_validation.cells import CannotPredict, Row
from planner_validation.llm_rows import parse_notes

MAX_TOKEN_ERROR = 0.05
"""By how much tokens per second and step time of a row may miss the tokens of a step."""
MAX_PARAMETER_ERROR = 0.02
"""By how much the sizes of a row may miss its number of parameters."""
BYTES_PER_MOMENT = {"8": 1.03, "16": 2.0, "32": 4.0}
NEEDED_COLUMNS = (
    *("params_B", "layers", "hidden", "heads", "ffn_hidden", "vocab"),
    *("seq_len", "micro_batch", "activation_checkpointing"),
)
BASE_DTYPES: dict[str, BaseDtype] = {
    "": "bf16",
    "bf16": "bf16",
    "fp16": "bf16",
    "fp32": "fp32",
    "int8": "int8",
    "int4-gptq": "int4",
}
CHECKPOINTING: dict[str, Literal["none", "selective", "full"]] = {
    "none": "none",
    "selective": "selective",
    "full": "full",
    "unsloth": "full",
}
TRAINERS = ("full", "sft", "dpo", "kto")
LOGP_BYTES_PER_LOGIT = 10.0
"""Five tensors in 16 bits: TRL's `selective_log_softmax` keeps logits and log-probabilities of each row, and backward
has the gradients of a row in all rows, of their sum, and of logits with the last token."""
RETURNED_LOGITS_BYTES = 2.0
"""Bytes of a logit in a model's output."""
RETURNS_LOGITS = ("4.46", "2024-11", "2026")
"""The transformers that keeps logits in its output through backward; the date from which rows without a
version have it, and that from which TRL lets go of it."""
RETURNING_LOGITS = tuple(BYTES_PER_LOGIT[kind] + RETURNED_LOGITS_BYTES for kind in ("whole", "in-place"))
FREES_4BIT_INPUTS = "2024-08"
"""Month after bitsandbytes 0.43.2."""
FUSED_ATTENTION_DEFAULT = "2024"
"""Year from which software takes fused attention unless told otherwise (transformers 4.36)."""
FUSED_ADAMW_DEFAULT = "2025-08"
"""Month from which transformers' default optimizer makes no copies."""


@dataclass(frozen=True)
class FineTuningRow:
    """A row, understood: `peak_gib` as `counter` (a property of `MemoryEstimate`) counts it."""

    run: FineTuning
    peak_gib: float
    counter: str


def parse_finetune_row(row: Row) -> FineTuningRow:
    """What a row with a measured peak says. CannotPredict: what it leaves open, or that it contradicts itself."""
    notes = parse_notes(row)
    if not row["peak_memory_gib"]:
        raise CannotPredict("no peak is stated")
    if row["kind"] != "measured":
        raise CannotPredict("the peak is an estimate")
    if "suspect" in notes or "oddity" in notes:
        raise CannotPredict("the row contradicts its source")
    if "_short_" in notes.get("seq_len", "") or (not row["packing"] and "torchtune" in row["source"]):
        raise CannotPredict("the length is a cap that short samples do not reach")
    if row["tokens_per_sec"] and row["step_time_s"] and row["packing"] == "yes" and row["grad_accum"] == "1":
        tokens = int(row["gpus"]) * int(row["micro_batch"]) * int(row["seq_len"])
        if abs(float(row["tokens_per_sec"]) * float(row["step_time_s"]) / tokens - 1) > MAX_TOKEN_ERROR:
            raise CannotPredict("tokens per second and step time contradict the length")
    counter = {"allocated": "allocated", "nvidia-smi": "total"}.get(row["memory_kind"], "reserved")
    return FineTuningRow(parse_finetune_run(row), float(row["peak_memory_gib"]), counter)


def parse_finetune_run(row: Row) -> FineTuning:
    """The run of a row, whatever it measured. CannotPredict: what it leaves open."""
    if row["method"] not in ("lora", "qlora", *TRAINERS):
        raise CannotPredict(f"method {row['method']} is not modelled")
    for column in NEEDED_COLUMNS:
        if not row[column]:
            raise CannotPredict(f"{column} is not stated")
    if row["activation_checkpointing"] not in CHECKPOINTING:
        raise CannotPredict(f"activation_checkpointing {row['activation_checkpointing']} is not modelled")
    if not row["attention"] and "" < row["date"] < FUSED_ATTENTION_DEFAULT:
        raise CannotPredict("attention is not stated")
    notes, has_adapters = parse_notes(row), _has_adapters(row)
    if has_adapters and not row["lora_rank"]:
        raise CannotPredict("lora_rank is not stated")
    if "context_parallel" in notes:
        raise CannotPredict("context parallelism is not modelled")
    if row["attention"] == "eager":
        raise CannotPredict("attention that stores scores is not modelled")
    if row["optimizer"] and "adam" not in row["optimizer"]:
        raise CannotPredict(f"optimizer {row['optimizer']} is not modelled")
    is_sharded = row["parallelism"].startswith("fsdp") or row["parallelism"] == "zero3"
    if is_sharded and not row["gpus"]:
        raise CannotPredict("gpus is not stated")
    sizes = infer_sizes(row)
    trained_bytes = 2.0 if row["optimizer_bits"] == "16" or not has_adapters else 4.0
    if notes.get("master", "").startswith("fp32") or row["base_dtype"] == "fp32":
        trained_bytes = 4.0
    run = FineTuning(
        sizes=sizes,
        seq_len=int(row["seq_len"]),
        micro_size=int(row["micro_batch"]),
        base_dtype=_base_dtype(row),
        adapter_rank=int(row["lora_rank"]) if has_adapters else 0,
        adapter_targets=_adapter_targets(row["lora_targets"]),
        adapter_dropout="LitGPT" in row["source"],
        trained_bytes=trained_bytes,
        bytes_per_moment=0.0
        if "paged" in row["optimizer"]
        else BYTES_PER_MOMENT.get(row["optimizer_bits"], 4.0 if has_adapters else trained_bytes),
        keeps_gradients=notes.get("optimizer_in_bwd") != "yes",
        accumulates_gradients=row["grad_accum"] not in ("", "1"),
        checkpointing=CHECKPOINTING[row["activation_checkpointing"]],
        offloads_checkpoints=notes.get("activation_offload") == "yes" or row["activation_checkpointing"] == "unsloth",
        num_shards=int(row["gpus"]) if is_sharded else 1,
        offloads_state=notes.get("cpu_offload") == "yes",
        stack=infer_stack(row, sizes),
    )
    if row["method"] == "dpo":
        return with_preference_pairs(run, "online")
    if row["method"] == "kto" and not has_adapters:
        return replace(run, frozen_models=((sizes, "bf16"),))
    return run


def _has_adapters(row: Row) -> bool:
    return row["method"] in ("lora", "qlora") or parse_notes(row).get("tuning", "") in ("lora", "qlora")


def infer_stack(row: Row, sizes: DecoderSizes) -> FineTuningStack:
    """What the software of a row does, by its name, version and date."""
    source, notes, date = row["source"], parse_notes(row), row["date"] or "9999"
    has_adapters, is_4bit = _has_adapters(row), row["base_dtype"] == "nf4"
    is_litgpt, is_torchtune = "LitGPT" in source, "torchtune" in source
    is_transformers = not is_litgpt and not is_torchtune
    framework, system = notes.get("framework", ""), notes.get("system", "")
    has_fast_kernels, is_unsloth = "foak" in framework, "Unsloth" in system
    has_liger, is_compiled = notes.get("liger") == "yes", notes.get("compile") == "yes"
    # PEFT's preparation makes norms fp32, and so all that follows; FSDP casts it back.
    is_prepared = is_4bit and row["gpus"] == "1" and (framework == "baseline-peft-bnb" or system.startswith("HF"))
    is_fsdp1 = row["parallelism"] == "fsdp1" or "NO_SHARD" in notes.get("ddp", "")
    has_foreach = is_litgpt or (is_transformers and date < FUSED_ADAMW_DEFAULT)
    return FineTuningStack(
        bytes_per_logit=_bytes_per_logit(row, is_transformers, has_fast_kernels),
        fuses_norms=not sizes.gated or has_fast_kernels or has_liger or is_compiled or is_unsloth,
        fuses_gate=has_liger or is_compiled or is_unsloth,
        fuses_qkv=is_litgpt,
        outer_bytes=4.0 if is_4bit and "TRL" in source else 2.0,
        stream_bytes=4.0 if is_prepared else 2.0,
        copies_adapter_inputs=has_adapters and is_transformers,
        keeps_frozen_inputs=is_4bit and not is_torchtune and (is_litgpt or date < FREES_4BIT_INPUTS),
        copies_moments=has_foreach and row["optimizer"] in ("adamw", "adamw_torch"),
        frees_late=has_adapters and is_fsdp1,
    )


def _bytes_per_logit(row: Row, is_transformers: bool, has_fast_kernels: bool) -> float:
    # LitGPT's slices are cut before the loss, and all of their log-probabilities are kept.
    whole = "in-place" if has_fast_kernels else "whole"
    kind = {"fused": "fused", "chunked": whole if "LitGPT" in row["source"] else "sliced"}.get(row["loss"], whole)
    bytes_per_logit = BYTES_PER_LOGIT[kind]
    if kind != whole or not is_transformers:
        return bytes_per_logit
    if row["method"] == "dpo":
        return LOGP_BYTES_PER_LOGIT
    since_version, since_date, until_date = RETURNS_LOGITS
    version = parse_notes(row).get("stack", "").partition("transformers_")[2]
    is_returned = version >= since_version if version else row["date"] >= since_date
    if row["method"] == "kto" or (is_returned and row["date"] < until_date):
        bytes_per_logit += RETURNED_LOGITS_BYTES
    return bytes_per_logit


def _base_dtype(row: Row) -> BaseDtype:
    """The format of frozen weights. bitsandbytes is used with double quantization unless a table has it both ways."""
    if row["base_dtype"] == "nf4":
        is_single = "LitGPT" in row["source"] and parse_notes(row).get("double_quant") != "yes"
        return "nf4" if is_single else "nf4-double"
    try:
        return BASE_DTYPES[row["base_dtype"]]
    except KeyError:
        raise CannotPredict(f"base_dtype {row['base_dtype']} is not modelled") from None


def _adapter_targets(cell: str) -> frozenset[str]:
    if cell in ("", "all-linear"):
        return ALL_LINEAR
    words = cell.replace("c_attn", "q k v").replace("mlp", "gate up down").split()
    return frozenset(words) & ALL_LINEAR


def infer_sizes(row: Row) -> DecoderSizes:
    """The model's sizes: head dimension, gate and tied embeddings as they come closest to its number of parameters.
    CannotPredict: none comes close."""
    hidden, heads = int(row["hidden"]), int(row["heads"])
    moe = parse_notes(row).get("moe", "").split("_")
    experts, active = (int(moe[0]), int(moe[2])) if "active" in moe else (1, 1)
    options = [
        DecoderSizes(
            num_layers=int(row["layers"]),
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=int(row["kv_heads"] or heads),
            head_dim=head_dim,
            ffn_hidden_size=int(row["ffn_hidden"]),
            vocab_size=int(row["vocab"]),
            gated=gated,
            tie_embeddings=tied,
            num_experts=experts,
            experts_per_token=active,
        )
        for head_dim in dict.fromkeys((hidden // heads, 64, 128, 256))
        for gated in (True, False)
        for tied in (False, True)
    ]
    parameters = float(row["params_B"]) * 1e9
    closest = min(options, key=lambda sizes: abs(sizes.num_parameters - parameters))
    if abs(closest.num_parameters / parameters - 1) > MAX_PARAMETER_ERROR:
        raise CannotPredict("the sizes do not give the number of parameters")
    return replace(closest, tie_embeddings=False) if "LitGPT" in row["source"] else closest  # which ties nothing


def forget_own_source(row: Row, run: FineTuning) -> FineTuning:
    """The run as it would be predicted had nothing been learned from rows of its own source. Learned were: from IBM's,
    what FSDP1 frees late and the logits that transformers keeps; from LitGPT's, its one layer for q, k and v and that
    its slices save nothing; from torchtune's, that of its slices only one has more than 16 bits; from TRL's, the logits
    of its losses and fp32 embeddings. Norms in fp32 (IBM's) are seen in LLaMA-Factory's, too."""
    stack, source = run.stack, row["source"]
    if "IBM" in source:
        kept = RETURNED_LOGITS_BYTES if stack.bytes_per_logit in RETURNING_LOGITS else 0.0
        stack = replace(stack, frees_late=False, bytes_per_logit=stack.bytes_per_logit - kept, stream_bytes=2.0)
    elif "LitGPT" in source:
        stack = replace(stack, fuses_qkv=False, bytes_per_logit=BYTES_PER_LOGIT["sliced"])
    elif "torchtune" in source and row["loss"] == "chunked":
        stack = replace(stack, bytes_per_logit=2.0 + 4.0)  # fp32 log-probabilities of all slices
    elif "TRL" in source:
        whole = BYTES_PER_LOGIT["whole"] if stack.bytes_per_logit else 0.0
        stack = replace(stack, bytes_per_logit=whole, outer_bytes=2.0)
    return replace(run, stack=stack)
