"""What `auto` means for a recipe's gradient synchronization: the size of buckets, and the steps of the warm-up."""

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
CHANGED_STATE_KEY, GPU_ONLY_MODULES_KEY = "state_changed_by_forward", "gpu_only_modules"
"""Keys of what a trial says of a model: the saved state that its forwards change, and the modules that several workers
can run on GPUs only; each as a text, which is empty where there is none."""

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
    if recipe.local_sgd is None:
        return DEFAULT_WARMUP_STEPS
    return max(DEFAULT_WARMUP_STEPS, math.ceil(recipe.steps / LOCAL_SGD_WARMUP_DIVISOR))


def bucket_size_bytes(grad_sync: GradSyncConfig) -> float:
    """Bytes of gradients that travel together."""
    return BYTES_PER_MIB * (DEFAULT_BUCKET_MIB if grad_sync.bucket_mib == "auto" else grad_sync.bucket_mib)


def overlaps_with_backward(recipe: Recipe, parallelism: Parallelism, device: str) -> bool:
    """Whether replicas reduce gradients during backward, bucket by bucket, rather than after it or by FSDP."""
    sharded = parallelism.shard * parallelism.context * parallelism.expert > 1
    reduced_by_fsdp = sharded and (device != "cpu" or not reduces_hybrid_shards(recipe))
    reduced_later = parallelism.pipeline > 1 or recipe.local_sgd is not None
    return parallelism.replicate > 1 and not (reduced_by_fsdp or reduced_later)


def gradient_bytes_per_rank(num_parameters: int, parallelism: Parallelism) -> float:
    """Bytes of gradients that each worker reduces, of a model with `num_parameters` trained parameters."""
    return 4.0 * num_parameters / (parallelism.tensor * parallelism.shard)


def inter_node_bucket_mib(gradient_bytes: float, grad_sync: GradSyncConfig) -> float:
    """Default bucket size in MiB between nodes, for `gradient_bytes` bytes of gradients."""
    min_mib = MIN_POWERSGD_BUCKET_MIB if grad_sync.compression == "powersgd" else MIN_BUCKET_MIB
    return min(DEFAULT_BUCKET_MIB, max(min_mib, round(gradient_bytes / BYTES_PER_MIB / MIN_BUCKETS_BETWEEN_NODES, 1)))


def reduces_hybrid_shards(recipe: Recipe) -> bool:
    """Whether our reducer, and not FSDP, sums gradients over the replicas of a model that FSDP shards: where the recipe
    wants another sum than FSDP's all-reduce."""
    if recipe.local_sgd is not None:
        return False
    return recipe.determinism == "elastic" or recipe.grad_sync.method not in ("auto", "all-reduce")
