"""Processes that form gloo worlds and run functions of a test file there.

    def case(rank: int, world: int, *, size: int) -> float: ...

    def test_something(world: World) -> None:
        first, second = world.run(2, case, size=3)

Processes start when they are first needed and live as long as the test file; each case has a gloo world of its own.
"""

import contextlib
import multiprocessing
import os
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any


class CaseFailure(str):
    """The traceback of a case."""


def start_forkserver() -> ForkServerContext:
    """Starts processes from one that has imported what takes long, once for all files: all that a worker needs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["phalanx.train.worker", "pytest"])
    return context


def run_cases(rank: int, orders: Connection) -> None:
    """A process: does what it is told until it is told nothing more. A warning is an error, as in pytest."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    warnings.simplefilter("error")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    while (order := orders.recv()) is not None:
        meeting, world, case, arguments = order
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
        dist.barrier()  # a case that sends nothing may end while others are still connecting to this rank
        try:
            orders.send(case(rank, world, **arguments))
        except Exception:  # noqa: BLE001 the test shows it
            orders.send(CaseFailure(traceback.format_exc()))
        dist.destroy_process_group()


class ProcessWorlds:
    """The processes, waiting for orders."""

    def __init__(self, folder: Path):
        self._folder, self._count = folder, 0
        self._found: dict[str, list[Any]] = {}
        self._processes: list[tuple[ForkServerProcess, Connection]] = []

    def run(self, size: int, case: Callable[..., Any], /, **arguments: Any) -> list[Any]:
        """What `case(rank, world, **arguments)` returns on each rank of a new world of `size`. AssertionError with the
        traceback where it raises."""
        while len(self._processes) < size:
            self._start_one()
        self._count += 1
        pipes = [pipe for _, pipe in self._processes[:size]]
        for pipe in pipes:
            pipe.send((self._folder / f"meeting-{self._count}", size, case, arguments))
        try:
            results = [pipe.recv() for pipe in pipes]
        except BaseException:  # of what is left in the pipes the next case would know nothing, and wait
            self._kill()
            raise
        failures = [result for result in results if isinstance(result, CaseFailure)]
        assert not failures, failures[0]
        return results

    def run_once(self, size: int, case: Callable[..., Any], /, **arguments: Any) -> list[Any]:
        """As `run`; what several tests look at is computed once."""
        key = repr((size, case.__name__, sorted(arguments.items())))
        if key not in self._found:
            self._found[key] = self.run(size, case, **arguments)
        return self._found[key]

    def close(self) -> None:
        for _, pipe in self._processes:
            with contextlib.suppress(BrokenPipeError):  # it died, and a test has told
                pipe.send(None)
        for process, _ in self._processes:
            process.join()

    def _kill(self) -> None:
        for process, _ in self._processes:
            process.kill()
            process.join()
        self._processes = []

    def _start_one(self) -> None:
        context = start_forkserver()
        near, far = context.Pipe()
        process = context.Process(target=run_cases, args=(len(self._processes), far), daemon=True)
        process.start()
        far.close()
        self._processes.append((process, near))
