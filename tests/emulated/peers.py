"""Three emulated GPUs that talk over NCCL, one of which may fall: prints what each saw as one JSON object."""

import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import hostgpu
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _abort_process_group

GPUS = 3
TIMEOUT = 4.0
"""Seconds that a collective may take."""
FALLS = 1


def full(value: float, count: int = 6, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((count,), value, dtype=dtype, device="cuda")


def numbers(rank: int) -> dict[str, Any]:
    """Results of every kind of collective."""
    found: dict[str, Any] = {}
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8):
        x = full(rank + 1, dtype=dtype)
        dist.all_reduce(x)
        found[str(dtype)] = x.tolist()
    for name in ("AVG", "MAX", "MIN", "PRODUCT"):
        x = full(rank + 1)
        dist.all_reduce(x, op=getattr(dist.ReduceOp, name))
        found[name] = float(x[0])
    x = full(rank + 1)
    dist.reduce(x, 2)
    found["reduce"] = float(x[0])
    x = full(rank)
    dist.broadcast(x, 1)
    found["broadcast"] = float(x[0])
    gathered = torch.empty(GPUS * 2, device="cuda")
    dist.all_gather_into_tensor(gathered, full(rank, 2))
    found["gathered"] = gathered.tolist()
    part = torch.empty(2, device="cuda")
    dist.reduce_scatter_tensor(part, gathered + rank)
    found["scattered"] = part.tolist()
    swapped = torch.empty(GPUS, device="cuda")
    dist.all_to_all_single(swapped, torch.arange(3.0, device="cuda") + 10 * rank)
    found["swapped"] = swapped.tolist()
    came = torch.empty(2, device="cuda")
    asked = [
        dist.P2POp(dist.isend, full(rank, 2), (rank + 1) % GPUS),
        dist.P2POp(dist.irecv, came, (rank - 1) % GPUS),
    ]
    for work in dist.batch_isend_irecv(asked):
        work.wait()
    found["came"] = came.tolist()
    pair = dist.new_group([0, 2])  # all ranks split the communicator
    if rank != 1:
        x = full(rank + 1)
        dist.all_reduce(x, group=pair)
        found["pair"] = float(x[0])
    dist.destroy_process_group()
    return found


def asked_late(fall: signal.Signals) -> Callable[[int], dict[str, Any]]:
    """What the others see of a collective that the one that falls does not take part in: for how long it holds up the
    host, whether it ended (an error of the communicator ends it for torch), whether a wait for the GPU came through
    before an abort, and how soon by one."""

    def run(rank: int) -> dict[str, Any]:
        x = full(1)
        dist.all_reduce(x)
        torch.cuda.synchronize()
        if rank == FALLS:
            os.kill(os.getpid(), fall)
        begun = time.monotonic()
        asked = dist.all_reduce(x, async_op=True)
        assert asked is not None
        host = time.monotonic() - begun
        time.sleep(1)
        ended, waited = asked.is_completed(), []

        def wait() -> None:
            torch.cuda.synchronize()
            waited.append(time.monotonic())

        waiting = threading.Thread(target=wait)
        waiting.start()
        time.sleep(0.5)
        through = bool(waited)
        begun = time.monotonic()
        _abort_process_group()
        waiting.join()
        return {"host": host, "ended": ended, "through": through, "abort": waited[0] - begun}

    return run


def watched(rank: int) -> dict[str, Any]:
    """It waits; torch's watchdog ends the process."""
    x = full(1)
    dist.all_reduce(x)
    torch.cuda.synchronize()
    if rank == FALLS:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(x)
    torch.cuda.synchronize()
    return {}


CASES: dict[str, Callable[[int], dict[str, Any]]] = {
    "numbers": numbers,
    "killed": asked_late(signal.SIGKILL),
    "stopped": asked_late(signal.SIGSTOP),
    "watched": watched,
}


def worker(name: str, rank: int, folder: Path) -> None:
    torch.cuda.set_device(rank)
    hostgpu.install()
    dist.init_process_group(
        "cpu:gloo,cuda:nccl",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=GPUS,
        timeout=timedelta(seconds=TIMEOUT if name == "watched" else 60),
        device_id=torch.device("cuda", rank),
    )
    (folder / str(rank)).write_text(json.dumps(CASES[name](rank)))
    os._exit(0)


def main(name: str) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder, pids = Path(place), []
        for rank in range(GPUS):
            pids.append(os.fork())
            if not pids[-1]:
                try:
                    worker(name, rank, folder)
                finally:
                    os._exit(1)
        ends = {rank: os.waitpid(pid, 0)[1] for rank, pid in enumerate(pids) if rank != FALLS or name == "numbers"}
        if name != "numbers":
            os.kill(pids[FALLS], signal.SIGKILL)
        said = {rank: json.loads(text) if (text := _read(folder / str(rank))) else None for rank in ends}
        print(json.dumps([{"end": os.waitstatus_to_exitcode(ends[rank]), "said": said[rank]} for rank in ends]))


def _read(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


if __name__ == "__main__":
    main(sys.argv[1])
