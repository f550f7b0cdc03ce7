"""Running jobs in the order of their keys, so that those to stop for a better one are found at once."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from phalanx.fleet.simulate.job_state import SimulatedJob
from phalanx.fleet.simulate.progress_clock import ProgressClock

FIRST_PROGRESS_S, CLOCK_NUMBER, KEY_SLOPE, JOB_ID, KEY_FIRST, KEY_SECOND = range(6)
"""Rows of the table. Unused columns are NaN, which is not greater than anything."""
JobKey = tuple[float, ...]


class RunningJobs:
    """Running jobs with keys that change only when they are set."""

    def __init__(self) -> None:
        self._keys: list[tuple[JobKey, int]] = []
        self._jobs: list[SimulatedJob] = []
        self._key_of: dict[SimulatedJob, tuple[JobKey, int]] = {}

    def add(self, job: SimulatedJob, job_id: int, key: JobKey, slope: float) -> None:
        """Add a job that starts now. The first part of its key falls by `slope` for each second of progress."""
        place = bisect_left(self._keys, (key, job_id))
        self._keys.insert(place, (key, job_id))
        self._jobs.insert(place, job)
        self._key_of[job] = (key, job_id)

    def set_key(self, job: SimulatedJob, key: JobKey) -> None:
        """Change the key of a job."""
        job_id = self._key_of[job][1]
        self.remove(job)
        self.add(job, job_id, key, 0.0)

    def set_all_keys(self, find_key: Callable[[SimulatedJob], JobKey]) -> None:
        """Compute the keys of all jobs again."""
        entries = sorted((find_key(job), job_id, job) for job, (_, job_id) in self._key_of.items())
        self._keys = [(key, job_id) for key, job_id, _ in entries]
        self._jobs = [job for _, _, job in entries]
        self._key_of = dict(zip(self._jobs, self._keys, strict=True))

    def remove(self, job: SimulatedJob) -> None:
        """Remove a job."""
        place = bisect_left(self._keys, self._key_of.pop(job))
        del self._keys[place]
        del self._jobs[place]

    def find_worse(self, key: JobKey, now_s: float) -> Sequence[SimulatedJob]:
        """Return the jobs with a greater key, that with the greatest first."""
        worse = self._jobs[bisect_right(self._keys, (key, math.inf)) :]
        worse.reverse()
        return worse


class ProgressingJobs(RunningJobs):
    """Running jobs with keys that fall while they make progress, each in a column that is used again when it stops."""

    def __init__(self) -> None:
        super().__init__()
        self._columns: dict[SimulatedJob, int] = {}
        self._job_in: list[SimulatedJob | None] = []
        self._unused: list[int] = []
        self._clock_numbers: dict[ProgressClock | None, int] = {None: 0}
        self._table: NDArray[np.float64] = np.full((KEY_SECOND + 1, 64), np.nan)

    def add(self, job: SimulatedJob, job_id: int, key: JobKey, slope: float) -> None:
        if self._unused:
            column = self._unused.pop()
            self._job_in[column] = job
        else:
            column = len(self._job_in)
            self._job_in.append(job)
            if column == self._table.shape[1]:
                self._table = np.hstack([self._table, np.full_like(self._table, np.nan)])
        self._columns[job] = column
        first_step_s = (job.attempt_start_s or 0.0) + job.costs.restart_s
        first_progress_s = first_step_s if job.clock is None else job.clock.progress_s(first_step_s)
        clock_number = self._clock_numbers.setdefault(job.clock, len(self._clock_numbers))
        self._table[:, column] = (first_progress_s, clock_number, slope, job_id, *key)

    def remove(self, job: SimulatedJob) -> None:
        column = self._columns.pop(job)
        self._job_in[column] = None
        self._unused.append(column)
        self._table[:, column] = np.nan

    def find_worse(self, key: JobKey, now_s: float) -> Sequence[SimulatedJob]:
        table = self._table[:, : len(self._job_in)]
        progress_s = np.maximum(0.0, self._find_progress_s(table, now_s) - table[FIRST_PROGRESS_S])
        first = table[KEY_FIRST] - table[KEY_SLOPE] * progress_s
        worse = np.flatnonzero((first > key[0]) | ((first == key[0]) & (table[KEY_SECOND] > key[1])))
        order = np.lexsort((-table[JOB_ID, worse], -table[KEY_SECOND, worse], -first[worse]))
        return [job for column in worse[order].tolist() if (job := self._job_in[column]) is not None]

    def _find_progress_s(self, table: NDArray[np.float64], now_s: float) -> NDArray[np.float64] | float:
        """Return the progress from the start of the simulation until now, by the clock of each job."""
        if len(self._clock_numbers) == 1:  # none throttles
            return now_s
        by_clock = np.array([now_s if clock is None else clock.progress_s(now_s) for clock in self._clock_numbers])
        return np.asarray(by_clock[np.nan_to_num(table[CLOCK_NUMBER]).astype(np.intp)])
