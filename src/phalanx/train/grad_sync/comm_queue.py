"""Run the phases of an algorithm on the buckets while backward continues.

On a CPU separate threads send a bucket, run its second phase, and finish it. So backward does not wait for quantization
or sockets, and the progress of a bucket does not depend on when backward makes the next gradient. Each channel of an
algorithm has its own second-phase and finish threads. On a GPU the host does not wait for communication, and everything
after the first phase is enqueued after backward.
"""

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue

import torch

from phalanx.train.grad_sync.algorithms import DeferredWork, GradSyncAlgorithm, PendingWork, wait_for
from phalanx.train.grad_sync.buckets import Bucket


@dataclass
class BucketTask:
    """A bucket in flight. `done` is set when its sum is in it, or after an error."""

    bucket_index: int
    bucket: Bucket
    pending: PendingWork | None
    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None


TaskQueue = SimpleQueue[BucketTask | list[BucketTask]]
"""Tasks, and at the end a list of those still in flight."""


class CommQueue:
    """Call `submit` for every bucket of a step in order, then `wait_all`, which raises the errors of all threads."""

    def __init__(self, algorithm: GradSyncAlgorithm, use_threads: bool):
        self._algorithm = algorithm
        self._tasks: list[BucketTask] = []
        self._queues: list[TaskQueue] = []  # one per channel
        self._sender: ThreadPoolExecutor | None = None
        if use_threads and algorithm.is_two_phase:
            self._sender = ThreadPoolExecutor(1, thread_name_prefix="send", initializer=_limit_thread_cores)
            for _ in range(algorithm.num_channels):
                queue, second_phase_done = TaskQueue(), TaskQueue()
                # Daemon threads: a worker must be able to exit while they still wait for a lost peer.
                phases = (_run_second_phase, queue, second_phase_done), (_run_finish, second_phase_done, None)
                for arguments in ((algorithm, *phase) for phase in phases):
                    threading.Thread(target=_run_worker_thread, args=arguments, daemon=True, name="exchange").start()
                self._queues.append(queue)

    def submit(self, bucket_index: int, bucket: Bucket, fill_bucket: Callable[[Bucket], None] = lambda _: None) -> None:
        """Send a bucket, filled by `fill_bucket`. Until `wait_all` the bucket belongs to the queue."""

        def start() -> PendingWork | None:
            fill_bucket(bucket)
            return self._algorithm.start(bucket_index, bucket)

        if self._sender is None:
            pending = start()
        else:
            started = self._sender.submit(start)
            pending = DeferredWork(lambda: wait_for(started.result()))
        task = BucketTask(bucket_index, bucket, pending)
        self._tasks.append(task)
        if self._queues:
            self._queues[bucket_index % len(self._queues)].put(task)

    def wait_all(self) -> None:
        """Wait until every bucket holds its sum."""
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
        """Stop the threads without joining them, since a lost peer may block them. They wait for the tasks in flight:
        gloo's own thread would otherwise poll without pause for a message that is not received."""
        unfinished, self._tasks = self._tasks, []
        for channel, queue in enumerate(self._queues):
            queue.put([task for task in unfinished if task.bucket_index % len(self._queues) == channel])
        if self._sender is not None:
            self._sender.shutdown(wait=False)


def _limit_thread_cores() -> None:
    """Limit a new thread to torch's configured number of threads. Most operations do so automatically, but a matrix
    product as the first operation of a thread would use all cores of the machine."""
    torch.set_num_threads(torch.get_num_threads())


def _run_second_phase(algorithm: GradSyncAlgorithm, task: BucketTask) -> None:
    wait_for(task.pending)
    task.pending = algorithm.start_second_phase(task.bucket_index, task.bucket) if algorithm.is_two_phase else None


def _run_finish(algorithm: GradSyncAlgorithm, task: BucketTask) -> None:
    pending, task.pending = task.pending, None  # a completed operation may be waited for only once
    wait_for(pending)
    algorithm.finish(task.bucket_index, task.bucket)


def _run_worker_thread(
    algorithm: GradSyncAlgorithm,
    phase: Callable[[GradSyncAlgorithm, BucketTask], None],
    source: TaskQueue,
    target: TaskQueue | None,
) -> None:
    """Run `phase` on each task and pass the task on. After an error nothing more is sent, because the peers expect
    another bucket."""
    _limit_thread_cores()
    failed: BaseException | None = None
    while isinstance(task := source.get(), BucketTask):
        failed = failed or task.error
        try:
            if failed is None:
                phase(algorithm, task)
        except BaseException as error:  # noqa: BLE001 - `wait_all` raises it
            failed = error
        task.error = failed
        if target is None:
            task.done.set()
        else:
            target.put(task)
        del task  # otherwise the thread would keep the last bucket, and the model's gradients, alive
    if target is not None:
        target.put(task)
        return
    for last in task:
        with contextlib.suppress(RuntimeError):  # an error of a lost peer, for a result that is not needed any more
            if last.error is None:
                wait_for(last.pending)
