"""Among which strategies `exchange: {strategy: auto}` may choose for a recipe."""

from phalanx.recipe.schema import Layout, Recipe

BY_ACCURACY = ("allreduce", "bf16", "int8")
"""What `auto` knows: the most accurate first, each with fewer bytes than the one before."""


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
