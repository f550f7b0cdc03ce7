"""The batch of a recipe that lets it grow with the workers, and what is told of it. Pure; the learning rate that
follows is `train/schedule.py`'s business.

It is settled once, on the first start: a run that goes on with more workers keeps its batch and its learning rate,
since both are mathematics and the order of the samples depends on the batch.
"""

from phalanx.recipe.schema import Recipe


def grown(recipe: Recipe, workers: int) -> Recipe:
    """The recipe for a run that starts on so many workers: `batch.global` is a number for the whole run, and
    `optim.scaling`, where there is one, says for how many samples `optim.lr` is meant."""
    batch, optim = recipe.batch, recipe.optim
    if optim.scaling is not None and optim.scaling.base_batch is None and batch.per == "worker":
        scaling = optim.scaling.model_copy(update={"base_batch": batch.global_})
        optim = optim.model_copy(update={"scaling": scaling})
    if batch.per == "worker":
        batch = batch.model_copy(update={"global_": batch.global_ * workers, "per": None})
    return recipe.model_copy(update={"batch": batch, "optim": optim})


def growth_told(given: Recipe, resolved: Recipe, peak: float) -> list[str]:
    """What a first start says of a batch and a learning rate that grew; `peak` is the highest rate that the scaling
    allows."""
    told, batch, scaling = [], resolved.batch.global_, resolved.optim.scaling
    if given.batch.global_ != batch:
        told.append(f"batch.global {given.batch.global_} for each of {batch // given.batch.global_} workers: {batch}")
    if scaling is not None and peak != given.optim.lr:
        late = f" at step {scaling.warmup}" if peak > given.optim.lr and scaling.warmup else ""
        told.append(
            f"optim.scaling: {scaling.rule}: learning rate {given.optim.lr:.3g} for {scaling.base_batch} samples, "
            f"{peak:.3g}{late} for {batch}"
        )
        if late and scaling.warmup > resolved.steps:
            told.append(
                f"optim.scaling.warmup: the run ends after {resolved.steps} of its {scaling.warmup} steps, before that"
            )
    return told


def stays_told(given: Recipe, resolved: Recipe, workers: int) -> list[str]:
    """What is said where a run whose batch is for each worker goes on with another number of workers."""
    if given.batch.per is None or given.batch.global_ * workers == resolved.batch.global_:
        return []
    began = resolved.batch.global_ // given.batch.global_
    return [
        f"batch.global stays {resolved.batch.global_}, as the run began on {began} "
        f"{'worker' if began == 1 else 'workers'}: only another run can have another batch"
    ]
