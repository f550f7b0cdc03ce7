"""How fast is the reader of images alone? Images/s of Phalanx on one core beside torch's DataLoader and stream formats.

    python benchmarks/images.py [--out docs/benchmarks/images.md] [--images 8192] [--rounds 7]

Each gives uint8 batches [256, 64, 64, 3] and int64 labels, shuffled, of the same random images. No reader decodes: the
formats hold raw pixels, as Phalanx's shards do after their preparation; JPEG in the same formats is slower by the time
that decoding takes. All run in this process, in turns within each round, and are measured in seconds of CPU time of
all its threads, which other programs do not change: images/s of one core. The table has the medians. webdataset,
litdata and mosaicml-streaming are measured where they are installed.
"""

import argparse
import gc
import io
import itertools
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from data import cpu_name, installed, rate_of_batches
from phalanx.data import RunData, open_data, prepare_source
from phalanx.recipe import data_schema

SHAPE = (64, 64, 3)
BATCH, NUM_CLASSES = 256, 10
Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]
PEERS = ("webdataset", "litdata", "mosaicml-streaming")


def phalanx_reader(data: RunData) -> Batches:
    for step in itertools.count():
        batch = data.read_training(step * BATCH, BATCH)
        yield torch.from_numpy(batch["images"]), torch.from_numpy(batch["labels"])


class RawImages(Dataset[tuple[torch.Tensor, int]]):
    """The usual map-style dataset, over a memory map."""

    def __init__(self, pixels: np.ndarray, labels: np.ndarray):
        self._pixels, self._labels = pixels, labels

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        return torch.from_numpy(np.array(self._pixels[number])), int(self._labels[number])


def torch_loader(pixels: np.ndarray, labels: np.ndarray) -> Batches:
    while True:
        yield from DataLoader(RawImages(pixels, labels), BATCH, shuffle=True, drop_last=True)


def to_tensors(samples: list[tuple[bytes, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    pixels = np.stack([np.frombuffer(content, np.uint8).reshape(SHAPE) for content, _ in samples])
    return torch.from_numpy(pixels), torch.tensor([label for _, label in samples])


def webdataset_loader(pixels: np.ndarray, labels: np.ndarray, folder: Path) -> Batches:
    import webdataset

    if not folder.exists():
        folder.mkdir()
        for first in range(0, len(labels), 1024):
            with tarfile.open(folder / f"{first:06d}.tar", "w") as archive:
                for number in range(first, min(first + 1024, len(labels))):
                    for ending, content in (("bin", pixels[number].tobytes()), ("cls", str(labels[number]).encode())):
                        member = tarfile.TarInfo(f"{number:06d}.{ending}")
                        member.size = len(content)
                        archive.addfile(member, io.BytesIO(content))
    archives = sorted(map(str, folder.glob("*.tar")))
    dataset = webdataset.WebDataset(archives, shardshuffle=len(archives)).shuffle(1000).to_tuple("bin", "cls")
    samples = dataset.map(lambda each: (each[0], int(each[1])))
    while True:
        yield from DataLoader(samples, BATCH, collate_fn=to_tensors, drop_last=True)


def litdata_loader(pixels: np.ndarray, labels: np.ndarray, folder: Path) -> Batches:
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming.cache import Cache

    if not folder.exists():
        folder.mkdir()
        cache = Cache(str(folder), chunk_bytes=1 << 24)
        for number, label in enumerate(labels.tolist()):
            cache[number] = {"image": pixels[number].tobytes(), "label": label}
        cache.done()
        cache.merge()
    dataset = StreamingDataset(str(folder), shuffle=True, drop_last=True)

    def collate(samples: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
        return to_tensors([(each["image"], each["label"]) for each in samples])

    while True:
        yield from StreamingDataLoader(dataset, batch_size=BATCH, num_workers=0, collate_fn=collate)


def mosaic_loader(pixels: np.ndarray, labels: np.ndarray, folder: Path) -> Batches:
    from streaming import MDSWriter, StreamingDataset

    if not folder.exists():
        with MDSWriter(out=str(folder), columns={"image": "bytes", "label": "int"}) as writer:
            for number, label in enumerate(labels.tolist()):
                writer.write({"image": pixels[number].tobytes(), "label": label})
    dataset = StreamingDataset(local=str(folder), shuffle=True, batch_size=BATCH)

    def collate(samples: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
        return to_tensors([(each["image"], int(each["label"])) for each in samples])

    while True:
        yield from DataLoader(dataset, BATCH, collate_fn=collate, drop_last=True)


def prepare_images(folder: Path, count: int) -> RunData:
    """Random images as PNG files in a folder of each class, prepared; also as the arrays pixels.npy and labels.npy."""
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (count, *SHAPE), np.uint8)
    labels = random.integers(0, NUM_CLASSES, count)
    for number, label in enumerate(labels.tolist()):
        path = folder / "png" / f"class-{label}" / f"{number:06d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels[number]).save(path, compress_level=0)
    np.save(folder / "pixels.npy", pixels)
    np.save(folder / "labels.npy", labels)
    source = data_schema.DataSource(images=str(folder / "png"), image_size=SHAPE[:2])
    dataset = prepare_source(source, data_schema.DataConfig(), folder, folder / "dataset")
    prepared = data_schema.DataConfig(source=data_schema.DataSource(prepared=str(dataset)))
    return open_data(prepared, data_schema.EvaluationConfig(holdout_fraction=0.0), 0)


def measure(folder: Path, count: int, rounds: int, seconds: float) -> dict[str, list[float]]:
    """Images/s by reader, one number a round."""
    data = prepare_images(folder, count)
    pixels, labels = np.load(folder / "pixels.npy", mmap_mode="r"), np.load(folder / "labels.npy")
    readers: dict[str, Callable[[], Batches]] = {
        "phalanx": lambda: phalanx_reader(data),
        "torch DataLoader": lambda: torch_loader(pixels, labels),
    }
    loaders = {"webdataset": webdataset_loader, "litdata": litdata_loader, "mosaicml-streaming": mosaic_loader}
    for name, loader in loaders.items():
        if installed(name):
            readers[name] = lambda loader=loader, name=name: loader(pixels, labels, folder / name)
    found: dict[str, list[float]] = {name: [] for name in readers}
    for _ in range(rounds):
        for name, start in readers.items():
            batches = start()
            images, _labels = next(batches)
            assert (images.shape, images.dtype) == ((BATCH, *SHAPE), torch.uint8), name
            found[name].append(rate_of_batches(batches, BATCH, seconds, time.process_time))
            del batches
            gc.collect()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        found = measure(Path(name), options.images, options.rounds, options.seconds)
    medians = {name: statistics.median(values) for name, values in found.items()}
    versions = ", ".join(f"{name} {installed(name)}" for name in ("torch", *PEERS) if installed(name))
    missing = [name for name in PEERS if not installed(name)]
    lines = [
        "# Data: images/s of the reader alone",
        "",
        f"`python benchmarks/images.py --images {options.images} --rounds {options.rounds}` on {date.today()}: "
        f"{cpu_name()}, CPU time; {versions}. Raw RGB images of 64 x 64 pixels, shuffled, in batches of "
        f"{BATCH}; medians.",
        *([f"Not installed, so not measured: {', '.join(missing)}."] if missing else []),
        "",
        "| reader | images/s | phalanx is faster by |",
        "|---|---:|---:|",
        *(f"| {name} | {rate:,.0f} | {medians['phalanx'] / rate:.2f} x |" for name, rate in medians.items()),
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.out is not None:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
