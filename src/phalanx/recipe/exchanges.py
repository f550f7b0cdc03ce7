"""What `auto` means for a recipe's gradient synchronization: among which methods it may choose, by what they cost, and
the size of buckets."""

import math

from phalanx.recipe.schema import GradSyncConfig, Parallelism, Recipe

BUCKET = 25.0
"""MiB of a bucket where nobody planned another size: as DistributedDataParallel has it (Li et al. 2020)."""
PARTS = 12
"""Between nodes a bucket holds at most such a part of the gradients: what travels beside backward costs nothing, and
the last bucket never does."""
LEAST, LEAST_OF_POWERSGD = 1.0, 2.0
"""MiB of which nothing is gained by sending less at a time; `powersgd` sends so little of them that what counts is how
often."""
DETERMINISM_LIMIT = 0.02
"""`determinism: auto` promises bits where deterministic kernels cost less than this part of forward and backward."""
DETERMINISTIC_COST, NONDETERMINISTIC = "deterministic_cost", "nondeterministic"
"""Keys of what a trial finds: that part, and the operation without a deterministic kernel."""
WRITES = "parameters_changed_by_forward"
"""Key of the names of parameters to which its forwards write."""
CHANGES, LOSES, ONLY_GPU = "state_changed_by_forward", "unsaved_state_changed_by_forward", "gpu_only_modules"
"""Keys of what a trial says of a model: the state that its forwards change, what they change that no checkpoint holds,
and the modules that several workers can run on GPUs only; each as a text, which is empty where there is none."""
MIB = 2**20

BY_ACCURACY = ("all-reduce", "bf16", "int8")
"""What `auto` knows: the most accurate first, each with fewer bytes than the one before."""

FIRST = 100
"""Steps at the beginning of a run in which at least gradients travel whole."""
THIRD = 3
"""Of a run's steps workers take such a part together before local SGD: a GPT of 600 steps ends 1.3% above
synchronous fp32 if they part after 100, 0.3% if after 200 (docs/benchmarks/grad-sync.md). DiLoCo's authors begin with
the weights of 24,000 steps and go on for 64,000 (Douillard et al. 2023)."""


def not_kept(state: str) -> str:
    """Why results would depend on the number of workers."""
    return (
        f"determinism: elastic cannot be kept, because forwards of the model change {state}, and each worker sees "
        "other samples; use determinism=fixed-world, or layers without such state"
    )


def start_key(recipe: Recipe) -> str | None:
    """The key that says how many first steps are of another kind; None where all are alike."""
    if recipe.local_sgd is not None:
        return "local_sgd.warmup_steps"
    return "grad_sync.warmup_steps" if recipe.grad_sync.compression == "powersgd" else None


def given_start(recipe: Recipe) -> int | str:
    """That number as the recipe has it."""
    return recipe.grad_sync.warmup_steps if recipe.local_sgd is None else recipe.local_sgd.warmup_steps


def first_steps(recipe: Recipe) -> int:
    """How many steps of a run are of another kind."""
    start = given_start(recipe)
    if isinstance(start, int):
        return start
    return FIRST if recipe.local_sgd is None else max(FIRST, math.ceil(recipe.steps / THIRD))


def bucket_bytes(grad_sync: GradSyncConfig) -> float:
    """Bytes of gradients that travel together."""
    return MIB * (BUCKET if grad_sync.bucket_mib == "auto" else grad_sync.bucket_mib)


def travels_beside(recipe: Recipe, layout: Parallelism, device: str) -> bool:
    """Whether replicas add up gradients beside backward, bucket by bucket, rather than after it or by FSDP."""
    sharded = layout.shard * layout.context * layout.expert > 1
    by_fsdp = sharded and (device != "cpu" or not sums_shards(recipe, layout, device))
    return layout.replicate > 1 and not (layout.pipeline > 1 or by_fsdp or recipe.local_sgd is not None)


def gradients_of_one(parameters: int, layout: Parallelism) -> float:
    """Bytes of gradients that each worker exchanges, of a model of so many trained parameters."""
    return 4.0 * parameters / (layout.tensor * layout.shard)


def bucket_between_nodes(gradients: float, grad_sync: GradSyncConfig) -> float:
    """MiB of a bucket where nobody planned another size, for so many bytes of gradients."""
    least = LEAST_OF_POWERSGD if grad_sync.compression == "powersgd" else LEAST
    return min(BUCKET, max(least, round(gradients / MIB / PARTS, 1)))


def sums_shards(recipe: Recipe, layout: Parallelism, device: str) -> bool:
    """Whether it is a reducer of ours that sums between replicas which FSDP shards, and not FSDP itself. A choice among
    methods needs one; on a GPU FSDP keeps it, whose sums travel beside backward there, as ours would not."""
    if recipe.local_sgd is not None:
        return False
    method = recipe.grad_sync.method
    named = recipe.determinism == "elastic" or method not in ("auto", "all-reduce")
    only = 1 < layout.replicate < layout.world == layout.replicate * layout.shard and layout.expert == 1
    return named or (method == "auto" and recipe.determinism == "off" and only and device == "cpu")


def is_chosen_while_training(recipe: Recipe) -> bool:
    """Whether the recipe leaves it to `auto` to try lossy compression."""
    return recipe.determinism == "off" and recipe.grad_sync.method == "auto" and recipe.local_sgd is None


def candidates(recipe: Recipe, device: str) -> tuple[str, ...]:
    """Methods that may take turns in a run, the most accurate first. One alone where nothing is to be chosen: it is
    given; `determinism` wants an order of addition that never depends on a clock; weights are sent and not gradients;
    FSDP sums between replicas itself; or there is nobody to send to. While the parallelism is `auto` it may turn out as
    any."""
    method, layout = recipe.grad_sync.method, recipe.parallelism
    if method != "auto":
        return (method,)
    fixed = not is_chosen_while_training(recipe)
    if isinstance(layout, Parallelism):
        sharded = layout.shard * layout.context * layout.expert > 1
        left_to_fsdp = sharded and not sums_shards(recipe, layout, device)
        fixed |= layout.replicate == 1 or layout.pipeline > 1 or left_to_fsdp
    if fixed:
        return BY_ACCURACY[:1]
    # int8 keeps what it could not send, but the loss scale of fp16 changes
    return BY_ACCURACY[:2] if recipe.precision == "fp16" else BY_ACCURACY
