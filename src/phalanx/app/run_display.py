"""Show the progress of a run before its recipe is known."""

from typing import Self, TextIO

from phalanx.observe.progress import LogProgressDisplay, ProgressDisplay, make_display
from phalanx.observe.run_progress import RunFacts, read_run_facts
from phalanx.run import Event, Run
from phalanx.run.event_types import AttemptStarted, RunEnded, RunWarning, WorkerFailure


class DeferredDisplay:
    """A run's progress display, created when training starts or fails: the facts it shows are not known earlier.
    Warnings before that are shown at once: it may wait for nodes for minutes."""

    def __init__(self, run: Run, stream: TextIO):
        self._run, self._stream = run, stream
        self._early_events: list[Event] = []
        self._display: ProgressDisplay | None = None

    def show_event(self, event: Event) -> None:
        """Show one event; events come in the order of events.jsonl."""
        if self._display is None and isinstance(event, RunWarning):
            LogProgressDisplay(self._stream, 0, RunFacts(self._run.path.name)).show_event(event)
            return
        if self._display is None:
            self._early_events.append(event)
            if not isinstance(event, AttemptStarted | WorkerFailure | RunEnded):
                return
            facts = read_run_facts(self._run) if self._run.resolved.is_file() else RunFacts(self._run.path.name)
            self._display = make_display(self._stream, 0, facts)
            for each in self._early_events:
                self._display.show_event(each)
            return
        self._display.show_event(event)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._display is not None:
            self._display.close()
