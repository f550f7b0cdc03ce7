"""Measured memory of published runs beside what `footprint` says, for the tests and to be looked at:

    python tests/helpers/memory_rows.py

reads shared/validation/ and prints a line for each run, then a table by source. Nothing here is a test.
"""

import csv
import math
import re
import statistics
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from torch import nn

from phalanx.cluster import load_cluster
from phalanx.formatting import BYTES_PER_GIB
from phalanx.models import transformer
from phalanx.planner.activation_memory import LossMode
from phalanx.planner.device_costs import stack_by_name
from phalanx.planner.memory import (
    MemoryCounter,
    MemoryEstimate,
    TrainingOptions,
    estimate_memory,
    estimate_memory_by_rank,
)
from phalanx.planner.model_profile import ModelProfile
from phalanx.planner.scenario import Scenario
from phalanx.planner.trace.trace_model import build_on_meta, language_modeling_forward, profile_model
from phalanx.recipe.schema import Parallelism

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from planner_validation.llm_rows import CannotPredict, DecoderShape, parse_run
from planner_validation.llm_scenarios import profile_of_shape, scenario_of

VALIDATION = Path(__file__).parents[3] / "shared" / "validation"
NOTES: dict[str, tuple[float, MemoryCounter]] = {
    # how a row's note gives memory: bytes of its unit, and what was read
    "real_alloc_GiB": (BYTES_PER_GIB, "allocated"),  # torch's max_memory_allocated
    "mem_GiB": (BYTES_PER_GIB, "reserved"),  # torchtitan's log: max_memory_reserved
    "mem_MiB": (2.0**20, "allocated"),  # ColossalAI's benchmark: max_memory_allocated
    "mem_per_gpu": (1e9, "total"),  # BLOOM: nvidia-smi
}
VOCABULARIES = {"GPTSentencePieceTokenizer": 256000}
"""Of tokenizers, where the table lacks it (nemotron_2_256k.model)."""


@dataclass(frozen=True)
class Compared:
    """One run: bytes, as read in `way`."""

    source: str
    run: str
    way: MemoryCounter
    measured: float
    setup: Scenario
    found: MemoryEstimate

    @property
    def predicted(self) -> float:
        """What `footprint` says of what was measured."""
        return float(getattr(self.found, self.way))

    @property
    def error(self) -> float:
        """Of the prediction, as a share of the measurement."""
        return self.predicted / self.measured - 1

    @property
    def inside(self) -> bool:
        """Whether the measurement lies where it is said to."""
        low, high = self.found.interval(self.way)
        return low <= self.measured <= high


def memory_rows() -> list[Compared]:
    """All runs of all tables. FileNotFoundError: they are not there."""
    return [*published(), *megatron(), *sweep()]


def read(name: str) -> list[dict[str, str]]:
    """A table of shared/validation."""
    with (VALIDATION / name).open(newline="") as file:
        return list(csv.DictReader(file))


def published() -> Iterator[Compared]:
    """Runs whose note tells memory, but for those of which the model or the micro-batch is unknown."""
    for row in read("published_runs.csv"):
        found = re.search(r"(?:^|;)(" + "|".join(NOTES) + r")=([0-9.]+)", row["note"])
        if found is None or not row["micro_batch"]:
            continue
        try:
            run = parse_run(row)
            # For times a head has as many features as a kernel takes; what is stored is what it has.
            shape = replace(run.shape, head_dim=run.shape.hidden_size // run.shape.num_heads)
            setup = scenario_of(replace(run, shape=shape), row["source"])
        except CannotPredict:
            continue
        unit, way = NOTES[found[1]]
        name = f"{row['model']} {layout_of(setup)}"
        loss: LossMode = "fused" if "_cef" in row["note"] else "whole"  # cross-entropy fusion
        yield Compared(
            row["source"],
            name,
            way,
            float(found[2]) * unit,
            setup,
            estimate_memory(setup, TrainingOptions(loss_mode=loss)),
        )


def megatron() -> Iterator[Compared]:
    """Dense decoders of Megatron-LM's functional tests; torch's max_memory_allocated."""
    for row in read("megatron_lm_golden_memory.csv"):
        setup = megatron_setup(row)
        if setup is None:
            continue
        size = "7B and more" if setup.profile.num_parameters > 5e9 else "tiny"
        name = f"{row['case']} {row['env']} {layout_of(setup)}"
        measured = float(row["mem_max_allocated_GiB"]) * BYTES_PER_GIB
        loss: LossMode = "fused" if row["cross-entropy-loss-fusion"] == "true" else "whole"
        # Megatron-LM logs on the last rank.
        yield Compared(
            f"Megatron-LM tests, {size}",
            name,
            "allocated",
            measured,
            setup,
            estimate_memory_by_rank(setup, TrainingOptions(loss_mode=loss))[-1],
        )


@cache
def with_dropout(shape: DecoderShape) -> ModelProfile:
    """The profile of a decoder with dropout."""

    def make() -> nn.Module:
        return transformer(
            vocab_size=shape.vocab_size,
            seq_len=shape.seq_len,
            layers=shape.layers,
            hidden_size=shape.hidden_size,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            ffn_hidden_size=shape.ffn_hidden_size,
            activation="swiglu" if shape.gated else "relu2",
            tie_embeddings=shape.tie_embeddings,
            qk_norm=False,
            dropout=0.1,
        )

    return profile_model(build_on_meta(make), language_modeling_forward(shape.vocab_size, shape.seq_len), shape.seq_len)


def megatron_setup(row: Mapping[str, str]) -> Scenario | None:
    """What one of Megatron-LM's tests ran; None for those that are no plain pre-training of a dense decoder."""
    if row["model"] != "gpt" or "grpo" in row["case"] or "resume" in row["case"] or not row["iter_s_min"]:
        return None
    if "gb200" in row["case"] and "gb200" not in row["env"]:  # repeats the figures of a run with other ranks
        return None
    if row["multi-latent-attention"] or row["use-megatron-fsdp"] or row["num-experts"] or row["fp8-format"]:
        return None

    def number(name: str, otherwise: int) -> int:
        return int(row[name]) if row[name] else otherwise

    layers, width, heads = number("num-layers", 0), number("hidden-size", 0), number("num-attention-heads", 0)
    tensor, pipeline = number("tensor-model-parallel-size", 1), number("pipeline-model-parallel-size", 1)
    context, micro = number("context-parallel-size", 1), number("micro-batch-size", 1)
    vocab = number("vocab-size", VOCABULARIES.get(row["tokenizer-type"], 50257))
    shape = DecoderShape(
        layers=layers,
        hidden_size=width,
        num_heads=heads,
        # The tests of tiny models do not group queries (the flag that would make the column count is not set).
        num_kv_heads=number("num-query-groups", heads) if width > 1024 else heads,
        head_dim=width // heads,
        ffn_hidden_size=number("ffn-hidden-size", 4 * width),
        gated=row["swiglu"] == "true",
        vocab_size=math.ceil(vocab / (128 * tensor)) * 128 * tensor,
        seq_len=number("seq-length", 0),
        tie_embeddings=row["untie-embeddings-and-output-weights"] != "true",
    )
    chunks = number("num-virtual-stages-per-pipeline-rank", 1)
    if per_stage := number("num-layers-per-virtual-pipeline-stage", 0):
        chunks = layers // pipeline // per_stage
    batch = number("global-batch-size", 384)
    zero = 1 if row["use-distributed-optimizer"] == "true" else 0
    using = replace(
        stack_by_name("megatron"),
        sequence_parallel=row["sequence-parallel"] == "true",
        attention_speed=0.0 if row["attention-backend"] == "unfused" or row["transformer-impl"] == "local" else 1.0,
        gradient_bytes=4,
    )

    def with_replicas(replicas: int) -> Scenario:
        return Scenario(
            # Megatron-LM's dropout is 0.1 unless it is told otherwise, as its release runs are.
            profile=profile_of_shape(shape) if "release" in row["case"] else with_dropout(shape),
            cluster=load_cluster("h100:8"),
            parallelism=Parallelism(replicate=replicas, tensor=tensor, pipeline=pipeline, context=context),
            micro_size=micro,
            global_batch=batch,
            precision="bf16" if row["bf16"] == "true" else "fp16",
            checkpointing="full" if row["recompute-granularity"] == "full" else "none",
            zero_level=zero,
            virtual_stages=chunks,
            stack=using,
        )

    # The table lacks the number of replicas: that whose training state is closest to what was allocated between steps.
    between = float(row["mem_allocated_GiB"]) * BYTES_PER_GIB

    def gap(setup: Scenario) -> float:
        found = estimate_memory_by_rank(setup)[-1]
        return abs(found.parameters + found.gradients + found.optimizer_state - between)

    known = [8 // (tensor * pipeline * context)] if tensor * pipeline * context <= 8 else [1]
    options = known if not zero else [*known, *(2**power for power in range(8))]
    return min((with_replicas(max(1, each)) for each in options), key=gap)


def sweep() -> Iterator[Compared]:
    """Llama-3.1-8B by sequence length: DeepSpeed ZeRO-3 on 8 GPUs; max_memory_reserved."""
    for row in read("mlengineering_llama8b_seqsweep.csv"):
        setup = sweep_setup(int(row["seqlen"].removesuffix("K")) * 1024)
        found = estimate_memory(setup, TrainingOptions(offload=True, loss_mode="chunked"))
        for column in ("h200_peak_gib", "b200_peak_gib"):
            measured = float(row[column]) * BYTES_PER_GIB
            yield Compared(
                "ml-engineering Llama-8B", f"{row['seqlen']} {column[:4]}", "reserved", measured, setup, found
            )


@cache
def sweep_setup(sequence: int) -> Scenario:
    """One row of the sweep."""
    shape = DecoderShape(32, 4096, 32, 8, 128, 14336, True, 128256, sequence, False)
    return Scenario(
        profile=profile_of_shape(shape),
        cluster=load_cluster("h200:8"),
        parallelism=Parallelism(shard=8),
        micro_size=1,
        global_batch=8,
        checkpointing="full",
        zero_level=3,
        stack=stack_by_name("torch"),
    )


def layout_of(setup: Scenario) -> str:
    """A layout in few words."""
    layout = setup.parallelism
    sizes = {
        "dp": setup.data_parallel,
        "tp": layout.tensor,
        "pp": layout.pipeline,
        "cp": layout.context,
        "v": setup.virtual_stages,
    }
    words = [f"{name}{size}" for name, size in sizes.items() if size > 1]
    return " ".join([*words, f"micro {setup.micro_size}", setup.checkpointing, setup.precision])


def table(rows: list[Compared]) -> str:
    """Errors by source."""
    lines = [
        f"{'source':50} {'read as':10} {'runs':>4} {'median':>7} {'90 %':>6} {'bias':>6} {'worst':>6} {'inside':>7}"
    ]
    for source in dict.fromkeys(row.source for row in rows):
        mine = [row for row in rows if row.source == source]
        errors = sorted(abs(row.error) for row in mine)
        lines.append(
            f"{source[:50]:50} {mine[0].way:10} {len(mine):4} {statistics.median(errors):7.1%} "
            f"{errors[math.ceil(0.9 * len(errors)) - 1]:6.1%} {statistics.median(row.error for row in mine):+6.1%} "
            f"{errors[-1]:6.1%} {sum(row.inside for row in mine) / len(mine):7.0%}"
        )
    return "\n".join(lines)


def main() -> None:
    """Print what was measured and what is predicted."""
    try:
        rows = memory_rows()
    except FileNotFoundError as error:
        sys.exit(f"no measured runs to compare with: {error}")
    for row in rows:
        print(
            f"{row.measured / BYTES_PER_GIB:7.1f} {row.predicted / BYTES_PER_GIB:7.1f} {row.error:+6.1%}  "
            f"{row.source[:16]}  {row.run}"
        )
    print(table(rows))


if __name__ == "__main__":
    main()
