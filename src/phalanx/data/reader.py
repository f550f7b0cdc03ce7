"""Read batches from prepared datasets: samples by number, through memory maps. Each block of 64 KiB is verified when it
is first touched in an epoch, and for validation samples in an evaluation.

A sample of tokens is a window of sequence + 1 tokens of one shard: the first `seq_len` are the input, the last
`seq_len` the targets. Windows begin every `seq_len` tokens, so every token is a target once in an epoch. A sample of
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

from phalanx.data.manifest import LABEL_BYTES, DatasetManifest, read_manifest
from phalanx.data.order import Int64Array, ShuffleOrder, SourceMixture, num_validation_samples
from phalanx.data.shard import MappedShard, ValueArray, check_shard_size
from phalanx.errors import RecipeError
from phalanx.recipe import data_schema

Batch = dict[str, npt.NDArray[Any]]
"""`tokens`, `targets` int64 [b, s] (-100 = no target) and, with document masking, `documents` int32 [b, s] (number of
the document within the sample); or `images` uint8 [b, h, w, c] and `labels` int64 [b]."""

IGNORE_INDEX = -100
_LOCATED_SAMPLES = 1 << 13  # samples that are located at once: enough to amortize numpy's cost per call


@dataclass(frozen=True)
class DataInfo:
    """What a model must know of the data. Tokens: `vocab_size`, `seq_len`. Images: `num_classes`, `image_shape` (h, w,
    c), `class_names` if the classes have names."""

    kind: Literal["tokens", "images"]
    vocab_size: int | None
    num_classes: int | None
    seq_len: int | None
    image_shape: tuple[int, int, int] | None
    class_names: tuple[str, ...] | None = None


class PreparedDataset:
    """The samples of one dataset directory, numbered 0 .. samples - 1. Its shards are opened when they are needed."""

    def __init__(self, folder: Path, seq_len: int):
        self.folder = folder
        self.manifest = manifest = read_manifest(folder)
        for entry in manifest.shards:
            check_shard_size(folder, entry)
        tokens = manifest.kind == "tokens"
        self._stride = seq_len if tokens else manifest.record
        self.sample_length = seq_len + 1 if tokens else manifest.record
        counts = [max(entry.count - 1, 0) // seq_len if tokens else entry.count for entry in manifest.shards]
        self._sample_ends = np.cumsum(counts, dtype=np.int64)
        self.num_samples = int(self._sample_ends[-1]) if counts else 0
        self._shards: dict[int, MappedShard] = {}

    def locate(self, sample: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Shard of each sample, and the place of its first value there."""
        shard = np.searchsorted(self._sample_ends, sample, side="right")
        return shard, (sample - np.where(shard > 0, self._sample_ends[shard - 1], 0)) * self._stride

    def open_shard(self, number: int) -> MappedShard:
        """A shard, mapped into memory."""
        if (shard := self._shards.get(number)) is None:
            shard = MappedShard(self.folder, self.manifest.shards[number], np.dtype(self.manifest.dtype))
            self._shards[number] = shard
        return shard

    def reset_verification(self) -> None:
        """Have everything that is read from now on verified again."""
        for shard in self._shards.values():
            shard.reset_verification()


@dataclass
class _LocatedSamples:
    """Where samples first .. first + 8191 of a run lie, as plain lists: a loop reads them faster than arrays."""

    first_sample: int
    source: list[int]
    shard: list[int]
    start_offset: list[int]


class SampleReader:
    """A mixture of datasets of which training or evaluation takes samples by number."""

    def __init__(
        self,
        datasets: Sequence[PreparedDataset],
        orders: Sequence[ShuffleOrder],
        mixture: SourceMixture,
        is_validation: bool,
    ):
        self._datasets, self._orders, self._mixture = datasets, orders, mixture
        self._is_validation = is_validation
        self._located = _LocatedSamples(-1, [], [], [])
        self._epoch_samples = max(sum(order.num_samples - order.num_validation for order in orders), 1)
        self._last_first = -1

    def read_samples(self, first_sample: int, count: int) -> ValueArray:
        """The samples number first .. first + count - 1, one a row."""
        if (
            first_sample <= self._last_first
            if self._is_validation
            else first_sample // self._epoch_samples != self._last_first // self._epoch_samples
        ):
            for dataset in self._datasets:  # what was right then may be damaged by now
                dataset.reset_verification()
        self._last_first = first_sample
        rows = np.empty((count, self._datasets[0].sample_length), self._datasets[0].manifest.dtype)
        for row, (shard, start) in zip(rows, self.locate_samples(first_sample, count), strict=True):
            stop = start + len(row)
            if not shard.all_verified:
                shard.verify_range(start, stop)
            row[:] = shard.values[start:stop]
        return rows

    def locate_samples(self, first_sample: int, count: int) -> list[tuple[MappedShard, int]]:
        """Shard and first value of each of those samples."""
        locations: list[tuple[MappedShard, int]] = []
        while len(locations) < count:
            sample_number = first_sample + len(locations)
            block = self._locate_block(sample_number // _LOCATED_SAMPLES * _LOCATED_SAMPLES)
            part = slice(
                sample_number - block.first_sample,
                min(sample_number - block.first_sample + count - len(locations), _LOCATED_SAMPLES),
            )
            locations += [
                (self._datasets[source].open_shard(shard), start)
                for source, shard, start in zip(
                    block.source[part], block.shard[part], block.start_offset[part], strict=True
                )
            ]
        return locations

    def _locate_block(self, first: int) -> _LocatedSamples:
        located = self._located  # replaced as a whole, so that two threads may read at once
        if located.first_sample != first:
            number = np.arange(first, first + _LOCATED_SAMPLES)
            source, index = self._mixture.locate(number)
            shard, start = np.empty_like(number), np.empty_like(number)
            for source_index, (dataset, order) in enumerate(zip(self._datasets, self._orders, strict=True)):
                own = np.flatnonzero(source == source_index)
                sample = (
                    order.validation_samples(index[own] % max(order.num_validation, 1))
                    if self._is_validation
                    else order.training_samples(index[own])
                )
                shard[own], start[own] = dataset.locate(sample)
            self._located = located = _LocatedSamples(first, source.tolist(), shard.tolist(), start.tolist())
        return located


RESTORE_FILES_HINT = "restore the files that the recipe's data.source matched, or use --force to continue with these"
"""For a run that resumes with other data."""


class RunData:
    """Everything that a run trains on and is scored on. Made by `open_data`."""

    def __init__(
        self,
        info: DataInfo,
        fingerprint: str,
        train: SampleReader,
        num_train_samples: int,
        validation: SampleReader,
        num_validation_samples: int,
        document_masking: bool,
    ):
        self.info = info
        self.fingerprint = fingerprint
        self.num_train_samples = num_train_samples  # in one epoch of every source
        self.num_validation_samples = num_validation_samples
        self._train, self._validation = train, validation
        self._document_masking = document_masking

    def read_training(self, first_sample: int, count: int) -> Batch:
        """The run's samples number consumed .. consumed + count - 1. Epochs follow one another without end."""
        return self._read_batch(self._train, first_sample, count)

    def read_validation(self, start: int, count: int) -> Batch:
        """Return the validation samples start .. start + count - 1, all below `num_validation_samples`."""
        if not 0 <= start <= start + count <= self.num_validation_samples:
            raise ValueError(f"validation samples {start} to {start + count - 1} of {self.num_validation_samples}")
        return self._read_batch(self._validation, start, count)

    def _read_batch(self, pool: SampleReader, first: int, count: int) -> Batch:
        rows = pool.read_samples(first, count)
        if self.info.image_shape is not None:
            labels = rows[:, :LABEL_BYTES].copy().view("<u4")[:, 0].astype(np.int64)
            pixels = np.ascontiguousarray(rows[:, LABEL_BYTES:])
            return {"images": pixels.reshape(count, *self.info.image_shape), "labels": labels}
        batch: Batch = {"tokens": rows[:, :-1].astype(np.int64), "targets": rows[:, 1:].astype(np.int64)}
        if self._document_masking:
            begins = _document_start_mask(pool.locate_samples(first, count), rows.shape[1])
            np.putmask(batch["targets"], begins[:, 1:], IGNORE_INDEX)
            batch["documents"] = np.cumsum(begins[:, :-1], axis=1, dtype=np.int32)
        return batch


def _document_start_mask(locations: list[tuple[MappedShard, int]], length: int) -> npt.NDArray[np.bool_]:
    """Where in every sample [b, length] a document begins behind another; never at its first token."""
    begins = np.zeros((len(locations), length), np.bool_)
    for row, (shard, start) in zip(begins, locations, strict=True):
        starts = shard.document_starts
        for at in range(bisect_right(starts, start), bisect_left(starts, start + length)):
            row[starts[at] - start] = True
    return begins


def open_data(data: data_schema.DataConfig, evaluation: data_schema.EvaluationConfig, seed: int) -> RunData:
    """Open what a recipe names, its sources all `prepared`. Nothing but manifests is read yet.

    RecipeError when the sources do not fit each other or are too small; DataError when one is damaged.
    """
    sources = data.source if isinstance(data.source, list) else [data.source]
    holdout_fraction = 0.0 if evaluation.source else evaluation.holdout_fraction
    train = [_open_prepared(source, data.seq_len) for source in sources]
    info = _common_info(train, data.seq_len)
    orders = [_make_order(dataset, holdout_fraction, seed) for dataset in train]
    weights = [source.weight for source in sources]
    mixture = SourceMixture(weights)
    if evaluation.source:
        dataset = _open_prepared(evaluation.source, data.seq_len)
        _common_info([*train, dataset], data.seq_len, has_validation=True)
        whole_order = ShuffleOrder(dataset.num_samples, dataset.num_samples, dataset.manifest.fingerprint, 0)
        validation, num_validation_samples = (
            SampleReader([dataset], [whole_order], SourceMixture([1]), is_validation=True),
            dataset.num_samples,
        )
    else:
        validation_datasets = [
            _open_prepared(source, data.seq_len) for source in sources
        ]  # verified at other times than the training data
        validation = SampleReader(validation_datasets, orders, mixture, is_validation=True)
        num_validation_samples = mixture.max_samples_within([order.num_validation for order in orders])
    fingerprint_inputs = {
        "datasets": [dataset.manifest.fingerprint for dataset in train],
        "mixture": mixture.counts.tolist(),
        "held": [order.num_validation for order in orders],
        "sequence": info.seq_len,
        "documents": "separate" if data.document_masking else "join",  # as it was first written: it is hashed
    }
    return RunData(
        info,
        xxh3_128_hexdigest(json.dumps(fingerprint_inputs, sort_keys=True).encode()),
        SampleReader(train, orders, mixture, is_validation=False),
        sum(order.num_samples - order.num_validation for order in orders),
        validation,
        num_validation_samples,
        document_masking=data.document_masking and info.kind == "tokens",
    )


def _open_prepared(source: data_schema.DataSource, seq_len: int) -> PreparedDataset:
    if source.prepared is None:
        raise ValueError("a source must be prepared before it is opened")
    dataset = PreparedDataset(Path(source.prepared), seq_len)
    if not dataset.num_samples:
        shards = dataset.manifest.shards
        in_shard = "" if len(shards) == 1 else f" in the longest of its {len(shards)} shards"
        raise RecipeError(
            f"data.seq_len: {seq_len} tokens and the next need at least {seq_len + 1}, but {source.prepared} has only "
            f"{max(shard.count for shard in shards)} tokens{in_shard}"
        )
    return dataset


def _make_order(dataset: PreparedDataset, holdout_fraction: float, seed: int) -> ShuffleOrder:
    num_validation = num_validation_samples(dataset.num_samples, holdout_fraction)
    return ShuffleOrder(dataset.num_samples, num_validation, dataset.manifest.fingerprint, seed)


def _mixing_requirements(manifest: DatasetManifest) -> dict[str, Any]:
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


def _common_info(datasets: Sequence[PreparedDataset], seq_len: int, has_validation: bool = False) -> DataInfo:
    """The facts that all datasets share; RecipeError when one is of another kind. `has_validation`: the last of them is
    that of `evaluation.source`."""
    first = datasets[0].manifest
    for number, dataset in enumerate(datasets[1:], 1):
        other = "evaluation.source" if has_validation and number == len(datasets) - 1 else f"data.source.{number}"
        for key, first_value in _mixing_requirements(first).items():
            other_value = _mixing_requirements(dataset.manifest)[key]
            folders = f"{datasets[0].folder} and {dataset.folder}"
            if key == "labels" and first_value and other_value and first_value != other_value:
                which = next(
                    at for at, (one, two) in enumerate(zip(first_value, other_value, strict=True)) if one != two
                )
                raise RecipeError(
                    f"data.source: its classes and those of {other} have other names: number {which} is "
                    f"{first_value[which]!r} and {other_value[which]!r} ({folders}); give the sub-folders of both the "
                    f"same names"
                )
            if key != "labels" and first_value != other_value:
                raise RecipeError(f"data.source: {folders} cannot be mixed: {key} is {first_value} and {other_value}")
    seq_len_or_none = seq_len if first.kind == "tokens" else None
    return DataInfo(first.kind, first.vocab, first.classes, seq_len_or_none, first.shape, first.labels)
