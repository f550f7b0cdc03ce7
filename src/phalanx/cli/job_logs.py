"""`phalanx jobs logs`: what a job prints, line by line, until it is over if that is wanted."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from phalanx.jobs.engine import Engine, reader_of
from phalanx.jobs.log_stream import LogStream
from phalanx.jobs.spec import State, Status
from phalanx.run import Event, Run
from phalanx.run.event_types import AttemptStarted

LOOK = 0.5
"""Seconds between two looks."""


def lines_of(
    engine: Engine,
    ident: str,
    follow: bool,
    raw: bool,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.time,
) -> Iterator[str]:
    """The lines of a job. Of one that trains a run: what its workers print and what happens, from its directory; until
    that has begun, where it cannot be seen from here, for any other job and with `raw`: what the engine has."""
    status = engine.poll(ident)
    stream = None
    if status.run is not None and not raw:
        run = Run(Path(status.run))
        stream = LogStream(run, status.submitted or 0.0, in_words(run), clock)
    read, width = reader_of(engine, ident), 0
    while True:
        over = not follow or status.state.over
        lines = stream.look(last=over) if stream is not None else []
        if stream is None or not stream.begun:
            yield from read(over)
        for line in lines:
            width = max(width, len(line.who))
            yield str(replace(line, who=line.who.ljust(width)))
        if over:
            break
        sleep(LOOK)
        status = engine.poll(ident)
    if follow and stream is not None and stream.begun:
        yield _ended(status, engine.name)


def in_words(run: Run) -> Callable[[Event], list[str]]:
    """Events as `phalanx train` prints them into a log."""
    from phalanx.observe.live import Lines, LiveFacts, facts_of

    made = Lines(0, LiveFacts(run.path.name))

    def say(event: Event) -> list[str]:
        nonlocal made
        if isinstance(event, AttemptStarted) and run.resolved.is_file():  # the facts are not there before
            made = Lines(0, facts_of(run))
        return [part for text in made.take(event) for part in text.splitlines()]

    return say


def _ended(status: Status, engine: str) -> str:
    code = f", exit code {status.code}" if status.code else ""
    more = "" if status.state is State.DONE else f"; `phalanx jobs logs {status.id} --on {engine} --raw` has the rest"
    return f"job {status.id} {status.state}{code}{more}"
