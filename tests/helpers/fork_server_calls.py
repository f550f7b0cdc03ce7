"""What the tests of the fork server let it run, in processes of their own."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from phalanx.errors import DataError

HELPERS = Path(__file__).parent
WITHOUT_TORCH = f"{HELPERS / 'without_torch'}{os.pathsep}{HELPERS}"
"""PYTHONPATH of a fork server that has these calls and no torch."""
seen: list[Any] = []
held: list[Any] = []


def double(value: int) -> int:
    return 2 * value


def huge_bytes(size: int) -> int:
    """Bytes of this process in huge pages while it holds a tensor of `size` bytes."""
    import torch

    held = torch.ones(size // 4)
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    assert held[-1] == 1
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("AnonHugePages:"))


def remember(value: Any) -> list[Any]:
    seen.append(value)
    return seen


def keep(value: Any) -> None:
    held.append(value)


def kept(_: Any) -> list[Any]:
    return held


def refuse(text: str) -> None:
    raise DataError(text)


def fail(text: str) -> None:
    raise LookupError(text)


def fail_at_length(_: str) -> None:
    raise RuntimeError("CUDA error: it went wrong\nConsider this.\n\nCompile with that.\n")


def lose_gpu(_: str) -> None:
    """As torch's: no other way to make one than a GPU's failure."""
    raise RuntimeError("CUDA error: uncorrectable ECC error encountered\nSearch for more.\n")


def speak(path: str) -> None:
    print("into the log, or nowhere", flush=True)
    print("or there", file=sys.stderr)
    Path(path, "done").touch()


def read(path: str) -> None:
    Path(path).read_bytes()


def leave(code: int) -> None:
    sys.exit(code)


def vanish(code: int) -> None:
    os._exit(code)


def kill_fork_server(_: Any) -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    signal.pause()


def kill_oneself(number: int) -> None:
    os.kill(os.getpid(), number)


def write_rank_variables(path: str) -> None:
    """A worker that tells its place and leaves with its rank's number."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "PHALANX_ATTEMPT", "EXTRA")
    print("worker", os.environ["RANK"], "speaks")
    (Path(path) / os.environ["RANK"]).write_text(" ".join(os.environ[name] for name in names))
    sys.exit(10 + int(os.environ["RANK"]))


def wait_for_term_at(path: str) -> None:
    """A worker that lets SIGTERM through when the gate (a FIFO) is written to, and leaves with 75 if it came."""
    came: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    Path(os.environ["GATE"]).read_text()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    sys.exit(75 if came else 1)


def stay(_: str) -> None:
    """A worker that never ends."""
    while True:
        signal.pause()


def wait_for_ever(path: str) -> None:
    """A worker with a child of its own; both tell their process ids through FIFOs and never end."""
    name = "child" if os.fork() == 0 else "worker"
    (Path(path) / name).write_text(str(os.getpid()))
    while True:
        signal.pause()


def gone(folder: str) -> None:
    (Path(folder) / "gone").read_bytes()
