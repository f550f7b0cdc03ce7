"""Training on a source while it is being prepared: `data.prepare: stream`.

A source is divided into pieces before anything is read, and each piece becomes one shard. An epoch visits the pieces
in a permutation of its own, in *windows* of `data.stream_window` pieces; the samples of a window are permuted. Which
sample has which number is a function of the listing of the source, the seed and the window alone: a reader waits until
the pieces of the next window are there. So the order is the same on any number of workers, after a resume, and when the
preparation has been finished before. A part of the pieces is for validation, chosen without the seed.

The directory of a stream has from the beginning a manifest without shards and `stream.json`, which names the listing;
shards and their `.done` files are added, and at the end the manifest has all shards.
"""

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from xxhash import xxh3_128_hexdigest

from phalanx.data.manifest import STREAM_FILE, ShardEntry, read_manifest
from phalanx.data.order import Int64Array, hash_key, num_validation_samples, permute
from phalanx.data.prepare_plan import READER_VERSION, TOKENIZING_VERSION, PreparePlan, read_done_file
from phalanx.data.shard import MappedShard
from phalanx.errors import DataError, ExitCode, PhalanxError, RecipeError, error_of_code
from phalanx.run.directory import write_json
from phalanx.run.lock import is_locked
from phalanx.safe_files import read_json

LOCK_FILE = "lock"
_ERROR_FILE = "error.json"
_POLL_S, _LOOK_INTERVAL_S = 0.1, 5.0
_PIECE_BITS = 32
"""A sample of a stream has the number piece << 32 | number in the piece."""


@dataclass(frozen=True)
class StreamDescription:
    """What a stream is before anything of it is prepared. `identity` names the listing and what is made of it."""

    identity: str
    num_pieces: int

    @classmethod
    def from_plan(cls, plan: PreparePlan) -> "StreamDescription":
        """Names and sizes of the files, relative to their common directory, and what they become. Times are left out: a
        copy of the files on another machine is the same stream."""
        root = os.path.commonpath([file.path.rpartition("/")[0] or "/" for file in plan.files])
        parts = {
            "files": [(os.path.relpath(file.path, root), file.size) for file in plan.files],
            "pieces": [[(part.start, part.stop) for part in piece] for piece in plan.pieces],
            "kind": plan.kind,
            "field": plan.text_field,
            "format": plan.token_format,
            "tokenizer": plan.tokenizer_xxh3 or plan.tokenizer,
            "ends": asdict(plan.ends),
            "versions": [READER_VERSION, TOKENIZING_VERSION],
        }
        return cls(xxh3_128_hexdigest(json.dumps(parts, sort_keys=True).encode()), len(plan.pieces))

    def write(self, directory: Path) -> None:
        """Write stream.json."""
        write_json(directory / STREAM_FILE, asdict(self))


def read_description(directory: Path) -> StreamDescription:
    """The description of a stream. Raises DataError for a damaged one."""
    found = read_json(directory / STREAM_FILE)
    try:
        return StreamDescription(**found)
    except TypeError as error:
        raise DataError(f"{directory / STREAM_FILE}: not a description of a stream ({error})") from None


def is_stream(directory: Path) -> bool:
    """Whether a data set is, or was, prepared as a stream."""
    return (directory / STREAM_FILE).is_file()


def report_stream_error(directory: Path, error: PhalanxError) -> None:
    """Tell the readers of a stream why its preparation has ended."""
    write_json(directory / _ERROR_FILE, {"message": str(error), "code": int(error.code)})


def check_stream_error(directory: Path) -> None:
    """Raise what ended the preparation of a stream, if anything did."""
    with suppress(FileNotFoundError):
        found = read_json(directory / _ERROR_FILE)
        raise error_of_code(found["message"], found["code"])


def forget_stream_error(directory: Path) -> None:
    """Remove what an earlier preparation reported."""
    (directory / _ERROR_FILE).unlink(missing_ok=True)


def is_being_prepared(directory: Path) -> bool:
    """Whether a process prepares this stream now."""
    return is_locked(directory / LOCK_FILE)


def piece_order(num_pieces: int, holdout_fraction: float, seed: int, identity: str) -> tuple[list[int], list[int]]:
    """The pieces for validation, and those for training in the order of the first epoch. RecipeError for too few."""
    if holdout_fraction and num_pieces < 2:
        raise RecipeError(
            "data.prepare: a stream keeps whole pieces of at least 4 MiB for validation, and the source is one piece; "
            "expected `first` for a source of this size, or evaluation.source"
        )
    num_held = num_validation_samples(num_pieces, holdout_fraction)
    key = np.array(hash_key("validation", identity), np.uint64)
    pieces = permute(np.arange(num_pieces, dtype=np.uint64), num_pieces, key).tolist()
    held, rest = pieces[:num_held], sorted(pieces[num_held:])
    return held, [rest[number] for number in _permuted(len(rest), "pieces", identity, seed, 0).tolist()]


def preparation_order(description: StreamDescription, holdout_fraction: float, seed: int) -> list[int]:
    """All pieces, in the order in which a run reads them: those for validation first."""
    validation, training = piece_order(description.num_pieces, holdout_fraction, seed, description.identity)
    return [*validation, *training]


def _permute(index: Int64Array, size: int, *key: object) -> Int64Array:
    return permute(index.astype(np.uint64), size, np.array(hash_key(*key), np.uint64)).astype(np.int64)


def _permuted(size: int, *key: object) -> Int64Array:
    return _permute(np.arange(size), size, *key)


class StreamedDataset:
    """The shards of a stream by their pieces. A shard that is not there yet is waited for."""

    def __init__(
        self,
        directory: Path,
        seq_len: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self._directory, self.location = directory, str(directory)
        self._stride, self.sample_length = seq_len, seq_len + 1
        self._clock, self._sleep = clock, sleep
        self.description = read_description(directory)
        self.fingerprint = self.description.identity
        self.manifest = manifest = read_manifest(directory)
        self._finished = {int(entry.file[len("shard-") : -len(".bin")]): entry for entry in manifest.shards}
        self._shards: dict[int, MappedShard] = {}

    def count_samples(self, piece: int) -> int:
        """Samples of a piece, once it is prepared."""
        entry = self.wait_for(piece)
        return 0 if entry is None else max(entry.count - 1, 0) // self._stride

    def wait_for(self, piece: int) -> ShardEntry | None:
        """The shard of a piece, None for one without tokens. Raises what ended the preparation, or UNFINISHED where
        nothing prepares the stream any more."""
        if self._finished:
            return self._finished.get(piece)
        next_look = self._clock()
        while (done := read_done_file(self._directory, piece)) is None:
            if self._clock() >= next_look:
                check_stream_error(self._directory)
                if not is_being_prepared(self._directory) and read_done_file(self._directory, piece) is None:
                    raise PhalanxError(
                        f"{self._directory}: nothing prepares this stream any more; run the same command again",
                        ExitCode.UNFINISHED,
                    )
                next_look = self._clock() + _LOOK_INTERVAL_S
            self._sleep(_POLL_S)
        return done.entry if done.entry.count else None

    def locate(self, sample: Int64Array) -> list[tuple[tuple[int, int, int], ...]]:
        """The range of values of each sample: piece, and start .. stop - 1 in its shard."""
        piece, number = sample >> _PIECE_BITS, sample & (1 << _PIECE_BITS) - 1
        start = number * self._stride
        stop = start + self.sample_length
        return [(each,) for each in zip(piece.tolist(), start.tolist(), stop.tolist(), strict=True)]

    def fetch_ahead(self, samples: Int64Array, located: list[tuple[tuple[int, int, int], ...]]) -> None:
        """Nothing: the order of preparation is that of reading."""

    def count_tokens(self, sample: Int64Array) -> Int64Array:
        """Tokens of each sample that are no padding: all."""
        return np.full(len(sample), self._stride)

    def open_shard(self, piece: int, sample: int) -> MappedShard:
        """The shard of a piece, mapped into memory."""
        if (shard := self._shards.get(piece)) is None:
            entry = self.wait_for(piece)
            assert entry is not None
            shard = self._shards[piece] = MappedShard(self._directory, entry, np.dtype(self.manifest.dtype))
        return shard

    def reset_verification(self) -> None:
        """Have everything that is read from now on verified again."""
        for shard in self._shards.values():
            shard.reset_verification()


class _SampleRange:
    """The samples of some pieces, one piece after the other, in an order of their own."""

    def __init__(self, pieces: Sequence[int], counts: Sequence[int], *key: object):
        self._pieces, self._ends, self._key = np.array(pieces, np.int64), np.cumsum(counts, dtype=np.int64), key
        self.size = int(self._ends[-1]) if len(pieces) else 0

    def samples(self, position: Int64Array) -> Int64Array:
        """The samples at positions 0 .. size - 1 of the order."""
        place = _permute(position, self.size, *self._key)
        piece = np.searchsorted(self._ends, place, side="right")
        first = np.where(piece > 0, self._ends[piece - 1], 0)
        return (self._pieces[piece] << _PIECE_BITS) + place - first


class StreamOrder:
    """The order of a stream's samples. It knows as many windows as were asked for: later ones are not prepared yet."""

    def __init__(self, dataset: StreamedDataset, window: int, holdout_fraction: float, seed: int):
        self._dataset, self._window, self._seed = dataset, window, seed
        self._identity = identity = dataset.description.identity
        held, first_epoch = piece_order(dataset.description.num_pieces, holdout_fraction, seed, identity)
        self._pieces = sorted(first_epoch)
        self._validation = self._make_range(held, "validation-samples", identity)
        self.num_validation = self._validation.size
        self._windows: list[_SampleRange] = []
        self._ends: list[int] = []  # of the windows, in samples
        self._add_window()

    @property
    def num_samples(self) -> int:
        """All samples, as far as this can be known: of the windows that are there, and as many for each other one."""
        known = min(len(self._ends), self._windows_per_epoch)
        return self._ends[known - 1] * self._windows_per_epoch // known + self.num_validation

    def training_samples(self, index: Int64Array) -> Int64Array:
        """The samples that training meets at the positions `index`; waits until they are prepared."""
        last = int(index.max(initial=0))
        while self._ends[-1] <= last:
            self._add_window()
        window = np.searchsorted(self._ends, index, side="right")
        samples = np.empty_like(index)
        for number in np.unique(window).tolist():
            own = window == number
            first = self._ends[number - 1] if number else 0
            samples[own] = self._windows[number].samples(index[own] - first)
        return samples

    def validation_samples(self, index: Int64Array) -> Int64Array:
        """The validation samples with the numbers `index`."""
        return self._validation.samples(index)

    @property
    def _windows_per_epoch(self) -> int:
        return -(-len(self._pieces) // self._window)

    def _add_window(self) -> None:
        number = len(self._windows)
        epoch, window = divmod(number, self._windows_per_epoch)
        order = _permuted(len(self._pieces), "pieces", self._identity, self._seed, epoch)
        pieces = [self._pieces[each] for each in order[window * self._window : (window + 1) * self._window].tolist()]
        self._windows.append(self._make_range(pieces, "window", self._identity, self._seed, number))
        self._ends.append((self._ends[-1] if self._ends else 0) + self._windows[-1].size)
        if number + 1 == self._windows_per_epoch and not self._ends[-1]:
            raise RecipeError(
                f"data.seq_len: no piece of {self._dataset.location} has {self._dataset.sample_length} tokens"
            )

    def _make_range(self, pieces: Sequence[int], *key: object) -> _SampleRange:
        return _SampleRange(pieces, [self._dataset.count_samples(piece) for piece in pieces], *key)
