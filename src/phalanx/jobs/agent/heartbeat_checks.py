"""Checks of an attempt's workers by their heartbeats: hangs and stragglers.

A straggler is a worker that needs longer for its part of each step than its peers, which wait for it. It is found when
waiting is a separate phase, as for replicas in gradient synchronization. Workers that share one model (shards, pipeline
stages) wait while they compute, and cannot be distinguished.
"""

import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median

from phalanx.jobs.agent.attempt import AttemptState, HangReport, worker_log_path
from phalanx.jobs.agent.hang_detection import MIN_SILENCE_S, find_deadlock, find_hang
from phalanx.jobs.agent.leader_state import LeaderState
from phalanx.run.event_types import HangDetected, StragglerDetected
from phalanx.run.heartbeat import Heartbeat

STOP_TIMEOUT_S = 15.0
"""Seconds after a stop request in which workers must reach the end of a step. Slurm and Kubernetes kill after 30."""
MAX_WAIT_AGE_S = 5.0
"""Age in seconds of a report that a worker waits in a collective: a worker that waits on reports once a second."""

WINDOW_S = 15.0
"""Seconds over which workers are compared."""
MIN_STEPS = 5
"""Minimum steps of every worker in this window: a single slow step is no straggler."""
MIN_SLOWDOWN = 1.25
"""Busy time of a straggler, over the median of its peers."""


def check_hangs(leader: LeaderState, attempt: AttemptState, abort: Callable[[str], None]) -> None:
    """Detect a hang. It is reported with the workers' stacks, and ends the attempt when it is certain or too long."""
    heartbeats, find_stopped = attempt.heartbeats()
    now = leader.clock()
    if attempt.killed:  # by an earlier failure
        return
    if measure_silence(heartbeats.values(), now) <= MIN_SILENCE_S:
        attempt.hang = None
        return
    suspect = None if attempt.hang is None else attempt.hang.rank
    found = find_hang(heartbeats, now, attempt.step_seconds, find_stopped(), suspect, bool(attempt.exit_statuses))
    if found is None:
        attempt.hang = None
    elif attempt.hang is None or attempt.hang.rank != found.rank:
        log = worker_log_path(leader.run.logs, attempt.number, found.rank)
        attempt.hang = HangReport(found.rank, log, measure_log_size(log))
        leader.signal_workers(signal.SIGUSR2)
    elif not attempt.hang.reported:
        attempt.hang.reported = True
        leader.emit(
            HangDetected(
                rank=found.rank,
                host=attempt.host_of(found.rank),
                step=found.step,
                phase=found.phase,
                silence_s=round(found.silence_s, 3),
                is_stopped=found.is_stopped,
                stack=attempt.hang.read_stack(),
            )
        )
    elif found.is_certain or found.silence_s > leader.recovery.hang_timeout_s:
        if not found.is_certain:
            limit = f"fault_tolerance.hang_timeout_s is {leader.recovery.hang_timeout_s:g} s"
            hint = f"{limit}: raise it if the worker did not hang but was slow"
            leader.warn(hint)
        abort(found.description)


def note_meeting(attempt: AttemptState) -> None:
    """Record whether a worker has left the rendezvous."""
    if not attempt.has_met:
        phases = {
            heartbeat.phase
            for node, ranks in attempt.ranks_by_node.items()
            for heartbeat in node.heartbeats(ranks).values()
            if heartbeat is not None
        }
        attempt.has_met = bool(phases - {"starting"})


def check_stop(leader: LeaderState, attempt: AttemptState, abort: Callable[[str], None]) -> None:
    """End workers that were asked to stop, and hang or have no step to save: what asked kills the agent soon after."""
    if not leader.stopping or attempt.killed or leader.clock() - leader.stopping_since < STOP_TIMEOUT_S:
        return
    if attempt.hang is not None and attempt.hang.reported:
        abort(f"asked to stop {STOP_TIMEOUT_S:g} s ago, and worker {attempt.hang.rank} hangs")
    elif attempt.num_steps == 0 and attempt.result is None:
        abort(f"asked to stop {STOP_TIMEOUT_S:g} s ago, before the first step: there is nothing to save")


def check_deadlock(leader: LeaderState, attempt: AttemptState, abort: Callable[[str], None]) -> None:
    """End the attempt, with the stacks of both sides, when workers wait in collectives that cannot end."""
    now = leader.clock()
    waits = {rank: wait for rank, (t, wait) in attempt.waits.items() if now - t <= MAX_WAIT_AGE_S}
    if attempt.killed or (deadlock := find_deadlock(waits)) is None:
        return
    rank, peer = deadlock.collectives
    heartbeats, step = attempt.heartbeats()[0], attempt.last_step(rank) or 0
    log = worker_log_path(leader.run.logs, attempt.number, rank)
    attempt.hang = HangReport(rank, log, 0, reported=True)
    leader.emit(
        HangDetected(
            rank=rank,
            host=attempt.host_of(rank),
            step=step,
            phase=f"deadlock with worker {peer}",
            silence_s=round(measure_silence(heartbeats.values(), now), 3),
            is_stopped=False,
            stack="\n".join(f"worker {each}:\n{waits[each].stack}" for each in (rank, peer)),
        )
    )
    abort(f"step {step}: {deadlock.description}")


def check_stragglers(leader: LeaderState, attempt: AttemptState) -> None:
    """Report a straggler, once per rank and attempt."""
    now = leader.clock()
    if attempt.world_size < 2 or now - attempt.last_comparison < WINDOW_S:
        return
    heartbeats = {rank: heartbeat for rank, heartbeat in attempt.heartbeats()[0].items() if heartbeat is not None}
    if has_too_few_steps(attempt.straggler_baseline, heartbeats):
        return
    found = find_straggler(attempt.straggler_baseline, heartbeats)
    attempt.last_comparison, attempt.straggler_baseline = now, heartbeats
    if found is not None and found.rank not in attempt.reported_stragglers:
        attempt.reported_stragglers.add(found.rank)
        leader.emit(replace(found, host=attempt.host_of(found.rank)))


def measure_log_size(log: Path) -> int:
    """Return the size of a log in bytes; 0 if unknown."""
    try:
        return log.stat().st_size
    except OSError:
        return 0


def measure_silence(heartbeats: Iterable[Heartbeat | None], now: float) -> float:
    """Return the seconds since the last heartbeat of any worker; 0 before the first."""
    return min((now - heartbeat.t for heartbeat in heartbeats if heartbeat is not None), default=0.0)


def has_too_few_steps(before: Mapping[int, Heartbeat], after: Mapping[int, Heartbeat]) -> bool:
    """Whether workers ran too few steps between the samples to be compared."""
    return any(after[rank].step - before[rank].step < MIN_STEPS for rank in set(before) & set(after))


def find_straggler(before: Mapping[int, Heartbeat], after: Mapping[int, Heartbeat]) -> StragglerDetected | None:
    """Return the worker that the others waited for between two samples, or None."""
    ranks = sorted(set(before) & set(after))
    if len(ranks) < 2 or any(before[rank].pid != after[rank].pid for rank in ranks):
        return None
    steps = min(after[rank].step - before[rank].step for rank in ranks)
    wall_s = median(after[rank].t - before[rank].t for rank in ranks)
    if steps <= 0 or wall_s <= 0:
        return None
    busy_s = {rank: after[rank].busy_s - before[rank].busy_s for rank in ranks}
    slowest = max(ranks, key=busy_s.__getitem__)
    peer_busy_s = median(busy_s[rank] for rank in ranks if rank != slowest)
    if peer_busy_s <= 0 or busy_s[slowest] <= MIN_SLOWDOWN * peer_busy_s:
        return None
    wait_s = busy_s[slowest] - peer_busy_s
    return StragglerDetected(
        rank=slowest,
        slowdown=round(busy_s[slowest] / peer_busy_s, 3),
        wait_s_per_step=round(wait_s / steps, 6),
        wait_fraction=round(min(1.0, wait_s / wall_s), 4),
    )
