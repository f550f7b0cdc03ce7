"""Checks of an attempt's workers by their heartbeats: hangs and stragglers."""

import signal
from collections.abc import Callable

from phalanx.jobs.agent.attempt import AttemptState, worker_log_path
from phalanx.jobs.agent.hang_detection import MIN_SILENCE_S, find_hang
from phalanx.jobs.agent.hang_report import HangReport, measure_log_size, measure_silence
from phalanx.jobs.agent.leader_state import LeaderState
from phalanx.jobs.agent.stragglers import WINDOW_S, find_straggler, has_too_few_steps
from phalanx.run.event_types import HangDetected, StragglerDetected


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
