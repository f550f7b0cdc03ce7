"""From prepared datasets to batches: samples by number, read through memory maps. Each block of 64 KiB is verified when
it is first touched in an epoch, and for held-out samples in an evaluation.

A sample of tokens is a window of sequence + 1 tokens of one shard: the first `sequence` are the input, the last
`sequence` the targets. Windows begin every `sequence` tokens, so every token is a target once in an epoch. A sample of
images is one record. Which sample has which number is decided in `order.py`; nothing here depends on rank or world.
"""

import json
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128_hexdigest

from phalanx.data.manifest import LABEL_BYTES, Manifest, read_manifest
from phalanx.data.order import Index, Mixture, Order, held_out_count
from phalanx.data.shard import Shard, Values, check_size
from phalanx.errors import RecipeError
from phalanx.recipe import schema

Batch = dict[str, npt.NDArray[Any]]
"""`tokens`, `targets` int64 [b, s] (-100 = no target) and, where documents are kept apart, `documents` int32 [b, s]
(number of the document within the sample); or `images` uint8 [b, h, w, c] and `labels` int64 [b]."""

IGNORED = -100
_AHEAD = 1 << 13  # so many samples are located at once: numpy's cost per call is then spread thin


@dataclass(frozen=True)
class Facts:
    """What a model must know of the data. Tokens: `vocab`, `sequence`. Images: `classes`, `shape` (h, w, c)."""

    kind: Literal["tokens", "images"]
    vocab: int | None
    classes: int | None
    sequence: int | None
    shape: tuple[int, int, int] | None


class Dataset:
    """The samples of one dataset directory, numbered 0 .. samples - 1. Its shards are opened when they are needed."""

    def __init__(self, folder: Path, sequence: int):
        self.folder = folder
        self.manifest = manifest = read_manifest(folder)
        for entry in manifest.shards:
            check_size(folder, entry)
        tokens = manifest.kind == "tokens"
        self._stride = sequence if tokens else manifest.record
        self.length = sequence + 1 if tokens else manifest.record
        counts = [max(entry.count - 1, 0) // sequence if tokens else entry.count for entry in manifest.shards]
        self._ends = np.cumsum(counts, dtype=np.int64)
        self.samples = int(self._ends[-1]) if counts else 0
        self._shards: dict[int, Shard] = {}

    def locate(self, sample: Index) -> tuple[Index, Index]:
        """Shard of each sample, and the place of its first value there."""
        shard = np.searchsorted(self._ends, sample, side="right")
        return shard, (sample - np.where(shard > 0, self._ends[shard - 1], 0)) * self._stride

    def shard(self, number: int) -> Shard:
        """A shard, mapped into memory."""
        if (shard := self._shards.get(number)) is None:
            shard = Shard(self.folder, self.manifest.shards[number], np.dtype(self.manifest.dtype))
            self._shards[number] = shard
        return shard

    def forget(self) -> None:
        """Have everything that is read from now on verified again."""
        for shard in self._shards.values():
            shard.forget()


@dataclass
class _Located:
    """Where samples first .. first + 8191 of a run lie, as plain lists: a loop reads them faster than arrays."""

    first: int
    source: list[int]
    shard: list[int]
    start: list[int]


class Pool:
    """A mixture of datasets of which training or evaluation takes samples by number."""

    def __init__(self, datasets: Sequence[Dataset], orders: Sequence[Order], mixture: Mixture, held_out: bool):
        self._datasets, self._orders, self._mixture = datasets, orders, mixture
        self._held_out = held_out
        self._located = _Located(-1, [], [], [])
        self._epoch = max(sum(order.samples - order.held for order in orders), 1)
        self._last = -1

    def rows(self, first: int, count: int) -> Values:
        """The samples number first .. first + count - 1, one a row."""
        if first <= self._last if self._held_out else first // self._epoch != self._last // self._epoch:
            for dataset in self._datasets:  # what was right then may be damaged by now
                dataset.forget()
        self._last = first
        rows = np.empty((count, self._datasets[0].length), self._datasets[0].manifest.dtype)
        for row, (shard, start) in zip(rows, self.places(first, count), strict=True):
            stop = start + len(row)
            if not shard.checked:
                shard.check(start, stop)
            row[:] = shard.values[start:stop]
        return rows

    def places(self, first: int, count: int) -> list[tuple[Shard, int]]:
        """Shard and first value of each of those samples."""
        places: list[tuple[Shard, int]] = []
        while len(places) < count:
            at = first + len(places)
            block = self._block(at // _AHEAD * _AHEAD)
            part = slice(at - block.first, min(at - block.first + count - len(places), _AHEAD))
            places += [
                (self._datasets[source].shard(shard), start)
                for source, shard, start in zip(block.source[part], block.shard[part], block.start[part], strict=True)
            ]
        return places

    def _block(self, first: int) -> _Located:
        located = self._located  # replaced as a whole, so that two threads may read at once
        if located.first != first:
            number = np.arange(first, first + _AHEAD)
            source, index = self._mixture.locate(number)
            shard, start = np.empty_like(number), np.empty_like(number)
            for which, (dataset, order) in enumerate(zip(self._datasets, self._orders, strict=True)):
                mine = np.flatnonzero(source == which)
                sample = (
                    order.held_out(index[mine] % max(order.held, 1)) if self._held_out else order.train(index[mine])
                )
                shard[mine], start[mine] = dataset.locate(sample)
            self._located = located = _Located(first, source.tolist(), shard.tolist(), start.tolist())
        return located


class Data:
    """Everything that a run trains on and is scored on. Made by `open_data`."""

    def __init__(
        self,
        facts: Facts,
        fingerprint: str,
        train: Pool,
        train_samples: int,
        held_out: Pool,
        held_out_samples: int,
        separate: bool,
    ):
        self.facts = facts
        self.fingerprint = fingerprint
        self.train_samples = train_samples  # in one epoch of every source
        self.held_out_samples = held_out_samples
        self._train, self._held_out = train, held_out
        self._separate = separate

    def train(self, consumed: int, count: int) -> Batch:
        """The run's samples number consumed .. consumed + count - 1. Epochs follow one another without end."""
        return self._batch(self._train, consumed, count)

    def held_out(self, start: int, count: int) -> Batch:
        """The held-out samples number start .. start + count - 1, all below `held_out_samples`."""
        if not 0 <= start <= start + count <= self.held_out_samples:
            raise ValueError(f"held-out samples {start} to {start + count - 1} of {self.held_out_samples}")
        return self._batch(self._held_out, start, count)

    def _batch(self, pool: Pool, first: int, count: int) -> Batch:
        rows = pool.rows(first, count)
        if self.facts.shape is not None:
            labels = rows[:, :LABEL_BYTES].copy().view("<u4")[:, 0].astype(np.int64)
            pixels = np.ascontiguousarray(rows[:, LABEL_BYTES:])
            return {"images": pixels.reshape(count, *self.facts.shape), "labels": labels}
        batch: Batch = {"tokens": rows[:, :-1].astype(np.int64), "targets": rows[:, 1:].astype(np.int64)}
        if self._separate:
            begins = _document_starts(pool.places(first, count), rows.shape[1])
            np.putmask(batch["targets"], begins[:, 1:], IGNORED)
            batch["documents"] = np.cumsum(begins[:, :-1], axis=1, dtype=np.int32)
        return batch


def _document_starts(places: list[tuple[Shard, int]], length: int) -> npt.NDArray[np.bool_]:
    """Where in every sample [b, length] a document begins behind another; never at its first token."""
    begins = np.zeros((len(places), length), np.bool_)
    for row, (shard, start) in zip(begins, places, strict=True):
        starts = shard.starts
        for at in range(bisect_right(starts, start), bisect_left(starts, start + length)):
            row[starts[at] - start] = True
    return begins


def open_data(data: schema.DataConfig, evaluate: schema.EvaluationConfig, seed: int) -> Data:
    """Open what a recipe names, its sources all `prepared`. Nothing but manifests is read yet.

    RecipeError when the sources do not fit each other or are too small; DataError when one is damaged.
    """
    sources = data.source if isinstance(data.source, list) else [data.source]
    share = 0.0 if evaluate.source else evaluate.holdout_fraction
    train = [_open(source, data.seq_len) for source in sources]
    facts = _common_facts(train, data.seq_len)
    orders = [_order(dataset, share, seed) for dataset in train]
    weights = [source.weight for source in sources]
    mixture = Mixture(weights)
    if evaluate.source:
        dataset = _open(evaluate.source, data.seq_len)
        _common_facts([*train, dataset], data.seq_len, scored=True)
        everything = Order(dataset.samples, dataset.samples, dataset.manifest.fingerprint, 0)
        held_out, held_out_samples = Pool([dataset], [everything], Mixture([1]), held_out=True), dataset.samples
    else:
        again = [_open(source, data.seq_len) for source in sources]  # verified at other times than the training data
        held_out = Pool(again, orders, mixture, held_out=True)
        held_out_samples = mixture.samples_within([order.held for order in orders])
    decides = {
        "datasets": [dataset.manifest.fingerprint for dataset in train],
        "mixture": mixture.counts.tolist(),
        "held": [order.held for order in orders],
        "sequence": facts.sequence,
        "documents": "separate" if data.document_masking else "join",  # as it was first written: it is hashed
    }
    return Data(
        facts,
        xxh3_128_hexdigest(json.dumps(decides, sort_keys=True).encode()),
        Pool(train, orders, mixture, held_out=False),
        sum(order.samples - order.held for order in orders),
        held_out,
        held_out_samples,
        separate=data.document_masking and facts.kind == "tokens",
    )


def _open(source: schema.DataSource, sequence: int) -> Dataset:
    if source.prepared is None:
        raise ValueError("a source must be prepared before it is opened")
    dataset = Dataset(Path(source.prepared), sequence)
    if not dataset.samples:
        raise RecipeError(
            f"data.seq_len: {sequence} tokens and the next are more than any shard of {source.prepared} holds"
        )
    return dataset


def _order(dataset: Dataset, share: float, seed: int) -> Order:
    held = held_out_count(dataset.samples, share)
    return Order(dataset.samples, held, dataset.manifest.fingerprint, seed)


def _alike(manifest: Manifest) -> dict[str, Any]:
    """What datasets must have in common to be mixed. A tokenizer is what it does, whatever it is called."""
    tokenizer = manifest.tokenizer or {}
    return {
        "kind": manifest.kind,
        "vocab": manifest.vocab,
        "tokenizer": tokenizer.get("xxh3", tokenizer.get("name")),
        "shape": manifest.shape,
        "classes": manifest.classes,
        "labels": manifest.labels,
    }


def _common_facts(datasets: Sequence[Dataset], sequence: int, scored: bool = False) -> Facts:
    """The facts that all datasets share; RecipeError when one is of another kind. `scored`: the last of them is that
    of `evaluation.source`."""
    first = datasets[0].manifest
    for number, dataset in enumerate(datasets[1:], 1):
        other = "evaluation.source" if scored and number == len(datasets) - 1 else f"data.source.{number}"
        for key, here in _alike(first).items():
            there = _alike(dataset.manifest)[key]
            folders = f"{datasets[0].folder} and {dataset.folder}"
            if key == "labels" and here and there and here != there:
                which = next(at for at, (one, two) in enumerate(zip(here, there, strict=True)) if one != two)
                raise RecipeError(
                    f"data.source: its classes and those of {other} have other names: number {which} is "
                    f"{here[which]!r} and {there[which]!r} ({folders}); give the sub-folders of both the same names"
                )
            if key != "labels" and here != there:
                raise RecipeError(f"data.source: {folders} cannot be mixed: {key} is {here} and {there}")
    return Facts(first.kind, first.vocab, first.classes, sequence if first.kind == "tokens" else None, first.shape)
