"""Events in words: one sentence for each kind that somebody wants to read."""

from typing import Any

from phalanx.observe import units
from phalanx.observe.history import file_of
from phalanx.run import Event


def sentence(event: Event, world: int, step: int, total: int) -> str:
    """One line for an event that is not a step; empty for kinds that nobody needs to read. Of the run are known its
    workers, the last step and all that it shall have."""
    kind, get = event["kind"], event.get
    if kind == "start":
        again = f"attempt {get('attempt')}: " if get("attempt") else ""
        again += "again " if get("grown") else ""
        begin = f"from step {get('from_step')}" if get("from_step") else "from the beginning"
        return f"{again}{units.times(world, 'worker')} on {get('device', '?')}, {begin}, {total} steps in all"
    if kind == "compiled":
        breaks = f", with {units.times(get('breaks', 0), 'graph break')}" if get("breaks") else ""
        return f"compiled {units.times(get('blocks', 0), 'block')} in {units.duration(get('seconds'))}{breaks}"
    if kind == "eval":
        scores: dict[str, Any] = get("metrics") or {}
        listed = "".join(f"  {name} {units.loss(value)}" for name, value in scores.items())
        return f"evaluation at step {get('step')}: held-out loss {units.loss(get('loss'))}{listed}" + (
            "  (best so far)" if get("best") else ""
        )
    if kind == "checkpoint":
        return (
            f"checkpoint at step {get('step')}: {units.size(get('bytes'))}, stood still {units.duration(get('stall'))}"
        )
    if kind == "checkpoint_rejected":
        return f"checkpoint rejected: {file_of(event)}: {get('reason', 'no reason given')}"
    if kind == "checkpoint_failed":
        return f"checkpoint failed at step {get('step')}: {get('reason', 'no reason given')}; training goes on"
    if kind == "exchange":
        return f"exchange at step {get('step')}: {get('strategy')}: {get('why')}"
    if kind == "guard":
        return f"guard at step {get('step')}: {get('what')}, {get('action')} (skipped steps so far: {get('count', 1)})"
    if kind == "fault":
        return f"fault: {get('detail') or 'rank {}: {}'.format(get('rank', '?'), get('what'))}"
    if kind == "hang":
        return hang_in_words(event)
    if kind == "straggler":
        return straggler_in_words(event)
    if kind == "warning":
        return f"warning: {get('text')}"
    if kind == "end":
        return f"{get('status')} at step {get('step', step)} of {total}"
    return ""


CURRENT = "Current thread"
"""How faulthandler begins with the thread that took the signal: the main one."""


def hang_in_words(event: Event) -> str:
    """Who seems stuck, where, in what, and the innermost line of its stack that is not a library's, if it told one: of
    the thread that trains, which is printed as the current one, and not of those that read or save beside it."""
    get = event.get
    how = "is held still" if get("stopped") else "gives no sign of life"
    said = f"hang: worker {get('rank')} on {get('node')} {how} for {units.duration(get('silent'))}"
    said += f", in step {get('step')}, doing: {get('doing')}"
    stack = str(get("stack") or "")
    trains = stack.rpartition(CURRENT)[2]
    lines = [line.strip() for line in trains.splitlines() if line.strip().startswith("File ")]
    own = [line for line in lines if "/site-packages/" not in line and "/lib/python" not in line]
    at = (own or lines)[:1]
    return said + (f"; {at[0]}" if at else "")


def straggler_in_words(event: Event) -> str:
    """Who is slow, by how much, and what it costs."""
    get = event.get
    return (
        f"straggler: worker {get('rank')} on {get('node')} takes {float(get('factor', 1)):.2f} x as long as its peers: "
        f"they wait {units.duration(get('lost'))} a step for it, {units.percent(get('share'))} of the time"
    )
