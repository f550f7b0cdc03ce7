"""What `auto` means for a recipe's exchange: among which strategies it may choose, and the size of buckets."""

from phalanx.recipe.schema import Exchange, Layout, Recipe

BUCKET = 25.0
"""MiB of a bucket where nobody planned another size: as DistributedDataParallel has it (Li et al. 2020)."""
PARTS = 12
"""Between nodes a bucket holds at most such a part of the gradients: what travels beside backward costs nothing, and
the last bucket never does."""
LEAST = 1.0
"""MiB of which nothing is gained by sending less at a time."""
MIB = 2**20

BY_ACCURACY = ("allreduce", "bf16", "int8")
"""What `auto` knows: the most accurate first, each with fewer bytes than the one before."""


def bucket_bytes(exchange: Exchange) -> float:
    """Bytes of gradients that travel together."""
    return MIB * (BUCKET if exchange.bucket == "auto" else exchange.bucket)


def bucket_between_nodes(gradients: float) -> float:
    """MiB of a bucket where nobody planned another size, for so many bytes of gradients."""
    return min(BUCKET, max(LEAST, round(gradients / MIB / PARTS, 1)))


def candidates(recipe: Recipe) -> tuple[str, ...]:
    """Strategies that may take turns in a run, the most accurate first. One alone where nothing is to be chosen: it is
    given; `exact` wants an order of addition that never depends on a clock; FSDP sums between replicas itself; or there
    is nobody to send to. While the layout is `auto` it may turn out as any."""
    strategy, exact, layout = recipe.exchange.strategy, recipe.exchange.exact, recipe.layout
    if strategy != "auto":
        return (strategy,)
    fixed = exact != "no"
    if isinstance(layout, Layout):
        sharded = layout.shard * layout.context * layout.expert > 1
        fixed |= layout.replicate == 1 or layout.pipeline > 1 or sharded
    if fixed:
        return BY_ACCURACY[:1]
    # int8 keeps what it could not send, but the loss scale of fp16 changes
    return BY_ACCURACY[:2] if recipe.precision == "fp16" else BY_ACCURACY
