"""What each fault cost, from the events of a run: charged to the attempt that it ended."""

from made_events import made
from phalanx.app.chaos import RecoveryCost, compute_costs
from phalanx.cli.chaos_output import format_cost_table
from phalanx.jobs.chaos.fault_plan import Fault, FaultPhase, FaultTrigger
from phalanx.jobs.chaos.faults import InjectedFault
from phalanx.run import Event
from phalanx.run.event_types import AttemptStarted, RunEnded, StepDone, WorkerFailure

MOMENT = FaultTrigger(FaultPhase.STEP, 0.0)


def start(t: float, attempt: int, from_step: int) -> Event:
    return made(AttemptStarted, time=t, attempt=attempt, start_step=from_step, world_size=2, total_steps=9)


def steps(t: float, first: int, last: int) -> list[Event]:
    """A second for each."""
    return [made(StepDone, time=t + n - first + 1, step=n, duration_s=1.0) for n in range(first, last + 1)]


def struck(number: int, kind: str, t: float, attempt: int, phase: FaultPhase = FaultPhase.STEP) -> InjectedFault:
    return InjectedFault(Fault(number, kind, 1, MOMENT, 0.5), t, attempt, 5, phase, "")


def test_a_killed_attempt_costs_what_is_done_again_and_the_time_to_the_next() -> None:
    events = [start(0.0, 0, 0), *steps(0.0, 1, 5), made(WorkerFailure, time=5.5, rank=1)]
    events += [start(7.0, 1, 3), *steps(7.0, 4, 9), made(RunEnded, time=13.0)]
    one = struck(1, "kill", 5.2, 0)
    (cost,) = compute_costs([one], events)
    assert cost == RecoveryCost(
        recovery_s=7.0 - 5.2, wasted_steps=2, lost_device_s=2 * (2.0 + 2.0)
    )  # two workers: steps 4 and 5, and 5 s to 7 s
    header, line, _ = format_cost_table([one], [cost])
    assert header.split() == ["FAULT", "TARGET", "WHEN", "RECOVERY", "WASTED", "COST"]
    assert line == "   1  kill   worker 1  attempt 0, step 5     1.8 s  2 steps  8.0 s"


def test_what_strikes_a_restart_is_charged_to_the_fault_before_it() -> None:
    events = [start(0.0, 0, 0), *steps(0.0, 1, 5), made(WorkerFailure, time=5.5, rank=1)]
    events += [start(9.0, 2, 5), *steps(9.0, 6, 9), made(RunEnded, time=13.0)]
    first, second = compute_costs([struck(1, "kill", 5.2, 0), struck(2, "kill", 6.0, 1, FaultPhase.RESTART)], events)
    assert (first.recovery_s, first.lost_device_s) == (None, 2 * 4.0)
    assert second == RecoveryCost(recovery_s=3.0, wasted_steps=None, lost_device_s=None)


def test_an_attempt_that_saves_and_stops_is_back_with_the_next_one() -> None:
    events = [start(1.0, 0, 0), *steps(1.0, 1, 5), made(RunEnded, time=6.0, status="interrupted")]
    events += [start(10.0, 1, 5), *steps(10.0, 6, 9), made(RunEnded, time=14.0)]
    (cost,) = compute_costs([struck(1, "preempt", 0.5, 0, FaultPhase.RESTART)], events)
    assert cost == RecoveryCost(recovery_s=9.5, wasted_steps=0, lost_device_s=None)


def test_a_fault_that_ends_nothing_costs_nothing_by_itself() -> None:
    events = [start(0.0, 0, 0), *steps(0.0, 1, 9), made(RunEnded, time=9.0)]
    assert compute_costs([struck(1, "freeze", 3.0, 0)], events) == [RecoveryCost(None, None, None)]
