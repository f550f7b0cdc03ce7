"""What each fault cost, from the events of a run: charged to the attempt that it ended."""

from typing import Any

from phalanx.cli.chaos_page import Cost, costs_of, table
from phalanx.jobs.chaos.inject import Struck
from phalanx.jobs.chaos.plan import Fault, Moment, Phase

MOMENT = Moment(Phase.STEP, 0.0)


def event(t: float, kind: str, **fields: Any) -> dict[str, Any]:
    return {"t": t, "kind": kind, **fields}


def start(t: float, attempt: int, from_step: int) -> dict[str, Any]:
    return event(t, "start", attempt=attempt, from_step=from_step, world=2, steps=9)


def steps(t: float, first: int, last: int) -> list[dict[str, Any]]:
    """A second for each."""
    return [event(t + n - first + 1, "step", step=n, seconds=1.0, parts={}) for n in range(first, last + 1)]


def struck(number: int, kind: str, t: float, attempt: int, phase: Phase = Phase.STEP) -> Struck:
    return Struck(Fault(number, kind, 1, MOMENT, 0.5), t, attempt, 5, phase, "")


def test_a_killed_attempt_costs_what_is_done_again_and_the_time_to_the_next() -> None:
    events = [start(0.0, 0, 0), *steps(0.0, 1, 5), event(5.5, "fault", rank=1, what="SIGKILL")]
    events += [start(7.0, 1, 3), *steps(7.0, 4, 9), event(13.0, "end", status="done")]
    one = struck(1, "kill", 5.2, 0)
    (cost,) = costs_of([one], events)
    assert cost == Cost(back=7.0 - 5.2, again=2, seconds=2 * (2.0 + 2.0))  # two workers: steps 4 and 5, and 5 s to 7 s
    header, line, _ = table([one], [cost])
    assert header.split() == ["fault", "whom", "struck", "trains", "again", "done", "again", "cost"]
    assert line == "   1  kill       worker 1   attempt 0, step 5                       1.8 s    2 steps        8.0 s"


def test_what_strikes_a_restart_is_charged_to_the_fault_before_it() -> None:
    events = [start(0.0, 0, 0), *steps(0.0, 1, 5), event(5.5, "fault", rank=1, what="SIGKILL")]
    events += [start(9.0, 2, 5), *steps(9.0, 6, 9), event(13.0, "end", status="done")]
    first, second = costs_of([struck(1, "kill", 5.2, 0), struck(2, "kill", 6.0, 1, Phase.RESTART)], events)
    assert (first.back, first.seconds) == (None, 2 * 4.0)
    assert second == Cost(back=3.0, again=None, seconds=None)


def test_an_attempt_that_saves_and_stops_is_back_with_the_next_one() -> None:
    events = [start(1.0, 0, 0), *steps(1.0, 1, 5), event(6.0, "end", status="stopped")]
    events += [start(10.0, 1, 5), *steps(10.0, 6, 9), event(14.0, "end", status="done")]
    (cost,) = costs_of([struck(1, "preempt", 0.5, 0, Phase.RESTART)], events)
    assert cost == Cost(back=9.5, again=0, seconds=None)


def test_a_fault_that_ends_nothing_costs_nothing_by_itself() -> None:
    events = [start(0.0, 0, 0), *steps(0.0, 1, 9), event(9.0, "end", status="done")]
    assert costs_of([struck(1, "pause", 3.0, 0)], events) == [Cost(None, None, None)]
