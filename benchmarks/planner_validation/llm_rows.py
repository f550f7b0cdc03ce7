"""From a row of a table of published runs to what is to be predicted: the model's shape, how it was divided, and what
was measured. Columns are those of shared/validation/published_runs.csv; empty cells are told apart from zeros.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from planner_validation.cells import CannotPredict, Row

DEFAULT_HEAD_DIM = 128
"""Features of a head where the number of heads is not given."""
BLANK_CELLS = ("", "-", "nan", "none", "null", "n/a", "?")
"""What tables write where they know nothing."""
MAX_CELL_VALUE, MAX_LAYERS = 100_000_000, 10_000
"""The largest number that a cell may hold, and the most layers: beyond any run, and what a slip of the pen gives."""


VOCAB_BY_FAMILY = {
    "bert": 30528,
    "bloom": 250880,
    "llama[- ]?3": 128256,
    "llama[- ]?4": 202048,
    "llama|mistral|mixtral": 32000,
    "qwen": 151936,
    "deepseek": 129280,
    "gpt-?oss": 201088,
    "opt": 50272,
    "mpt": 50368,
    "nemotron|palm": 256000,
    "gpt|megatron|mt-nlg|turing": 51200,
}
"""Words of the vocabulary of a family of models, padded as its software pads them, by the first pattern in its name."""
MASKED_FAMILY = "bert"
PADDING_FREE_LEN, FILLED_SHARE_EXPONENT = 128, -0.38
"""BERT's samples of 128 tokens are nearly full; of longer ones the share that is no padding falls with the length: by
0.59 from 128 to 512 (Krell et al. 2021, arXiv 2107.02027, table 1, Wikipedia: 0.83 and 0.49)."""


@dataclass(frozen=True)
class DecoderShape:
    """A decoder as tables give it."""

    layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_hidden_size: int
    gated: bool
    vocab_size: int
    seq_len: int
    tie_embeddings: bool
    num_experts: int = 0
    top_k: int = 0
    expert_hidden_size: int = 0
    shared_expert_hidden_size: int = 0
    dense_layers: int = 0


@dataclass(frozen=True)
class PublishedRun:
    """A row, understood."""

    shape: DecoderShape
    gpu: str
    devices: int
    global_batch: int
    tensor: int
    pipeline: int
    context: int
    expert: int
    data_parallel: int
    """Groups of devices among which the batch is divided."""
    zero: int
    replicate: int
    """Copies of sharded weights (hybrid sharding); 1 elsewhere."""
    micro_size: int | None
    virtual_stages: int
    checkpointing: str | None
    precision: str
    step_s: float | None
    """Seconds of a step, None when the row does not tell."""
    network_gbps: float | None
    """Of one node, one way, where the note tells."""
    notes: Mapping[str, str] = field(default_factory=dict)
    padding_share: float = 0.0
    """Tokens of a sample that software leaves out because they are padding."""


def parse_notes(row: Row) -> dict[str, str]:
    """The column `note`: key=value pairs divided by semicolons."""
    pairs = (part.partition("=") for part in row.get("note", "").split(";"))
    return {key.strip(): value.strip() for key, _, value in pairs if key.strip()}


def parse_run(row: Row) -> PublishedRun:
    """What a row says. CannotPredict tells what is missing or contradicts itself."""
    note_values = parse_notes(row)
    if note_values.get("task", "").lower() in ("lora", "peft"):
        raise CannotPredict("task=LoRA: fine-tuning with adapters, no pre-training run")
    devices, batch = _parse_int(row, "n_gpus"), _parse_int(row, "global_batch_seqs")
    tensor, pipeline, context, expert = (_parse_int(row, name, 1) for name in ("tp", "pp", "cp", "ep"))
    kind = row.get("fsdp", "").strip().lower()
    if not row.get("tp", "").strip() and not kind:
        raise CannotPredict("tp, pp and dp are empty: the layout is not given")
    inner = tensor * pipeline * context
    if devices % inner:
        raise CannotPredict(f"tp x pp x cp = {inner} does not divide n_gpus = {devices}")
    zero = _parse_zero(kind, note_values)
    parts = devices // inner
    if batch < parts:
        raise CannotPredict(f"global_batch_seqs = {batch} is less than the {parts} groups that n_gpus and layout leave")
    shape = infer_shape(row, note_values)
    if expert > 1 and not shape.num_experts:
        raise CannotPredict(f"ep = {expert}, but the row does not tell the number of experts")
    micro = _infer_micro_size(_parse_optional_int(row, "micro_batch"), batch // parts, pipeline)
    return PublishedRun(
        shape=shape,
        gpu=row["gpu"].strip(),
        devices=devices,
        global_batch=batch,
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        expert=expert,
        data_parallel=parts,
        zero=zero,
        replicate=1,
        micro_size=micro,
        virtual_stages=_parse_virtual_stages(note_values, shape.layers, pipeline),
        checkpointing=_parse_checkpointing(row.get("recompute", "")),
        precision=_parse_precision(row.get("precision", "")),
        step_s=measured_step_seconds(row, shape, devices, batch),
        network_gbps=_parse_network(note_values.get("net", "")),
        notes=note_values,
        padding_share=_padding_share(row, shape),
    )


def _padding_share(row: Row, shape: DecoderShape) -> float:
    if MASKED_FAMILY not in row.get("model", "").lower():
        return 0.0
    return 1.0 - min(1.0, float((shape.seq_len / PADDING_FREE_LEN) ** FILLED_SHARE_EXPONENT))


def _infer_micro_size(given: int | None, samples_per_group: int, pipeline: int) -> int | None:
    """The micro-batch, of a group's `samples_per_group`. Some tables give a group's whole share as if it were one; but
    a pipeline
    with fewer micro-batches than stages would stand still most of the time, and nobody runs that: then it is 1."""
    if given is None:
        return None
    if pipeline > 1 and samples_per_group // given < pipeline <= samples_per_group:
        return 1
    return largest_divisor(samples_per_group, given)


def largest_divisor(number: int, most: int) -> int:
    """Of `number`, not above `most` (1 or more)."""
    low = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return max(size for each in low for size in (each, number // each) if size <= most)


def infer_shape(row: Row, note_values: Mapping[str, str]) -> DecoderShape:
    """The model's shape."""
    layers, width = _parse_int(row, "layers", most=MAX_LAYERS), _parse_int(row, "hidden")
    sequence, vocab = _parse_int(row, "seq_len"), _parse_int(row, "vocab", _family_vocab(row))
    heads = _parse_optional_int(row, "heads") or max(1, width // DEFAULT_HEAD_DIM)
    if heads > width:
        raise CannotPredict(f"heads = {heads} is more than hidden = {width}")
    kv_heads = int(_parse_number(note_values.get("kv_heads", "")) or heads)
    moe = _parse_moe(note_values.get("moe", ""))
    head_dim = width // heads
    if head_dim % 8:  # models that do not divide evenly have heads of 64 at least, and kernels work in eights
        head_dim = max(64, -(-head_dim // 8) * 8)
    ffn = _parse_optional_int(row, "ffn_hidden")
    if ffn is None:
        if not moe:
            raise CannotPredict("ffn_hidden is empty")
        ffn = 4 * width
    expert_ffn = moe.get("moe_ffn", 0)
    shape = DecoderShape(
        layers=layers,
        hidden_size=width,
        num_heads=heads,
        num_kv_heads=kv_heads if heads % kv_heads == 0 else heads,
        head_dim=head_dim,
        ffn_hidden_size=ffn,
        gated="gated" in note_values.get("mlp", "") or ffn < 4 * width or bool(moe),
        vocab_size=vocab,
        seq_len=sequence,
        tie_embeddings=False,
        num_experts=moe.get("experts", 0),
        top_k=moe.get("topk", 0),
        expert_hidden_size=expert_ffn,
        shared_expert_hidden_size=moe.get("shared", 0) * expert_ffn,
        dense_layers=moe.get("dense_layers", 0),
    )
    return _match_parameter_count(shape, _parse_number(row.get("params_B", "")))


def _family_vocab(row: Row) -> int | None:
    """The vocabulary of a row's family of models, None of one that is not known."""
    model = row.get("model", "").lower()
    return next((vocab for pattern, vocab in VOCAB_BY_FAMILY.items() if re.search(pattern, model)), None)


def _parse_moe(text: str) -> dict[str, int]:
    """Of a note like `moe=experts:128/topk:8/moe_ffn:1536`."""
    found = {}
    for part in filter(None, text.split("/")):
        name, _, number = part.partition(":")
        if not number.strip().isdecimal():
            raise CannotPredict(f"moe={text} in note: expected whole numbers as in experts:128/topk:8/moe_ffn:1536")
        found[name.strip()] = int(number)
    return found


def count_shape_parameters(shape: DecoderShape) -> float:
    """Of a shape, norms left out."""
    query = shape.hidden_size * shape.num_heads * shape.head_dim
    attention = 2 * query + 2 * shape.hidden_size * shape.num_kv_heads * shape.head_dim
    matrices = 3 if shape.gated else 2
    dense = matrices * shape.hidden_size * shape.ffn_hidden_size
    mixture = (
        3 * shape.hidden_size * (shape.num_experts * shape.expert_hidden_size + shape.shared_expert_hidden_size)
        + shape.hidden_size * shape.num_experts
    )
    of_experts = shape.layers - shape.dense_layers if shape.num_experts else 0
    layers = shape.layers * attention + of_experts * mixture + (shape.layers - of_experts) * dense
    return layers + shape.hidden_size * shape.vocab_size * (1 if shape.tie_embeddings else 2)


def _match_parameter_count(shape: DecoderShape, billions: float | None) -> DecoderShape:
    """Gated or not and tied or not, whichever comes closest to the number of parameters that the row tells."""
    if not billions or shape.num_experts:
        return shape
    options = [
        replace(shape, gated=gated, tie_embeddings=tie)
        for gated in (shape.gated, not shape.gated)
        for tie in (False, True)
    ]
    return min(options, key=lambda each: abs(count_shape_parameters(each) / 1e9 - billions))


def measured_step_seconds(row: Row, shape: DecoderShape, devices: int, batch: int) -> float | None:
    """Seconds of a step: as given, else from tokens a second, else from the rate and the convention that counts its
    operations (`tflops_kind`)."""
    if (seconds := _parse_positive(row.get("step_time_s", ""))) is not None:
        return seconds
    tokens = batch * shape.seq_len / devices
    if (rate := _parse_positive(row.get("tokens_per_sec_per_gpu", ""))) is not None:
        return tokens / rate
    if (tflops := _parse_positive(row.get("tflops_per_gpu", ""))) is None:
        return None
    return tokens * flops_per_token(shape, parse_notes(row).get("tflops_kind", "")) / (tflops * 1e12)


def flops_per_token(shape: DecoderShape, kind: str) -> float:
    """Operations of a token as a source counts them: 6 a parameter that takes part, and attention, whole (12 L h s) or,
    where it says so, causal-halved; hardware figures count the forward of blocks twice, since they are recomputed."""
    embedding = shape.hidden_size * shape.vocab_size
    head = 6.0 * embedding
    blocks = 6.0 * (_active_parameters(shape) - embedding * (1 if shape.tie_embeddings else 2))
    attention = 12.0 * shape.layers * shape.num_heads * shape.head_dim * shape.seq_len
    if "causal-halved" in kind:
        attention /= 2
    if kind.startswith("hardware"):
        return (blocks + attention) * 4 / 3 + head
    return blocks + attention + head


def _active_parameters(shape: DecoderShape) -> float:
    if not shape.num_experts:
        return count_shape_parameters(shape)
    idle = (
        3
        * shape.hidden_size
        * (shape.num_experts - shape.top_k)
        * shape.expert_hidden_size
        * (shape.layers - shape.dense_layers)
    )
    return count_shape_parameters(shape) - idle


def _parse_zero(kind: str, said: Mapping[str, str]) -> int:
    if said.get("sharding") == "SHARD_GRAD_OP":
        return 2
    if found := re.match(r"zero\s*-?([0-3])", kind):
        return int(found[1])
    if kind in ("true", "hsdp", "fsdp", "yes"):
        return 3
    return 1 if kind in ("", "false") else 0


def _parse_virtual_stages(said: Mapping[str, str], layers: int, pipeline: int) -> int:
    """Virtual stages of a rank. Some sources print layers of a virtual stage instead: then that is what divides."""
    given = int(_parse_number(said.get("vpp", "").split("(")[0]) or 1)
    if pipeline == 1 or given < 1:
        return 1
    return given if pipeline * given <= layers else 1


def _parse_checkpointing(text: str) -> str | None:
    text = text.strip().lower()
    if not text:
        return None
    if text.startswith(("full", "qkv_proj_offloaded")):
        return "full"
    if text.startswith("none"):
        return "none"
    return "selective"


def _parse_precision(text: str) -> str:
    text = text.strip().lower()
    for name in ("fp4", "fp8", "bf16", "fp16", "tf32", "fp32"):
        if name in text:
            return name
    return "bf16"


def _parse_network(text: str) -> float | None:
    """GB/s of one node, one way, from `8xHDR200`, `400Gbps/node`, `8x400Gb IB`, `1600Gbps`."""
    if found := re.search(r"(\d+)\s*x\s*[A-Za-z]*\s*(\d+)", text):
        return int(found[1]) * int(found[2]) / 8
    if found := re.search(r"(\d+)\s*Gbps", text):
        return int(found[1]) / 8
    return None


def _parse_number(text: str) -> float | None:
    found = re.match(r"\s*((?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)", text or "", re.IGNORECASE)
    value = float(found[1]) if found else math.inf
    return value if math.isfinite(value) else None


def _parse_positive(text: str) -> float | None:
    """What was measured; nothing takes no time."""
    return _parse_number(text) or None


def _parse_optional_int(row: Row, name: str, most: int = MAX_CELL_VALUE) -> int | None:
    """A whole number from 1 to `most`, or None where the table has none."""
    text = (row.get(name) or "").strip()
    if text.casefold() in BLANK_CELLS:
        return None
    value = _parse_number(text)
    if value is None or not 1 <= value <= most or value != int(value):
        raise CannotPredict(f"{name} = {text}: expected a whole number from 1 to {most:,}")
    return int(value)


def _parse_int(row: Row, name: str, otherwise: int | None = None, most: int = MAX_CELL_VALUE) -> int:
    value = _parse_optional_int(row, name, most)
    if value is None:
        if otherwise is None:
            raise CannotPredict(f"{name} is empty")
        return otherwise
    return value
