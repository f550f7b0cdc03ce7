"""What each schedule of a pipeline asks of its stages and micro-batches. Pure: `check` refuses by it, `plan` and
`train` count by it."""

from phalanx.recipe.schema import Parallelism


def stages_of(layout: Parallelism) -> int:
    """Stages of a pipeline: as given, else one a rank, or two for the interleaved schedule."""
    if layout.layers_per_stage is not None:
        return len(layout.layers_per_stage)
    return layout.pipeline * (2 if layout.pipeline_schedule == "interleaved" else 1)


def stages_problem(schedule: str, stages: int, ranks: int) -> str | None:
    """What is wrong with a number of stages on a number of ranks; None where the schedule can have them."""
    each = stages // ranks
    if schedule in ("gpipe", "1f1b"):
        fits, rule = stages == ranks, f"one stage a rank: {ranks} stages"
    elif schedule == "interleaved":
        fits, rule = stages % ranks == 0 and each > 1, f"2 or more stages a rank: {2 * ranks}, {3 * ranks}, ... stages"
    else:
        fits, rule = stages % ranks == 0 and each > 0, f"{ranks}, {2 * ranks}, ... stages"
    return None if fits else f"{schedule} on {ranks} ranks takes {rule}, not {stages}"


def fitting(schedule: str, micro_batches: int, stages: int, ranks: int) -> bool:
    """Whether the schedule can run with a number of micro-batches a step: one forward, one backward wants one for each
    stage; schedules that go in rounds want rounds of the same length, of about as many as there are ranks. All at once
    (gpipe) and the V of zero-bubble take any number."""
    if schedule == "1f1b":
        return micro_batches >= stages
    if schedule == "gpipe" or (schedule == "zero-bubble" and stages == 2 * ranks):
        return micro_batches >= 1
    return micro_batches >= 1 and micro_batches % max(1, micro_batches // ranks) == 0
