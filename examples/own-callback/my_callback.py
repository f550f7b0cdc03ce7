"""Writes the losses of a run to losses.csv in its directory: step, training loss, held-out loss where there is one.

A callback is any class with some of the methods on_train_start(run), post_step(run, event), post_evaluation(run,
event), on_train_end(run, event) and others (docs/how-to/extend.md). `run` has path, rank, model and step; an event has
the fields that it has in events.jsonl. Every worker calls its own; this one acts on the first only.
"""

import csv
from typing import Any

from phalanx.run.event_types import EvaluationDone, RunEnded, StepDone

HEADER = ("step", "loss", "held_out_loss")


class LossCsv:
    def on_train_start(self, run: Any) -> None:
        if run.rank != 0:
            return
        path = run.path / "losses.csv"
        kept = []
        if path.exists():  # a run that goes on from a checkpoint does the steps after it again
            with open(path, newline="") as old:
                kept = [row for row in list(csv.reader(old))[1:] if len(row) == len(HEADER) and int(row[0]) <= run.step]
        self.file = open(path, "w", newline="")  # noqa: SIM115  closed in on_train_end()
        self.writer = csv.writer(self.file)
        self.writer.writerows([HEADER, *kept])
        self.file.flush()

    def post_step(self, run: Any, event: StepDone) -> None:
        self._write(run, (event.step, event.loss, ""))

    def post_evaluation(self, run: Any, event: EvaluationDone) -> None:
        self._write(run, (event.step, "", event.loss))

    def on_train_end(self, run: Any, event: RunEnded) -> None:
        if run.rank == 0:
            self.file.close()

    def _write(self, run: Any, row: tuple[Any, ...]) -> None:
        if run.rank == 0:
            self.writer.writerow(row)
            self.file.flush()
