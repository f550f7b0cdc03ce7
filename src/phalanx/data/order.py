"""Data order as pure functions: which sample has the number n of a run. No state, no lists of indices, no files.

Every epoch visits all samples in a permutation of its own, computed element by element, so that it costs the same
memory for a thousand samples and for a trillion. The permutation is a Feistel network over a rectangle of
rows x columns >= size, walked until it lands inside (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002,
method 3: generalised Feistel with cycle walking).
"""

from collections.abc import Sequence
from math import gcd, isqrt

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

UInt64Array = npt.NDArray[np.uint64]
Int64Array = npt.NDArray[np.int64]

_FEISTEL_ROUNDS = 6
_GOLDEN_RATIO_64 = 0x9E3779B97F4A7C15
_MIXTURE_PERIOD = 1 << 14  # resolution of mixture weights: 0.006%


def _splitmix64(x: UInt64Array) -> UInt64Array:
    """splitmix64's finaliser: every bit of the answer depends on every bit of x."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _feistel_permute(x: UInt64Array, rows: int, columns: int, keys: UInt64Array) -> UInt64Array:
    """A permutation of 0 .. rows * columns - 1. Each round adds to one coordinate a hash of the other, which can be
    taken away again: that makes it a bijection whatever the hash is."""
    sizes = np.uint64(rows), np.uint64(columns)
    first, second = np.divmod(x, sizes[1])
    for step in range(_FEISTEL_ROUNDS):
        keyed = second + keys + np.uint64((step + 1) * _GOLDEN_RATIO_64 % 2**64)
        # two bits are shifted out so that the sum cannot overflow
        first, second = second, (first + (_splitmix64(keyed) >> np.uint64(2))) % sizes[step % 2]
    return first * sizes[1] + second


def permute(index: UInt64Array, size: int, keys: UInt64Array) -> UInt64Array:
    """Where the permutations of 0 .. size - 1 named by `keys` (one for each element, or one for all) send `index`."""
    rows = isqrt(size - 1) + 1 if size > 1 else 1
    columns = -(-size // rows)
    keys = np.broadcast_to(keys, index.shape)
    permuted = _feistel_permute(index, rows, columns, keys)
    while (outside := np.flatnonzero(permuted >= size)).size:
        permuted[outside] = _feistel_permute(permuted[outside], rows, columns, keys[outside])
    return permuted


def hash_key(*parts: object) -> int:
    """A 64-bit key from anything that prints the same everywhere."""
    return xxh3_64_intdigest("/".join(map(str, parts)).encode())


class ShuffleOrder:
    """The order of one source of `num_samples` samples; `num_validation` of them are never used for training.

    The validation samples depend on the fingerprint only: another seed trains in another order, but is scored on the
    same samples.
    """

    def __init__(self, num_samples: int, num_validation: int, fingerprint: str, seed: int):
        self.num_samples, self.num_validation = num_samples, num_validation
        # Another word in the key would choose other validation samples than earlier runs trained without.
        self._validation_key = np.array(hash_key("held-out", fingerprint), np.uint64)  # words: allow
        self._epoch_key = np.array(hash_key("train", fingerprint, seed), np.uint64)

    def training_samples(self, index: Int64Array) -> Int64Array:
        """The samples that training meets at the positions `index` (0, 1, ...; epochs follow one another)."""
        size = self.num_samples - self.num_validation
        epoch, position = np.divmod(index.astype(np.uint64), np.uint64(size))
        keys = np.add(self._epoch_key, epoch * np.uint64(_GOLDEN_RATIO_64), dtype=np.uint64)
        permuted = permute(position, size, _splitmix64(keys))
        return self.validation_samples(permuted.astype(np.int64) + self.num_validation)

    def validation_samples(self, index: Int64Array) -> Int64Array:
        """Indices of the validation samples with numbers `index` (0 .. num_validation - 1)."""
        return permute(index.astype(np.uint64), self.num_samples, self._validation_key).astype(np.int64)


def num_validation_samples(num_samples: int, holdout_fraction: float) -> int:
    """Return how many of `num_samples` are validation samples: the fraction, but at least one, and never all."""
    return 0 if holdout_fraction == 0 else min(max(round(num_samples * holdout_fraction), 1), num_samples - 1)


class SourceMixture:
    """Which source each sample of a run comes from: a fixed pattern, repeated, as even as the weights allow.

    Among any n consecutive samples from the start, source i has its share of n to within one or two.
    """

    def __init__(self, weights: Sequence[float]):
        counts = np.maximum(np.rint(np.array(weights) / sum(weights) * _MIXTURE_PERIOD).astype(np.int64), 1)
        counts //= gcd(*counts.tolist())
        # Source i's samples are due at even distances; sorting all of them by due time interleaves the sources.
        due = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
        pattern = np.repeat(np.arange(len(counts)), counts)[np.argsort(due, kind="stable")]
        self.counts = counts
        self._pattern = pattern
        self._positions = [np.flatnonzero(pattern == source) for source in range(len(counts))]
        self._index_in_source = np.empty(len(pattern), np.int64)
        for positions in self._positions:
            self._index_in_source[positions] = np.arange(len(positions))

    def locate(self, sample_number: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Source of each sample `sample_number`, and how many samples that source has given before it."""
        period, position = np.divmod(sample_number, len(self._pattern))
        source = self._pattern[position]
        return source, period * self.counts[source] + self._index_in_source[position]

    def max_samples_within(self, sizes: Sequence[int]) -> int:
        """How many samples from the start on need no more than `sizes[i]` samples of any source i."""
        limits = (
            size // int(count) * len(self._pattern) + int(positions[size % int(count)])
            for size, count, positions in zip(sizes, self.counts, self._positions, strict=True)
        )
        return min(limits)
