"""The stall of a save, what a save costs training meanwhile, and how fast a checkpoint is read.

    python benchmarks/checkpoint.py                         # 0.25 and 1 GB, a few minutes
    python benchmarks/checkpoint.py --quick                 # 0.25 GB, under a minute
    python benchmarks/checkpoint.py --out docs/benchmarks/checkpoint.md

Peers: `torch.save` with fsync, torch's distributed checkpoint (DCP), and DCP's `async_save`, in a gloo world of one
process. All methods save the same parameters and AdamW state, take turns within each repeat, and medians are shown. A
training loop (fp32 MLP, fused AdamW, all cores) runs beside the saves. Nothing is asserted.
"""

import argparse
import os
import platform
import shutil
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from phalanx.train.checkpoint.durable import DurableDirectory
from phalanx.train.checkpoint.format import read_manifest
from phalanx.train.checkpoint.load import load_blocks
from phalanx.train.checkpoint.save import CheckpointSaver
from phalanx.train.checkpoint.shard_file import TensorShard

LAYER_WIDTH = 2048
BATCH_ROWS = 256
State = dict[str, torch.Tensor]


class Training:
    """An MLP whose parameters and AdamW state are about `nbytes`."""

    def __init__(self, nbytes: float):
        layers = max(1, round(nbytes / (12 * LAYER_WIDTH * LAYER_WIDTH)))
        torch.manual_seed(0)
        self.model = nn.Sequential(
            *(nn.Sequential(nn.Linear(LAYER_WIDTH, LAYER_WIDTH, bias=False), nn.ReLU()) for _ in range(layers))
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.x = torch.randn(BATCH_ROWS, LAYER_WIDTH)
        self.step(lambda: None)

    def step(self, before_optimizer: Callable[[], object]) -> float:
        """One training step; its seconds."""
        began = time.perf_counter()
        self.model(self.x).square().mean().backward()
        before_optimizer()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - began

    def state(self) -> State:
        tensors = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            tensors |= {f"optimizer/{name}/{key}": value for key, value in self.optimizer.state[parameter].items()}
        return tensors


class BlockingSave:
    """A method that stops training until the checkpoint is on disk."""

    def __init__(self, save: Callable[[Path, State], object]):
        self._save = save

    def start(self, folder: Path, state: State) -> None:
        self._save(folder, state)

    def before_optimizer(self) -> None:
        pass

    def done(self) -> bool:
        return True


def torch_save(folder: Path, state: State) -> None:
    folder.mkdir()
    with open(folder / "all.pt", "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def dcp_save(folder: Path, state: State) -> None:
    dcp.save(dict(state), storage_writer=dcp.FileSystemWriter(folder), no_dist=False)


class DcpAsync:
    """`dcp.async_save`: it copies in the caller, then writes in a thread."""

    def __init__(self) -> None:
        self._future: Future[Any] | None = None

    def start(self, folder: Path, state: State) -> None:
        self._future = dcp.async_save(dict(state), storage_writer=dcp.FileSystemWriter(folder))  # type: ignore[assignment]

    def before_optimizer(self) -> None:
        pass

    def done(self) -> bool:
        assert self._future is not None
        if self._future.done():
            self._future.result()
        return self._future.done()


class PhalanxSaver:
    """Ours: copied during the next forward and backward, written and committed in the background."""

    def __init__(self) -> None:
        self._savers: dict[Path, CheckpointSaver] = {}
        self._step = 0

    def start(self, folder: Path, state: State) -> None:
        self._saver = self._savers.setdefault(folder.parent, CheckpointSaver(DurableDirectory(folder.parent, 0, 1)))
        self._step += 1
        self._saver.start(self._step, [TensorShard.full_tensor(*item) for item in state.items()], {"samples": 0})

    def before_optimizer(self) -> None:
        self._saver.wait_snapshot_copied()

    def done(self) -> bool:
        state = self._saver.poll()
        if state.phase == "written":
            self._saver.commit_async()
        assert state.phase != "failed", state.reason
        return state.phase == "committed"

    def blocking(self, folder: Path, state: State) -> None:
        self.start(folder, state)
        self._saver.poll_when_idle()
        committed = self._saver.commit()
        assert committed.path is not None, committed.reason


def measure_time(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


@contextmanager
def create_empty_dir(root: Path) -> Iterator[Path]:
    """A place to save to; what was written is gone afterwards, and the disk at rest."""
    yield root / "checkpoint"
    for path in root.iterdir():
        shutil.rmtree(path)
    os.sync()


def blocking_saves(state: State, root: Path, repeats: int) -> dict[str, float]:
    """Median seconds in which each method blocks and writes the same state."""
    methods: dict[str, Callable[[Path, State], object]] = {
        "torch.save + fsync": torch_save,
        "DCP save": dcp_save,
        "Phalanx, blocking": PhalanxSaver().blocking,
    }
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for repeat in range(repeats + 1):
        for name, save in methods.items():
            with create_empty_dir(root) as folder:
                took = measure_time(partial(save, folder, state))
            if repeat:  # the first round warms up
                seconds[name].append(took)
    return {name: statistics.median(values) for name, values in seconds.items()}


def measure_saves_during_training(training: Training, root: Path, repeats: int) -> dict[str, list[float]]:
    """For each method the medians of: seconds that training stood still; seconds until the checkpoint stood; step time
    meanwhile over step time alone; seconds that training lost in all."""
    methods: dict[str, Any] = {
        "torch.save + fsync": BlockingSave(torch_save),
        "DCP save": BlockingSave(dcp_save),
        "DCP async_save": DcpAsync(),
        "Phalanx": PhalanxSaver(),
    }
    rows: dict[str, list[tuple[float, ...]]] = {name: [] for name in methods}
    for repeat in range(repeats + 1):
        for name, method in methods.items():
            alone = statistics.median(training.step(lambda: None) for _ in range(5))
            with create_empty_dir(root) as folder:
                row = save_once(method, training, folder, alone)
            if repeat:
                rows[name].append(row)
    return {name: [statistics.median(column) for column in zip(*values, strict=True)] for name, values in rows.items()}


def save_once(method: Any, training: Training, folder: Path, alone: float) -> tuple[float, ...]:
    """Save while training goes on. `alone` is the time of an undisturbed step."""
    waits: list[float] = []

    def wait() -> None:
        waits.append(measure_time(method.before_optimizer))

    began = time.perf_counter()
    waits.append(measure_time(partial(method.start, folder, training.state())))
    steps = 0
    while steps == 0 or not method.done():
        training.step(wait)
        steps += 1
    total, stall = time.perf_counter() - began, sum(waits)
    return stall, total, (total - stall) / steps / alone, total - steps * alone


def plain_read(file: Path, targets: list[tuple[int, memoryview]], threads: int, block: int) -> None:
    """As fast as this machine reads the file into the same tensors: `targets` are (position in the file, memory)."""

    def part(number: int) -> None:
        with open(file, "rb", buffering=0) as opened:
            for position, memory in targets[number::threads]:
                for start in range(0, len(memory), block):
                    os.preadv(opened.fileno(), [memory[start : start + block]], position + start)

    workers = [threading.Thread(target=part, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def drop_cache(folder: Path) -> None:
    """Without root: ask the kernel to forget these files' pages."""
    for file in folder.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def measure_loads(state: State, root: Path, repeats: int, threads: int) -> dict[str, dict[str, float]]:
    """Median seconds to read the state into tensors that exist already, from the page cache and from the disk."""
    torch_save(root / "torch", state)
    dcp_save(root / "dcp", state)
    PhalanxSaver().blocking(root / "checkpoint", state)
    (ours,) = root.glob("step-*")
    data = ours / "rank-00000.safetensors"
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    blocks = [(name, (0,) * tensor.dim(), tensor) for name, tensor in into.items()]
    tensors = read_manifest(ours).tensors
    targets = [
        (tensors[name].pieces[0].bytes[0], memoryview(tensor.view(-1).numpy()).cast("B"))
        for name, tensor in into.items()
    ]

    def torch_load() -> None:
        for name, tensor in torch.load(root / "torch" / "all.pt", weights_only=True).items():
            into[name].copy_(tensor)

    methods: dict[str, tuple[Callable[[], object], Path]] = {
        f"plain read, {threads} threads, 1 MiB": (lambda: plain_read(data, targets, threads, 1 << 20), ours),
        f"plain read, {threads} threads, 8 MiB": (lambda: plain_read(data, targets, threads, 8 << 20), ours),
        "Phalanx, every byte verified": (lambda: load_blocks(ours, blocks, read_manifest(ours)), ours),
        "torch.load (not verified)": (torch_load, root / "torch"),
        "DCP load (not verified)": (lambda: dcp.load(dict(into), checkpoint_id=root / "dcp"), root / "dcp"),
    }
    seconds: dict[str, dict[str, list[float]]] = {name: {"warm": [], "cold": []} for name in methods}
    for repeat in range(repeats + 1):
        for name, (read, folder) in methods.items():
            drop_cache(folder)
            cold = measure_time(read)
            read()
            warm = measure_time(read)
            if repeat:
                seconds[name]["cold"].append(cold)
                seconds[name]["warm"].append(warm)
    shutil.rmtree(root)
    root.mkdir()
    return {name: {cache: statistics.median(v) for cache, v in both.items()} for name, both in seconds.items()}


def measure(gigabytes: float, root: Path, repeats: int, threads: int) -> list[str]:
    """The tables for one size, as lines of Markdown."""
    training = Training(gigabytes * 1e9)
    state = training.state()
    nbytes = sum(tensor.nbytes for tensor in state.values())
    blocking = blocking_saves(state, root, repeats)
    own = blocking["Phalanx, blocking"]
    lines = [f"## {nbytes / 1e9:.2f} GB of parameters and AdamW state ({len(state)} tensors)", ""]
    lines += ["| save, nothing else running | seconds | GB/s |", "|---|---|---|"]
    lines += [f"| {name} | {s:.3f} | {nbytes / 1e9 / s:.2f} |" for name, s in blocking.items()]
    lines += ["", "| save during training | stall, s | of our blocking save | on disk after, s "]
    lines[-1] += "| step meanwhile / alone | training lost, s |"
    lines += ["|---|---|---|---|---|---|"]
    for name, (stall, total, slower, lost) in measure_saves_during_training(training, root, repeats).items():
        lines.append(f"| {name} | {stall:.4f} | {stall / own:.1%} | {total:.2f} | {slower:.2f} | {lost:.3f} |")
    lines += ["", "| load into existing tensors | page cache, GB/s | of plain read | from disk, GB/s | of plain read |"]
    lines += ["|---|---|---|---|---|"]
    read = measure_loads(state, root, repeats, threads)
    best = {cache: min(s[cache] for name, s in read.items() if name.startswith("plain")) for cache in ("warm", "cold")}
    for name, s in read.items():
        columns = (f"{nbytes / 1e9 / s[cache]:.2f} | {best[cache] / s[cache]:.0%}" for cache in ("warm", "cold"))
        lines.append(f"| {name} | {' | '.join(columns)} |")
    return [*lines, ""]


def describe_machine() -> str:
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    name = models[0].split(":")[1].strip() if models else platform.machine()
    return f"{name}, {os.cpu_count()} cores; Python {platform.python_version()}, torch {torch.__version__}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one size, fewer repeats")
    parser.add_argument("--sizes", type=float, nargs="+", default=None, metavar="GB", help="default: 0.25 1")
    parser.add_argument("--repeats", type=int, default=None, help="default: 7, quick: 3")
    parser.add_argument("--threads", type=int, default=2, help="threads that read (default: 2)")
    parser.add_argument("--folder", type=Path, default=None, help="where to write (default: a temporary directory)")
    parser.add_argument("--out", type=Path, default=None, help="write the tables to this Markdown file, too")
    arguments = parser.parse_args()
    sizes = arguments.sizes or ([0.25] if arguments.quick else [0.25, 1.0])
    repeats = arguments.repeats or (3 if arguments.quick else 7)
    # torch's own: DCP warns about its own use of deprecated storage names
    warnings.filterwarnings("ignore", module="torch")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    lines = [
        "# Checkpoints: stall of a save, and speed of loading",
        "",
        f"`python benchmarks/checkpoint.py {' '.join(sys.argv[1:])}`".replace(" `", "`"),
        "",
        f"{time.strftime('%Y-%m-%d')}; {describe_machine()}. Medians of {repeats} interleaved repeats. *Stall*: time "
        f"for "
        "which the training thread waits for the save. *Training lost*: time of all steps until the checkpoint was "
        "complete, less that of as many undisturbed steps. *Page cache*: read just before; *from disk*: after "
        "POSIX_FADV_DONTNEED (a virtual machine's host may still hold the bytes). Plain read is the faster of the two.",
        "",
    ]
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for size in sizes:
            lines += measure(size, Path(folder), repeats, arguments.threads)
    dist.destroy_process_group()
    print("\n".join(lines))
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text("\n".join(lines).rstrip() + "\n")


if __name__ == "__main__":
    main()
