"""What `auto` means for a recipe's gradient synchronization: among which methods it may choose, by what they cost, and
the size of buckets."""

import math

from phalanx.formatting import BYTES_PER_MIB
from phalanx.recipe.schema import GradSyncConfig, Parallelism, Recipe

DEFAULT_BUCKET_MIB = 25.0
"""Default bucket size in MiB, as in DistributedDataParallel (Li et al. 2020)."""
MIN_BUCKETS_BETWEEN_NODES = 12
"""Between nodes a bucket holds at most the gradients divided by this: what overlaps with backward costs nothing, and
the last bucket never overlaps."""
MIN_BUCKET_MIB, MIN_POWERSGD_BUCKET_MIB = 1.0, 2.0
"""MiB of which nothing is gained by sending less at a time; `powersgd` sends so little of them that what counts is how
often."""
MAX_DETERMINISM_SLOWDOWN = 0.02
"""`determinism: auto` promises bits where deterministic kernels cost less than this part of forward and backward."""
DETERMINISTIC_SLOWDOWN_KEY, NONDETERMINISTIC_OP_KEY = "deterministic_cost", "nondeterministic"
"""Keys of what a trial finds: that part, and the operation without a deterministic kernel."""
CHANGED_PARAMETERS_KEY = "parameters_changed_by_forward"
"""Key of the names of parameters to which its forwards write."""
CHANGED_STATE_KEY, UNSAVED_STATE_KEY, GPU_ONLY_MODULES_KEY = (
    "state_changed_by_forward",
    "unsaved_state_changed_by_forward",
    "gpu_only_modules",
)
"""Keys of what a trial says of a model: the state that its forwards change, what they change that no checkpoint holds,
and the modules that several workers can run on GPUs only; each as a text, which is empty where there is none."""

AUTO_COMPRESSIONS = ("all-reduce", "bf16", "int8")
"""What `auto` knows: the most accurate first, each with fewer bytes than the one before."""

DEFAULT_WARMUP_STEPS = 100
"""Steps at the beginning of a run in which at least gradients travel whole."""
LOCAL_SGD_WARMUP_DIVISOR = 3
"""The warm-up before local SGD is the run's steps divided by this: a GPT of 600 steps ends 1.3% above synchronous fp32
with a warm-up of 100 steps, 0.3% with 200 (docs/benchmarks/grad-sync.md). DiLoCo's authors begin with the weights of
24,000 steps and train 64,000 more (Douillard et al. 2023)."""


def explain_not_elastic(state: str) -> str:
    """Why results would depend on the number of workers."""
    return (
        f"determinism: elastic cannot be kept, because forwards of the model change {state}, and each worker sees "
        "other samples; use determinism=fixed-world, or layers without such state"
    )


def start_key(recipe: Recipe) -> str | None:
    """Return the key with the number of warm-up steps; None where all steps are equal."""
    if recipe.local_sgd is not None:
        return "local_sgd.warmup_steps"
    return "grad_sync.warmup_steps" if recipe.grad_sync.compression == "powersgd" else None


def given_start(recipe: Recipe) -> int | str:
    """Return that number as the recipe has it."""
    return recipe.grad_sync.warmup_steps if recipe.local_sgd is None else recipe.local_sgd.warmup_steps


def num_warmup_steps(recipe: Recipe) -> int:
    """How many steps of a run are of another kind."""
    start = given_start(recipe)
    if isinstance(start, int):
        return start
    return (
        DEFAULT_WARMUP_STEPS
        if recipe.local_sgd is None
        else max(DEFAULT_WARMUP_STEPS, math.ceil(recipe.steps / LOCAL_SGD_WARMUP_DIVISOR))
    )


def bucket_size_bytes(grad_sync: GradSyncConfig) -> float:
    """Bytes of gradients that travel together."""
    return BYTES_PER_MIB * (DEFAULT_BUCKET_MIB if grad_sync.bucket_mib == "auto" else grad_sync.bucket_mib)


def overlaps_with_backward(recipe: Recipe, parallelism: Parallelism, device: str) -> bool:
    """Whether replicas reduce gradients during backward, bucket by bucket, rather than after it or by FSDP."""
    sharded = parallelism.shard * parallelism.context * parallelism.expert > 1
    reduced_by_fsdp = sharded and (device != "cpu" or not reduces_hybrid_shards(recipe, parallelism, device))
    return parallelism.replicate > 1 and not (
        parallelism.pipeline > 1 or reduced_by_fsdp or recipe.local_sgd is not None
    )


def gradient_bytes_per_rank(num_parameters: int, parallelism: Parallelism) -> float:
    """Bytes of gradients that each worker reduces, of a model with `num_parameters` trained parameters."""
    return 4.0 * num_parameters / (parallelism.tensor * parallelism.shard)


def inter_node_bucket_mib(gradient_bytes: float, grad_sync: GradSyncConfig) -> float:
    """Default bucket size in MiB between nodes, for `gradient_bytes` bytes of gradients."""
    min_mib = MIN_POWERSGD_BUCKET_MIB if grad_sync.compression == "powersgd" else MIN_BUCKET_MIB
    return min(DEFAULT_BUCKET_MIB, max(min_mib, round(gradient_bytes / BYTES_PER_MIB / MIN_BUCKETS_BETWEEN_NODES, 1)))


def reduces_hybrid_shards(recipe: Recipe, parallelism: Parallelism, device: str) -> bool:
    """Whether our reducer, and not FSDP, sums gradients over the replicas of a model that FSDP shards. A choice among
    methods needs our reducer. On a GPU FSDP keeps the sum, since there it overlaps with backward, which our reducer
    would not."""
    if recipe.local_sgd is not None:
        return False
    method = recipe.grad_sync.method
    is_named = recipe.determinism == "elastic" or method not in ("auto", "all-reduce")
    is_hybrid_only = (
        1 < parallelism.replicate < parallelism.world == parallelism.replicate * parallelism.shard
        and parallelism.expert == 1
    )
    return is_named or (method == "auto" and recipe.determinism == "off" and is_hybrid_only and device == "cpu")


def is_chosen_while_training(recipe: Recipe) -> bool:
    """Whether the recipe leaves it to `auto` to try lossy compression."""
    return recipe.determinism == "off" and recipe.grad_sync.method == "auto" and recipe.local_sgd is None


def auto_algorithms(recipe: Recipe, device: str) -> tuple[str, ...]:
    """Return the methods that `auto` may choose among while training, the most accurate first. There is only one where
    the recipe gives it, where `determinism` wants an order of addition that does not depend on time, where weights are
    sent instead of gradients (local SGD), where FSDP sums over replicas, or where there is one replica. While the
    parallelism is `auto`, all of these remain possible."""
    method, parallelism = recipe.grad_sync.method, recipe.parallelism
    if method != "auto":
        return (method,)
    fixed = not is_chosen_while_training(recipe)
    if isinstance(parallelism, Parallelism):
        sharded = parallelism.shard * parallelism.context * parallelism.expert > 1
        reduced_by_fsdp = sharded and not reduces_hybrid_shards(recipe, parallelism, device)
        fixed |= parallelism.replicate == 1 or parallelism.pipeline > 1 or reduced_by_fsdp
    if fixed:
        return AUTO_COMPRESSIONS[:1]
    # int8 keeps what it could not send, but the loss scale of fp16 changes
    return AUTO_COMPRESSIONS[:2] if recipe.precision == "fp16" else AUTO_COMPRESSIONS
