"""From a row of a table of published runs to what is to be predicted: the model's shape, how it was divided, and what
was measured. Columns are those of shared/validation/published_runs.csv; empty cells are told apart from zeros.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from planner_validation.cells import CannotPredict, Row

USUAL_HEAD = 128
"""Features of a head where the number of heads is not given."""
BLANK = ("", "-", "nan", "none", "null", "n/a", "?")
"""What tables write where they know nothing."""
MOST, DEEPEST = 100_000_000, 10_000
"""The largest number that a cell may hold, and the most layers: beyond any run, and what a slip of the pen gives."""


@dataclass(frozen=True)
class Shape:
    """A decoder as tables give it."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    gated: bool
    vocab: int
    sequence: int
    tie: bool
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    dense_layers: int = 0


@dataclass(frozen=True)
class Run:
    """A row, understood."""

    shape: Shape
    gpu: str
    devices: int
    batch: int
    tensor: int
    pipeline: int
    context: int
    expert: int
    parts: int
    """Groups of devices among which the batch is divided."""
    zero: int
    replicate: int
    """Copies of sharded weights (hybrid sharding); 1 elsewhere."""
    micro: int | None
    chunks: int
    recompute: str | None
    precision: str
    measured: float | None
    """Seconds of a step, None when the row does not tell."""
    network_gbps: float | None
    """Of one node, one way, where the note tells."""
    notes: Mapping[str, str] = field(default_factory=dict)


def notes(row: Row) -> dict[str, str]:
    """The column `note`: key=value pairs divided by semicolons."""
    pairs = (part.partition("=") for part in row.get("note", "").split(";"))
    return {key.strip(): value.strip() for key, _, value in pairs if key.strip()}


def understand(row: Row) -> Run:
    """What a row says. CannotPredict tells what is missing or contradicts itself."""
    said = notes(row)
    if said.get("task", "").lower() in ("lora", "peft"):
        raise CannotPredict("task=LoRA: fine-tuning with adapters, no pre-training run")
    devices, batch = _integer(row, "n_gpus"), _integer(row, "global_batch_seqs")
    tensor, pipeline, context, expert = (_integer(row, name, 1) for name in ("tp", "pp", "cp", "ep"))
    kind = row.get("fsdp", "").strip().lower()
    if not row.get("tp", "").strip() and not kind:
        raise CannotPredict("tp, pp and dp are empty: the layout is not given")
    inner = tensor * pipeline * context
    if devices % inner:
        raise CannotPredict(f"tp x pp x cp = {inner} does not divide n_gpus = {devices}")
    zero = _zero(kind, said)
    parts = devices // inner
    if batch < parts:
        raise CannotPredict(f"global_batch_seqs = {batch} is less than the {parts} groups that n_gpus and layout leave")
    shape = shape_of(row, said)
    if expert > 1 and not shape.experts:
        raise CannotPredict(f"ep = {expert}, but the row does not tell the number of experts")
    micro = _micro(_maybe(row, "micro_batch"), batch // parts, pipeline)
    return Run(
        shape=shape,
        gpu=row["gpu"].strip(),
        devices=devices,
        batch=batch,
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        expert=expert,
        parts=parts,
        zero=zero,
        replicate=1,
        micro=micro,
        chunks=_chunks(said, shape.layers, pipeline),
        recompute=_recompute(row.get("recompute", "")),
        precision=_precision(row.get("precision", "")),
        measured=measured(row, shape, devices, batch),
        network_gbps=_network(said.get("net", "")),
        notes=said,
    )


def _micro(given: int | None, share: int, pipeline: int) -> int | None:
    """The micro-batch, of a group's `share`. Some tables give a group's whole share as if it were one; but a pipeline
    with fewer micro-batches than stages would stand still most of the time, and nobody runs that: then it is 1."""
    if given is None:
        return None
    if pipeline > 1 and share // given < pipeline <= share:
        return 1
    return largest_divisor(share, given)


def largest_divisor(number: int, most: int) -> int:
    """Of `number`, not above `most` (1 or more)."""
    low = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return max(size for each in low for size in (each, number // each) if size <= most)


def shape_of(row: Row, said: Mapping[str, str]) -> Shape:
    """The model's shape."""
    layers, width = _integer(row, "layers", most=DEEPEST), _integer(row, "hidden")
    sequence, vocab = _integer(row, "seq_len"), _integer(row, "vocab")
    heads = _maybe(row, "heads") or max(1, width // USUAL_HEAD)
    if heads > width:
        raise CannotPredict(f"heads = {heads} is more than hidden = {width}")
    kv_heads = int(_number(said.get("kv_heads", "")) or heads)
    moe = _mixture(said.get("moe", ""))
    head_dim = width // heads
    if head_dim % 8:  # models that do not divide evenly have heads of 64 at least, and kernels work in eights
        head_dim = max(64, -(-head_dim // 8) * 8)
    ffn = _maybe(row, "ffn_hidden")
    if ffn is None:
        if not moe:
            raise CannotPredict("ffn_hidden is empty")
        ffn = 4 * width
    expert_ffn = moe.get("moe_ffn", 0)
    shape = Shape(
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads if heads % kv_heads == 0 else heads,
        head_dim=head_dim,
        ffn=ffn,
        gated="gated" in said.get("mlp", "") or ffn < 4 * width or bool(moe),
        vocab=vocab,
        sequence=sequence,
        tie=False,
        experts=moe.get("experts", 0),
        top_k=moe.get("topk", 0),
        expert_ffn=expert_ffn,
        shared_ffn=moe.get("shared", 0) * expert_ffn,
        dense_layers=moe.get("dense_layers", 0),
    )
    return _most_like(shape, _number(row.get("params_B", "")))


def _mixture(text: str) -> dict[str, int]:
    """Of a note like `moe=experts:128/topk:8/moe_ffn:1536`."""
    found = {}
    for part in filter(None, text.split("/")):
        name, _, number = part.partition(":")
        if not number.strip().isdecimal():
            raise CannotPredict(f"moe={text} in note: expected whole numbers as in experts:128/topk:8/moe_ffn:1536")
        found[name.strip()] = int(number)
    return found


def parameters(shape: Shape) -> float:
    """Of a shape, norms left out."""
    query = shape.width * shape.heads * shape.head_dim
    attention = 2 * query + 2 * shape.width * shape.kv_heads * shape.head_dim
    matrices = 3 if shape.gated else 2
    dense = matrices * shape.width * shape.ffn
    mixture = 3 * shape.width * (shape.experts * shape.expert_ffn + shape.shared_ffn) + shape.width * shape.experts
    of_experts = shape.layers - shape.dense_layers if shape.experts else 0
    layers = shape.layers * attention + of_experts * mixture + (shape.layers - of_experts) * dense
    return layers + shape.width * shape.vocab * (1 if shape.tie else 2)


def _most_like(shape: Shape, billions: float | None) -> Shape:
    """Gated or not and tied or not, whichever comes closest to the number of parameters that the row tells."""
    if not billions or shape.experts:
        return shape
    options = [
        replace(shape, gated=gated, tie=tie) for gated in (shape.gated, not shape.gated) for tie in (False, True)
    ]
    return min(options, key=lambda each: abs(parameters(each) / 1e9 - billions))


def measured(row: Row, shape: Shape, devices: int, batch: int) -> float | None:
    """Seconds of a step: as given, else from tokens a second, else from the rate and the convention that counts its
    operations (`tflops_kind`)."""
    if (seconds := _positive(row.get("step_time_s", ""))) is not None:
        return seconds
    tokens = batch * shape.sequence / devices
    if (rate := _positive(row.get("tokens_per_sec_per_gpu", ""))) is not None:
        return tokens / rate
    if (tflops := _positive(row.get("tflops_per_gpu", ""))) is None:
        return None
    return tokens * counted_flops(shape, notes(row).get("tflops_kind", "")) / (tflops * 1e12)


def counted_flops(shape: Shape, kind: str) -> float:
    """Operations of a token as a source counts them: 6 a parameter that takes part, and attention, whole (12 L h s) or,
    where it says so, causal-halved; hardware figures count the forward of blocks twice, since they are recomputed."""
    embedding = shape.width * shape.vocab
    head = 6.0 * embedding
    blocks = 6.0 * (_active(shape) - embedding * (1 if shape.tie else 2))
    attention = 12.0 * shape.layers * shape.heads * shape.head_dim * shape.sequence
    if "causal-halved" in kind:
        attention /= 2
    if kind.startswith("hardware"):
        return (blocks + attention) * 4 / 3 + head
    return blocks + attention + head


def _active(shape: Shape) -> float:
    if not shape.experts:
        return parameters(shape)
    idle = 3 * shape.width * (shape.experts - shape.top_k) * shape.expert_ffn * (shape.layers - shape.dense_layers)
    return parameters(shape) - idle


def _zero(kind: str, said: Mapping[str, str]) -> int:
    if said.get("sharding") == "SHARD_GRAD_OP":
        return 2
    if found := re.match(r"zero\s*-?([0-3])", kind):
        return int(found[1])
    if kind in ("true", "hsdp", "fsdp", "yes"):
        return 3
    return 1 if kind in ("", "false") else 0


def _chunks(said: Mapping[str, str], layers: int, pipeline: int) -> int:
    """Virtual stages of a rank. Some sources print layers of a virtual stage instead: then that is what divides."""
    given = int(_number(said.get("vpp", "").split("(")[0]) or 1)
    if pipeline == 1 or given < 1:
        return 1
    return given if pipeline * given <= layers else 1


def _recompute(text: str) -> str | None:
    text = text.strip().lower()
    if not text:
        return None
    if text.startswith(("full", "qkv_proj_offloaded")):
        return "full"
    if text.startswith("none"):
        return "none"
    return "selective"


def _precision(text: str) -> str:
    text = text.strip().lower()
    for name in ("fp4", "fp8", "bf16", "fp16", "tf32", "fp32"):
        if name in text:
            return name
    return "bf16"


def _network(text: str) -> float | None:
    """GB/s of one node, one way, from `8xHDR200`, `400Gbps/node`, `8x400Gb IB`, `1600Gbps`."""
    if found := re.search(r"(\d+)\s*x\s*[A-Za-z]*\s*(\d+)", text):
        return int(found[1]) * int(found[2]) / 8
    if found := re.search(r"(\d+)\s*Gbps", text):
        return int(found[1]) / 8
    return None


def _number(text: str) -> float | None:
    found = re.match(r"\s*((?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)", text or "", re.IGNORECASE)
    value = float(found[1]) if found else math.inf
    return value if math.isfinite(value) else None


def _positive(text: str) -> float | None:
    """What was measured; nothing takes no time."""
    return _number(text) or None


def _maybe(row: Row, name: str, most: int = MOST) -> int | None:
    """A whole number from 1 to `most`, or None where the table has none."""
    text = (row.get(name) or "").strip()
    if text.casefold() in BLANK:
        return None
    value = _number(text)
    if value is None or not 1 <= value <= most or value != int(value):
        raise CannotPredict(f"{name} = {text}: expected a whole number from 1 to {most:,}")
    return int(value)


def _integer(row: Row, name: str, otherwise: int | None = None, most: int = MOST) -> int:
    value = _maybe(row, name, most)
    if value is None:
        if otherwise is None:
            raise CannotPredict(f"{name} is empty")
        return otherwise
    return value
