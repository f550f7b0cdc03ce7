"""The recipe: what to train and how, as values. Reading files and reporting errors live in `load.py`.

Unknown keys are refused. Every field has the default that DESIGN.md names; together they are the example.
`auto` is resolved before training (`autoconfig/choices.py`); `Recipe` itself never measures anything.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from phalanx.recipe.data_schema import DataConfig, EvaluationConfig
from phalanx.recipe.field_types import (
    NUMBER_NOT_BOOL,
    Begin,
    ConfigModel,
    Count,
    Fraction,
    NonNegativeNumber,
    PercentText,
    PositiveNumber,
    StepCount,
    check_finite,
)


class ModelConfig(ConfigModel):
    """The model: `build` is `module:callable` that returns an `nn.Module`, called with `args`; or `hf:PATH`, a Hugging
    Face directory with architecture and weights."""

    model_config = ConfigDict(title="Model")

    build: str = "phalanx.models:transformer"
    """`module:callable`; the recipe's folder is on the import path. Or `hf:PATH` or `hf:URL` of a Hugging
    Face directory, or `hf://OWNER/NAME[@REVISION]` of the hub."""
    args: Annotated[dict[str, Any], AfterValidator(check_finite)] = Field(default_factory=dict)
    """Arguments of the callable. `vocab_size`, `seq_len` and `num_classes` come from the data if the callable takes
    them. With `hf:PATH`, values that replace those of its config.json."""
    tp_plan: dict[str, str] | None = None
    """How `parallelism.tensor` divides the model: pattern of module names -> style. null: the built-in plan for a known
    model."""
    embedding_noise: PositiveNumber | None = None
    """NEFTune: uniform noise of up to this / sqrt(seq_len x width) that is added to the input embeddings in training; 5
    is usual for fine-tuning. null: none."""
    quantization_aware: Literal["int4"] | None = None
    """`int4`: layers compute with the weights that `phalanx checkpoint export --form int4` will store, so that training
    makes up for the rounding; with `hf:PATH`. null: they do not."""


class AdapterConfig(ConfigModel):
    """Adapters for fine-tuning: the model's own weights are frozen, and for each chosen layer two small matrices are
    trained, which add scale x (B A) to its weight (LoRA). An export has them merged."""

    model_config = ConfigDict(title="Adapter")

    kind: Literal["lora", "rslora", "dora"] = "lora"
    """`lora`: the scale is alpha / rank. `rslora`: alpha / sqrt(rank), so that a higher rank does not weaken the
    adapter. `dora`: as `lora`, and a magnitude is trained for each output, to which the adapted weight is scaled."""
    rank: Count = 8
    """Rows of A and columns of B, for each layer."""
    alpha: PositiveNumber = 16.0
    """Scale of the adapter; it is divided by `rank`, or by its root (`kind`)."""
    target_modules: str | list[str] | None = None
    """Names of linear layers, convolutions, embeddings or fused experts, or their last parts (`q_proj`); `*` matches
    one part. null: all linear layers and experts in the blocks but routers."""
    dropout: Fraction = 0.0
    """Dropout on the inputs of A, in training; 0 with experts and embeddings."""
    init: Literal["default", "pissa"] = "default"
    """Values at the start. `default`: B is zero. `pissa`: the principal singular vectors of the weight, which are
    subtracted from it, so that training changes its most important part."""
    modules_to_save: list[str] = Field(
        default_factory=list,
        description="Names of modules that are trained in full, or their last parts, such as `lm_head` or `norm`.",
    )
    base_dtype: Literal["int8", "nf4"] | None = None
    """Format of the frozen weights of linear layers in the blocks. `int8`: about 1 byte a parameter, with a scale for
    each 64; `nf4`: about 0.56 bytes, by bitsandbytes; on one process and replicas. null: that of the model."""
    init_from: str | None = None
    """Adapter to start from: a directory or URL in PEFT's format, of the same kind, rank, alpha and layers."""


class PreferenceConfig(ConfigModel):
    """Learn from pairs of a chosen and a rejected answer, or from answers with a label (`kto`)."""

    model_config = ConfigDict(title="Preference")

    kind: Literal["preference"] = "preference"
    """`preference`."""
    loss: Literal["dpo", "ipo", "kto", "orpo", "simpo"] = "dpo"
    """The loss. `dpo`, `ipo` and `kto` compare with the model as it was before the first step, and compute its
    log-probabilities once; `orpo` and `simpo` need no reference."""
    beta: PositiveNumber = 0.1
    """How far the model may move from the reference: the scale of the difference of log-probabilities. Of `ipo` it is
    tau, of `orpo` lambda."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5), NUMBER_NOT_BOOL] = 0.0
    """For `dpo`: share of pairs that are labelled wrongly (conservative DPO)."""
    margin: NonNegativeNumber = 0.5
    """For `simpo`: gamma, the difference of rewards that is asked for."""
    chat_loss_weight: NonNegativeNumber = 0.0
    """Weight of the cross-entropy of the chosen answers, a mean over their tokens, besides the loss of pairs."""
    desirable_weight: NonNegativeNumber = 1.0
    """For `kto`: weight of answers with the label true."""
    undesirable_weight: NonNegativeNumber = 1.0
    """For `kto`: weight of answers with the label false."""

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares with the model as it was before the first step."""
        return self.loss in ("dpo", "ipo", "kto")


class DistillationConfig(ConfigModel):
    """Learn the distribution of a teacher over the next token."""

    model_config = ConfigDict(title="Distillation")

    kind: Literal["distillation"] = "distillation"
    """`distillation`."""
    teacher: str
    """The teacher: a run, or `hf:PATH` of a Hugging Face directory. It has the same tokens."""
    teacher_top_k: Count | None = None
    """Store this many of the teacher's largest log-probabilities for each target before the first step, and train
    without the teacher; all others are one class. null: the teacher runs next to the student."""
    divergence: Literal["forward", "reverse", "jsd"] = "forward"
    """What is minimized: KL(teacher, student), KL(student, teacher), or the generalised Jensen-Shannon divergence."""
    jsd_beta: Annotated[float, Field(gt=0, lt=1), NUMBER_NOT_BOOL] = 0.5
    """For `jsd`: weight of the teacher in the mixture."""
    temperature: PositiveNumber = 1.0
    """Both distributions are softened by it, and the loss is multiplied by its square."""
    data_loss_weight: Annotated[float, Field(ge=0, lt=1), NUMBER_NOT_BOOL] = 0.0
    """Weight of the cross-entropy with the data; the divergence has the rest."""
    on_policy: Annotated[float, Field(ge=0, le=1), NUMBER_NOT_BOOL] = 0.0
    """Share of the micro-batches in which the student's own answers replace those of the data (GKD's lambda). Each
    sample is a conversation: data.packing: single."""
    max_new_tokens: Count = 32
    """For `on_policy`: longest answer, in tokens."""

    @model_validator(mode="after")
    def _check_on_policy(self) -> Self:
        if self.on_policy and (self.teacher_top_k is not None or self.data_loss_weight):
            raise ValueError(
                "on_policy: goes without teacher_top_k and data_loss_weight, which are of the data's answers"
            )
        return self


class GrpoConfig(ConfigModel):
    """Learn from rewards of the model's own answers (GRPO). Small and exact: see docs/how-to/conversations.md."""

    model_config = ConfigDict(title="GRPO")

    kind: Literal["grpo"] = "grpo"
    """`grpo`."""
    reward: str
    """`module:function` that takes lists of prompts, answers and the data's own answers, and returns a number for each
    answer."""
    group_size: Annotated[int, Field(ge=2), NUMBER_NOT_BOOL] = 8
    """Answers to each prompt; their mean reward is the baseline."""
    max_new_tokens: Count = 32
    """Longest answer, in tokens."""
    temperature: PositiveNumber = 1.0
    """Temperature of the sampling."""
    reward_timeout_s: PositiveNumber = 60.0
    """Seconds that one call of the reward may take."""


class RewardConfig(ConfigModel):
    """Learn a reward: one number for a text, higher for the chosen one of a pair (Bradley-Terry)."""

    model_config = ConfigDict(title="Reward")

    kind: Literal["reward"] = "reward"
    """`reward`."""
    center_rewards_coefficient: NonNegativeNumber = 0.0
    """Weight of the squared sum of a pair's rewards, which keeps their mean near 0 (TRL recommends 0.01)."""


class TextClassificationConfig(ConfigModel):
    """Learn the class of a text, from records with `text` and `label`."""

    model_config = ConfigDict(title="Text classification")

    kind: Literal["text-classification"] = "text-classification"
    """`text-classification`."""
    classes: list[str]
    """Names of the classes in the model's order. A `label` is one of them, or its number from 0 on."""


class EmbeddingConfig(ConfigModel):
    """Learn embeddings of texts: an anchor's positive is to be more similar to it than the other texts of the
    micro-batch (multiple negatives ranking). Records have `anchor`, `positive` and perhaps `negative`."""

    model_config = ConfigDict(title="Embedding")

    kind: Literal["embedding"] = "embedding"
    """`embedding`."""
    pooling: Literal["mean", "cls", "last"] = "mean"
    """What is the embedding of a text: the mean over its tokens, or that of its first or its last token."""
    scale: PositiveNumber = 20.0
    """Factor of the cosines: the inverse of the temperature."""


TaskConfig = Annotated[
    PreferenceConfig | DistillationConfig | GrpoConfig | RewardConfig | TextClassificationConfig | EmbeddingConfig,
    Field(discriminator="kind"),
]
RECORDS_OF_TASKS = {"reward": "rewards", "text-classification": "classes", "embedding": "texts"}
"""Tasks of whole texts -> `data.chat.records`; each record is a sample."""


class BatchConfig(ConfigModel):
    """`global_size` samples make one optimizer step; `micro_size` samples are computed at once (it changes only
    rounding)."""

    model_config = ConfigDict(title="Batch")

    global_size: Count = 16
    """Samples of one optimizer step, over all workers. Changes the mathematics. `phalanx report` shows how far it can
    grow: the gradient noise scale."""
    micro_size: Count | Literal["auto"] = "auto"
    """Samples that one worker computes at once. Changes speed, memory and rounding only. `auto`: as many as fit, by
    prediction and a trial; if memory still runs out, the run resumes with fewer."""
    scale_with_workers: bool = False
    """Whether `global_size` is for each worker: the global batch is then `global_size` times the number of workers at
    the first start of the run, and does not change when the run resumes on another number. `optimizer.lr_scaling`
    scales the learning rate with it."""


class LrScheduleConfig(ConfigModel):
    """Learning rate over the run: linear warm-up, then decay to `min_lr_ratio` x lr at the last step."""

    model_config = ConfigDict(title="Schedule")

    warmup_steps: Begin = 20
    """Steps over which the rate rises linearly."""
    decay: Literal["cosine", "linear", "wsd", "poly", "step", "constant"] = "cosine"
    """Shape of the decay from `lr`. `wsd` (warm-up, stable, decay) stays at `lr` until the last `decay_fraction` of the
    run, in which it falls with 1 - the root of the part that is done. `poly` and `step` are Caffe's: a power of the
    remaining fraction of the run, and drops at given times."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1), NUMBER_NOT_BOOL] = 0.1
    """Rate at the last step, as a fraction of `lr`. Not used by `step`, which ends where its milestones lead."""
    decay_fraction: Annotated[float, Field(gt=0, le=1), NUMBER_NOT_BOOL] = 0.1
    """For `wsd`: the part of the run in which the rate decays."""
    power: PositiveNumber = 0.5
    """For `poly`: lr x (remaining fraction of the run)^power."""
    milestones: list[Annotated[float, Field(gt=0, lt=1), NUMBER_NOT_BOOL]] = Field(
        [0.5, 0.75], description="For `step`: when the rate drops, as fractions of the run after warm-up."
    )
    gamma: Annotated[float, Field(gt=0, lt=1), NUMBER_NOT_BOOL] = 0.1
    """For `step`: the factor of each drop."""


class LrScalingConfig(ConfigModel):
    """How the learning rate scales with the batch. `lr` is then the rate for `base_batch_size` samples; with k times as
    many it becomes k x or sqrt(k) x lr, after a warm-up that begins at `lr` (Goyal et al. 2017)."""

    model_config = ConfigDict(title="Learning rate scaling")

    rule: Literal["linear", "sqrt"] = "linear"
    """`linear` is usual for sgd, `sqrt` for adamw and lamb."""
    base_batch_size: Count | None = None
    """Samples of a step that `lr` is meant for. null: batch.global_size, if that is for each worker."""
    warmup_steps: Begin = 200
    """Steps over which the rate rises from `lr` to that of the batch, in addition to the schedule's own warm-up."""


class ParamGroupConfig(ConfigModel):
    """Parameters with a learning rate or weight decay of their own."""

    model_config = ConfigDict(title="Parameter group")

    match: str
    """Pattern of parameter names, in which `*` matches any text: `*.embedding.weight`, `blocks.0.*`."""
    lr_ratio: PositiveNumber = 1.0
    """Their learning rate, as a multiple of that of the others."""
    weight_decay: Annotated[float, Field(ge=0), NUMBER_NOT_BOOL] | None = None
    """Their weight decay, also of norms and biases; null: as without a group."""


class OptimizerConfig(ConfigModel):
    """The optimizer. `max_grad_norm` limits the norm of the whole gradient; null: no limit."""

    model_config = ConfigDict(title="Optimizer")

    name: Literal["adamw", "sgd", "muon", "lars", "lamb"] = "adamw"
    """Which optimizer. For large batches, `lars` replaces `sgd` and `lamb` replaces `adamw`. `muon` trains the matrices
    of linear layers and experts; embeddings, the output layer and vectors use `adamw`."""
    lr: PositiveNumber = 1e-3
    """Peak learning rate. For `lars` it is usually 1 to 30."""
    weight_decay: Annotated[float, Field(ge=0), NUMBER_NOT_BOOL] = 0.1
    """Weight decay, independent of the gradient. Norms, biases and other vectors have none."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """Decay rates of adamw's and lamb's first and second moment."""
    momentum: Fraction = Field(0.9, description="Momentum of sgd, muon and lars.")
    max_grad_norm: PositiveNumber | None = 1.0
    """Gradient clipping: limit on the norm of the whole gradient; null: no limit."""
    ema_decay: Annotated[float, Field(gt=0, lt=1), NUMBER_NOT_BOOL] | None = None
    """Keep an exponential moving average (EMA) of the weights with this decay, such as 0.999, in fp32: 4 bytes for each
    trained parameter. It begins with the weights after the first step. `evaluation.weights` says which are used. Not in
    a loop of one's own. null: none."""
    state_dtype: Literal["fp32", "bf16", "int8"] = "fp32"
    """Format of adamw's moments: 8, 4 or about 2 bytes for each parameter. `int8` quantizes in blocks. `bf16` and
    `int8` round stochastically."""
    offload: bool = False
    """Whether the state of adamw or sgd is in host memory and updated by the CPU. No effect without a GPU."""
    schedule: LrScheduleConfig = LrScheduleConfig()
    """Learning rate over the run."""
    lr_scaling: LrScalingConfig | None = Field(
        None, description="Scales the learning rate with the batch. null: no scaling."
    )
    groups: list[ParamGroupConfig] = Field(
        default_factory=list,
        description="Parameters with another learning rate or weight decay. The first that matches a name counts.",
    )


class Parallelism(ConfigModel):
    """world = replicate x shard x tensor x pipeline x context; `expert` reuses shard x context."""

    model_config = ConfigDict(title="Parallelism")

    replicate: Count = 1
    """Whole copies of the model, each with its part of the batch."""
    shard: Count = 1
    """Ranks over which parameters are sharded."""
    tensor: Count = 1
    """Ranks over which matrices are split."""
    pipeline: Count = 1
    """Stages of layers."""
    context: Count = 1
    """Ranks over which a sequence is split."""
    expert: Count = 1
    """Ranks over which experts are split; reuses shard x context."""
    async_tp: bool = False
    """Asynchronous tensor parallelism: ranks compute half of a product while the other half is sent. Faster where
    products are large and links slow; `phalanx tune` measures it."""
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble"] = "1f1b"
    """Order in which pipeline stages compute micro-batches. For pipelines only."""
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
    """Trade-offs between memory and time."""

    model_config = ConfigDict(title="Memory")

    activation_checkpointing: Literal["auto", "none", "selective", "full"] = "auto"
    """Which activations backward recomputes instead of keeping them. `selective` keeps the results of matrix products,
    attention and communication; `full` keeps only the inputs of a block. `auto`: the least recomputation with which a
    sample fits."""
    chunked_loss: bool | Literal["auto"] = "auto"
    """Whether the loss of a language model is computed without holding all logits at once; this needs an output layer
    without a bias. `auto`: where the logits of a micro-batch would take more than 256 MB in fp32."""


FixedGradSyncAlgorithm = Literal["all-reduce", "binomial-tree", "parameter-server"]
GradCompression = Literal["none", "bf16", "int8", "powersgd"]
LocalSgdMethod = Literal["average", "diloco"]


class GradSyncConfig(ConfigModel):
    """How gradients are added over replicas: docs/explanation/gradient-synchronization.md."""

    model_config = ConfigDict(title="Gradient synchronization")

    algorithm: Literal["auto", FixedGradSyncAlgorithm] = "auto"
    """How gradients are added. `auto` is all-reduce, or the fixed tree of `determinism: elastic`."""
    compression: GradCompression = "none"
    """Format in which gradients are sent. `bf16`, `int8` and `powersgd` send fewer bytes, need `determinism: off`, and
    work with `algorithm: auto` or `all-reduce`."""
    bucket_mib: Literal["auto"] | PositiveNumber = "auto"
    """Bucket size: MiB of gradients that replicas send together. `auto`: 25; between nodes at most a 12th of the
    gradients, but at least 1. `phalanx plan` writes the best size for the cluster's network."""
    powersgd_rank: Count = 4
    """Columns of the two matrices in which `powersgd` sends a gradient: more are more accurate, and more bytes."""
    warmup_steps: Begin | Literal["auto"] = "auto"
    """`powersgd`: first steps of a run, in which gradients are sent uncompressed. `auto`: 100."""

    @property
    def method(self) -> str:
        """The compression where there is one, which goes with all-reduce; else the algorithm."""
        return self.algorithm if self.compression == "none" else self.compression


class OuterOptimizerConfig(ConfigModel):
    """The outer optimizer of `diloco`: SGD with Nesterov momentum on the mean change of the workers' weights."""

    model_config = ConfigDict(title="Outer optimizer")

    lr: PositiveNumber = 0.7
    """Learning rate of outer steps. 1 without momentum would be plain averaging."""
    momentum: Fraction = 0.9
    """Nesterov momentum of outer steps; 0 for none."""


class LocalSgdConfig(ConfigModel):
    """Local SGD: each worker takes local optimizer steps, and weights are synchronized every `sync_every` steps. Needs
    `determinism: off`."""

    model_config = ConfigDict(title="Local SGD")

    method: LocalSgdMethod = "diloco"
    """`average` takes the mean of the workers' weights (local SGD); `diloco` uses the mean change of their weights as
    the gradient of an outer optimizer."""
    sync_every: StepCount = 25
    """Steps that each worker takes before weights are synchronized."""
    warmup_steps: Begin | Literal["auto"] = "auto"
    """First steps of a run, after each of which weights are synchronized (post-local SGD). `auto`: 100, or a third of
    the run's steps if that is more."""
    num_fragments: Count = 1
    """Parts in which weights are synchronized, in turn, each every `sync_every` steps, so that less is sent at a
    time."""
    sync_delay: Begin = 0
    """Steps for which the transfer overlaps with training before workers take the synchronized weights."""
    sync_dtype: Literal["fp32", "bf16", "int8"] = "fp32"
    """Format in which the change of a worker's weights is sent. `int8` has error feedback."""
    outer_optimizer: OuterOptimizerConfig = OuterOptimizerConfig()


class UploadConfig(ConfigModel):
    """Upload checkpoints from the disk to an object store, in the background while training continues."""

    model_config = ConfigDict(title="Upload")

    to: str
    """URL, such as s3://BUCKET/RUN. Its checkpoints are in URL/checkpoints, and are restored where the disk has none
    that is newer."""
    every: StepCount | None = None
    """Upload a checkpoint if N steps were done since the one before it there; null: each, unless the upload before is
    still in flight. The last one is always uploaded."""
    keep: Count | None = None
    """Number of newest checkpoints to keep there, and the best; null: all."""
    max_bandwidth: PositiveNumber | None = None
    """Bytes per second that all workers together send; null: no limit."""


class CheckpointConfig(ConfigModel):
    """Save every N steps; keep the newest `keep` checkpoints and the best by validation loss."""

    model_config = ConfigDict(title="Checkpoint")

    every: StepCount | None = 50
    """Save every N steps; null saves at the end only."""
    keep: Count = 3
    """Number of newest checkpoints to keep; the best by validation loss is kept in addition."""
    in_memory_every: StepCount | PercentText | None = "1%"
    """Copy the state into the memory of the nodes every N steps, or as often as takes this fraction of the time (`1%`);
    null: never. A lost worker or node then costs the steps since the last copy."""
    upload: UploadConfig | None = None
    """Upload checkpoints to an object store; null: no upload."""


TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio"]


class FaultToleranceConfig(ConfigModel):
    """Limits on restarts of a run."""

    model_config = ConfigDict(title="Fault tolerance")

    max_restarts: Count = 3
    """Failed attempts in a row without progress before the run is given up."""
    hang_timeout_s: PositiveNumber = 600.0
    """Seconds without a heartbeat after which workers that seem to hang are restarted. A hang is reported much earlier;
    a worker that is stopped while others are not is restarted sooner."""
    last_call_s: PositiveNumber = 30.0
    """With `--nodes MIN:MAX`: seconds for which the start waits for more nodes once MIN have joined."""
    rejoin_after_s: PositiveNumber = 600.0
    """With `--nodes MIN:MAX`: seconds after which a node that has joined takes part, if no checkpoint comes before."""


RETIRED_KEYS = ("budget", "lora")
"""Keys of earlier versions that checkpoints still hold, without a value."""


class Recipe(ConfigModel):
    """Everything that defines a run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "gpt-python"
    """Name of the run; `--run` defaults to runs/NAME."""
    model: ModelConfig = ModelConfig()
    init_from: str | None = None
    """Weights to start from: a run, a checkpoint, or `hf:PATH` of a directory of safetensors, such as an export. Each
    may be a URL."""
    adapter: AdapterConfig | None = Field(
        None, description="Train adapters instead of the model's own weights. null: none."
    )
    task: str | TaskConfig = "language-modeling"
    """The task: `language-modeling`, `chat`, `classification`, or your own `module:Class`; `preference`,
    `distillation`, `grpo`, `reward`, `text-classification` and `embedding` as a mapping with `kind` and keys of their
    own."""
    data: DataConfig = DataConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    batch: BatchConfig = BatchConfig()
    steps: StepCount = 300
    """Optimizer steps of the whole run. May be raised later; the schedule's horizon follows."""
    epochs: PositiveNumber | None = None
    """Passes over the training samples, instead of `steps`. null: `steps`."""
    optimizer: OptimizerConfig = OptimizerConfig()
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device type: `cuda` is a GPU of NVIDIA or AMD (ROCm), see docs/reference/devices.md. `auto`: GPUs if torch finds
    any, else the CPU."""
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16", "fp8"] = "auto"
    """Number format of matrix products and convolutions; norms, losses, parameters and sums of gradients are fp32. It
    is the same computation under every parallelism. `auto` measures whether fp32 or bf16 is faster here; a CPU without
    instructions for bf16 takes fp32. `tf32` is fp32
    with products of 10 bits on NVIDIA's tensor cores. `fp8` is bf16 with fp8 in the linear layers of blocks with
    more than 4,096 inputs or 1,024 outputs; it needs an NVIDIA GPU of compute capability 8.9 or later."""
    parallelism: Parallelism | Literal["auto"] = "auto"
    """How the workers divide the work."""
    memory: MemoryConfig = MemoryConfig()
    compile: bool | Literal["auto", "cuda-graphs"] = "auto"
    """Whether the repeated blocks of the model are compiled with torch.compile. `cuda-graphs` also records them as CUDA
    graphs, for small models in which kernel launches dominate; for whole replicas on GPUs only."""
    determinism: Literal["auto", "fixed-world", "elastic", "off"] = "auto"
    """Which runs are bit-identical. `fixed-world`: those on the same number of workers. `elastic`: those on any number
    of replicas. `off`: lossy compression, local SGD and non-deterministic kernels are allowed. `auto` is `fixed-world`
    on a CPU. On a GPU a trial measures the cost of deterministic kernels: below 2% it is `fixed-world`, else `off`, and
    gradients are still sent in fp32."""
    grad_sync: GradSyncConfig = GradSyncConfig()
    local_sgd: LocalSgdConfig | None = Field(
        None, description="Synchronize weights every few steps instead of gradients in each step. null: off."
    )
    checkpoint: CheckpointConfig = CheckpointConfig()
    fault_tolerance: FaultToleranceConfig = FaultToleranceConfig()
    trackers: list[TrackerName] = Field(
        default_factory=list,
        description="Experiment trackers that get the run while it trains: tensorboard, wandb, mlflow, trackio.",
    )
    callbacks: list[str] = Field(default_factory=list, description="`module:Class` of callbacks.")
    num_threads: Count | Literal["auto"] = Field(
        "auto",
        description="CPU threads of each worker. `auto`: OMP_NUM_THREADS if it is set, else the cores divided by the "
        "workers, or fewer where a trial on a CPU is within 3% with fewer.",
    )
    seed: Annotated[int, Field(ge=0, le=(1 << 63) - 1), NUMBER_NOT_BOOL] = 0
    """Seed of the initial weights, the order of data and all random numbers."""

    @model_validator(mode="after")
    def _check_epochs(self) -> Self:
        if self.epochs is not None and self.steps != type(self).model_fields["steps"].default:
            raise ValueError("epochs: found besides steps; give one of them")
        return self

    @property
    def task_kind(self) -> str:
        """The name of the task."""
        return self.task if isinstance(self.task, str) else self.task.kind

    @property
    def has_head_loss(self) -> bool:
        """Whether the loss can be computed from the output layer's input, without all logits."""
        return self.task_kind in ("language-modeling", "chat", "preference")

    @model_validator(mode="before")
    @classmethod
    def _expand_task(cls, values: Any) -> Any:
        """Write out what a task implies: its keys, and that its data are conversations, packed whole."""
        if not isinstance(values, dict):
            return values
        task = values.get("task")
        if task in ("preference", "distillation", "grpo", *RECORDS_OF_TASKS):
            values = {**values, "task": (task := {"kind": task})}
        elif task == {"kind": "chat"}:
            values = {**values, "task": (task := "chat")}
        kind = task.get("kind") if isinstance(task, dict) else getattr(task, "kind", task)
        data = values.get("data", {})
        if isinstance(kind, str) and kind in RECORDS_OF_TASKS:
            return _expand_text_task(values, kind, task)
        if kind not in ("chat", "preference", "grpo") or not isinstance(data, dict):
            return values
        loss = task.get("loss") if isinstance(task, dict) else getattr(task, "loss", None)
        records = "chat" if kind != "preference" else "labels" if loss == "kto" else "pairs"
        chat = data.get("chat") or {}
        chat = {**chat, "records": records} if isinstance(chat, dict) else chat
        implied: dict[str, Any] = {"packing": "whole", "document_masking": True}
        if kind == "grpo" and isinstance(chat, dict):
            implied, chat = {"packing": "single"}, {**chat, "train_on": "last"}
        if isinstance(chat, dict) and chat.get("images"):
            implied = {"packing": "single"}
        return {**values, "data": {**implied, **data, "chat": chat}}

    @model_validator(mode="before")
    @classmethod
    def _drop_retired_keys(cls, values: Any) -> Any:
        """Read recipes in checkpoints of earlier versions, which hold `budget: null` and `lora: null`."""
        if not isinstance(values, dict):
            return values
        if values.get("lora") is not None:
            raise ValueError("lora: the key is `adapter`, with the same keys in it: adapter: {rank: 8}")
        return {name: value for name, value in values.items() if name not in RETIRED_KEYS or value is not None}


def _expand_text_task(values: dict[str, Any], kind: str, task: Any) -> dict[str, Any]:
    """Write out what a task of whole texts implies: its records, and the architecture of a Hugging Face model."""
    classes = task.get("classes") if isinstance(task, dict) else getattr(task, "classes", None)
    data, model = values.get("data", {}), values.get("model", {})
    if kind == "text-classification" and (not isinstance(classes, list) or len(set(map(str, classes))) < 2):
        raise ValueError(
            "task: text-classification needs `classes`, 2 names at least: {kind: text-classification, classes: [a, b]}"
        )
    if isinstance(data, dict):
        chat = data.get("chat") or {}
        chat = {**chat, "records": RECORDS_OF_TASKS[kind], "classes": classes} if isinstance(chat, dict) else chat
        values = {**values, "data": {"packing": "single", **data, "chat": chat}}
    own_args = (model.get("args") or {}) if isinstance(model, dict) else None
    if isinstance(own_args, dict) and str(model.get("build")).startswith("hf:"):
        args: dict[str, Any] = {"architectures": ["AutoModel"]}
        if kind != "embedding":
            num_labels = len(classes) if isinstance(classes, list) else 1
            args = {"architectures": ["AutoModelForSequenceClassification"], "num_labels": num_labels}
        values = {**values, "model": {**model, "args": {**args, **own_args}}}
    return values


class ResolvedBatch(BatchConfig):
    """`micro_size` is known."""

    micro_size: Annotated[int, Field(gt=0)]


class ResolvedMemory(MemoryConfig):
    """What is traded for memory is chosen."""

    activation_checkpointing: Literal["none", "selective", "full"]
    chunked_loss: bool


class ResolvedGradSync(GradSyncConfig):
    """Algorithm, bucket size and warm-up are known."""

    algorithm: FixedGradSyncAlgorithm
    bucket_mib: Annotated[float, Field(gt=0)]
    warmup_steps: Annotated[int, Field(ge=0)]


class ResolvedLocalSgd(LocalSgdConfig):
    """The warm-up is known."""

    warmup_steps: Annotated[int, Field(ge=0)]


class ResolvedRecipe(Recipe):
    """A recipe without `auto`."""

    batch: ResolvedBatch
    device: Literal["cpu", "cuda"]
    precision: Literal["fp32", "tf32", "bf16", "fp16", "fp8"]
    parallelism: Parallelism
    memory: ResolvedMemory
    compile: bool | Literal["cuda-graphs"]
    determinism: Literal["fixed-world", "elastic", "off"]
    grad_sync: ResolvedGradSync
    local_sgd: ResolvedLocalSgd | None = None
    num_threads: Annotated[int, Field(gt=0)]
