"""Spread what would happen at once: starts of jobs over a site's ramp, blocking saves over an interval. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.fleet.power_tree import NodePower


def estimate_start_step(power: NodePower, num_devices: int) -> float:
    """Return the watts by which the start of a job on `num_devices` of a node raises its power at most."""
    return power.rest_max_w - power.rest_idle_w + num_devices * (power.device_max_w - power.device_idle_w)


def plan_starts(steps_w: Sequence[float], max_ramp_w_per_s: float | None, begin_s: float = 0.0) -> list[float]:
    """Return when each job starts, in seconds, in order: so late that power rises no faster than the ramp.

    A job's own rise takes about a second and cannot be slowed down by its start: the ramp holds as a mean from each
    start to the next.

    Args:
        steps_w: Watts by which each job raises the power.
        max_ramp_w_per_s: Of the site; None without a limit, where all start at once.
        begin_s: Start of the first one.
    """
    starts, free_s = [], begin_s
    for step_w in steps_w:
        starts.append(free_s)
        if max_ramp_w_per_s is not None:
            free_s += step_w / max_ramp_w_per_s
    return starts


@dataclass(frozen=True)
class SavePattern:
    """Blocking saves of a job: every `interval_s` seconds power falls by `swing_w` for `stall_s` seconds."""

    interval_s: float
    stall_s: float
    swing_w: float


def plan_save_offsets(jobs: Sequence[SavePattern], max_swing_w: float | None) -> list[float] | None:
    """Return by how many seconds the saves of each job come later, so that no more fall together than the swing allows;
    None where they cannot be spread so far.

    Jobs share slots, one after the other over the shortest interval: a slot is as long as the longest stall in it. With
    other intervals than equal ones saves meet again later.
    """
    if max_swing_w is None:
        return [0.0] * len(jobs)
    offsets = [0.0] * len(jobs)
    begin_s, slot_w, slot_s = 0.0, 0.0, 0.0
    for index in sorted(range(len(jobs)), key=lambda each: -jobs[each].swing_w):
        job = jobs[index]
        if job.swing_w > max_swing_w:
            return None
        if slot_w + job.swing_w > max_swing_w:
            begin_s, slot_w, slot_s = begin_s + slot_s, 0.0, 0.0
        offsets[index], slot_w, slot_s = begin_s, slot_w + job.swing_w, max(slot_s, job.stall_s)
    if jobs and begin_s + slot_s > min(job.interval_s for job in jobs):
        return None
    return offsets
