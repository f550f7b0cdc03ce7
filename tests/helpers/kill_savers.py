"""Kills children while they save, again and again, and looks at what they left. A process of its own, because it forks.

    kill_savers.py random DIRECTORY SEED COUNT     SIGKILL at random moments
    kill_savers.py calls DIRECTORY                SIGKILL before the 1st, 2nd, 3rd ... call that changes the file system

Each child saves a few steps in turn (so it also replaces checkpoints) and tells through a pipe what was
committed. After each kill the directory is cleaned and must hold only whole checkpoints, all committed ones among them.
"""

import os
import random
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable
from itertools import count as count_from
from pathlib import Path
from typing import Any

import torch

from phalanx.train.checkpoint.durable import DurableDirectory, apply_retention, clean_checkpoint_dir
from phalanx.train.checkpoint.format import list_checkpoints, parse_step, read_manifest
from phalanx.train.checkpoint.load import load_tensors, verify_checkpoint
from phalanx.train.checkpoint.save import CheckpointSaver
from phalanx.train.checkpoint.shard_file import TensorShard

SIZE = 200_000
CALLS = ("write", "fsync", "rename", "unlink", "rmdir", "mkdir")


def child(directory: Path, numbers: Iterable[int], tell: Callable[[int], None]) -> None:
    saver = CheckpointSaver(DurableDirectory(directory, 0, 1))
    for number in numbers:
        tensors = {"a": torch.full((SIZE,), float(number)), "b": torch.tensor(number)}
        saver.start(1 + number % 3, [TensorShard.full_tensor(*item) for item in tensors.items()], {"number": number})
        saver.wait_snapshot_copied()
        saver.poll_when_idle()
        assert saver.commit().path is not None
        tell(number)
    apply_retention(directory, keep=1)


def look(directory: Path, told: list[int], retained: bool) -> None:
    """Everything that is there is whole, and nothing that was committed is lost."""
    clean_checkpoint_dir(directory)
    numbers = {}
    for path in list_checkpoints(directory):
        verify_checkpoint(path)
        number = read_manifest(path).meta["number"]
        tensors = load_tensors(path)
        assert tensors["b"] == number, path
        assert torch.equal(tensors["a"], torch.full((SIZE,), float(number))), path
        numbers[parse_step(path)] = number
    left = {path.name for path in directory.glob("*")}
    assert left == {path.name for path in list_checkpoints(directory)}, left
    for number in told:
        step = 1 + number % 3
        assert (retained and step == 1) or numbers[step] >= number, (number, numbers)


def run(
    directory: Path, numbers: Iterable[int], die: Callable[[int], None], prepare: Callable[[], None]
) -> tuple[list[int], bool]:
    """Fork a child, let `die` end it, and return the numbers that it committed and whether it ended by itself."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        sink = os.fdopen(write, "w")
        prepare()
        child(directory, numbers, lambda number: print(number, file=sink, flush=True))
        os._exit(0)
    os.close(write)
    die(pid)
    status = os.waitpid(pid, 0)[1]
    with os.fdopen(read) as file:
        told = [int(line) for line in file if line.endswith("\n")]
    assert status in (0, signal.SIGKILL), f"the child failed: {status}"
    return told, status == 0


def at_random(directory: Path, seed: int, count: int) -> None:
    rng = random.Random(seed)
    committed = 0
    for _ in range(count):
        delay = rng.uniform(0.0, 0.25)

        def die(pid: int, delay: float = delay) -> None:
            end = time.monotonic() + delay
            while (left := end - time.monotonic()) > 0:
                select.select([], [], [], left)
            os.kill(pid, signal.SIGKILL)

        told, _ = run(directory, count_from(committed + 1), die, lambda: None)
        committed = max([committed, *told])
        look(directory, told, retained=False)
    assert committed > 0, "no child lived long enough to commit"


def at_each_call(directory: Path) -> None:
    limit, done = 0, False
    while not done:
        limit += 1

        def prepare(limit: int = limit) -> None:
            left = iter(range(limit))

            def wrapped(call: Callable[..., Any]) -> Callable[..., Any]:
                def counted(*args: Any, **kwargs: Any) -> Any:
                    if next(left, None) is None:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return call(*args, **kwargs)

                return counted

            for name in CALLS:
                setattr(os, name, wrapped(getattr(os, name)))

        # steps 1, 2 and again 1, which is replaced
        fresh = directory / str(limit)
        told, done = run(fresh, (0, 1, 3), lambda pid: None, prepare)
        look(fresh, told, retained=len(told) == 3)
    assert limit > 30, "the calls are not counted"


if __name__ == "__main__":
    torch.set_num_threads(1)  # OpenMP does not survive a fork
    place = Path(sys.argv[2])
    if sys.argv[1] == "random":
        at_random(place, int(sys.argv[3]), int(sys.argv[4]))
    else:
        at_each_call(place)
