"""What `auto` means for a recipe's exchange: among which strategies it may choose, by what they cost, and the size of
buckets."""

import math

from phalanx.recipe.schema import LOCAL, Exchange, Layout, Recipe

BUCKET = 25.0
"""MiB of a bucket where nobody planned another size: as DistributedDataParallel has it (Li et al. 2020)."""
PARTS = 12
"""Between nodes a bucket holds at most such a part of the gradients: what travels beside backward costs nothing, and
the last bucket never does."""
LEAST, LEAST_OF_POWERSGD = 1.0, 2.0
"""MiB of which nothing is gained by sending less at a time; `powersgd` sends so little of them that what counts is how
often."""
DETERMINISM_LIMIT = 0.02
"""`exact: auto` promises bits where deterministic kernels cost less than this part of forward and backward."""
DETERMINISTIC_COST, NONDETERMINISTIC = "deterministic_cost", "nondeterministic"
"""Keys of what a trial finds: that part, and the operation without a deterministic kernel."""
WRITES = "changed_by_forward"
"""Key of the names of parameters to which its forwards write."""
CHANGES, LOSES, ONLY_GPU = "changes", "loses", "only_gpu"
"""Keys of what a trial says of a model: the state that its forwards change, what they change that no checkpoint holds,
and the modules that several workers can run on GPUs only; each as a text, which is empty where there is none."""
MIB = 2**20

BY_ACCURACY = ("allreduce", "bf16", "int8")
"""What `auto` knows: the most accurate first, each with fewer bytes than the one before."""

FIRST = 100
"""Steps at the beginning of a run in which at least gradients travel whole."""
THIRD = 3
"""Of a run's steps workers take such a part together before they train apart: a GPT of 600 steps ends 1.3% above
synchronous fp32 if they part after 100, 0.3% if after 200 (docs/results/exchange.md). DiLoCo's authors begin with the
weights of 24,000 steps and go on for 64,000 (Douillard et al. 2023)."""


def not_kept(state: str) -> str:
    """Why results would depend on the number of workers."""
    return (
        f"exchange.exact: replicas cannot be kept, because forwards of the model change {state}, and each worker sees "
        "other samples; use exchange.exact=world, or layers without such state"
    )


def heeds_start(exchange: Exchange) -> bool:
    """Whether something begins with steps of another kind."""
    return exchange.strategy in (*LOCAL, "powersgd")


def first_steps(recipe: Recipe) -> int:
    """How many steps of a run are of another kind."""
    exchange = recipe.exchange
    if exchange.start != "auto":
        return exchange.start
    return max(FIRST, math.ceil(recipe.steps / THIRD)) if exchange.strategy in LOCAL else FIRST


def bucket_bytes(exchange: Exchange) -> float:
    """Bytes of gradients that travel together."""
    return MIB * (BUCKET if exchange.bucket == "auto" else exchange.bucket)


def travels_beside(exchange: Exchange, layout: Layout, device: str) -> bool:
    """Whether replicas add up gradients beside backward, bucket by bucket, rather than after it or by FSDP."""
    sharded = layout.shard * layout.context * layout.expert > 1
    by_fsdp = sharded and (device != "cpu" or not sums_shards(exchange, layout, device))
    return layout.replicate > 1 and not (layout.pipeline > 1 or by_fsdp or exchange.strategy in LOCAL)


def gradients_of_one(parameters: int, layout: Layout) -> float:
    """Bytes of gradients that each worker exchanges, of a model of so many trained parameters."""
    return 4.0 * parameters / (layout.tensor * layout.shard)


def bucket_between_nodes(gradients: float, exchange: Exchange) -> float:
    """MiB of a bucket where nobody planned another size, for so many bytes of gradients."""
    least = LEAST_OF_POWERSGD if exchange.strategy == "powersgd" else LEAST
    return min(BUCKET, max(least, round(gradients / MIB / PARTS, 1)))


def sums_shards(exchange: Exchange, layout: Layout, device: str) -> bool:
    """Whether it is an exchange that sums between replicas which FSDP shards, and not FSDP itself. A choice among
    strategies needs one; on a GPU FSDP keeps it, whose sums travel beside backward there, as ours would not."""
    named = exchange.exact == "replicas" or exchange.strategy not in ("auto", "allreduce")
    only = 1 < layout.replicate < layout.world == layout.replicate * layout.shard and layout.expert == 1
    return named or (exchange.strategy == "auto" and exchange.exact == "no" and only and device == "cpu")


def candidates(recipe: Recipe, device: str) -> tuple[str, ...]:
    """Strategies that may take turns in a run, the most accurate first. One alone where nothing is to be chosen: it is
    given; `exact` wants an order of addition that never depends on a clock; FSDP sums between replicas itself; or there
    is nobody to send to. While the layout is `auto` it may turn out as any."""
    strategy, exact, layout = recipe.exchange.strategy, recipe.exchange.exact, recipe.layout
    if strategy != "auto":
        return (strategy,)
    fixed = exact != "no"
    if isinstance(layout, Layout):
        sharded = layout.shard * layout.context * layout.expert > 1
        left_to_fsdp = sharded and not sums_shards(recipe.exchange, layout, device)
        fixed |= layout.replicate == 1 or layout.pipeline > 1 or left_to_fsdp
    if fixed:
        return BY_ACCURACY[:1]
    # int8 keeps what it could not send, but the loss scale of fp16 changes
    return BY_ACCURACY[:2] if recipe.precision == "fp16" else BY_ACCURACY
