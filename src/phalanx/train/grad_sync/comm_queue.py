"""Who carries buckets through the stages of a strategy while backward goes on.

On a CPU a thread sends buckets, another answers them and a third takes them: backward does not wait while numbers are
rounded and given to sockets, and when they have arrived does not depend on when it makes the next gradient. Each lane
of a strategy has an answering and a taking thread of its own. On a GPU waiting costs the host nothing, and everything
after the first stage follows after backward.
"""

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue

import torch

from phalanx.train.grad_sync.algorithms.base import GradSyncAlgorithm, PendingWork
from phalanx.train.grad_sync.buckets import Bucket


@dataclass
class BucketTask:
    """A bucket on its way. `done` is set when its sum is in it, or cannot be."""

    bucket_index: int
    bucket: Bucket
    pending: PendingWork | None
    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None


TaskQueue = SimpleQueue[BucketTask | list[BucketTask]]
"""Parcels, and at the end a list of those that are still under way."""


@dataclass(frozen=True)
class _SubmittedStart:
    """What another thread sends."""

    future: Future[PendingWork | None]

    def wait(self) -> None:
        pending = self.future.result()
        if pending is not None:
            pending.wait()


class CommQueue:
    """`submit` for every bucket of a step in turn, then `wait_all`. What goes wrong anywhere is raised by
    `wait_all`."""

    def __init__(self, algorithm: GradSyncAlgorithm, use_threads: bool):
        self._algorithm = algorithm
        self._tasks: list[BucketTask] = []
        self._queues: list[TaskQueue] = []  # of each lane
        self._sender: ThreadPoolExecutor | None = None
        if use_threads and algorithm.is_two_phase:
            self._sender = ThreadPoolExecutor(1, thread_name_prefix="send", initializer=_limit_thread_cores)
            for _ in range(algorithm.num_channels):
                queue, second_phase_done = TaskQueue(), TaskQueue()
                # Daemons: a worker whose peers are gone must be able to end while these still wait for them.
                for phase, source, target in (
                    (_run_second_phase, queue, second_phase_done),
                    (_run_finish, second_phase_done, None),
                ):
                    arguments = (algorithm, phase, source, target)
                    threading.Thread(target=_run_worker_thread, args=arguments, daemon=True, name="exchange").start()
                self._queues.append(queue)

    def submit(self, bucket_index: int, bucket: Bucket, fill_bucket: Callable[[Bucket], None] = lambda _: None) -> None:
        """All of a bucket is there, and in it after `fill_bucket`. Until `wait_all` it is the courier's."""

        def start() -> PendingWork | None:
            fill_bucket(bucket)
            return self._algorithm.start(bucket_index, bucket)

        pending = start() if self._sender is None else _SubmittedStart(self._sender.submit(start))
        task = BucketTask(bucket_index, bucket, pending)
        self._tasks.append(task)
        if self._queues:
            self._queues[bucket_index % len(self._queues)].put(task)

    def wait_all(self) -> None:
        """Leave all sums in their buckets."""
        if not self._queues:
            for task in self._tasks:
                _run_second_phase(self._algorithm, task)
        while self._tasks:
            task = self._tasks[0]
            if self._queues:
                task.done.wait()
            del self._tasks[0]
            if task.error is not None:
                raise task.error
            if not self._queues:
                _run_finish(self._algorithm, task)

    def close(self) -> None:
        """Let the threads end; they are not waited for, since what they wait for may never come. They take in what is
        still under way: for a message that nobody wants any more gloo's own thread would look without a pause."""
        unfinished, self._tasks = self._tasks, []
        for channel, queue in enumerate(self._queues):
            queue.put([task for task in unfinished if task.bucket_index % len(self._queues) == channel])
        if self._sender is not None:
            self._sender.shutdown(wait=False)


def _limit_thread_cores() -> None:
    """Have a new thread compute with as many threads as torch was told. Most operations see to that by themselves, but
    a product of matrices, if it comes first, takes all cores of the machine."""
    torch.set_num_threads(torch.get_num_threads())


def _run_second_phase(algorithm: GradSyncAlgorithm, task: BucketTask) -> None:
    if task.pending is not None:
        task.pending.wait()
    task.pending = algorithm.start_second_phase(task.bucket_index, task.bucket) if algorithm.is_two_phase else None


def _run_finish(algorithm: GradSyncAlgorithm, task: BucketTask) -> None:
    pending, task.pending = task.pending, None  # what has arrived may be waited for only once
    if pending is not None:
        pending.wait()
    algorithm.finish(task.bucket_index, task.bucket)


def _run_worker_thread(
    algorithm: GradSyncAlgorithm,
    phase: Callable[[GradSyncAlgorithm, BucketTask], None],
    source: TaskQueue,
    target: TaskQueue | None,
) -> None:
    """A thread that does a step with each parcel and hands it on. After an error nothing is sent any more: others would
    wait for another bucket."""
    _limit_thread_cores()
    failed: BaseException | None = None
    while isinstance(task := source.get(), BucketTask):
        failed = failed or task.error
        try:
            if failed is None:
                phase(algorithm, task)
        except BaseException as error:  # noqa: BLE001 - whatever it is, `wait_all` raises it
            failed = error
        task.error = failed
        if target is None:
            task.done.set()
        else:
            target.put(task)
        del task  # or the last one, with the model's gradients, would live as long as the thread
    if target is not None:
        target.put(task)
        return
    for last in task:
        with contextlib.suppress(RuntimeError):  # of a peer that is gone, which nobody waits for any more
            if last.pending is not None and last.error is None:
                last.pending.wait()
