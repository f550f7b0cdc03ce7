"""The run directory: paths, events, result. It is the only thing that `observe` reads of a run.

Everything in it is plain JSON, YAML or safetensors, so it can be moved, copied and read without Phalanx.
"""

from phalanx.run.directory import Run
from phalanx.run.event_types import Event
from phalanx.run.events import EventLog, EventTail, read_events, select_final_steps, sum_training_seconds

__all__ = ["Event", "EventLog", "EventTail", "Run", "read_events", "select_final_steps", "sum_training_seconds"]
