"""Retention of checkpoints: keep the newest complete ones and those that are protected."""

from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from phalanx.run import Run
from phalanx.run.directory import write_json
from phalanx.run.event_types import RunWarning
from phalanx.run.events import ReportEventFn
from phalanx.train.checkpoint.commit import DELETED_SUFFIX, discard_directory
from phalanx.train.checkpoint.format import CorruptCheckpointError, list_checkpoints, parse_step, read_manifest


def apply_retention(directory: Path, keep: int, protect: Collection[int] = ()) -> list[Path]:
    """Remove all checkpoints except the `keep` newest complete ones and the protected steps (the best one); return what
    was removed. Call it after a commit.

    Complete means that the manifest is good; reading all data after each save would be too expensive. An incomplete
    checkpoint does not count as kept. If the process is killed meanwhile, `clean_checkpoint_dir` removes the rest.
    Failed removals are tried again at the next call. Raises OSError if storage fails.
    """
    for path in directory.glob(f"step-*{DELETED_SUFFIX}"):
        discard_directory(path)
    whole = 0
    removed = []
    for path in list_checkpoints(directory):
        if whole >= keep:
            if parse_step(path) not in protect:
                discard_directory(path)
                removed.append(path)
        elif _has_good_manifest(path):
            whole += 1
    return removed


def _has_good_manifest(path: Path) -> bool:
    try:
        read_manifest(path)
    except CorruptCheckpointError:
        return False
    return True


class Retention:
    """Removes the old checkpoints of a run in the background, on the worker that commits. `keep` newest ones and the
    best stay. A removal that fails is reported, and training continues."""

    def __init__(self, run: Run, keep: int, report_event: ReportEventFn):
        self._run, self._keep, self._report_event = run, keep, report_event
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="retention")
        self._removals: list[Future[list[Path]]] = []

    def remove_old(self, step: int) -> None:
        """Remove old checkpoints, but not that of `step`, which is good."""
        self._report_failures()
        self._removals.append(self._thread.submit(self._apply, step))

    def remove_after(self, step: int) -> None:
        """Remove the checkpoints of later steps; return when they are gone. Raises OSError if storage fails."""
        self._thread.submit(self._remove_after, step).result()  # the thread may be removing old ones

    def record_best(self, step: int, loss: float) -> None:
        """Record that this checkpoint has the lowest validation loss, before `remove_old`."""
        try:
            write_json(best_checkpoint_file(self._run), {"step": step, "loss": loss})
        except OSError as error:  # the checkpoint may have filled the disk; training continues
            text = f"step {step} is the best so far, but this could not be written: {error}"
            self._report_event(RunWarning(text=text))

    def close(self) -> None:
        """Wait until all removals are done."""
        self._thread.shutdown()
        self._report_failures()

    def _apply(self, step: int) -> list[Path]:
        best = self._run.read_json_or_empty(best_checkpoint_file(self._run)).get("step")
        protected = [step, best] if isinstance(best, int) else [step]
        return apply_retention(self._run.checkpoints, self._keep, protected)

    def _remove_after(self, step: int) -> None:
        for path in list_checkpoints(self._run.checkpoints):
            if parse_step(path) > step:
                discard_directory(path)

    def _report_failures(self) -> None:
        done = [removal for removal in self._removals if removal.done()]
        self._removals = [removal for removal in self._removals if removal not in done]
        for removal in done:
            try:
                removal.result()
            except OSError as error:
                self._report_event(RunWarning(text=f"an old checkpoint could not be removed: {error}"))


def best_checkpoint_file(run: Run) -> Path:
    """Return the file that names the checkpoint with the lowest validation loss."""
    return run.checkpoints / "best.json"
