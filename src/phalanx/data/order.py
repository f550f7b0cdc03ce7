"""Data order as pure functions: which sample has the number n of a run. No state, no lists of indices, no files.

Every epoch visits all samples in a permutation of its own, computed element by element, so that it costs the same
memory for a thousand samples and for a trillion. The permutation is a Feistel network over a rectangle of
rows x columns >= size, walked until it lands inside (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002,
method 3: generalised Feistel with cycle walking).
"""

from collections.abc import Sequence
from itertools import pairwise
from math import gcd, isqrt
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

UInt64Array = npt.NDArray[np.uint64]
Int64Array = npt.NDArray[np.int64]

_FEISTEL_ROUNDS = 6
_GOLDEN_RATIO_64 = 0x9E3779B97F4A7C15
_MIXTURE_PERIOD = 1 << 14  # resolution of mixture weights: 0.006%
_BLOCK_STEPS = 8
_BLOCK_STRIDE = 1265  # odd, and about 0.618 of the blocks of a period, so that consecutive ones differ much
_SPREAD_RATIOS = tuple(
    ratio for root in ((5**0.5 - 1) / 2, 2**0.5 - 1, 3**0.5 - 1, 7**0.5 - 2) for ratio in (root, 1 - root)
)
"""Multiples of them are spread evenly between whole numbers. One of several, so that all sources meet."""


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
    """Return how many of `num_samples` are validation samples: the fraction, but at least one and not all, unless it
    is 0 or 1."""
    if holdout_fraction in (0, 1):
        return num_samples * int(holdout_fraction)
    return min(max(round(num_samples * holdout_fraction), 1), num_samples - 1)


def reduce_weights(weights: Sequence[float]) -> list[int]:
    """Return weights as whole numbers in the same proportions, for a fingerprint."""
    exact = np.array(weights) / sum(weights) * _MIXTURE_PERIOD
    counts = np.maximum(np.rint(exact).astype(np.int64), exact > 0)
    return [int(count) for count in counts // gcd(*counts.tolist())]


def weigh_by_size(sizes: Sequence[int], temperature: float) -> list[float]:
    """Return the weights n^(1/T) of sources of n samples, the largest 1."""
    return [(size / max(sizes)) ** (1 / temperature) for size in sizes]


class StepMixture:
    """Which source each sample of a run comes from, so that the sources of every step have the shares of their weights,
    and so have those of each place in a step over 8 steps, to within one sample: whichever worker or micro-batch the
    place belongs to.

    Sources are arcs of a circle of 16,384 positions, as long as their weights. The samples of a step are spread evenly
    over the circle, neighbours far from each other, and each step turns the circle: by one turn within each eighth of
    it in every 8 steps, in an order that the seed draws for every 8, so that no stride meets the same sources.
    """

    def __init__(self, weights: Sequence[float], global_size: int, seed: int):
        self.counts = counts = _divide_period(weights)
        self._global_size = global_size
        self._ends = np.cumsum(counts)
        ranks = [_rank((np.arange(global_size) * ratio) % 1) for ratio in _SPREAD_RATIOS]
        self._offsets = np.array(ranks) * _MIXTURE_PERIOD // global_size
        num_blocks = _MIXTURE_PERIOD // _BLOCK_STEPS
        block, step_in_block = np.divmod(np.arange(_MIXTURE_PERIOD, dtype=np.uint64), np.uint64(_BLOCK_STEPS))
        keys = _splitmix64(block * np.uint64(_GOLDEN_RATIO_64) + np.uint64(hash_key("mixture", seed)))
        eighth = permute(step_in_block, _BLOCK_STEPS, keys).astype(np.int64)
        self._turns = eighth * num_blocks + block.astype(np.int64) * _BLOCK_STRIDE % num_blocks
        self._spread = (keys % np.uint64(len(_SPREAD_RATIOS))).astype(np.int64)
        # how many samples of each source a period has before each of its steps
        ends = self._count_below(self._ends - self._turns[:, None]) - self._count_below(-self._turns)[:, None]
        of_step = np.diff(ends, axis=1, prepend=0)
        self._samples_before: Int64Array = np.cumsum(of_step, axis=0) - of_step

    def _count_below(self, position: Int64Array) -> Int64Array:
        """Return how many of a step's offsets, repeated around the circle without end, are in 0 .. position - 1."""
        turns, rest = np.divmod(position, _MIXTURE_PERIOD)
        return turns * self._global_size + np.searchsorted(np.sort(self._offsets[0]), rest)

    def locate(self, sample_number: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Source of each sample `sample_number`, and how many samples that source has given before it."""
        step, place = np.divmod(sample_number, self._global_size)
        steps, row = np.unique(step, return_inverse=True)
        step_in_period = steps % _MIXTURE_PERIOD
        turned = self._offsets[self._spread[step_in_period]] + self._turns[step_in_period, None]
        source = np.searchsorted(self._ends, turned % _MIXTURE_PERIOD, side="right")
        index = np.empty_like(source)
        before = self.count_before(steps)
        for number in range(len(self.counts)):
            own = source == number
            np.copyto(index, before[:, number, None] + np.cumsum(own, axis=1) - 1, where=own)
        return source[row, place], index[row, place]

    def count_before(self, step: Int64Array) -> Int64Array:
        """Return how many samples each source has given before each `step`: an array of [steps, sources]."""
        period, step_in_period = np.divmod(step, _MIXTURE_PERIOD)
        before_period: Int64Array = period[:, None] * self.counts * self._global_size
        return before_period + self._samples_before[step_in_period]


class MixtureSchedule:
    """Mixtures that follow one another, each from a step on: pairs of that step and of the weights. Each source
    continues where the mixture before has left it."""

    def __init__(self, stages: Sequence[tuple[int, Sequence[float]]], global_size: int, seed: int):
        self._global_size = global_size
        self._first_steps = [first for first, _ in stages]
        self._mixtures = [StepMixture(weights, global_size, seed) for _, weights in stages]
        # what each source gave before a stage, less what it would have given with the weights of that stage
        self._offsets = [np.zeros(len(stages[0][1]), np.int64)]
        for (before, after), step in zip(pairwise(self._mixtures), self._first_steps[1:], strict=True):
            first = np.array([step])
            self._offsets.append(self._offsets[-1] + (before.count_before(first) - after.count_before(first))[0])

    def locate(self, sample_number: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Source of each sample `sample_number`, and how many samples that source has given before it."""
        source, index = np.empty_like(sample_number), np.empty_like(sample_number)
        stages = np.searchsorted(self._first_steps, sample_number // self._global_size, side="right") - 1
        for stage in np.unique(stages).tolist():
            own = stages == stage
            source[own], from_stage = self._mixtures[stage].locate(sample_number[own])
            index[own] = from_stage + self._offsets[stage][source[own]]
        return source, index


def _divide_period(weights: Sequence[float]) -> Int64Array:
    """Return the positions of the circle that each source has: at least one if it has a weight, and all of them
    together."""
    exact = np.array(weights) / sum(weights) * _MIXTURE_PERIOD
    counts = np.maximum(exact.astype(np.int64), exact > 0)
    for _ in range(abs(_MIXTURE_PERIOD - int(counts.sum()))):
        missing = np.where(counts > 1, counts - exact, -np.inf) if counts.sum() > _MIXTURE_PERIOD else exact - counts
        counts[np.argmax(missing)] += np.sign(_MIXTURE_PERIOD - counts.sum())
    return counts


def _rank(values: npt.NDArray[np.floating[Any]]) -> Int64Array:
    """Return the place of each value among all, from the smallest."""
    ranks = np.empty(len(values), np.int64)
    ranks[np.argsort(values, kind="stable")] = np.arange(len(values))
    return ranks


class SourceSequence:
    """All samples of the first source, then all of the second, and so on: the order of a validation set."""

    def __init__(self, sizes: Sequence[int]):
        self._ends = np.cumsum(sizes, dtype=np.int64)
        self._starts = self._ends - np.array(sizes, np.int64)

    def locate(self, sample_number: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Source of each sample `sample_number`, and its number in that source."""
        source = np.searchsorted(self._ends, sample_number, side="right")
        return source, sample_number - self._starts[source]


def divide_samples(max_samples: int, sizes: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Divide at most `max_samples` among sources by weight. A source of fewer than its share gives all that it has, and
    the others share the rest; each gives one at least where that is possible."""
    counts, left = [0] * len(sizes), max_samples
    order = sorted((source for source, size in enumerate(sizes) if size), key=lambda each: sizes[each] / weights[each])
    weight_left = float(sum(weights[source] for source in order))
    for num_done, source in enumerate(order, 1):
        share = min(round(left * weights[source] / weight_left), left - (len(order) - num_done))
        counts[source] = min(sizes[source], max(share, min(left, 1)))
        left -= counts[source]
        weight_left -= weights[source]
    return counts
