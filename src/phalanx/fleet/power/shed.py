"""Choose the jobs to pause for a load target that caps alone do not reach. Pure."""

from collections.abc import Callable, Sequence, Set
from dataclasses import replace

from phalanx.fleet.power.allocation import NodeLimit, PoweredJob, allocate_caps
from phalanx.fleet.power.load_targets import LoadTarget
from phalanx.fleet.power_settings import PowerSettings
from phalanx.fleet.power_tree import NO_PARENT, PowerTree


def choose_paused_jobs(
    tree: PowerTree,
    limits: Sequence[NodeLimit],
    jobs: Sequence[PoweredJob],
    budgets_w: Sequence[float | None],
    settings: PowerSettings,
    targets: dict[str, LoadTarget],
    pausable: Set[str],
) -> frozenset[str]:
    """Return the names of the jobs to pause: those of the lowest priority, and no more than needed.

    Args:
        tree: The levels and nodes.
        limits: For each node its devices' limits.
        jobs: All jobs, the paused ones, too.
        budgets_w: For each level now.
        settings: Margin and the lowest cap of jobs that were not swept: below it a job is paused rather than slowed.
        targets: The active one of each level. Levels without one, or with the strategy `caps`, pause nothing.
        pausable: Names of the jobs that can be paused.
    """
    pausing = {level: target for level, target in targets.items() if target.strategy != "caps"}
    if not pausing:
        return frozenset()
    is_first = any(target.strategy == "pause-first" for target in pausing.values())

    def find_tight(running: Sequence[PoweredJob]) -> frozenset[int]:
        share = 1.0 if is_first else settings.min_cap_share
        counted = [replace(job, curves={}) for job in running] if is_first else running
        return allocate_caps(tree, limits, counted, budgets_w, settings.margin, share).tight_levels

    levels = {index for index, level in enumerate(tree.levels) if level.label in pausing}
    choice = [job for job in jobs if job.name in pausable and _is_below(tree, job, levels)]
    helped = levels - find_tight([job for job in jobs if job not in choice])
    """Levels that hold with all of these paused: another one, as with a silent node, must not keep them from it."""
    choice = [job for job in choice if _is_below(tree, job, helped)]
    fits = lambda running: helped.isdisjoint(find_tight(running))  # noqa: E731
    return _pause_until(fits, jobs, sorted(choice, key=lambda job: (job.priority, job.num_devices, job.name)))


def _pause_until(
    fits: Callable[[Sequence[PoweredJob]], bool], jobs: Sequence[PoweredJob], choice: Sequence[PoweredJob]
) -> frozenset[str]:
    """Pause one after the other until it fits, then take those back that were not needed, the last ones first. None
    where all together are not enough: what does not help is not paused."""
    paused: list[str] = []

    def running_without(names: Sequence[str]) -> list[PoweredJob]:
        return [job for job in jobs if job.name not in names]

    for job in choice:
        if fits(running_without(paused)):
            break
        paused.append(job.name)
    if not paused or not fits(running_without(paused)):
        return frozenset()
    for name in [job.name for job in reversed(choice) if job.name in paused]:
        rest = [each for each in paused if each != name]
        if fits(running_without(rest)):
            paused = rest
    return frozenset(paused)


def _is_below(tree: PowerTree, job: PoweredJob, levels: Set[int]) -> bool:
    for node in job.devices:
        level = tree.nodes[node].rack
        while level != NO_PARENT:
            if level in levels:
                return True
            level = tree.levels[level].parent
    return False
