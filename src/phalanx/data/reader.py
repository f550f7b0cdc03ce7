"""Read batches from prepared datasets: samples by number, through memory maps. Each block of 64 KiB is verified when it
is first touched in an epoch, and for validation samples in an evaluation.

A sample of tokens is a window of sequence + 1 tokens of one shard: the first `seq_len` are the input, the last
`seq_len` the targets. Windows begin every `seq_len` tokens, so every token is a target once in an epoch; or they hold
whole documents and padding (`packing.py`). A sample of images is one record. Which sample has which number is decided
in `order.py`; nothing here depends on rank or world.
"""

import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, Protocol
from weakref import WeakSet

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128_hexdigest

from phalanx.data.chat_images import ImageProcessor, unpack_files
from phalanx.data.dataset_files import open_dataset_files
from phalanx.data.manifest import (
    LABEL_BYTES,
    LOSS_BIT,
    NUMBERED_RECORDS,
    REJECTED_BIT,
    SEQUENCE_BIT,
    TOKEN_MASK,
    TOKENIZER_FILE,
    DatasetManifest,
    narrowest_token_dtype,
    read_manifest,
)
from phalanx.data.order import (
    Int64Array,
    MixtureSchedule,
    ShuffleOrder,
    SourceSequence,
    divide_samples,
    num_validation_samples,
    reduce_weights,
    weigh_by_size,
)
from phalanx.data.packing import (
    LongDocuments,
    PackedWindows,
    TokenRanges,
    has_text_only,
    list_documents,
    pack_documents,
)
from phalanx.data.shard import MappedShard, ValueArray, check_shard_size
from phalanx.data.stream import StreamedDataset, StreamOrder, is_stream
from phalanx.data.text_records import numbers_to_margins
from phalanx.errors import RecipeError
from phalanx.recipe import data_schema
from phalanx.recipe.locations import name_recipe_key
from phalanx.run.mixture import MixtureStage, SourceMixture
from phalanx.storage.cache import announce_use
from phalanx.storage.url import is_url

Batch = dict[str, npt.NDArray[Any]]
"""`tokens`, `targets` int64 [b, s] (-100 = no target) and, with document masking, `documents` int32 [b, s] (number of
the document within the sample); or `images` uint8 [b, h, w, c] and `labels` int64 [b]. For preferences each sequence is
a document; `rejected` bool [b, s] says of its tokens which it is, and `sample_ids` int64 [b] name the samples. Of whole
texts `sequences` int32 [b, s] numbers those of a sample (-1: padding); `labels` int64 [b] or `margins` fp32 [b]. Of
conversations with images also what the model takes of them, in arrays with names that begin with IMAGE_INPUT."""

IGNORE_INDEX = -100
PADDING_TOKEN = 0  # any would do: it is no target, and no earlier token attends to it
_LOCATED_SAMPLES = 1 << 13  # samples that are located at once: enough to amortize numpy's cost per call
_LOCATED_STREAM_SAMPLES = 1 << 8  # of a stream, of which these must have been prepared


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

    @property
    def bytes_per_sample(self) -> int:
        """Bytes of a sample as it is prepared."""
        if self.kind == "images":
            return LABEL_BYTES + math.prod(self.image_shape or ())
        return narrowest_token_dtype(self.vocab_size or 0).itemsize * (self.seq_len or 0)


TokenRange = tuple[int, int, int]
"""Shard, and the values start .. stop - 1 of it."""


class PreparedDataset:
    """The samples of one dataset, numbered 0 .. samples - 1. Its shards are opened when they are needed."""

    def __init__(self, location: str, seq_len: int):
        self.files = open_dataset_files(location)
        self.location, folder = location, self.files.directory
        self.manifest = manifest = read_manifest(folder)
        self.fingerprint = manifest.fingerprint
        if self.files.url is None:
            for entry in manifest.shards:
                check_shard_size(folder, entry)
        else:
            self.files.check_sizes(manifest)
        tokens = manifest.kind == "tokens"
        self._stride = seq_len if tokens else manifest.record
        self.sample_length = seq_len + 1 if tokens else manifest.record
        counts = [max(entry.count - 1, 0) // seq_len if tokens else entry.count for entry in manifest.shards]
        self._sample_ends = np.cumsum(counts, dtype=np.int64)
        self.num_samples = int(self._sample_ends[-1]) if counts else 0
        self._shards: dict[int, MappedShard] = {}
        self._upcoming: list[tuple[int, int]] = []  # samples of the run, and the shards that they are read from
        _opened.add(self)

    def locate(self, sample: Int64Array) -> list[tuple[TokenRange, ...]]:
        """The ranges of values of each sample."""
        shard = np.searchsorted(self._sample_ends, sample, side="right")
        start = (sample - np.where(shard > 0, self._sample_ends[shard - 1], 0)) * self._stride
        stop = start + self.sample_length
        return [(values,) for values in zip(shard.tolist(), start.tolist(), stop.tolist(), strict=True)]

    def count_tokens(self, sample: Int64Array) -> Int64Array:
        """Tokens of each sample that are no padding."""
        return np.full(len(sample), self._stride)

    def open_shard(self, number: int, sample: int) -> MappedShard:
        """A shard, mapped into memory, to read the run's sample of this number."""
        if (shard := self._shards.get(number)) is None:
            entry = self.manifest.shards[number]
            if not (self.files.directory / entry.file).exists():
                self._announce_uses(sample)
                for dataset in _opened:  # what is not read at this moment may be evicted
                    dataset._shards.clear()
            with self.files.open_shard(entry) as file:
                shard = MappedShard(self.files.directory, entry, np.dtype(self.manifest.dtype), file)
            self._shards[number] = shard
        return shard

    def fetch_ahead(self, samples: Int64Array, located: list[tuple[TokenRange, ...]]) -> None:
        """Download the shards of these ranges, of the run's samples of these numbers, in the background, if they are in
        a store."""
        if self.files.url is not None:
            pairs = zip(samples.tolist(), located, strict=True)
            self._upcoming = [(sample, shard) for sample, ranges in pairs for shard, _, _ in ranges]
            self._announce_uses(self._upcoming[0][0] if self._upcoming else 0)
            numbers = dict.fromkeys(shard for _, shard in self._upcoming)
            self.files.fetch_ahead(self.manifest.shards[number] for number in numbers)

    def _announce_uses(self, sample: int) -> None:
        """Say after how many samples each shard is needed, from the run's sample of this number on."""
        soonest = {shard: number - sample for number, shard in reversed(self._upcoming) if number >= sample}
        for number, entry in enumerate(self.manifest.shards) if self.files.is_evictable else ():
            announce_use(self.files.directory / entry.file, soonest.get(number))

    def reset_verification(self) -> None:
        """Have everything that is read from now on verified again."""
        for shard in list(self._shards.values()):  # another thread may clear them
            shard.reset_verification()


_opened: "WeakSet[PreparedDataset]" = WeakSet()
"""The datasets of this process."""


class PackedDataset(PreparedDataset):
    """Samples that are windows of whole documents."""

    def __init__(self, location: str, windows: PackedWindows):
        super().__init__(location, windows.seq_len)
        self._windows = windows
        self.num_samples = len(windows.ends)

    def locate(self, sample: Int64Array) -> list[tuple[TokenRange, ...]]:
        """The ranges of tokens of each sample, one after the other. Padding follows them."""
        ranges, ends = self._windows.ranges, self._windows.ends
        begins = np.where(sample > 0, ends[sample - 1], 0)
        parts = [slice(*edges) for edges in zip(begins.tolist(), ends[sample].tolist(), strict=True)]
        columns = ranges.shard, ranges.start, ranges.stop
        return [tuple(zip(*(column[part].tolist() for column in columns), strict=True)) for part in parts]

    def count_tokens(self, sample: Int64Array) -> Int64Array:
        return self._windows.num_tokens[sample]


AnyDataset = PreparedDataset | StreamedDataset
AnyOrder = ShuffleOrder | StreamOrder


class Mixture(Protocol):
    """Which source has the sample of a number."""

    def locate(self, sample_number: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Source of each sample, and its number in that source."""


@dataclass
class _LocatedSamples:
    """Where samples first .. first + 8191 of a run lie, as plain lists: a loop reads them faster than arrays."""

    first_sample: int
    source: list[int]
    ranges: list[tuple[TokenRange, ...]]


SampleRanges = list[tuple[MappedShard, int, int]]
"""The shards of a sample's values, and the ranges start .. stop - 1 in them."""
DocumentRanges = list[tuple[memoryview, int, int]]
"""Where documents start in these shards, and the ranges."""


class SampleReader:
    """A mixture of datasets of which training or evaluation takes samples by number."""

    def __init__(
        self, datasets: Sequence[AnyDataset], orders: Sequence[AnyOrder], mixture: Mixture, is_validation: bool
    ):
        self._datasets, self._orders, self._mixture = datasets, orders, mixture
        self._is_validation = is_validation
        is_streamed = any(isinstance(dataset, StreamedDataset) for dataset in datasets)
        self._block_size = _LOCATED_STREAM_SAMPLES if is_streamed else _LOCATED_SAMPLES
        self._located = _LocatedSamples(-1, [], [])
        self._tokens_before = (-1, np.zeros(0, np.int64))
        num_validation = sum(order.num_validation for order in orders)
        num_all = sum(order.num_samples for order in orders)
        self.num_samples = num_validation if is_validation else num_all - num_validation
        self._last_first = -1

    def read_samples(self, first_sample: int, count: int) -> tuple[ValueArray, list[DocumentRanges]]:
        """The samples number first .. first + count - 1, one a row, and the ranges that they were read from. What these
        leave is padding."""
        return self._read_rows(self._open_samples(first_sample, count), count)

    def read_by_ids(self, first_id: int, count: int) -> tuple[ValueArray, list[DocumentRanges]]:
        """The samples with the ids first .. first + count - 1 (`find_sample_ids`), as of `read_samples`."""
        return self._read_rows(self._open_ids(first_id, count), count)

    def _open_ids(self, first_id: int, count: int) -> Iterator[SampleRanges]:
        for dataset in self._whole_datasets:
            start, stop = max(first_id, 0), min(first_id + count, dataset.num_samples)
            for ranges in dataset.locate(np.arange(start, max(start, stop))):  # before the first step
                yield [(dataset.open_shard(shard, 0), begin, end) for shard, begin, end in ranges]
            first_id -= dataset.num_samples

    def _read_rows(self, opened: Iterator[SampleRanges], count: int) -> tuple[ValueArray, list[DocumentRanges]]:
        rows = np.empty((count, self._datasets[0].sample_length), self._datasets[0].manifest.dtype)
        located: list[DocumentRanges] = []
        for row, ranges in zip(rows, opened, strict=True):
            filled = 0
            for shard, start, stop in ranges:
                if not shard.all_verified:
                    shard.verify_range(start, stop)
                row[filled : filled + stop - start] = shard.values[start:stop]
                filled += stop - start
            row[filled:] = PADDING_TOKEN
            located.append([(shard.document_starts, start, stop) for shard, start, stop in ranges])
        return rows, located

    def read_image_files(self, first_sample: int, count: int) -> list[list[bytes]]:
        """Return the image files of each of those samples, one conversation each: the document behind its tokens."""
        files = []
        for ((shard, start, _),) in self._locate_samples(first_sample, count):
            begins = shard.document_starts
            at = bisect_right(begins, start)
            begin, stop = begins[at], begins[at + 1] if at + 1 < len(begins) else len(shard.values)
            shard.verify_range(begin, stop)
            files.append(unpack_files(shard.values[begin:stop]))
        return files

    def read_images(self, first_sample: int, count: int) -> tuple[ValueArray, ValueArray]:
        """The bytes of the labels [n, LABEL_BYTES] and the pixels [n, values] of those samples, each in one copy."""
        labels = np.empty((count, LABEL_BYTES), np.uint8)
        pixels = np.empty((count, self._datasets[0].sample_length - LABEL_BYTES), np.uint8)
        for number, ((shard, start, stop),) in enumerate(self._open_samples(first_sample, count)):
            if not shard.all_verified:
                shard.verify_range(start, stop)
            labels[number] = shard.values[start : start + LABEL_BYTES]
            pixels[number] = shard.values[start + LABEL_BYTES : stop]
        return labels, pixels

    def find_sample_ids(self, first_sample: int, count: int) -> Int64Array:
        """Numbers of those samples, below `num_dataset_samples`, that do not depend on the order of reading."""
        source, index = self._mixture.locate(np.arange(first_sample, first_sample + count))
        ids, before = np.empty(count, np.int64), 0
        for number, (dataset, order) in enumerate(zip(self._whole_datasets, self._orders, strict=True)):
            own = source == number
            samples_of = order.validation_samples if self._is_validation else order.training_samples
            ids[own] = before + samples_of(index[own])
            before += dataset.num_samples
        return ids

    @property
    def locations(self) -> list[str]:
        """Where the datasets are."""
        return [dataset.location for dataset in self._whole_datasets]

    @property
    def num_dataset_samples(self) -> int:
        """Samples of all datasets."""
        return sum(dataset.num_samples for dataset in self._whole_datasets)

    @property
    def _whole_datasets(self) -> list[PreparedDataset]:
        """The datasets, none of them a stream: conversations are packed, which needs all of them at once."""
        return [dataset for dataset in self._datasets if isinstance(dataset, PreparedDataset)]

    def _open_samples(self, first_sample: int, count: int) -> Iterator[SampleRanges]:
        """Where those samples are. At the begin of an epoch or an evaluation their blocks become unverified."""
        epoch_samples = max(self.num_samples, 1)
        begins = first_sample // epoch_samples != self._last_first // epoch_samples
        if first_sample <= self._last_first if self._is_validation else begins:
            for dataset in self._datasets:  # what was right then may be damaged by now
                dataset.reset_verification()
        self._last_first = first_sample
        return self._locate_samples(first_sample, count)

    def count_tokens(self, first_sample: int, count: int) -> int:
        """Tokens of those samples that are no padding. Reads nothing."""
        total = 0
        first_block = first_sample // self._block_size * self._block_size
        for sample_number in range(first_block, first_sample + count, self._block_size):
            first, before = self._tokens_before
            if first != sample_number:
                tokens = np.zeros(self._block_size, np.int64)
                for dataset, own, sample in self._find_samples(sample_number):
                    tokens[own] = dataset.count_tokens(sample)
                before = np.concatenate([[0], np.cumsum(tokens)])
                self._tokens_before = sample_number, before
            offset = first_sample - sample_number
            start, stop = np.clip((offset, offset + count), 0, self._block_size)
            total += int(before[stop] - before[start])
        return total

    def _locate_samples(self, first_sample: int, count: int) -> Iterator[SampleRanges]:
        """Yield the shards of each of those samples, and its ranges of values there."""
        for sample in range(first_sample, first_sample + count):
            place = sample % self._block_size
            block = self._locate_block(sample - place)
            dataset = self._datasets[block.source[place]]
            yield [(dataset.open_shard(shard, sample), start, stop) for shard, start, stop in block.ranges[place]]

    def _locate_block(self, first: int) -> _LocatedSamples:
        located = self._located  # replaced as a whole, so that two threads may read at once
        if located.first_sample != first:
            located = _LocatedSamples(first, [0] * self._block_size, [()] * self._block_size)
            for number, (dataset, own, sample) in enumerate(self._find_samples(first)):
                ranges_of_samples = dataset.locate(sample)
                dataset.fetch_ahead(first + own, ranges_of_samples)
                for place, ranges in zip(own.tolist(), ranges_of_samples, strict=True):
                    located.source[place], located.ranges[place] = number, ranges
            self._located = located
        return located

    def _find_samples(self, first: int) -> Iterator[tuple[AnyDataset, Int64Array, Int64Array]]:
        """For each dataset, which of the samples first .. first + 8191 are its, and their numbers in it. A validation
        set ends before."""
        number = np.arange(first, first + self._block_size)
        source, index = self._mixture.locate(number[: self.num_samples - first] if self._is_validation else number)
        for source_index, (dataset, order) in enumerate(zip(self._datasets, self._orders, strict=True)):
            own = np.flatnonzero(source == source_index)
            samples_of = order.validation_samples if self._is_validation else order.training_samples
            yield dataset, own, samples_of(index[own])


RESTORE_FILES_HINT = "restore the files that the recipe's data.source matched, or use --force to continue with these"
"""For a run that resumes with other data."""


@dataclass(frozen=True)
class ValidationPart:
    """Validation samples first .. first + count - 1, all of one source, and that source's weight."""

    first: int
    count: int
    weight: float


@dataclass(eq=False)
class RunData:
    """Everything that a run trains on and is scored on. Made by `open_data`."""

    info: DataInfo
    fingerprint: str
    _train: SampleReader
    _validation: SampleReader
    _validation_parts: Sequence[ValidationPart]
    mixture: SourceMixture
    _document_masking: bool
    padding_fraction: float | None
    """Share of the positions of training samples that is padding; None where documents are cut instead."""
    num_cut_documents: int = 0
    """Training documents that are longer than a sample, where the others are kept whole."""
    num_dropped_documents: int = 0
    """Training documents that are left out, because they are longer than a sample."""
    records: str | None = None
    """What a document of conversations is; None for plain text and images."""
    _processor: ImageProcessor | None = None
    has_text_only: bool = False
    """Whether some conversations of data with images have none."""
    names_samples: bool = field(init=False)
    """Whether batches of tokens have `sample_ids`, for what is stored of each sample."""

    def __post_init__(self) -> None:
        self.names_samples = self.records in ("pairs", "labels")

    @property
    def num_train_samples(self) -> int:
        """Training samples in one epoch of every source."""
        return self._train.num_samples

    @property
    def num_validation_samples(self) -> int:
        """Samples of the validation set."""
        return self._validation.num_samples

    @property
    def has_images(self) -> bool:
        """Whether they are conversations with images."""
        return self._processor is not None

    def read_training(self, first_sample: int, count: int) -> Batch:
        """The run's samples number consumed .. consumed + count - 1. Epochs follow one another without end."""
        return self._read_batch(self._train, first_sample, count)

    def read_files(self, sample: int, is_validation: bool) -> list[bytes]:
        """Return the image files of a training or validation sample."""
        return (self._validation if is_validation else self._train).read_image_files(sample, 1)[0]

    def count_units(self, first_sample: int, count: int) -> int:
        """Tokens of those training samples, without padding, or images."""
        if self.padding_fraction is None:
            return count * (self.info.seq_len or 1)
        return self._train.count_tokens(first_sample, count)

    def read_validation(self, start: int, count: int) -> Batch:
        """Return the validation samples start .. start + count - 1, all below `num_validation_samples`."""
        if not 0 <= start <= start + count <= self.num_validation_samples:
            raise ValueError(f"validation samples {start} to {start + count - 1} of {self.num_validation_samples}")
        return self._read_batch(self._validation, start, count)

    def choose_validation_parts(self, max_samples: int) -> list[ValidationPart]:
        """Return at most `max_samples` validation samples: of each source a number by its weight, as far as it has
        them."""
        parts = self._validation_parts
        counts = divide_samples(max_samples, [part.count for part in parts], [part.weight for part in parts])
        return [replace(part, count=count) for part, count in zip(parts, counts, strict=True)]

    def _read_batch(self, pool: SampleReader, first: int, count: int) -> Batch:
        if self.info.image_shape is not None:
            labels, pixels = pool.read_images(first, count)
            numbers = labels.view("<u4")[:, 0].astype(np.int64)
            return {"images": pixels.reshape(count, *self.info.image_shape), "labels": numbers}
        rows, located = pool.read_samples(first, count)
        if self.records in NUMBERED_RECORDS:
            return _make_text_batch(rows, located, self.records == "rewards")
        batch = self._make_token_batch(rows, located)
        if self._processor is not None:
            batch |= self._processor.make_inputs(pool.read_image_files(first, count), batch["tokens"])
        if self.names_samples:
            before = self._first_validation_id if pool is self._validation else 0
            batch["sample_ids"] = before + pool.find_sample_ids(first, count)
        return batch

    def read_by_ids(self, first_id: int, count: int) -> Batch:
        """Return the samples with the `sample_ids` first .. first + count - 1, all below `num_sample_ids`: first those
        to train on, then those to validate on."""
        num_train = self._train.num_dataset_samples
        parts = [
            pool.read_by_ids(start, stop - start)
            for pool, start, stop in (
                (self._train, first_id, min(first_id + count, num_train)),
                (self._validation, max(first_id - num_train, 0), first_id + count - num_train),
            )
            if start < stop
        ]
        rows = np.concatenate([rows for rows, _ in parts])
        batch = self._make_token_batch(rows, [ranges for _, located in parts for ranges in located])
        return {**batch, "sample_ids": np.arange(first_id, first_id + count)}

    def _make_token_batch(self, rows: ValueArray, located: list[DocumentRanges]) -> Batch:
        # Values of conversations have bits beyond their token.
        marks, rows = (rows, rows) if self.records is None else (rows, rows & TOKEN_MASK)
        batch: Batch = {"tokens": rows[:, :-1].astype(np.int64), "targets": rows[:, 1:].astype(np.int64)}
        if self.padding_fraction is not None:
            num_tokens = np.array([sum(stop - start for _, start, stop in ranges) for ranges in located])
            is_padding = np.arange(1, rows.shape[1]) >= num_tokens[:, None]
            np.putmask(batch["targets"], is_padding, IGNORE_INDEX)
        if self.records is not None:
            np.putmask(batch["targets"], marks[:, 1:] & LOSS_BIT == 0, IGNORE_INDEX)
        if self.records in ("pairs", "labels"):
            batch["rejected"] = marks[:, :-1] & REJECTED_BIT != 0
        if self._document_masking:
            begins = _document_start_mask(located, rows.shape[1])
            if self.records is not None:
                begins[:, 1:] |= marks[:, 1:] & SEQUENCE_BIT != 0
            np.putmask(batch["targets"], begins[:, 1:], IGNORE_INDEX)
            batch["documents"] = np.cumsum(begins[:, :-1], axis=1, dtype=np.int32)
        return batch

    def check_classes(self) -> None:
        """Raise RecipeError if all texts to train on have one label. Reads until another is met."""
        names, first = self.info.class_names or (), int(self.read_training(0, 1)["labels"][0])
        for start in range(0, self.num_train_samples, _LOCATED_STREAM_SAMPLES):
            count = min(_LOCATED_STREAM_SAMPLES, self.num_train_samples - start)
            if (self.read_training(start, count)["labels"] != first).any():
                return
        raise RecipeError(f"data.source: all texts have the label {names[first]!r}; expected two classes at least")

    @property
    def num_sample_ids(self) -> int:
        """All `sample_ids` are below it."""
        return self._first_validation_id + self._validation.num_dataset_samples

    @property
    def _first_validation_id(self) -> int:
        """0 where the validation set is a part of the same samples: packed ones are of documents of its own."""
        is_part = self.padding_fraction is None and self._train.locations == self._validation.locations
        return 0 if is_part else self._train.num_dataset_samples


def _make_text_batch(rows: ValueArray, located: list[DocumentRanges], has_margins: bool) -> Batch:
    """Make a batch of records of whole texts, each a number and its sequences."""
    num_values = np.array([sum(stop - start for _, start, stop in ranges) for ranges in located])
    numbers, values = rows[:, 0] & TOKEN_MASK, rows[:, 1:]
    sequences = np.cumsum(values & SEQUENCE_BIT != 0, axis=1, dtype=np.int32) - 1
    np.putmask(sequences, np.arange(1, rows.shape[1]) >= num_values[:, None], -1)
    extra: Batch = {"margins": numbers_to_margins(numbers)} if has_margins else {"labels": numbers.astype(np.int64)}
    return {"tokens": (values & TOKEN_MASK).astype(np.int64), "sequences": sequences, **extra}


def _document_start_mask(located: list[DocumentRanges], length: int) -> npt.NDArray[np.bool_]:
    """Where in every sample [b, length] a document, or padding, begins behind another; never at its first token."""
    begins = np.zeros((len(located), length), np.bool_)
    for row, ranges in zip(begins, located, strict=True):
        filled = 0
        for starts, start, stop in ranges:
            row[filled] = filled > 0
            for at in range(bisect_right(starts, start), bisect_left(starts, stop)):
                row[filled + starts[at] - start] = True
            filled += stop - start
        row[filled : filled + 1] = True
    return begins


@dataclass(frozen=True)
class _Source:
    """A source's samples to train on and to validate on, each with its order."""

    train: tuple[AnyDataset, AnyOrder]
    validation: tuple[AnyDataset, AnyOrder]
    padding_fraction: float | None = None
    num_cut: int = 0
    num_dropped: int = 0
    has_text_only: bool = False

    @property
    def num_training(self) -> int:
        order = self.train[1]
        return order.num_samples - order.num_validation

    @property
    def num_validation(self) -> int:
        return self.validation[1].num_validation


def open_data(
    data: data_schema.DataConfig, evaluation: data_schema.EvaluationConfig, seed: int, global_size: int = 1
) -> RunData:
    """Open what a recipe names, its sources all `prepared`. Samples are not read yet.

    Args:
        global_size: samples of a step, over which several sources are mixed evenly.

    Raises:
        RecipeError: the sources do not fit each other or are too small.
        DataError: one is damaged.
    """
    holdout_fraction = 0.0 if evaluation.source else evaluation.holdout_fraction
    sources = [_open_source(source, data, holdout_fraction, seed, "data.source") for source in data.sources]
    datasets = [source.train[0] for source in sources]
    info = _common_info(datasets, data.seq_len)
    mixture = _mix_sources(data, [source.num_training for source in sources])
    weights = mixture.average_weights()
    scored, score_weights = sources, weights
    if evaluation.source:
        scored, score_weights = [_open_source(evaluation.source, data, 1.0, 0, "evaluation.source")], [1.0]
        _common_info([*datasets, scored[0].validation[0]], data.seq_len, has_validation=True)
    sizes = [source.num_validation for source in scored]
    fingerprint_inputs: dict[str, Any] = {
        "datasets": [dataset.fingerprint for dataset in datasets],
        "mixture": reduce_weights(mixture.stages[0].weights),
        "held": [source.num_validation for source in sources],
        "sequence": info.seq_len,
        "documents": "separate" if data.document_masking else "join",  # as it was first written: it is hashed
    }
    if len(sources) > 1:
        fingerprint_inputs["order"] = 2  # the second way to mix sources
    if data.curriculum:
        fingerprint_inputs["curriculum"] = [(step, reduce_weights(each)) for step, each in mixture.stages[1:]]
    if data.prepare == "stream":
        fingerprint_inputs["stream_window"] = data.stream_window
    if data.packing is not None:
        fingerprint_inputs["packing"] = data.packing
    if data.chat is not None:
        fingerprint_inputs["too_long"] = data.chat.too_long
    padding = [
        weight * source.padding_fraction
        for weight, source in zip(weights, sources, strict=True)
        if source.padding_fraction is not None
    ]
    schedule = MixtureSchedule(mixture.stages, global_size, seed)
    settings = datasets[0].manifest.processor
    tokenizer = open_dataset_files(data.sources[0].prepared or "").directory / TOKENIZER_FILE
    validation_sets = [source.validation[0] for source in scored]
    orders = [source.validation[1] for source in scored]
    return RunData(
        info,
        xxh3_128_hexdigest(json.dumps(fingerprint_inputs, sort_keys=True).encode()),
        SampleReader(datasets, [source.train[1] for source in sources], schedule, is_validation=False),
        SampleReader(validation_sets, orders, SourceSequence(sizes), is_validation=True),
        list(map(ValidationPart, accumulate(sizes, initial=0), sizes, score_weights)),
        mixture,
        _document_masking=data.document_masking and info.kind == "tokens",
        padding_fraction=sum(padding) / sum(weights) if padding else None,
        num_cut_documents=sum(source.num_cut for source in sources),
        num_dropped_documents=sum(source.num_dropped for source in sources),
        records=datasets[0].manifest.records,
        _processor=None if settings is None else ImageProcessor(settings, tokenizer),
        has_text_only=any(source.has_text_only for source in [*sources, *scored]),
    )


def _mix_sources(data: data_schema.DataConfig, sizes: Sequence[int]) -> SourceMixture:
    """The weights of the sources, which have these numbers of training samples, step by step."""
    weights = [source.weight for source in data.sources]
    if data.temperature is not None:
        weights = weigh_by_size(sizes, data.temperature)
    later = [MixtureStage(stage.from_step - 1, tuple(stage.weights)) for stage in data.curriculum or []]
    return SourceMixture(tuple(sizes), (MixtureStage(0, tuple(weights)), *later))


def _open_source(
    source: data_schema.DataSource, data: data_schema.DataConfig, holdout_fraction: float, seed: int, key: str
) -> _Source:
    """Open a source, of which `holdout_fraction` is for validation; 1: all of it."""
    if source.prepared is None:
        raise RecipeError(
            f"{key}: found {source.kind}, expected `prepared`: a run's resolved.yaml names prepared directories"
        )
    location = source.prepared
    if data.prepare == "stream" and key == "data.source" and not is_url(location) and is_stream(Path(location)):
        directory = Path(location)
        stream = StreamedDataset(directory, data.seq_len)
        window_order = StreamOrder(stream, data.stream_window, holdout_fraction, seed)
        return _Source((stream, window_order), (StreamedDataset(directory, data.seq_len), window_order))
    with name_recipe_key(key):
        dataset = PreparedDataset(location, data.seq_len)
    if dataset.manifest.processor is not None and not (data.chat is not None and data.chat.images):
        raise RecipeError(f"{key}: {location} has conversations with images; give data.chat.images: true")
    if data.packing is not None and dataset.manifest.kind == "tokens":
        return _open_packed(dataset, data, holdout_fraction, seed)
    if not dataset.num_samples:
        shards = dataset.manifest.shards
        in_shard = "" if len(shards) == 1 else f" in the longest of its {len(shards)} shards"
        raise RecipeError(
            f"data.seq_len: {data.seq_len} tokens and the next need at least {data.seq_len + 1}, but {location} has "
            f"only {max(shard.count for shard in shards)} tokens{in_shard}"
        )
    size = dataset.num_samples
    order = ShuffleOrder(size, num_validation_samples(size, holdout_fraction), dataset.manifest.fingerprint, seed)
    validation = PreparedDataset(location, data.seq_len)  # verified at other times than the training data
    return _Source((dataset, order), (validation, order))


def _open_packed(dataset: PreparedDataset, data: data_schema.DataConfig, holdout_fraction: float, seed: int) -> _Source:
    """Open a source and keep its documents whole, each in training or in validation."""
    location, manifest = dataset.location, dataset.manifest
    dataset.files.fetch(*(entry.sidecar for entry in manifest.shards))
    folder = dataset.files.directory
    too_long: LongDocuments = "split"
    if manifest.records is not None:
        too_long = "truncate" if data.chat is not None and data.chat.too_long == "truncate" else "drop"
    num_extra = int(manifest.records in NUMBERED_RECORDS)
    train, validation = (
        _pack_documents(documents, data, too_long, num_extra)
        for documents in list_documents(folder, manifest, holdout_fraction)
    )
    num_validation = len(validation.ends)
    num_long = train.num_dropped + validation.num_dropped
    if num_long and data.chat is not None and data.chat.too_long == "error":
        raise RecipeError(
            f"data.seq_len: {num_long} documents of {location} are longer than {data.seq_len} tokens; raise it, or use "
            "data.chat.too_long=drop or truncate"
        )
    if holdout_fraction < 1 and not len(train.ends):
        what = f": all {num_long} documents are longer than data.seq_len={data.seq_len}" if num_long else ""
        raise RecipeError(f"data.source: {location} has no tokens to train on{what}")
    return _Source(
        (PackedDataset(location, train), ShuffleOrder(len(train.ends), 0, manifest.fingerprint, seed)),
        (PackedDataset(location, validation), ShuffleOrder(num_validation, num_validation, manifest.fingerprint, seed)),
        train.padding_fraction,
        train.num_cut,
        train.num_dropped,
        has_text_only=manifest.processor is not None and has_text_only(folder, manifest),
    )


def _pack_documents(
    documents: TokenRanges, data: data_schema.DataConfig, too_long: LongDocuments, num_extra: int
) -> PackedWindows:
    """Pack documents that begin with `num_extra` values which are no tokens."""
    windows = pack_documents(documents, data.seq_len + num_extra, too_long, one_each=data.packing == "single")
    return replace(windows, seq_len=data.seq_len, num_tokens=windows.num_tokens - num_extra)


def _mixing_requirements(manifest: DatasetManifest) -> dict[str, Any]:
    """What datasets must have in common to be mixed. A tokenizer is what it does, whatever it is called."""
    tokenizer = manifest.tokenizer or {}
    return {
        "kind": manifest.kind,
        "vocab": manifest.vocab,
        "records": manifest.records,
        "images": manifest.processor and xxh3_128_hexdigest(json.dumps(manifest.processor, sort_keys=True).encode()),
        "tokenizer": tokenizer.get("xxh3", tokenizer.get("name")),
        "shape": manifest.shape,
        "classes": manifest.classes,
        "labels": manifest.labels,
    }


def _common_info(datasets: Sequence[AnyDataset], seq_len: int, has_validation: bool = False) -> DataInfo:
    """The facts that all datasets share; RecipeError when one is of another kind. `has_validation`: the last of them is
    that of `evaluation.source`."""
    first = datasets[0].manifest
    for number, dataset in enumerate(datasets[1:], 1):
        other = "evaluation.source" if has_validation and number == len(datasets) - 1 else f"data.source.{number}"
        for key, first_value in _mixing_requirements(first).items():
            other_value = _mixing_requirements(dataset.manifest)[key]
            if first_value != other_value and not (key == "labels" and None in (first_value, other_value)):
                raise RecipeError(
                    f"data.source: {datasets[0].location} and {dataset.location} ({other}) cannot be mixed: {key} is "
                    f"{first_value} and {other_value}"
                )
    seq_len_or_none = seq_len if first.kind == "tokens" else None
    return DataInfo(first.kind, first.vocab, first.classes, seq_len_or_none, first.shape, first.labels)
