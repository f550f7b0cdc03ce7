"""W&B: online, or offline into the run directory, as WANDB_MODE says; project and entity come from its variables, too.

W&B cannot replace a step, so only final steps are sent.
"""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from phalanx.observe.trackers.tracker import MetricRow, TrackedRun, Tracker, make_own_folder
from phalanx.observe.trackers.wandb_files import find_newest_step, find_offline_files

if TYPE_CHECKING:
    import wandb


class WandbTracker(Tracker):
    """A run of W&B."""

    supersedes: ClassVar[bool] = False

    def __init__(self) -> None:
        self._run: wandb.Run | None = None
        self._location = ""

    def open(self, tracked_run: TrackedRun) -> int:
        """Create or resume the run. Offline, its files say how far it is: a killed process leaves what it had written,
        which may be less than it had sent."""
        import wandb

        folder = make_own_folder(tracked_run.path / "wandb")
        offline_files = find_offline_files(tracked_run.path, tracked_run.id)
        newest = find_newest_step(offline_files) if offline_files else tracked_run.sent_step
        settings = wandb.Settings(
            console="off", silent=True, x_disable_stats=True, x_disable_meta=True, disable_git=True, disable_code=True
        )
        run = self._run = wandb.init(
            id=tracked_run.id,
            resume="allow",
            project=os.environ.get("WANDB_PROJECT") or tracked_run.project,
            name=tracked_run.name,
            config=dict(tracked_run.config),
            dir=str(tracked_run.path),
            settings=settings,
        )
        self._location = str(folder) if run.offline else str(run.url)
        return newest if run.offline else run.step - 1

    def log_rows(self, rows: Sequence[MetricRow]) -> None:
        """Hand rows to W&B's own process."""
        for row in rows:
            values: dict[str, Any] = {**row.metrics, "_timestamp": row.time}
            self._opened().log(values, step=row.step)

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set them in the summary."""
        self._opened().summary.update(dict(tags))

    def close(self, status: str | None) -> None:
        """Wait until everything is stored."""
        run, self._run = self._run, None
        if run is not None:
            run.finish(exit_code=1 if status == "failed" else 0)

    def describe_location(self) -> str:
        """The page, or the folder of offline files."""
        return self._location

    def _opened(self) -> "wandb.Run":
        assert self._run is not None
        return self._run
