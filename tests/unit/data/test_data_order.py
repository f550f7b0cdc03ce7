"""The order of samples: permutations, held-out share, mixtures."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.data.order import (
    MixtureSchedule,
    ShuffleOrder,
    SourceSequence,
    StepMixture,
    divide_samples,
    hash_key,
    num_validation_samples,
    permute,
    reduce_weights,
)


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


def test_reduced_weights_are_the_same_in_every_release():
    assert reduce_weights([3, 1]) == reduce_weights([6, 2]) == [3, 1]
    assert reduce_weights([2.5]) == [1]


WEIGHTS = ([1, 1], [7, 1], [1, 1, 1, 1], [3, 1, 4], [5, 2, 1.3], [100, 1])


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("global_size", [1, 2, 8, 24, 56, 840])
def test_every_step_and_every_worker_has_the_share_of_each_source(weights, global_size):
    mixture, shares = StepMixture(weights, global_size, seed=3), np.array(weights) / sum(weights)
    steps = mixture.locate(np.arange(37 * global_size, 137 * global_size))[0].reshape(100, global_size)
    for source, share in enumerate(shares):
        assert np.abs((steps == source).sum(1) - share * global_size).max() < 1.01
    for workers in (count for count in range(1, 9) if global_size % count == 0):
        for part in np.split(steps, workers, axis=1):
            of_worker = np.bincount(part.ravel(), minlength=len(weights)) / part.size
            assert np.abs(of_worker - shares).max() < 0.035


@pytest.mark.parametrize("stride", [2, 5, 8, 10, 64, 100])
def test_no_stride_of_steps_meets_one_source_more_than_the_others(stride):
    steps = StepMixture([1, 1, 2], 4, seed=0).locate(np.arange(4 * 16384))[0].reshape(-1, 4)
    for first in (0, stride - 1):
        of_first_place = np.bincount(steps[first::stride, 0], minlength=3) / len(steps[first::stride])
        assert np.abs(of_first_place - [0.25, 0.25, 0.5]).max() < 2.5 * (0.25 / len(steps[first::stride])) ** 0.5


def test_all_pairs_of_sources_meet_in_micro_batches():
    pairs = StepMixture([1, 1, 1, 1], 8, seed=0).locate(np.arange(8 * 200))[0].reshape(-1, 2)
    assert len({tuple(sorted(pair)) for pair in pairs.tolist()}) == 6


@given(weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=5), global_size=st.integers(1, 40))
@settings(max_examples=25, deadline=None)
def test_each_source_gives_its_samples_in_order_wherever_one_asks_from(weights, global_size):
    mixture = StepMixture(weights, global_size, seed=1)
    source, index = mixture.locate(np.arange(3000))
    for number in range(len(weights)):
        assert np.array_equal(index[source == number], np.arange((source == number).sum()))
    late = 16384 * global_size  # the first sample of the second period
    later_source, later_index = mixture.locate(np.arange(late - 7, late + 9))
    for number, count in enumerate(mixture.counts):
        own = later_index[later_source == number]
        assert own.tolist() == list(range(int(own[0]), int(own[0]) + len(own))) if len(own) else True
        assert mixture.counts.sum() == 16384
        second = later_index[7:][later_source[7:] == number]
        assert not len(second) or second[0] == count * global_size


def test_a_curriculum_changes_the_sources_from_its_step_on():
    schedule = MixtureSchedule([(0, [1, 0]), (10, [1, 1]), (30, [1, 3])], 8, seed=3)
    steps = schedule.locate(np.arange(50 * 8))[0].reshape(50, 8)
    assert (steps == 1).sum(1).tolist() == [0] * 10 + [4] * 20 + [6] * 20


def test_each_source_of_a_curriculum_continues_where_it_was_left():
    schedule = MixtureSchedule([(0, [3, 1]), (7, [0, 1]), (19, [1, 1]), (20_000, [1, 2])], 5, seed=3)
    source, index = schedule.locate(np.arange(25_000 * 5))
    for number in (0, 1):
        assert np.array_equal(index[source == number], np.arange((source == number).sum()))
    late_source, late_index = schedule.locate(np.arange(99_990, 100_020))
    assert np.array_equal(late_source, source[99_990:100_020])
    assert np.array_equal(late_index, index[99_990:100_020])


def test_a_mixture_is_the_same_in_every_release():
    source, index = StepMixture([3, 1], 4, seed=7).locate(np.arange(100_000, 100_012))
    assert source.tolist() == [0, 0, 0, 1, 0, 0, 1, 0, 1, 0, 0, 0]
    assert index[:4].tolist() == [75_000, 75_001, 75_002, 25_000]


def test_the_samples_of_a_validation_set_follow_source_by_source():
    source, index = SourceSequence([2, 0, 3]).locate(np.arange(5))
    assert (source.tolist(), index.tolist()) == ([0, 0, 2, 2, 2], [0, 1, 0, 1, 2])


@pytest.mark.parametrize(
    ("max_samples", "sizes", "weights", "counts"),
    [
        (512, [62, 1], [1, 1], [62, 1]),
        (100, [500, 1], [1, 1], [99, 1]),
        (100, [500, 500], [3, 1], [75, 25]),
        (100, [500, 10, 500], [1, 8, 1], [45, 10, 45]),
        (2, [500, 500, 500], [1, 1, 1], [1, 1, 0]),
        (100, [500, 500], [1000, 1], [99, 1]),
        (7, [0, 5], [1, 1], [0, 5]),
    ],
)
def test_validation_samples_are_divided_by_weight_as_far_as_each_source_goes(max_samples, sizes, weights, counts):
    assert divide_samples(max_samples, sizes, weights) == counts


@pytest.mark.parametrize(
    ("samples", "share", "held"), [(100, 0.0, 0), (100, 0.01, 1), (10, 0.01, 1), (1, 0.5, 0), (1, 1.0, 1)]
)
def test_the_held_out_share_is_at_least_one_sample_and_never_all(samples, share, held):
    assert num_validation_samples(samples, share) == held
