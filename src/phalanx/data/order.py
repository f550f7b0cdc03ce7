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

Numbers = npt.NDArray[np.uint64]
Index = npt.NDArray[np.int64]

_ROUNDS = 6
_GOLDEN = 0x9E3779B97F4A7C15
_PERIOD = 1 << 14  # resolution of mixture weights: 0.006%


def _mix(x: Numbers) -> Numbers:
    """splitmix64's finaliser: every bit of the answer depends on every bit of x."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _feistel(x: Numbers, rows: int, columns: int, keys: Numbers) -> Numbers:
    """A permutation of 0 .. rows * columns - 1. Each round adds to one coordinate a hash of the other, which can be
    taken away again: that makes it a bijection whatever the hash is."""
    sizes = np.uint64(rows), np.uint64(columns)
    here, there = np.divmod(x, sizes[1])
    for step in range(_ROUNDS):
        keyed = there + keys + np.uint64((step + 1) * _GOLDEN % 2**64)
        # two bits are shifted out so that the sum cannot overflow
        here, there = there, (here + (_mix(keyed) >> np.uint64(2))) % sizes[step % 2]
    return here * sizes[1] + there


def permute(index: Numbers, size: int, keys: Numbers) -> Numbers:
    """Where the permutations of 0 .. size - 1 named by `keys` (one for each element, or one for all) send `index`."""
    rows = isqrt(size - 1) + 1 if size > 1 else 1
    columns = -(-size // rows)
    keys = np.broadcast_to(keys, index.shape)
    out = _feistel(index, rows, columns, keys)
    while (outside := np.flatnonzero(out >= size)).size:
        out[outside] = _feistel(out[outside], rows, columns, keys[outside])
    return out


def key(*parts: object) -> int:
    """A 64-bit key from anything that prints the same everywhere."""
    return xxh3_64_intdigest("/".join(map(str, parts)).encode())


class Order:
    """The order of one source of `samples` samples, `held` of which training never sees.

    The held-out samples depend on the fingerprint alone: another seed trains in another order, but is scored on the
    same samples.
    """

    def __init__(self, samples: int, held: int, fingerprint: str, seed: int):
        self.samples, self.held = samples, held
        self._split = np.array(key("held-out", fingerprint), np.uint64)
        self._epochs = np.array(key("train", fingerprint, seed), np.uint64)

    def train(self, index: Index) -> Index:
        """The samples that training meets at the positions `index` (0, 1, ...; epochs follow one another)."""
        size = self.samples - self.held
        epoch, within = np.divmod(index.astype(np.uint64), np.uint64(size))
        keys = np.add(self._epochs, epoch * np.uint64(_GOLDEN), dtype=np.uint64)
        place = permute(within, size, _mix(keys))
        return self.held_out(place.astype(np.int64) + self.held)

    def held_out(self, index: Index) -> Index:
        """The held-out samples number `index` (0 .. held - 1)."""
        return permute(index.astype(np.uint64), self.samples, self._split).astype(np.int64)


def held_out_count(samples: int, share: float) -> int:
    """How many of `samples` are held out: the share, but at least one, and never all."""
    return 0 if share == 0 else min(max(round(samples * share), 1), samples - 1)


class Mixture:
    """Which source each sample of a run comes from: a fixed pattern, repeated, as even as the weights allow.

    Among any n consecutive samples from the start, source i has its share of n to within one or two.
    """

    def __init__(self, weights: Sequence[float]):
        counts = np.maximum(np.rint(np.array(weights) / sum(weights) * _PERIOD).astype(np.int64), 1)
        counts //= gcd(*counts.tolist())
        # Source i's samples are due at even distances; sorting all of them by due time interleaves the sources.
        due = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
        pattern = np.repeat(np.arange(len(counts)), counts)[np.argsort(due, kind="stable")]
        self.counts = counts
        self._pattern = pattern
        self._places = [np.flatnonzero(pattern == source) for source in range(len(counts))]
        self._rank = np.empty(len(pattern), np.int64)
        for places in self._places:
            self._rank[places] = np.arange(len(places))

    def locate(self, number: Index) -> tuple[Index, Index]:
        """Source of each sample `number`, and how many samples that source has given before it."""
        period, place = np.divmod(number, len(self._pattern))
        source = self._pattern[place]
        return source, period * self.counts[source] + self._rank[place]

    def samples_within(self, sizes: Sequence[int]) -> int:
        """How many samples from the start on need no more than `sizes[i]` samples of any source i."""
        limits = (
            size // int(count) * len(self._pattern) + int(places[size % int(count)])
            for size, count, places in zip(sizes, self.counts, self._places, strict=True)
        )
        return min(limits)
