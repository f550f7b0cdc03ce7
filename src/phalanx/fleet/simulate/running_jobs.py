"""Running jobs in columns, so that those to stop for a better one are found without a loop over all of them."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from phalanx.fleet.simulate.job_state import SimulatedJob

KEY_LENGTH = 3
DEVICES, FIRST_STEP_S, SLOPE, ID, KEY = range(5)
"""Rows of the table; the parts of the key are the last ones."""


class RunningJobs:
    """Running jobs, each in a column that is used again when it stops."""

    def __init__(self) -> None:
        self._columns: dict[SimulatedJob, int] = {}
        self._jobs: list[SimulatedJob | None] = []
        self._unused: list[int] = []
        self._table: NDArray[np.float64] = np.full((KEY + KEY_LENGTH, 64), np.nan)

    def add(self, job: SimulatedJob, job_id: int, key: tuple[float, ...], slope: float) -> None:
        """Add a job that starts now. The first part of its key falls by `slope` for each second of progress."""
        if self._unused:
            column = self._unused.pop()
            self._jobs[column] = job
        else:
            column = len(self._jobs)
            self._jobs.append(job)
            if column == self._table.shape[1]:
                self._table = np.hstack([self._table, np.full_like(self._table, np.nan)])
        self._columns[job] = column
        first_step_s = (job.attempt_start_s or 0.0) + job.costs.restart_s
        self._table[:KEY, column] = (job.devices, first_step_s, slope, job_id)
        self._table[KEY:, column] = (*key, 0.0, 0.0)[:KEY_LENGTH]

    def set_keys(self, jobs: Sequence[SimulatedJob], keys: Sequence[tuple[float, ...]]) -> None:
        """Change the keys of jobs."""
        columns = [self._columns[job] for job in jobs]
        self._table[KEY : KEY + len(keys[0]), columns] = np.array(keys).T

    def remove(self, job: SimulatedJob) -> None:
        """Remove a job."""
        column = self._columns.pop(job)
        self._jobs[column] = None
        self._unused.append(column)
        self._table[:, column] = np.nan

    def find_worse(self, key: tuple[float, ...], now_s: float, devices: int) -> list[SimulatedJob] | None:
        """Return jobs with a greater key, the greatest first; an empty list if they have fewer devices than these, and
        None if there are none."""
        table = self._table[:, : len(self._jobs)]
        first = table[KEY] - table[SLOPE] * np.maximum(0.0, now_s - table[FIRST_STEP_S])
        limits = (*key, 0.0, 0.0)
        second, third = table[KEY + 1], table[KEY + 2]
        # unused columns are NaN, which is not greater than anything
        is_later = (second > limits[1]) | ((second == limits[1]) & (third > limits[2]))
        worse = np.flatnonzero((first > limits[0]) | ((first == limits[0]) & is_later))
        if not len(worse):
            return None
        if table[DEVICES, worse].sum() < devices:
            return []
        order = np.lexsort((-table[ID, worse], -third[worse], -second[worse], -first[worse]))
        return [job for column in worse[order].tolist() if (job := self._jobs[column]) is not None]
