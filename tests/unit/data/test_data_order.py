"""The order of samples: permutations, held-out share, mixtures."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.data.order import ShuffleOrder, SourceMixture, hash_key, num_validation_samples, permute


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**64 - 1))
@settings(max_examples=60, deadline=None)
def test_a_permutation_meets_every_number_once(size, seed):
    out = permute(np.arange(size, dtype=np.uint64), size, np.array(seed, np.uint64))
    assert np.array_equal(np.sort(out), np.arange(size))


@given(size=st.integers(2**33, 2**62), seed=st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_huge_permutations_stay_in_range_and_do_not_collide(size, seed):
    index = np.random.default_rng(seed).integers(0, size, 500).astype(np.uint64)
    out = permute(index, size, np.array(seed, np.uint64))
    assert (out < size).all()
    assert len(np.unique(out)) == len(np.unique(index))


def test_every_element_may_have_a_permutation_of_its_own():
    index, keys = np.arange(100, dtype=np.uint64), np.arange(100, dtype=np.uint64)
    together = permute(index, 100, keys)
    alone = [permute(index[i : i + 1], 100, keys[i : i + 1])[0] for i in range(100)]
    assert together.tolist() == alone


def test_a_permutation_scatters_neighbours():
    out = permute(np.arange(10_000, dtype=np.uint64), 10_000, np.array(1, np.uint64)).astype(np.int64)
    assert abs(np.corrcoef(np.arange(10_000), out)[0, 1]) < 0.04
    assert np.abs(np.diff(out)).mean() == pytest.approx(10_000 / 3, rel=0.05)
    assert (np.diff(out) == 1).sum() < 10


def test_every_place_is_equally_likely():
    size = 10
    keys = np.array([hash_key("place", number) for number in range(20_000)], np.uint64)
    places = permute(np.zeros(20_000, np.uint64), size, keys)
    counts = np.bincount(places.astype(np.int64), minlength=size)
    assert ((counts - 2000) ** 2 / 2000).sum() < 30  # chi-squared with 9 degrees of freedom: p < 0.0005 beyond


@given(samples=st.integers(2, 500), share=st.floats(0.001, 0.9), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_training_never_sees_held_out_samples_and_meets_all_others_once_an_epoch(samples, share, seed):
    held = num_validation_samples(samples, share)
    order = ShuffleOrder(samples, held, "fingerprint", seed)
    held_out = set(order.validation_samples(np.arange(held)).tolist())
    assert len(held_out) == held >= 1
    for epoch in range(2):
        size = samples - held
        met = order.training_samples(np.arange(epoch * size, (epoch + 1) * size)).tolist()
        assert sorted([*met, *held_out]) == list(range(samples))


def test_held_out_samples_do_not_depend_on_the_seed():
    first, second = (ShuffleOrder(1000, 100, "fingerprint", seed).validation_samples(np.arange(100)) for seed in (0, 1))
    assert np.array_equal(first, second)


def test_seeds_epochs_and_datasets_have_orders_of_their_own():
    index = np.arange(1000)
    orders = [
        ShuffleOrder(1000, 0, "a", 0).training_samples(index),
        ShuffleOrder(1000, 0, "a", 0).training_samples(index + 1000),
        ShuffleOrder(1000, 0, "a", 1).training_samples(index),
        ShuffleOrder(1000, 0, "b", 0).training_samples(index),
    ]
    assert len({order.tobytes() for order in orders}) == 4


def test_the_order_is_the_same_in_every_release():
    assert ShuffleOrder(1000, 10, "fingerprint", 7).training_samples(np.arange(5)).tolist() == [705, 349, 739, 363, 198]


@given(weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=6))
@settings(max_examples=40, deadline=None)
def test_a_mixture_keeps_to_its_weights_from_the_first_sample_on(weights):
    mixture = SourceMixture(weights)
    source, index = mixture.locate(np.arange(5000))
    shares = mixture.counts / mixture.counts.sum()
    for which, share in enumerate(shares):
        met = np.cumsum(source == which)
        assert np.abs(met - share * np.arange(1, 5001)).max() <= len(weights) / 2 + 1
        assert np.array_equal(index[source == which], np.arange(met[-1]))
    assert np.allclose(shares, np.array(weights) / sum(weights), atol=2e-4)


def test_a_mixture_of_three_to_one_is_a_short_pattern():
    source, _ = SourceMixture([3, 1]).locate(np.arange(8))
    assert source.tolist() == [0, 0, 1, 0, 0, 0, 1, 0] or source.tolist() == [0, 1, 0, 0, 0, 1, 0, 0]


def test_where_a_sample_comes_from_does_not_depend_on_where_one_asks_from():
    mixture = SourceMixture([5, 2, 1.3])
    source, index = mixture.locate(np.arange(100_000))
    late_source, late_index = mixture.locate(np.arange(90_000, 90_010))
    assert np.array_equal(source[90_000:90_010], late_source)
    assert np.array_equal(index[90_000:90_010], late_index)


@given(weights=st.lists(st.floats(0.1, 10), min_size=1, max_size=4), sizes=st.lists(st.integers(0, 300), min_size=4))
@settings(max_examples=40, deadline=None)
def test_samples_within_is_the_longest_beginning_that_no_source_is_too_small_for(weights, sizes):
    mixture, sizes = SourceMixture(weights), sizes[: len(weights)]
    count = mixture.max_samples_within(sizes)
    source, index = mixture.locate(np.arange(count + 1))
    needed = [int(index[: count + 1][source == which].max(initial=-1)) + 1 for which in range(len(sizes))]
    assert any(need > size for need, size in zip(needed, sizes, strict=True))
    source, index = source[:count], index[:count]
    assert all(index[source == which].max(initial=-1) < size for which, size in enumerate(sizes))


@pytest.mark.parametrize(("samples", "share", "held"), [(100, 0.0, 0), (100, 0.01, 1), (10, 0.01, 1), (1, 0.5, 0)])
def test_the_held_out_share_is_at_least_one_sample_and_never_all(samples, share, held):
    assert num_validation_samples(samples, share) == held
