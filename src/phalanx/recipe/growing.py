"""The batch of a recipe that lets it grow with the workers, and what is told of it. Pure; the learning rate that
follows is `train/schedule.py`'s business.

It is settled once, on the first start: a run that goes on with more workers keeps its batch and its learning rate,
since both are mathematics and the order of the samples depends on the batch.
"""

from phalanx.recipe.schema import Recipe


def grown(recipe: Recipe, workers: int) -> Recipe:
    """The recipe for a run that starts on so many workers: `batch.global_size` is a number for the whole run, and
    `optimizer.lr_scaling`, where there is one, says for how many samples `optimizer.lr` is meant."""
    batch, optim = recipe.batch, recipe.optimizer
    if optim.lr_scaling is not None and optim.lr_scaling.base_batch_size is None and batch.scale_with_workers:
        scaling = optim.lr_scaling.model_copy(update={"base_batch_size": batch.global_size})
        optim = optim.model_copy(update={"lr_scaling": scaling})
    if batch.scale_with_workers:
        whole = {"global_size": batch.global_size * workers, "scale_with_workers": False}
        batch = batch.model_copy(update=whole)
    return recipe.model_copy(update={"batch": batch, "optimizer": optim})


def growth_told(given: Recipe, resolved: Recipe, peak: float) -> list[str]:
    """What a first start says of a batch and a learning rate that grew; `peak` is the highest rate that the scaling
    allows."""
    told, batch, scaling = [], resolved.batch.global_size, resolved.optimizer.lr_scaling
    if given.batch.global_size != batch:
        told.append(
            f"batch.global_size {given.batch.global_size} for each of {batch // given.batch.global_size} workers: "
            f"{batch}"
        )
    if scaling is not None and peak != given.optimizer.lr:
        late = f" at step {scaling.warmup_steps}" if peak > given.optimizer.lr and scaling.warmup_steps else ""
        told.append(
            f"optimizer.lr_scaling: {scaling.rule}: learning rate {given.optimizer.lr:.3g} for "
            f"{scaling.base_batch_size} samples, {peak:.3g}{late} for {batch}"
        )
        if late and scaling.warmup_steps > resolved.steps:
            told.append(
                f"optimizer.lr_scaling.warmup_steps: the run ends after {resolved.steps} of its "
                f"{scaling.warmup_steps} steps, before that"
            )
    return told


def stays_told(given: Recipe, resolved: Recipe, workers: int) -> list[str]:
    """What is said where a run whose batch is for each worker goes on with another number of workers."""
    if not given.batch.scale_with_workers or given.batch.global_size * workers == resolved.batch.global_size:
        return []
    began = resolved.batch.global_size // given.batch.global_size
    return [
        f"batch.global_size stays {resolved.batch.global_size}, as the run began on {began} "
        f"{'worker' if began == 1 else 'workers'}: only another run can have another batch"
    ]
