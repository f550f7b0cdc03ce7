"""Running jobs in columns, so that those to stop for a better one are found without a loop over all of them."""

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from phalanx.fleet.simulate.job_state import SimulatedJob

KEY_LENGTH = 2
JOB_DEVICES, FIRST_STEP_S, KEY_SLOPE, JOB_ID, KEY_FIRST, KEY_SECOND = range(6)
"""Rows of the table. Unused columns are NaN, which is not greater than anything."""
PLACE_NODE, PLACE_COLUMN, PLACE_DEVICES = range(3)
"""Rows of the places: devices that a job has on a node. Those of unused places are 0."""


class RunningJobs:
    """Running jobs, each in a column that is used again when it stops.

    Args:
        num_nodes: Nodes of the cluster.
        has_queues: Whether the first part of a key is the number of a queue, so that the devices of each are counted.
    """

    def __init__(self, num_nodes: int, has_queues: bool) -> None:
        self._num_nodes, self._has_queues = num_nodes, has_queues
        self._columns: dict[SimulatedJob, int] = {}
        self._queues: dict[float, int] = {}
        self._jobs: list[SimulatedJob | None] = []
        self._unused: list[int] = []
        self._table: NDArray[np.float64] = np.full((KEY_SECOND + 1, 64), np.nan)
        self._places_of: dict[SimulatedJob, list[int]] = {}
        self._unused_places: list[int] = []
        self._places: NDArray[np.int64] = np.zeros((3, 0), dtype=np.int64)

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
        self._table[:, column] = (job.devices, first_step_s, slope, job_id, *(*key, 0.0)[:KEY_LENGTH])
        self._count(key[0], job.devices)
        while len(self._unused_places) < len(job.placement):
            number = self._places.shape[1]
            more = max(64, number)
            self._places = np.hstack([self._places, np.zeros((3, more), dtype=np.int64)])
            self._unused_places += range(number, number + more)
        places = self._places_of[job] = [self._unused_places.pop() for _ in job.placement]
        self._places[:, places] = [
            [node for node, _ in job.placement],
            [column] * len(places),
            [count for _, count in job.placement],
        ]

    def set_keys(self, jobs: Sequence[SimulatedJob], keys: Sequence[tuple[float, ...]]) -> None:
        """Change the keys of jobs."""
        columns = [self._columns[job] for job in jobs]
        if self._has_queues:
            for job, column, key in zip(jobs, columns, keys, strict=True):
                self._count(float(self._table[KEY_FIRST, column]), -job.devices)
                self._count(key[0], job.devices)
        self._table[KEY_FIRST : KEY_FIRST + len(keys[0]), columns] = np.array(keys).T

    def remove(self, job: SimulatedJob) -> None:
        """Remove a job."""
        column = self._columns.pop(job)
        self._jobs[column] = None
        self._unused.append(column)
        self._count(float(self._table[KEY_FIRST, column]), -job.devices)
        self._table[:, column] = np.nan
        places = self._places_of.pop(job)
        self._places[:, places] = 0
        self._unused_places += places

    def _count(self, queue: float, devices: int) -> None:
        if self._has_queues:
            self._queues[queue] = self._queues.get(queue, 0) + devices

    def count_at_most(self, key: tuple[float, ...]) -> float:
        """Return the devices that jobs with a greater key have at most."""
        if not self._has_queues:
            return math.inf
        return sum(devices for queue, devices in self._queues.items() if queue >= key[0])

    def find_worse(self, key: tuple[float, ...], now_s: float) -> NDArray[np.bool_]:
        """Return which columns have a job with a greater key."""
        table = self._table[:, : len(self._jobs)]
        first = table[KEY_FIRST] - table[KEY_SLOPE] * np.maximum(0.0, now_s - table[FIRST_STEP_S])
        limit = key[1] if len(key) > 1 else 0.0
        return np.asarray((first > key[0]) | ((first == key[0]) & (table[KEY_SECOND] > limit)))

    def fits_without(
        self, worse: NDArray[np.bool_], devices: int, in_service: NDArray[np.bool_], per_node: int
    ) -> bool:
        """Return whether a job has a place if these stop: whole nodes above the devices of one, and a part of one."""
        nodes, columns, counts = self._places
        used = np.bincount(nodes, np.where(worse[columns], 0, counts), self._num_nodes)
        available = np.where(in_service, per_node - used, 0)
        full, rest = divmod(devices, per_node)
        num_whole = np.count_nonzero(available == per_node)
        return bool(
            num_whole > full or (num_whole == full and np.any((available >= rest) & (available < per_node)))
        ) or (rest == 0 and num_whole == full)

    def count_devices(self, worse: NDArray[np.bool_]) -> float:
        """Return the devices of the jobs in these columns."""
        return float(self._table[JOB_DEVICES, : len(worse)][worse].sum())

    def sort_worst_first(self, worse: NDArray[np.bool_], now_s: float) -> Iterator[SimulatedJob]:
        """Return the jobs in these columns, that with the greatest key first."""
        columns = np.flatnonzero(worse)
        table = self._table[:, columns]
        first = table[KEY_FIRST] - table[KEY_SLOPE] * np.maximum(0.0, now_s - table[FIRST_STEP_S])
        for column in columns[np.lexsort((-table[JOB_ID], -table[KEY_SECOND], -first))].tolist():
            job = self._jobs[column]
            assert job is not None
            yield job
