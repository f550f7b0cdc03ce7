"""Checks of an attempt's workers by their heartbeats: hangs and stragglers."""

import signal
from collections.abc import Callable

from phalanx.jobs.agent.attempt import AttemptState, worker_log_path
from phalanx.jobs.agent.hang_detection import MIN_SILENCE_S, find_deadlock, find_hang
from phalanx.jobs.agent.hang_report import HangReport, measure_log_size, measure_silence
from phalanx.jobs.agent.leader_state import LeaderState
from phalanx.jobs.agent.stragglers import WINDOW_S, find_straggler, has_too_few_steps
from phalanx.run.event_types import HangDetected, StragglerDetected

STOP_TIMEOUT_S = 15.0
"""Seconds after a stop request in which workers must reach the end of a step. Slurm and Kubernetes kill after 30."""
MAX_WAIT_AGE_S = 5.0
"""Age in seconds of a report that a worker waits in a collective: a worker that waits on reports once a second."""


def check_hangs(leader: LeaderState, attempt: AttemptState, abort: Callable[[str], None]) -> None:
    """Detect a hang. It is reported with the stacks that the workers print on request, and ends the attempt when it
    is certain or has lasted too long."""
    heartbeats, find_stopped = attempt.heartbeats()
    now = leader.clock()
    if attempt.abort_reason is not None:
        return
    if measure_silence(heartbeats.values(), now) <= MIN_SILENCE_S:
        attempt.hang = None
        return
    suspect = None if attempt.hang is None else attempt.hang.rank
    others_ended = bool(attempt.exit_statuses.keys() & attempt.active_ranks)
    found = find_hang(heartbeats, now, attempt.step_seconds, find_stopped(), suspect, others_ended)
    if found is None:
        attempt.hang = None
    elif attempt.hang is None or attempt.hang.rank != found.rank:
        log = worker_log_path(leader.run.logs, attempt.log_attempt_by_rank[found.rank], found.rank)
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
    if attempt.abort_reason is not None or (deadlock := find_deadlock(waits)) is None:
        return
    rank, peer = deadlock.collectives
    heartbeats, step = attempt.heartbeats()[0], attempt.last_step(rank) or 0
    log = worker_log_path(leader.run.logs, attempt.log_attempt_by_rank[rank], rank)
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
        leader.emit(
            StragglerDetected(
                rank=found.rank,
                host=attempt.host_of(found.rank),
                slowdown=round(found.slowdown, 3),
                wait_s_per_step=round(found.wait_s_per_step, 6),
                wait_fraction=round(found.wait_fraction, 4),
            )
        )
