"""How fast is the reader alone? Tokens/s of Phalanx on one core beside a plain loop, torch's DataLoader and litdata.

    python benchmarks/data.py [--out docs/benchmarks/data.md] [--megabytes 256] [--rounds 7]

Everyone reads random windows of the same bytes-as-tokens file and gives int64 torch tensors `tokens` and `targets`
of the same shape. All run on one core, in turns within each round, so that a disturbance meets them alike; the table
has the medians. Every loop runs over warm pages, and Phalanx's blocks have had their checksums compared beforehand, as
they have after a run's first epoch; what that first time costs stands in a row of its own.

litdata and mosaicml-streaming are measured where they are installed; otherwise the table says that they are missing.
"""

import argparse
import gc
import importlib.metadata
import itertools
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from phalanx.data import Prefetcher, RankBatch, RunData, open_data, prepare_source
from phalanx.recipe import data_schema

SEQUENCES = (256, 2048)
BATCH = 16
Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]


def as_tensors(batch: dict[str, np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(batch["tokens"]), torch.from_numpy(batch["targets"])


def phalanx_reader(data: RunData) -> Batches:
    for step in itertools.count():
        yield as_tensors(data.read_training(step * BATCH, BATCH))


def phalanx_feed(data: RunData) -> Batches:
    with Prefetcher(data, RankBatch(BATCH, BATCH), samples_consumed=0) as feed:
        for step in feed:
            yield as_tensors(step[0])


def plain_loop(tokens: np.ndarray, sequence: int) -> Batches:
    """The loop that small training scripts have (after nanoGPT's get_batch)."""
    random = np.random.default_rng(0)
    while True:
        starts = random.integers(0, len(tokens) - sequence - 1, BATCH)
        x = np.stack([tokens[i : i + sequence].astype(np.int64) for i in starts])
        y = np.stack([tokens[i + 1 : i + 1 + sequence].astype(np.int64) for i in starts])
        yield torch.from_numpy(x), torch.from_numpy(y)


class Windows(Dataset):
    """The usual map-style dataset over a memmap."""

    def __init__(self, tokens: np.ndarray, sequence: int):
        self.tokens, self.sequence = tokens, sequence

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.sequence

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = number * self.sequence
        window = torch.from_numpy(self.tokens[start : start + self.sequence + 1].astype(np.int64))
        return window[:-1], window[1:]


def torch_loader(tokens: np.ndarray, sequence: int, workers: int) -> Batches:
    windows = Windows(tokens, sequence)
    while True:
        yield from DataLoader(windows, BATCH, shuffle=True, num_workers=workers, drop_last=True)


def litdata_loader(tokens: np.ndarray, sequence: int, folder: Path) -> Batches:
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader
    from litdata.streaming.cache import Cache

    if not folder.exists():
        folder.mkdir()
        cache = Cache(str(folder), chunk_size=1 << 22, item_loader=TokensLoader(block_size=sequence + 1))
        for number, start in enumerate(range(0, len(tokens), 1 << 20)):
            cache[number] = torch.from_numpy(np.array(tokens[start : start + (1 << 20)]))
        cache.done()
        cache.merge()
    dataset = StreamingDataset(
        str(folder), item_loader=TokensLoader(block_size=sequence + 1), shuffle=True, drop_last=True
    )
    while True:
        for window in StreamingDataLoader(dataset, batch_size=BATCH, num_workers=0):
            window = window.long()
            yield window[:, :-1].contiguous(), window[:, 1:].contiguous()


def mosaic_loader(tokens: np.ndarray, sequence: int, folder: Path) -> Batches:
    from streaming import MDSWriter, StreamingDataset

    if not folder.exists():
        with MDSWriter(out=str(folder), columns={"tokens": "bytes"}) as writer:
            for start in range(0, len(tokens) - sequence, sequence):
                writer.write({"tokens": tokens[start : start + sequence + 1].tobytes()})
    dataset = StreamingDataset(local=str(folder), shuffle=True, batch_size=BATCH)
    width = tokens.dtype

    def collate(samples: list[dict[str, bytes]]) -> tuple[torch.Tensor, torch.Tensor]:
        window = torch.from_numpy(np.stack([np.frombuffer(s["tokens"], width).astype(np.int64) for s in samples]))
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()

    while True:
        yield from DataLoader(dataset, BATCH, collate_fn=collate, drop_last=True)


def rate(batches: Batches, sequence: int, seconds: float) -> float:
    """Tokens/s over about `seconds`."""
    tokens, targets = next(batches)
    assert tokens.shape == targets.shape == (BATCH, sequence)
    assert tokens.dtype == targets.dtype == torch.int64
    return rate_of_batches(batches, BATCH * sequence, seconds)


def rate_of_batches(
    batches: Iterator[object], size: int, seconds: float, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Values/s of batches of `size` values over about `seconds`; the first 20 do not count."""
    for _ in range(20):
        next(batches)
    count = 0
    begun = clock()
    while (passed := clock() - begun) < seconds:
        for _ in range(20):
            next(batches)
        count += 20 * size
    return count / passed


def make_dataset(folder: Path, megabytes: int) -> Path:
    """Random printable bytes as one text file, prepared with the byte tokenizer."""
    random = np.random.default_rng(0)
    with open(folder / "text.txt", "wb") as file:
        for _ in range(megabytes):
            lines = random.integers(32, 127, 1 << 20, dtype=np.uint8)
            lines[::64] = 10
            file.write(lines.tobytes())
    source = data_schema.DataSource(text="text.txt")
    return prepare_source(source, data_schema.DataConfig(), folder, folder / "dataset")


def open_at(dataset: Path, sequence: int) -> RunData:
    data = data_schema.DataConfig(source=data_schema.DataSource(prepared=str(dataset)), seq_len=sequence)
    return open_data(data, data_schema.EvaluationConfig(), 0)


def first_epoch(data: RunData, sequence: int) -> float:
    """Tokens/s of an epoch during which every block is compared with its checksum."""
    begun = time.perf_counter()
    for start in range(0, data.num_train_samples - BATCH + 1, BATCH):
        data.read_training(start, BATCH)
    return data.num_train_samples * sequence / (time.perf_counter() - begun)


def contestants(dataset: Path, folder: Path, sequence: int, data: RunData) -> dict[str, Callable[[], Batches]]:
    tokens = np.memmap(folder / "text.txt", np.uint8, mode="r")
    every: dict[str, Callable[[], Batches]] = {
        "phalanx, reader": lambda: phalanx_reader(data),
        "phalanx, Prefetcher": lambda: phalanx_feed(data),
        "plain numpy memmap loop": lambda: plain_loop(tokens, sequence),
        "torch DataLoader, 0 workers": lambda: torch_loader(tokens, sequence, 0),
        "torch DataLoader, 1 worker": lambda: torch_loader(tokens, sequence, 1),
    }
    if installed("litdata"):
        every["litdata"] = lambda: litdata_loader(tokens, sequence, folder / f"litdata-{sequence}")
    if installed("mosaicml-streaming"):
        every["mosaicml-streaming"] = lambda: mosaic_loader(tokens, sequence, folder / f"mosaic-{sequence}")
    return every


def installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def measure(folder: Path, megabytes: int, rounds: int, seconds: float) -> dict[int, dict[str, list[float]]]:
    """Tokens/s by sequence and contestant, one number a round."""
    dataset = make_dataset(folder, megabytes)
    rates: dict[int, dict[str, list[float]]] = {}
    for sequence in SEQUENCES:
        data = open_at(dataset, sequence)
        first = [first_epoch(data, sequence)]
        every = contestants(dataset, folder, sequence, data)
        found: dict[str, list[float]] = {name: [] for name in every}
        for _ in range(rounds):
            first.append(first_epoch(open_at(dataset, sequence), sequence))
            for name, start in every.items():
                batches = start()
                found[name].append(rate(batches, sequence, seconds))
                del batches
                gc.collect()
        rates[sequence] = {**found, "phalanx, reader, first epoch (compares checksums)": first[1:]}
    return rates


def table(rates: dict[int, dict[str, list[float]]], megabytes: int, rounds: int) -> str:
    """The results as Markdown."""
    medians = {s: {name: statistics.median(values) for name, values in found.items()} for s, found in rates.items()}
    head = "".join(f" {s}: M tokens/s | of plain |" for s in SEQUENCES)
    lines = [f"| reader |{head}", "|---|" + "---:|---:|" * len(SEQUENCES)]
    for name in medians[SEQUENCES[0]]:
        cells = (
            f" {medians[s][name] / 1e6:.1f} | {medians[s][name] / medians[s]['plain numpy memmap loop']:.2f} |"
            for s in SEQUENCES
        )
        lines.append(f"| {name} |" + "".join(cells))
    missing = [package for package in ("litdata", "mosaicml-streaming") if not installed(package)]
    versions = ", ".join(
        f"{name} {version}"
        for name in ("torch", "numpy", "litdata", "mosaicml-streaming")
        if (version := installed(name))
    )
    notes = [
        "# Data: tokens/s of the reader alone",
        "",
        f"{date.today()}, {cpu_name()}, one core; Python {platform.python_version()}, {versions}.",
        f"{megabytes} MiB of one-byte tokens, batches of {BATCH} samples of 256 or 2048 tokens, int64 out; median of",
        f"{rounds} interleaved rounds. Made by `python benchmarks/data.py --megabytes {megabytes} --rounds {rounds}`.",
        *([f"Not installed here, so not measured: {', '.join(missing)}."] if missing else []),
        "",
    ]
    return "\n".join([*notes, *lines]) + "\n"


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown processor")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the table to this file, too")
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each reader in each round")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        rates = measure(Path(folder), options.megabytes, options.rounds, options.seconds)
    text = table(rates, options.megabytes, options.rounds)
    print(text)
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    sys.exit(main())
