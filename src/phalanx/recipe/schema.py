"""The recipe: what to train and how, as values. Reading files and reporting errors live in `load.py`.

Unknown keys are refused. Every field has the default that DESIGN.md names; together they are the example.
`auto` is resolved before training (`autoconfig/choices.py`); `Recipe` itself never measures anything.
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


class ConfigModel(BaseModel):
    """Base of every part of a recipe: immutable, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


def _number(value: Any) -> Any:
    """Refuse true and false, which Python takes for 1 and 0."""
    if isinstance(value, bool):
        raise PydanticCustomError("number", "expected a number")
    return value


NUMBER_NOT_BOOL = BeforeValidator(_number)
"""Last in the annotation of each number that people write."""
MAX_STEPS = 10**10
"""Steps of a run: at a millisecond each, those of four months."""
MOST_SAMPLES = 10**8
"""Samples of a step. `MAX_STEPS` times this is below 2^63, in which positions are counted."""
MOST_WORKERS = 10**6
MOST_THREADS = 1024
LONGEST_SEQUENCE = 1 << 24
LARGEST_VOCABULARY = 10**7
LARGEST_SIDE = 1 << 14
"""Pixels of a picture's height or width."""
MAX_RANK_OR_MIB = 1 << 16
"""Rank of a matrix, and MiB of a bucket."""
MAX_RATE = 1e6
"""Of rates and weights, which are of the order of 1."""

Count = Annotated[int, Field(gt=0, le=10**6), NUMBER_NOT_BOOL]
"""How many there are of something."""
Samples = Annotated[int, Field(gt=0, le=MOST_SAMPLES), NUMBER_NOT_BOOL]
Ranks = Annotated[int, Field(gt=0, le=MOST_WORKERS), NUMBER_NOT_BOOL]
Begin = Annotated[int, Field(ge=0, le=MAX_STEPS), NUMBER_NOT_BOOL]
"""A number of first steps, or none."""
Rate = Annotated[float, Field(gt=0, le=MAX_RATE), NUMBER_NOT_BOOL]
Fraction = Annotated[float, Field(ge=0, lt=1), NUMBER_NOT_BOOL]


def _parse_steps(value: Any) -> Any:
    """Accept `100`, `"100 steps"` or `"1 step"`; anything else is left for pydantic to refuse."""
    if isinstance(value, str) and (match := re.fullmatch(r"\s*([0-9]{1,20})\s*(steps?)?\s*", value)):
        return int(match[1])
    return _number(value)


STEPS_REGEX = r"^\s*[0-9]+\s*(steps?)?\s*$"
_Steps = Annotated[int, Field(gt=0, le=MAX_STEPS)]

StepCount = Annotated[
    _Steps,
    BeforeValidator(
        _parse_steps, json_schema_input_type=_Steps | Annotated[str, StringConstraints(pattern=STEPS_REGEX)]
    ),
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


def _check_percent(value: str) -> str:
    if not 0 < float(value.strip().removesuffix("%")) <= 50:
        raise ValueError("expected a share above 0% and up to 50%")
    return value


PERCENT_REGEX = r"^\s*[0-9]+(\.[0-9]+)?\s*%\s*$"

PercentText = Annotated[str, StringConstraints(pattern=PERCENT_REGEX), AfterValidator(_check_percent)]
"""A share of the time, written `1%`."""


class ModelConfig(ConfigModel):
    """The network: `build` is `module:callable` returning an `nn.Module`, called with `args`; or `hf:PATH`, a Hugging
    Face directory; its architecture and weights are taken."""

    model_config = ConfigDict(title="Model")

    build: str = "phalanx.models:transformer"
    """`module:callable`; modules in the recipe's folder are found, too. Or `hf:PATH` of a Hugging Face directory."""
    args: Annotated[dict[str, Any], AfterValidator(_finite)] = Field(default_factory=dict)
    """Arguments of the callable. `vocab_size`, `seq_len`, `num_classes` are filled in from the data where it takes
    them. With `hf:PATH`, values that replace those of its config.json."""
    tp_plan: dict[str, str] | None = None
    """How `parallelism.tensor` divides the model: pattern of module names -> style. null: what is known about the
    model."""


class LoraConfig(ConfigModel):
    """LoRA adapters for fine-tuning: the model's own weights stay as they are, and two small matrices for each chosen
    layer learn what is added: alpha / rank x (B A). An export has them folded in."""

    model_config = ConfigDict(title="LoRA")

    rank: Annotated[int, Field(gt=0, le=MAX_RANK_OR_MIB), NUMBER_NOT_BOOL] = 8
    """Rows of A and columns of B, for each layer."""
    alpha: Rate = 16.0
    """Scale of what is added, divided by `rank`."""
    target_modules: str | list[str] | None = None
    """Names of linear layers, or their last parts (`q_proj`); `*` stands for one part. null: all in the blocks."""
    dropout: Fraction = 0.0
    """Of the inputs of A, in training."""


Side = Annotated[int, Field(gt=0, le=LARGEST_SIDE), NUMBER_NOT_BOOL]


class IdxFiles(ConfigModel):
    """An image set in IDX files (as MNIST and Fashion-MNIST are published), plain or .gz."""

    model_config = ConfigDict(title="IDX files")

    images: str
    """File of the images."""
    labels: str
    """File of the labels, as many as there are images."""


class DataSource(ConfigModel):
    """One source of samples: exactly one of `text`, `jsonl`, `parquet`, `idx`, `images`, `prepared`."""

    model_config = ConfigDict(title="Source")

    text: str | list[str] | None = Field(None, description="Glob(s) of text files; .gz and .xz are unpacked.")
    jsonl: str | list[str] | None = Field(None, description="Glob(s) of JSON-lines files; `text_field` holds the text.")
    parquet: str | list[str] | None = Field(None, description="Glob(s) of Parquet files; `text_field` is the column.")
    idx: IdxFiles | None = None
    """Image set in IDX files."""
    images: str | None = Field(None, description="A folder with one sub-folder of images for each class.")
    prepared: str | None = Field(None, description="A directory that `phalanx data prepare` wrote.")
    text_field: str = "text"
    """Name of the text field in JSON-lines and Parquet files."""
    exclude: str | list[str] = Field(default_factory=list, description="Glob(s) of files to leave out.")
    image_size: tuple[Side, Side] | None = Field(None, description="Height and width for image folders.")
    weight: Rate = 1.0
    """Share of the samples that comes from this source, relative to the weights of the others."""

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        given = [name for name in SOURCE_KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of {', '.join(SOURCE_KINDS)}; found {', '.join(given) or 'none'}")
        return self


SOURCE_KINDS = ("text", "jsonl", "parquet", "idx", "images", "prepared")


PYTHON_STDLIB_GLOB = "${python.stdlib}/**/*.py"
INSTALLED_PACKAGES_GLOBS = ["**/site-packages/**", "**/dist-packages/**"]
"""Installed packages lie below the standard library, but differ from machine to machine."""


class BpeTokenizerConfig(ConfigModel):
    """A byte-pair tokenizer trained on the data itself, with this many tokens."""

    model_config = ConfigDict(title="BPE tokenizer")

    bpe: Annotated[int, Field(ge=257, le=LARGEST_VOCABULARY), NUMBER_NOT_BOOL]
    """Number of tokens of the vocabulary."""


class DataConfig(ConfigModel):
    """Where samples come from. `document_masking` keeps attention and targets within a document."""

    model_config = ConfigDict(title="Data")

    source: DataSource | list[DataSource] = Field(
        default_factory=lambda: DataSource(text=PYTHON_STDLIB_GLOB, exclude=INSTALLED_PACKAGES_GLOBS)
    )
    """One source, or a list that is mixed by weight. The default is the source of Python's standard library."""
    tokenizer: str | BpeTokenizerConfig = Field(
        "bytes", description="`bytes`, {bpe: SIZE}, or a tokenizer.json: its path or directory."
    )
    seq_len: Annotated[int, Field(gt=0, le=LONGEST_SEQUENCE), NUMBER_NOT_BOOL] = 256
    """Tokens of one training sample."""
    document_masking: bool = False
    """Whether attention and targets stay within a document; false: they continue over its end."""


class EvaluationConfig(ConfigModel):
    """Scores on a validation set: a `holdout_fraction` of the samples that training never sees, or a `source` of its
    own."""

    model_config = ConfigDict(title="Evaluation")

    every: StepCount | None = 100
    """Steps between two evaluations; null: never."""
    holdout_fraction: Fraction = 0.01
    """Share of the samples that training never sees."""
    max_samples: Annotated[int, Field(gt=0, le=MAX_STEPS), NUMBER_NOT_BOOL] = Field(
        512, description="At most this many samples of the validation set are scored."
    )
    source: DataSource | None = None
    """Validation data of its own, instead of a share of the training data."""


class BatchConfig(ConfigModel):
    """`global_size` samples make one optimizer step; `micro_size` samples are computed at once (it changes only
    rounding)."""

    model_config = ConfigDict(title="Batch")

    global_size: Samples = 16
    """Samples of one optimizer step, over all workers. Changes the mathematics. `phalanx report` shows how far it may
    grow: the gradient noise scale."""
    micro_size: Samples | Literal["auto"] = "auto"
    """Samples computed at once by one worker. Changes speed, memory and rounding only. `auto`: as many as fit, by
    prediction and a trial; when memory runs out all the same, the run resumes with fewer."""
    scale_with_workers: bool = False
    """Whether `global_size` is for each worker: the batch is that times the workers of the run's first start, and stays
    so when the run resumes on another number; `optimizer.lr_scaling` lets the learning rate follow."""


class LrScheduleConfig(ConfigModel):
    """Learning rate over the run: linear warm-up, then decay to `min_lr_ratio` x lr at the last step."""

    model_config = ConfigDict(title="Schedule")

    warmup_steps: Begin = 20
    """Steps over which the rate rises linearly."""
    decay: Literal["cosine", "linear", "poly", "step", "constant"] = "cosine"
    """Shape of the way down from `lr`. `poly` and `step` are Caffe's: a power of what is left of the run, and drops at
    given times."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1), NUMBER_NOT_BOOL] = 0.1
    """Rate at the last step, as a share of `lr`; not of `step`, which ends where its milestones lead."""
    power: Annotated[float, Field(gt=0, le=100), NUMBER_NOT_BOOL] = 0.5
    """Of `poly`: lr x (what is left of the run)^power."""
    milestones: list[Annotated[float, Field(gt=0, lt=1), NUMBER_NOT_BOOL]] = Field(
        [0.5, 0.75], description="Of `step`: when the rate drops, as shares of the run after warm-up."
    )
    gamma: Annotated[float, Field(gt=0, lt=1), NUMBER_NOT_BOOL] = 0.1
    """Of `step`: what each drop multiplies the rate with."""


class LrScalingConfig(ConfigModel):
    """How the learning rate follows the batch. `lr` is then that of `base_batch_size` samples; with k times as many it
    becomes k x or sqrt(k) x lr, after a warm-up that begins at `lr` (Goyal et al. 2017)."""

    model_config = ConfigDict(title="Learning rate scaling")

    rule: Literal["linear", "sqrt"] = "linear"
    """`linear` is usual for sgd, `sqrt` for adamw and lamb."""
    base_batch_size: Samples | None = None
    """Samples of a step for which `lr` is right. null: batch.global_size, where that is for each worker."""
    warmup_steps: Begin = 200
    """Steps over which the rate rises from `lr` to that of the batch, in addition to the schedule's own warm-up."""


class OptimizerConfig(ConfigModel):
    """The optimizer. `max_grad_norm` limits the norm of the whole gradient; null: no limit."""

    model_config = ConfigDict(title="Optimizer")

    name: Literal["adamw", "sgd", "muon", "lars", "lamb"] = "adamw"
    """Which optimizer. `lars` and `lamb` are for large batches, in place of `sgd` and `adamw`."""
    lr: Rate = 1e-3
    """Peak learning rate. That of `lars` is of the order of 1 to 30."""
    weight_decay: Annotated[float, Field(ge=0, le=MAX_RATE), NUMBER_NOT_BOOL] = 0.1
    """Weight decay, independent of the gradient."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """Decay rates of adamw's and lamb's first and second moment."""
    momentum: Fraction = Field(0.9, description="Of sgd, muon and lars.")
    max_grad_norm: Annotated[float, Field(gt=0, le=1e12), NUMBER_NOT_BOOL] | None = 1.0
    """Gradient clipping: limit on the norm of the whole gradient; null: no limit."""
    state_dtype: Literal["fp32", "bf16", "int8"] = "fp32"
    """How adamw keeps its moments: 8, 4 or about 2 bytes for each parameter. `int8` quantizes blocks. The lower two
    round stochastically."""
    offload: bool = False
    """Whether the state of adamw or sgd is kept in host memory and updated by the CPU. Without a GPU it changes
    nothing."""
    schedule: LrScheduleConfig = LrScheduleConfig()
    """Learning rate over the run."""
    lr_scaling: LrScalingConfig | None = Field(
        None, description="Whether the learning rate follows the batch. null: it does not."
    )


class Parallelism(ConfigModel):
    """world = replicate x shard x tensor x pipeline x context; `expert` reuses shard x context."""

    model_config = ConfigDict(title="Parallelism")

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
    async_tp: bool = False
    """Tensor ranks compute half of a product while the other half travels. Pays where products are large and links
    slow; `phalanx tune` finds out."""
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble"] = "1f1b"
    """In which order pipeline stages compute micro-batches. For pipelines only."""
    layers_per_stage: list[Count] | None = None
    """Blocks of each pipeline stage, in order. null: as even as parameters allow, in two stages a rank where the
    schedule wants several."""

    @property
    def splits_backward(self) -> bool:
        """Whether a block's backward comes in two parts, for its input and later for its weights. Neither compiled
        blocks nor selective activation checkpointing can do that."""
        return self.pipeline_schedule == "zero-bubble" and self.pipeline > 1

    @property
    def world(self) -> int:
        """Number of processes that this parallelism occupies."""
        return self.replicate * self.shard * self.tensor * self.pipeline * self.context


class MemoryConfig(ConfigModel):
    """What is traded for memory."""

    model_config = ConfigDict(title="Memory")

    activation_checkpointing: Literal["auto", "none", "selective", "full"] = "auto"
    """Which activations are recomputed in the backward pass instead of kept. `selective` keeps the results of matrix
    products, attention and communication; `full` keeps only what enters a block. `auto`: as few as lets a sample
    fit."""
    chunked_loss: bool | Literal["auto"] = "auto"
    """Whether the loss of a language model is computed without holding all logits at once; this needs an output layer
    without a bias. `auto`: where the logits of a micro-batch would take more than 256 MB in fp32."""


GradSyncAlgorithm = Literal[
    "auto",
    "all-reduce",
    "ring",
    "binomial-tree",
    "recursive-halving",
    "parameter-server",
    "sharded-parameter-server",
    "hierarchical",
]
GradCompression = Literal["none", "bf16", "int8", "powersgd"]
LocalSgdMethod = Literal["average", "diloco"]


class GradSyncConfig(ConfigModel):
    """How gradients are added over replicas: docs/explanation/gradient-synchronization.md."""

    model_config = ConfigDict(title="Gradient synchronization")

    algorithm: GradSyncAlgorithm = "auto"
    """How gradients are added. `auto` is all-reduce, or the fixed tree of `determinism: elastic`; under `determinism:
    off` all-reduce, bf16 and int8 are tried while training and the best is taken."""
    compression: GradCompression = "none"
    """What gradients are sent as. `bf16`, `int8` and `powersgd` send fewer bytes, need `determinism: off`, and go with
    `algorithm: auto` or `all-reduce`."""
    bucket_mib: Literal["auto"] | Annotated[float, Field(gt=0, le=MAX_RANK_OR_MIB), NUMBER_NOT_BOOL] = "auto"
    """MiB of gradients that are sent together between replicas. `auto`: 25; between nodes at most a 12th of the
    gradients, but 1; `phalanx plan` writes the best for the cluster's network."""
    powersgd_rank: Annotated[int, Field(gt=0, le=MAX_RANK_OR_MIB), NUMBER_NOT_BOOL] = 4
    """Columns of the thin matrices in which `powersgd` sends a gradient: more are more exact, and more bytes."""
    warmup_steps: Begin | Literal["auto"] = "auto"
    """`powersgd`: first steps of a run, in which gradients are sent uncompressed. `auto`: 100."""

    @property
    def method(self) -> str:
        """The compression where there is one, which goes with all-reduce; else the algorithm."""
        return self.algorithm if self.compression == "none" else self.compression


class OuterOptimizerConfig(ConfigModel):
    """The outer optimizer of `diloco`: SGD with Nesterov momentum on how far workers moved on average."""

    model_config = ConfigDict(title="Outer optimizer")

    lr: Rate = 0.7
    """Learning rate of outer steps. 1 without momentum would be plain averaging."""
    momentum: Fraction = 0.9
    """Nesterov momentum of outer steps; 0 for none."""


class LocalSgdConfig(ConfigModel):
    """Local SGD: each worker takes optimizer steps of its own, and weights are synchronized every `sync_every` of them.
    Needs `determinism: off`."""

    model_config = ConfigDict(title="Local SGD")

    method: LocalSgdMethod = "diloco"
    """`average` takes the mean of the workers' weights (local SGD); `diloco` lets an outer optimizer take a step along
    their mean movement."""
    sync_every: StepCount = 25
    """Steps that each worker takes before weights are synchronized."""
    warmup_steps: Begin | Literal["auto"] = "auto"
    """First steps of a run, after each of which weights are synchronized (post-local SGD). `auto`: 100, or a third of
    the run's steps if that is more."""
    num_fragments: Count = 1
    """Parts in which weights are synchronized, in turn, each every `sync_every` steps: the network is asked for less at
    a time."""
    sync_delay: Begin = 0
    """Steps that workers continue before they take the synchronized weights, which are sent meanwhile."""
    sync_dtype: Literal["fp32", "bf16", "int8"] = "fp32"
    """What weights are sent as: the distance that a worker moved. `int8` has error feedback."""
    outer_optimizer: OuterOptimizerConfig = OuterOptimizerConfig()


class CheckpointConfig(ConfigModel):
    """Save every N steps; keep the newest `keep`, and the best by validation loss as well."""

    model_config = ConfigDict(title="Checkpoint")

    every: StepCount | Literal["auto"] | None = 50
    """Save every N steps; null saves at the end only. `auto` measures, while training, what a save costs, and
    saves as often as is best at the rate of failures (Young 1974, Daly 2006)."""
    keep: Count = 3
    """Newest checkpoints that stay; the best by validation loss stays as well."""
    in_memory_every: StepCount | PercentText | None = "1%"
    """Copy the state into the memory of the nodes every N steps, or as often as takes such a share of the time
    (`1%`); null: never. A worker or node that is lost then costs the steps since the last copy."""


class FaultToleranceConfig(ConfigModel):
    """When a run is restarted, and how often without progress before it is given up."""

    model_config = ConfigDict(title="Fault tolerance")

    max_restarts: Count = 3
    """Failed attempts in a row without progress before the run is given up."""
    hang_timeout_s: Annotated[float, Field(gt=0, le=1e7), NUMBER_NOT_BOOL] = 600.0
    """Seconds without a heartbeat after which workers that seem to hang are restarted. It is reported long before; a
    worker that is stopped while others are not is restarted sooner."""


class Recipe(ConfigModel):
    """Everything that defines a run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "gpt-python"
    """Name of the run; `--run` defaults to runs/NAME."""
    model: ModelConfig = ModelConfig()
    init_from: str | None = None
    """Weights to start from: a run, a checkpoint, or `hf:PATH` of a directory of safetensors, such as an export."""
    lora: LoraConfig | None = Field(None, description="Train LoRA adapters instead of the model's own weights.")
    task: str = "language-modeling"
    """What is learned: `language-modeling`, `classification`, or `module:Class` of your own."""
    data: DataConfig = DataConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    batch: BatchConfig = BatchConfig()
    steps: StepCount = 300
    """Optimizer steps of the whole run. May be raised later; the schedule's horizon follows."""
    optimizer: OptimizerConfig = OptimizerConfig()
    device: Literal["auto", "cpu", "cuda", "xpu", "mps"] = "auto"
    """What trains: `cuda` is a GPU of NVIDIA or AMD (ROCm), `xpu` one of Intel (docs/reference/devices.md).
    `auto`: GPUs where torch finds some, else the CPU."""
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16", "fp8"] = "auto"
    """Number format of the computation. `auto` measures whether fp32 or bf16 is faster here. `tf32` is fp32 with
    products of 10 bits on NVIDIA's tensor cores. `fp8` is bf16 with those linear layers of blocks in fp8 that measure
    faster so; it needs an NVIDIA GPU of compute capability 8.9 or later."""
    parallelism: Parallelism | Literal["auto"] = "auto"
    """How the workers divide the work."""
    memory: MemoryConfig = MemoryConfig()
    compile: bool | Literal["auto", "cuda-graphs"] = "auto"
    """Whether the repeated blocks of the model go through torch.compile. `cuda-graphs` records them as CUDA graphs as
    well, for models so small that launching kernels takes the time; whole replicas on GPUs only."""
    determinism: Literal["auto", "fixed-world", "elastic", "off"] = "auto"
    """Which runs have the same bits. `fixed-world`: those on the same number of workers. `elastic`: those on any number
    of replicas. `off`: lossy compression, local SGD and non-deterministic kernels are allowed. `auto` is `fixed-world`
    on a CPU. On a GPU a trial measures what deterministic kernels cost: below 2% it is `fixed-world`, else `off`, and
    gradients are still sent in fp32."""
    grad_sync: GradSyncConfig = GradSyncConfig()
    local_sgd: LocalSgdConfig | None = Field(
        None, description="Synchronize weights every few steps, in place of gradients in each. null: off."
    )
    checkpoint: CheckpointConfig = CheckpointConfig()
    fault_tolerance: FaultToleranceConfig = FaultToleranceConfig()
    callbacks: list[str] = Field(default_factory=list, description="`module:Class` of callbacks.")
    num_threads: Annotated[int, Field(gt=0, le=MOST_THREADS), NUMBER_NOT_BOOL] | Literal["auto"] = Field(
        "auto", description="CPU threads of each worker."
    )
    seed: Annotated[int, Field(ge=0, le=(1 << 63) - 1), NUMBER_NOT_BOOL] = 0
    """Of the initial weights, the order of data and all random numbers."""
