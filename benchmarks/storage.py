"""Checkpoints to and from an S3 store on this machine: how fast, next to the server's own limit.

    python benchmarks/storage.py                  # a Ceph gateway on loop-back, 512 MB, three rounds: a few minutes
    python benchmarks/storage.py --link 1gbit     # loop-back limited by tc, in a network namespace; needs root
    ... --out docs/benchmarks/storage.md          # with --link, the table is added to the file

Rows, which take turns in each round; medians are shown:

    server         objects of 16 MiB by obstore, 8 at once: the limit of this server and client
    phalanx        a checkpoint of one rank to the store, then read back and verified
    again          a save of which nothing changed, and one of which 1 % of the tensors changed
    peers          torch.distributed.checkpoint through fsspec and s3fs; torch.save and torch.load through s3fs;
                   tensorstore, in which Orbax writes arrays. Those that are installed: `pip install s3fs tensorstore`

Client and server share the cores, so figures are below those of a store of its own. Nothing is asserted. Peers neither
verify what they read nor know what is stored already.
"""

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from importlib import import_module
from pathlib import Path
from typing import Any

import obstore
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

from ceph_cluster import ceph_cluster
from phalanx.run import Run
from phalanx.storage.store import make_client
from phalanx.storage.url import parse_url
from phalanx.train.checkpoint.checkpoint_store import BLOCK_BYTES, PARALLEL_BLOCKS, CheckpointStore, StoreDestination
from phalanx.train.checkpoint.save import CheckpointSaver
from phalanx.train.checkpoint.shard_file import TensorShard
from phalanx.train.checkpoint.store_fetch import StoreSource
from phalanx.train.distributed.environment import DistEnv

BUCKET = "checkpoints"
TENSOR_BYTES = 4 << 20
State = dict[str, torch.Tensor]


def make_state(nbytes: int, seed: int) -> State:
    """Tensors of random bytes: they neither compress nor repeat."""
    generator = torch.Generator().manual_seed(seed)
    count = nbytes // TENSOR_BYTES
    return {f"layers.{number}.weight": torch.randn(TENSOR_BYTES // 4, generator=generator) for number in range(count)}


class ServerLimit:
    """Objects as large as our blocks, as many at once."""

    def __init__(self, nbytes: int):
        self._client = make_client(parse_url(f"s3://{BUCKET}"))
        self._keys = [f"limit/{number}" for number in range(nbytes // BLOCK_BYTES)]
        self._blocks = [os.urandom(BLOCK_BYTES) for _ in self._keys[:PARALLEL_BLOCKS]]

    def save(self, _: State, step: int) -> None:
        self._run(lambda number: obstore.put(self._client, self._keys[number], self._blocks[number % PARALLEL_BLOCKS]))

    def load(self, _: int) -> None:
        self._run(lambda number: obstore.get(self._client, self._keys[number]).bytes())

    def _run(self, request: Callable[[int], object]) -> None:
        with ThreadPoolExecutor(PARALLEL_BLOCKS) as pool:
            list(pool.map(request, range(len(self._keys))))


class Phalanx:
    """Saves of one rank to a store, and the restore into a run directory."""

    def __init__(self, directory: Path):
        self._run = Run(directory)
        self._run.create()
        self._url = f"s3://{BUCKET}/run"
        self._saver = CheckpointSaver(StoreDestination(CheckpointStore(self._url), 0, 1, 0, keep=1))

    def save(self, state: State, step: int) -> None:
        shards = [TensorShard(name, tensor, tuple(tensor.shape), (0,)) for name, tensor in state.items()]
        self._saver.start(step, shards, {"step": step})
        self._saver.wait_snapshot_copied()
        self._saver.poll_when_idle()
        status = self._saver.commit()
        assert status.path is not None, status.reason
        self._saver.cancel()

    def load(self, step: int) -> None:
        bad = StoreSource(self._run, DistEnv(), self._url).fetch(step)
        assert bad == [], bad


class DcpWithFsspec:
    """torch.distributed.checkpoint through fsspec, one rank."""

    def __init__(self, _: Path):
        self._url = f"s3://{BUCKET}/dcp"
        self._options = {"endpoint_url": os.environ["AWS_ENDPOINT_URL"]}
        require_modules("s3fs")

    def save(self, state: State, step: int) -> None:
        writer = FsspecWriter(f"{self._url}/{step}", thread_count=PARALLEL_BLOCKS, overwrite=True, **self._options)
        dcp.save(state, storage_writer=writer, no_dist=True)

    def load(self, step: int) -> None:
        reader = FsspecReader(f"{self._url}/{step}", **self._options)
        size = (TENSOR_BYTES // 4,)
        names = reader.read_metadata().state_dict_metadata
        dcp.load({name: torch.empty(size) for name in names}, storage_reader=reader, no_dist=True)


class TorchSave:
    """torch.save and torch.load through s3fs."""

    def __init__(self, _: Path):
        require_modules("s3fs")
        self._files = import_module("s3fs").S3FileSystem(endpoint_url=os.environ["AWS_ENDPOINT_URL"])

    def save(self, state: State, step: int) -> None:
        with self._files.open(f"{BUCKET}/torch/{step}.pt", "wb") as file:
            torch.save(state, file)

    def load(self, step: int) -> None:
        with self._files.open(f"{BUCKET}/torch/{step}.pt", "rb", block_size=BLOCK_BYTES) as file:
            torch.load(file)


class Tensorstore:
    """An array for each tensor, all at once, as Orbax writes them."""

    def __init__(self, _: Path):
        require_modules("tensorstore")
        self._tensorstore = import_module("tensorstore")

    def _open(self, name: str, step: int, **options: object) -> Any:
        store = {"driver": "s3", "bucket": BUCKET, "path": f"tensorstore/{step}/{name}/", "aws_region": "default"}
        store |= {"endpoint": os.environ["AWS_ENDPOINT_URL"], "use_conditional_write": False}
        return self._tensorstore.open({"driver": "zarr3", "kvstore": store}, **options)

    def save(self, state: State, step: int) -> None:
        arrays = {name: tensor.numpy() for name, tensor in state.items()}
        opened = [
            self._open(name, step, create=True, dtype=array.dtype, shape=array.shape) for name, array in arrays.items()
        ]
        writes = [each.result().write(array) for each, array in zip(opened, arrays.values(), strict=True)]
        for write in writes:
            write.result()
        self._names = list(arrays)

    def load(self, step: int) -> None:
        opened = [self._open(name, step) for name in self._names]
        for read in [each.result().read() for each in opened]:
            read.result()


PEERS = {
    "DCP, fsspec and s3fs": DcpWithFsspec,
    "torch.save, s3fs": TorchSave,
    "tensorstore (Orbax)": Tensorstore,
}


def require_modules(*names: str) -> None:
    """Raise ImportError where a peer's modules are not installed."""
    for name in names:
        import_module(name)


def make_peers(directory: Path) -> dict[str, Any]:
    """The peers that are installed."""
    peers = {}
    for name, peer in PEERS.items():
        try:
            peers[name] = peer(directory)
        except ImportError as error:
            print(f"SKIPPED {name}: {error}")
    return peers


def timed(act: Callable[..., object], *arguments: object) -> float:
    began = time.perf_counter()
    act(*arguments)
    return time.perf_counter() - began


def measure(directory: Path, nbytes: int, rounds: int) -> list[tuple[str, str, str]]:
    """The rows of the table: method, save and load in GB/s."""
    methods = {"server's limit": ServerLimit(nbytes), "phalanx": Phalanx(directory / "run"), **make_peers(directory)}
    saves: dict[str, list[float]] = {name: [] for name in methods}
    loads: dict[str, list[float]] = {name: [] for name in methods}
    again: dict[str, list[float]] = {"nothing changed": [], "1 % changed": []}
    for number in range(rounds):
        state = make_state(nbytes, number)
        step = 100 * (number + 1)
        for name, method in methods.items():
            saves[name].append(timed(method.save, state, step))
            loads[name].append(timed(method.load, step))
        ours = methods["phalanx"]
        again["nothing changed"].append(timed(ours.save, state, step + 1))
        for tensor in list(state.values())[: max(len(state) // 100, 1)]:
            tensor.add_(1)
        again["1 % changed"].append(timed(ours.save, state, step + 2))

    def rate(seconds: list[float]) -> str:
        return f"{nbytes / statistics.median(seconds) / 1e9:.2f}"

    rows = [(name, rate(saves[name]), rate(loads[name])) for name in methods]
    return rows + [(f"phalanx, {name}", rate(seconds), "") for name, seconds in again.items()]


def limit_loopback(rate: str) -> None:
    """Give this process a network namespace of its own, with a loop-back of this rate. The gateway and its OSD use it,
    too."""
    if "LIMITED_LINK" not in os.environ:
        os.environ["LIMITED_LINK"] = rate
        os.execvp("unshare", ["unshare", "--net", sys.executable, *sys.argv])
    for command in ("ip link set lo up", f"tc qdisc add dev lo root tbf rate {rate} burst 256kb latency 100ms"):
        subprocess.run(command.split(), check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--link", help="rate of loop-back as `tc` has it, such as 1gbit")
    options = parser.parse_args()
    if options.link is not None:
        limit_loopback(options.link)
    nbytes = options.megabytes * 1_000_000 // BLOCK_BYTES * BLOCK_BYTES
    with tempfile.TemporaryDirectory() as name, ceph_cluster(Path(name)) as ceph:
        os.environ.update(ceph.environment)
        ceph.make_bucket(BUCKET)
        rows = measure(Path(name), nbytes, options.rounds)
    lines = [
        "# Checkpoints in an object store" if options.link is None else f"## Over a link of {options.link}",
        "",
        f"`python benchmarks/storage.py --megabytes {options.megabytes} --rounds {options.rounds}` on {date.today()}: "
        f"{os.cpu_count()} cores ({platform.processor() or platform.machine()}), torch {torch.__version__}. "
        "Ceph's RADOS gateway 16.2 with one OSD on the same machine, over loop-back"
        f"{'' if options.link is None else f' of {options.link}, which gateway and OSD share'}; one rank; medians.",
        "",
        "| method | save, GB/s | load, GB/s |",
        "|---|---:|---:|",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
        "Client and server share the cores. s3torchconnector 1.5 is no row: it cannot write to this gateway "
        '("Header ETag not found" at the end of an upload). Peers do not verify what they read.',
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.out is not None:
        before = "" if options.link is None else options.out.read_text() + "\n"
        options.out.write_text(before + text)


if __name__ == "__main__":
    main()
