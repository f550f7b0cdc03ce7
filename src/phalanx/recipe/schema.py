"""The recipe: what to train and how, as values. Reading files and reporting errors live in `load.py`.

Unknown keys are refused. Every field has the default that DESIGN.md names; together they are the example.
`auto` is resolved before training (`plan/resolve.py`); `Recipe` itself never measures anything.
"""

import math
import re
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    model_validator,
)
from pydantic_core import PydanticCustomError


class Part(BaseModel):
    """Base of every part of a recipe: immutable, unknown keys refused."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, populate_by_name=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


def _number(value: Any) -> Any:
    """Refuse true and false, which Python takes for 1 and 0."""
    if isinstance(value, bool):
        raise PydanticCustomError("number", "expected a number")
    return value


NUMBER = BeforeValidator(_number)
"""Last in the annotation of each number that people write."""
LONGEST = 10**10
"""Steps of a run: at a millisecond each, those of four months."""
MOST_SAMPLES = 10**8
"""Of a step. `LONGEST` times so many are below 2^63, in which positions are counted."""
MOST_WORKERS = 10**6
MOST_THREADS = 1024
LONGEST_SEQUENCE = 1 << 24
LARGEST_VOCABULARY = 10**7
LARGEST_SIDE = 1 << 14
"""Pixels of a picture's height or width."""
WIDEST = 1 << 16
"""Rank of a matrix, and MiB of a bucket."""
LARGEST = 1e6
"""Of rates and weights, which are of the order of 1."""

Count = Annotated[int, Field(gt=0, le=10**6), NUMBER]
"""How many there are of something."""
Samples = Annotated[int, Field(gt=0, le=MOST_SAMPLES), NUMBER]
Ranks = Annotated[int, Field(gt=0, le=MOST_WORKERS), NUMBER]
Begin = Annotated[int, Field(ge=0, le=LONGEST), NUMBER]
"""A number of first steps, or none."""
Rate = Annotated[float, Field(gt=0, le=LARGEST), NUMBER]
Fraction = Annotated[float, Field(ge=0, lt=1), NUMBER]


def _steps(value: Any) -> Any:
    """Accept `100`, `"100 steps"` or `"1 step"`; anything else is left for pydantic to refuse."""
    if isinstance(value, str) and (match := re.fullmatch(r"\s*([0-9]{1,20})\s*(steps?)?\s*", value)):
        return int(match[1])
    return _number(value)


STEPS_PATTERN = r"^\s*[0-9]+\s*(steps?)?\s*$"
_Steps = Annotated[int, Field(gt=0, le=LONGEST)]

Steps = Annotated[
    _Steps,
    BeforeValidator(_steps, json_schema_input_type=_Steps | Annotated[str, StringConstraints(pattern=STEPS_PATTERN)]),
]
"""A number of optimizer steps, written `100` or `100 steps`."""


def _finite(value: Any) -> Any:
    """Refuse numbers that no JSON has: a builder in another process would get None for them."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"found {value}, expected finite numbers")
    below = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for each in below:
        _finite(each)
    return value


def _percent(value: str) -> str:
    if not 0 < float(value.strip().removesuffix("%")) <= 50:
        raise ValueError("expected a share above 0% and up to 50%")
    return value


PERCENT_PATTERN = r"^\s*[0-9]+(\.[0-9]+)?\s*%\s*$"

Percent = Annotated[str, StringConstraints(pattern=PERCENT_PATTERN), AfterValidator(_percent)]
"""A share of the time, written `1%`."""


class Model(Part):
    """The network: `build` is `module:callable` returning an `nn.Module`, called with `args`; or `hf:PATH`, a Hugging
    Face directory, whose architecture and weights are taken."""

    build: str = "phalanx.models:transformer"
    """`module:callable`; modules beside the recipe are found, too. Or `hf:PATH` of a Hugging Face directory."""
    args: Annotated[dict[str, Any], AfterValidator(_finite)] = Field(default_factory=dict)
    """Arguments of the callable. `vocab`, `sequence`, `classes` are filled in from the data where it takes them. With
    `hf:PATH`, values that replace those of its config.json."""
    rules: dict[str, str] | None = None
    """How `layout.tensor` cuts the model: pattern of module names -> style. null: what is known about the model."""


class Adapter(Part):
    """Low-rank adapters (LoRA) for fine-tuning: the model's own weights stay as they are, and two small matrices beside
    each chosen layer learn what is added: alpha / rank x (B A). An export has them folded in."""

    rank: Annotated[int, Field(gt=0, le=WIDEST), NUMBER] = 8
    """Rows of A and columns of B, for each layer."""
    alpha: Rate = 16.0
    """Scale of what is added, divided by `rank`."""
    modules: str | list[str] | None = None
    """Names of linear layers, or their last parts (`q_proj`); `*` stands for one part. null: all in the blocks."""
    dropout: Fraction = 0.0
    """Of the inputs of A, in training."""


Side = Annotated[int, Field(gt=0, le=LARGEST_SIDE), NUMBER]


class Idx(Part):
    """An image set in IDX files (as MNIST and Fashion-MNIST are published), plain or .gz."""

    images: str
    """File of the images."""
    labels: str
    """File of the labels, as many as there are images."""


class Source(Part):
    """One source of samples: exactly one of `text`, `jsonl`, `parquet`, `idx`, `images`, `prepared`."""

    text: str | list[str] | None = Field(None, description="Glob(s) of text files; .gz and .xz are unpacked.")
    jsonl: str | list[str] | None = Field(None, description="Glob(s) of JSON-lines files; `field` holds the text.")
    parquet: str | list[str] | None = Field(None, description="Glob(s) of Parquet files; `field` is the text column.")
    idx: Idx | None = None
    """Image set in IDX files."""
    images: str | None = Field(None, description="A folder with one sub-folder of images for each class.")
    prepared: str | None = Field(None, description="A directory that `phalanx data prepare` wrote.")
    field: str = "text"
    """Name of the text field in JSON-lines and Parquet files."""
    exclude: str | list[str] = Field(default_factory=list, description="Glob(s) of files to leave out.")
    size: tuple[Side, Side] | None = Field(None, description="Height and width for image folders.")
    weight: Rate = 1.0
    """Share of the samples that comes from this source, relative to the weights of the others."""

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        given = [name for name in SOURCE_KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of {', '.join(SOURCE_KINDS)}; found {', '.join(given) or 'none'}")
        return self


SOURCE_KINDS = ("text", "jsonl", "parquet", "idx", "images", "prepared")


STDLIB = "${python.stdlib}/**/*.py"
PACKAGES = ["**/site-packages/**", "**/dist-packages/**"]
"""Installed packages lie below the standard library, but differ from machine to machine."""


class Bpe(Part):
    """A byte-pair tokenizer trained on the data itself, with this many tokens."""

    bpe: Annotated[int, Field(ge=257, le=LARGEST_VOCABULARY), NUMBER]
    """Number of tokens of the vocabulary."""


class Data(Part):
    """Where samples come from. `documents: separate` keeps attention and targets within a document."""

    source: Source | list[Source] = Field(default_factory=lambda: Source(text=STDLIB, exclude=PACKAGES))
    """One source, or a list that is mixed by weight. The default is the source of Python's standard library."""
    tokenizer: str | Bpe = Field(
        "bytes", description="`bytes`, {bpe: SIZE}, or a tokenizer.json: its path or directory."
    )
    sequence: Annotated[int, Field(gt=0, le=LONGEST_SEQUENCE), NUMBER] = 256
    """Tokens of one training sample."""
    documents: Literal["join", "separate"] = "join"
    """`separate` keeps attention and targets within a document; `join` runs over its end."""


class Evaluate(Part):
    """Scores on held-out data: a `share` of the samples that training never sees, or a `source` of its own."""

    every: Steps | None = 100
    """Score every so many steps; null never does."""
    share: Fraction = 0.01
    """Share of the samples that is held out of training."""
    samples: Annotated[int, Field(gt=0, le=LONGEST), NUMBER] = Field(
        512, description="At most this many held-out samples are scored."
    )
    source: Source | None = None
    """Held-out data of its own, instead of a share of the training data."""


class Batch(Part):
    """`global` samples make one optimizer step; `micro` samples are computed at once (it changes only rounding)."""

    global_: Samples = Field(16, alias="global")
    """Samples of one optimizer step, over all workers. Changes the mathematics. `phalanx report` tells how far it may
    grow: the gradient noise scale."""
    per: Literal["worker"] | None = None
    """`worker`: the batch is `global` samples for each worker that the run is first started on, and stays that when it
    goes on with others; `optim.scaling` lets the learning rate follow. null: `global` is the whole batch."""
    micro: Samples | Literal["auto"] = "auto"
    """Samples computed at once by one worker. Changes speed, memory and rounding only. `auto`: as many as fit, by
    prediction and a trial; when memory runs out all the same, the run goes on with fewer."""


class Schedule(Part):
    """Learning rate over the run: linear warm-up, then decay to `final` x lr at the last step."""

    warmup: Begin = 20
    """Steps over which the rate rises linearly."""
    decay: Literal["cosine", "linear", "poly", "step", "constant"] = "cosine"
    """Shape of the way down from `lr`. `poly` and `step` are Caffe's: a power of what is left of the run, and drops at
    given times."""
    final: Annotated[float, Field(ge=0, le=1), NUMBER] = 0.1
    """Rate at the last step, as a share of `lr`; not of `step`, which ends where its drops lead."""
    power: Annotated[float, Field(gt=0, le=100), NUMBER] = 0.5
    """Of `poly`: lr x (what is left of the run)^power."""
    drops: list[Annotated[float, Field(gt=0, lt=1), NUMBER]] = Field(
        [0.5, 0.75], description="Of `step`: when the rate drops, as shares of the run after warm-up."
    )
    gamma: Annotated[float, Field(gt=0, lt=1), NUMBER] = 0.1
    """Of `step`: what each drop multiplies the rate with."""


class Scaling(Part):
    """How the learning rate follows the batch. `lr` is then that of `base_batch` samples; with k times as many it
    becomes k x or sqrt(k) x lr, after a warm-up that begins at `lr` (Goyal et al. 2017)."""

    rule: Literal["linear", "sqrt"] = "linear"
    """`linear` is usual for sgd, `sqrt` for adamw and lamb."""
    base_batch: Samples | None = None
    """Samples of a step for which `lr` is right. null: batch.global, where that is for each worker."""
    warmup: Begin = 200
    """Steps over which the rate rises from `lr` to that of the batch, beside the schedule's own warm-up."""


class Optim(Part):
    """The optimizer. `clip` bounds the norm of the whole gradient; null leaves it alone."""

    name: Literal["adamw", "sgd", "muon", "lars", "lamb"] = "adamw"
    """Which optimizer. `lars` and `lamb` are for large batches, in place of `sgd` and `adamw`."""
    lr: Rate = 1e-3
    """Peak learning rate. That of `lars` is of the order of 1 to 30."""
    weight_decay: Annotated[float, Field(ge=0, le=LARGEST), NUMBER] = 0.1
    """How fast weights shrink by themselves."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """Memory of adamw's and lamb's first and second moment."""
    momentum: Fraction = Field(0.9, description="Of sgd, muon and lars.")
    state: Literal["fp32", "bf16", "8bit"] = "fp32"
    """How adamw keeps its moments: 8, 4 or about 2 bytes for each parameter. The lower two round stochastically."""
    clip: Annotated[float, Field(gt=0, le=1e12), NUMBER] | None = 1.0
    """Bound on the norm of the whole gradient; null leaves it alone."""
    schedule: Schedule = Schedule()
    """Learning rate over the run."""
    scaling: Scaling | None = Field(None, description="Whether the learning rate follows the batch. null: it does not.")


class Layout(Part):
    """world = replicate x shard x tensor x pipeline x context; `expert` reuses shard x context."""

    replicate: Ranks = 1
    """Whole copies of the model, each with its part of the batch."""
    shard: Ranks = 1
    """Ranks over which parameters are sharded."""
    tensor: Ranks = 1
    """Ranks over which matrices are split."""
    pipeline: Ranks = 1
    """Stages of layers."""
    context: Ranks = 1
    """Ranks over which a sequence is split."""
    expert: Ranks = 1
    """Ranks over which experts are split; reuses shard x context."""
    overlap: bool = False
    """Tensor ranks compute half of a product while the other half travels. Pays where products are large and links
    slow; `phalanx tune` finds out."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble"] = "1f1b"
    """In which order pipeline stages compute micro-batches. For pipelines only."""
    stages: list[Count] | None = None
    """Blocks of each pipeline stage, in order. null: as even as parameters allow, in two stages a rank where the
    schedule wants several."""

    @property
    def splits_backward(self) -> bool:
        """Whether a block's backward comes in two parts, for its input and later for its weights. Neither compiled
        blocks nor selective recomputation can do that."""
        return self.schedule == "zero-bubble" and self.pipeline > 1

    @property
    def world(self) -> int:
        """Number of processes that this layout occupies."""
        return self.replicate * self.shard * self.tensor * self.pipeline * self.context


class Memory(Part):
    """What is traded for memory."""

    recompute: Literal["auto", "none", "selective", "full"] = "auto"
    """Which activations are computed again in the backward pass instead of kept. `selective` keeps the results of
    matrix products, attention and communication; `full` keeps only what enters a block. `auto`: as few as lets a
    sample fit."""
    loss: Literal["auto", "whole", "chunked"] = "auto"
    """`chunked` computes the loss of a language model without ever holding all logits; one whose output layer has a
    bias has none. `auto`: where those of a micro-batch would take more than 256 MB in fp32."""
    offload: Literal["none", "optimizer"] = "none"
    """What is kept in host memory. `optimizer`: the state of adamw or sgd, updated by the CPU. Without a GPU it changes
    nothing."""


Strategy = Literal[
    "auto",
    "allreduce",
    "ring",
    "tree",
    "halving",
    "server",
    "sharded-server",
    "hierarchical",
    "bf16",
    "int8",
    "powersgd",
    "local",
    "diloco",
]
LOSSY = ("bf16", "int8", "powersgd")
"""Strategies that round what they send."""
LOCAL = ("local", "diloco")
"""Strategies under which workers take steps of their own, and exchange weights every so many of them."""


class Outer(Part):
    """The outer optimizer of `diloco`: SGD with Nesterov momentum on how far workers moved on average."""

    lr: Rate = 0.7
    """Learning rate of outer steps. 1 without momentum would be plain averaging."""
    momentum: Fraction = 0.9
    """Nesterov momentum of outer steps; 0 for none."""


class Exchange(Part):
    """How gradients travel. `exact`: `replicas` = same bits on any number of replicas, `world` = same bits again
    on the same number, `no` = lossy exchange allowed, `auto` = `world` where it costs less than 2% of a step. `bucket`
    is in MiB."""

    strategy: Strategy = "auto"
    """How gradients are added up: docs/exchange.md. `bf16`, `int8` and `powersgd` send fewer bytes and need
    `exact: no`; so do `local` and `diloco`, which send nothing but every `every` steps. `auto` then chooses while
    training, and is else allreduce, or the fixed tree of `exact: replicas`."""
    low_rank: Annotated[int, Field(gt=0, le=WIDEST), NUMBER] = 4
    """Columns of the thin matrices in which `powersgd` sends a gradient: more are more exact, and more bytes."""
    exact: Literal["auto", "world", "replicas", "no"] = "auto"
    """What stays the same bits: see the part's description. `auto` is `world` on a CPU. On a GPU a trial measures what
    deterministic kernels cost: below 2% it is `world`, else `no`, and gradients still travel in fp32."""
    bucket: Literal["auto"] | Annotated[float, Field(gt=0, le=WIDEST), NUMBER] = "auto"
    """MiB of gradients that travel together between replicas. `auto`: 25; between nodes at most a 12th of the
    gradients, but 1; `phalanx plan` writes the best for the cluster's network."""
    every: Steps = 25
    """`local` and `diloco`: steps that each worker takes by itself before weights are exchanged."""
    start: Begin | Literal["auto"] = "auto"
    """`powersgd`, `local` and `diloco`: first steps of a run, in which gradients travel whole, or after each of which
    workers take the mean of their weights. `auto`: 100, or for `local` and `diloco` a third of the run's
    steps if that is more."""
    outer: Outer = Outer()
    fragments: Count = 1
    """`local` and `diloco`: parts in which weights are exchanged, by turns, each every `every` steps: the network is
    asked for less at a time."""
    delay: Begin = 0
    """`local` and `diloco`: steps that workers go on before they take what was exchanged, which travels meanwhile."""
    wire: Literal["fp32", "bf16", "int8"] = "fp32"
    """`local` and `diloco`: what weights travel as, told as how far a worker moved. `int8` keeps what it could not
    send."""


class Checkpoint(Part):
    """Save every so many steps; keep the newest `keep`, and the best by held-out loss besides."""

    every: Steps | Literal["auto"] | None = 50
    """Save every so many steps; null saves at the end only. `auto` measures, while training, what a save costs, and
    saves as often as is best at the rate of failures (Young 1974, Daly 2006)."""
    keep: Count = 3
    """Newest checkpoints that stay; the best by held-out loss stays besides."""


class Recovery(Part):
    """When a run is started again, and how often without progress before it is given up."""

    hot: Steps | Percent | None = "1%"
    """Copy the state into the memory of the nodes every so many steps, or as often as takes such a share of the time
    (`1%`); null never does. A worker or node that is lost then costs the steps since the last copy."""
    attempts: Count = 3
    """Failed attempts in a row without progress before the run is given up."""
    silence: Annotated[float, Field(gt=0, le=1e7), NUMBER] = 600.0
    """Seconds without a sign of life after which workers that seem stuck are started again. It is told long before; a
    worker that is held still while others are not does not wait so long."""


class Recipe(Part):
    """Everything that defines a run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "gpt-python"
    """Name of the run; `--run` defaults to runs/NAME."""
    model: Model = Model()
    init: str | None = None
    """Weights to start from: a run, a checkpoint, or `hf:PATH` of a directory of safetensors, such as an export."""
    adapter: Adapter | None = Field(None, description="Train small adapters (LoRA) instead of the model's own weights.")
    task: str = "language-modeling"
    """What is learned: `language-modeling`, `classification`, or `module:Class` of your own."""
    data: Data = Data()
    evaluate: Evaluate = Evaluate()
    batch: Batch = Batch()
    steps: Steps = 300
    """Optimizer steps of the whole run. May be raised later; the schedule's horizon follows."""
    optim: Optim = Optim()
    device: Literal["auto", "cpu", "cuda", "xpu", "mps"] = "auto"
    """What trains: `cuda` is a GPU of NVIDIA or AMD (ROCm), `xpu` one of Intel; docs/devices.md says what each can do.
    `auto`: GPUs where torch finds some, else the CPU."""
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16", "fp8"] = "auto"
    """Number format of the computation. `auto` measures whether fp32 or bf16 is faster here. `tf32` is fp32 with
    products of 10 bits on NVIDIA's tensor cores. `fp8` is bf16 with those linear layers of blocks in fp8 that measure
    faster so; it needs an NVIDIA GPU of compute capability 8.9 or later."""
    layout: Layout | Literal["auto"] = "auto"
    """How the workers share the work."""
    memory: Memory = Memory()
    compile: bool | Literal["auto", "graphs"] = "auto"
    """Whether the repeated blocks of the model go through torch.compile. `graphs` records them as CUDA graphs besides,
    for models so small that launching kernels takes the time; whole replicas on GPUs only."""
    exchange: Exchange = Exchange()
    checkpoint: Checkpoint = Checkpoint()
    recovery: Recovery = Recovery()
    callbacks: list[str] = Field(default_factory=list, description="`module:Class` of callbacks.")
    threads: Annotated[int, Field(gt=0, le=MOST_THREADS), NUMBER] | Literal["auto"] = Field(
        "auto", description="CPU threads of each worker."
    )
    seed: Annotated[int, Field(ge=0, le=(1 << 63) - 1), NUMBER] = 0
    """Of the initial weights, the order of data and all random numbers."""
