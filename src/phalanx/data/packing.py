"""Pack whole documents into windows (`data.packing: whole`): which documents each sample of a dataset holds.

Best-fit decreasing: the longest documents first, each into the fullest window in which it fits (Johnson, "Near-optimal
bin packing algorithms", 1973: at most 11/9 of the windows of the best packing; Ding et al., "Fewer truncations improve
language modeling", 2024). Documents of one length are placed together, so that each process can pack when it opens the
data: a million documents take about a second. The result depends on the documents and `seq_len` only.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from phalanx.data.manifest import DatasetManifest
from phalanx.data.order import Int64Array, hash_key, num_validation_samples, permute
from phalanx.data.shard import read_sidecar
from phalanx.errors import DataError

LongDocuments = Literal["split", "truncate", "drop"]


@dataclass(frozen=True)
class TokenRanges:
    """Ranges of tokens, start .. stop - 1 of a shard each."""

    shard: npt.NDArray[np.int32]
    start: Int64Array
    stop: Int64Array

    def select(self, index: npt.NDArray[Any]) -> "TokenRanges":
        """Return the ranges that an index or mask of numpy selects."""
        return TokenRanges(self.shard[index], self.start[index], self.stop[index])


def list_documents(folder: Path, manifest: DatasetManifest, holdout_fraction: float) -> tuple[TokenRanges, TokenRanges]:
    """List the documents of a dataset, in order: those to train on, and those of the validation set, which depend on
    the fingerprint only. A document that continues in the next shard is a range of each. DataError when a sidecar is
    damaged."""
    shards: list[TokenRanges] = []
    document_numbers: list[Int64Array] = []
    num_documents = 0
    for number, entry in enumerate(manifest.shards):
        begins = read_sidecar(folder, entry).documents
        continues = not len(begins) or begins[0] > 0
        edges = np.concatenate([[0] if continues else [], begins, [entry.count]]).astype(np.int64)
        if edges[0] < 0 or (np.diff(edges) < 0).any():
            raise DataError(f"{folder / entry.sidecar}: documents begin where the shard has no tokens")
        shards.append(TokenRanges(np.full(len(edges) - 1, number, np.int32), edges[:-1], edges[1:]))
        num_documents = max(num_documents - int(continues), 0)
        if manifest.processor is not None:  # every second document has image files
            shards[-1] = shards[-1].select(np.arange(0, len(edges) - 1, 2))
        document_numbers.append(np.arange(num_documents, num_documents + len(shards[-1].start)))
        num_documents += len(shards[-1].start)
    columns = zip(*((ranges.shard, ranges.start, ranges.stop) for ranges in shards), strict=True)
    documents = TokenRanges(*map(np.concatenate, columns))
    count = num_validation_samples(num_documents, holdout_fraction)
    key = np.array(hash_key("validation documents", manifest.fingerprint), np.uint64)
    is_validation = np.zeros(num_documents, np.bool_)
    is_validation[permute(np.arange(count, dtype=np.uint64), num_documents, key).astype(np.int64)] = True
    chosen, has_tokens = is_validation[np.concatenate(document_numbers)], documents.stop > documents.start
    return documents.select(has_tokens & ~chosen), documents.select(has_tokens & chosen)


def has_text_only(folder: Path, manifest: DatasetManifest) -> bool:
    """Return whether a conversation of a dataset with images has none: the document of its files is one value."""
    edges = ([*read_sidecar(folder, entry).documents, entry.count] for entry in manifest.shards)
    return any((np.diff(each)[1::2] == 1).any() for each in edges)


@dataclass(frozen=True)
class PackedWindows:
    """The samples of a packing: sample i has the ranges ends[i - 1] .. ends[i] - 1, one after the other, in
    `num_tokens[i]` of its `seq_len` positions. The rest is padding."""

    ranges: TokenRanges
    ends: Int64Array
    num_tokens: Int64Array
    seq_len: int
    num_cut: int = 0
    """Documents that are longer than `seq_len`, and so in several samples, or cut at their end."""
    num_dropped: int = 0
    """Documents that are longer than `seq_len`, and left out."""

    @property
    def padding_fraction(self) -> float:
        """Share of the positions that is padding."""
        return 1 - int(self.num_tokens.sum()) / max(len(self.ends) * self.seq_len, 1)


def pack_documents(
    documents: TokenRanges, seq_len: int, too_long: LongDocuments = "split", one_each: bool = False
) -> PackedWindows:
    """Pack documents into windows of `seq_len` tokens, or one into each. `too_long`: what becomes of a longer one; it
    is cut every `seq_len` tokens, cut at its end, or left out."""
    is_long = documents.stop - documents.start > seq_len
    num_long = int(is_long.sum())
    if too_long == "drop":
        documents = documents.select(~is_long)
    elif too_long == "truncate":
        documents = replace(documents, stop=np.minimum(documents.stop, documents.start + seq_len))
    pieces = _cut_long_documents(documents, seq_len)
    length = np.minimum(pieces.stop - pieces.start, seq_len)  # the last token of a full piece is only a target
    window = np.arange(len(length), dtype=np.int32) if one_each else _best_fit_decreasing(length, seq_len)
    in_windows = np.argsort(window, kind="stable")
    ends = np.cumsum(np.bincount(window))
    num_tokens = np.bincount(window, length).astype(np.int64)
    num_dropped = num_long if too_long == "drop" else 0
    return PackedWindows(
        pieces.select(in_windows), ends, num_tokens, seq_len, num_cut=num_long - num_dropped, num_dropped=num_dropped
    )


def _cut_long_documents(documents: TokenRanges, seq_len: int) -> TokenRanges:
    """Return ranges of at most `seq_len` tokens, and one more for ranges that continue: it is their last target."""
    length = documents.stop - documents.start
    num_pieces = np.where(length <= seq_len, 1, -(-(length - 1) // seq_len))
    pieces = documents.select(np.repeat(np.arange(len(length)), num_pieces))
    first = np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    start = pieces.start + (np.arange(len(first)) - first) * seq_len
    return TokenRanges(pieces.shard, start, np.minimum(pieces.stop, start + seq_len + 1))


class _OpenWindows:
    """Windows by the space that is left in them."""

    def __init__(self) -> None:
        self._windows: dict[int, list[Int64Array]] = {}
        self._spaces: list[int] = []  # sorted

    def add(self, space: int, windows: Int64Array) -> None:
        """Keep windows with this space left."""
        if space and len(windows):
            if space not in self._windows:
                self._windows[space] = []
                insort(self._spaces, space)
            self._windows[space].append(windows)

    def take_fullest(self, size: int) -> tuple[int, Int64Array] | None:
        """Take all windows with the least space that is at least `size`; None where there is none."""
        if (at := bisect_left(self._spaces, size)) == len(self._spaces):
            return None
        space = self._spaces.pop(at)
        return space, np.concatenate(self._windows.pop(space))


def _best_fit_decreasing(length: Int64Array, capacity: int) -> npt.NDArray[np.int32]:
    """Return the window of each item of `length`, which is 1 to `capacity`. Items of a length, and windows with the
    same space left, are handled together, in order."""
    window = np.empty(len(length), np.int32)
    # numpy sorts integers of 16 bits in linear time
    shortness = (capacity - length).astype(np.uint16 if capacity < 1 << 16 else np.int64)
    order = np.argsort(shortness, kind="stable")
    sizes, first = np.unique(-length[order], return_index=True)
    open_windows, num_windows = _OpenWindows(), 0
    for size, items in zip((-sizes).tolist(), np.split(order, first)[1:], strict=True):
        while len(items):
            fullest = open_windows.take_fullest(size)
            if fullest is None:
                space, windows = capacity, np.arange(num_windows, num_windows - (-len(items) // (capacity // size)))
                num_windows += len(windows)
            else:
                space, windows = fullest
            of_each = space // size
            num_full, num_in_last = divmod(min(len(items), len(windows) * of_each), of_each)
            num_placed = num_full * of_each + num_in_last
            window[items[:num_placed]] = np.repeat(windows, of_each)[:num_placed]
            open_windows.add(space - of_each * size, windows[:num_full])
            if num_in_last:
                open_windows.add(space - num_in_last * size, windows[num_full : num_full + 1])
                num_full += 1
            open_windows.add(space, windows[num_full:])
            items = items[num_placed:]
    return window
