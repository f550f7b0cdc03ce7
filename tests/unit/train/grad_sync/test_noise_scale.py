"""The gradient noise scale, on a problem where it is known."""

import math

import numpy as np
import pytest

from phalanx.train.grad_sync.noise_scale import GradientNoiseScale, estimate_noise

WIDTH, SPREAD, SIGNAL = 50, 2.0, 0.5
TRUTH = WIDTH * SPREAD**2 / (WIDTH * SIGNAL**2)  # tr(S) / |G|^2 of gradients ~ N(SIGNAL, SPREAD^2) in each direction


def norms(steps: int, small: int = 4, big: int = 32, seed: int = 0) -> list[tuple[float, int, float, int]]:
    """For each step the mean squared norm over the small batches, and that of the big one they make up."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(steps):
        gradients = random.normal(SIGNAL, SPREAD, (big // small, small, WIDTH)).mean(axis=1)
        mean_square = float(np.square(gradients).sum(axis=1).mean())
        found.append((mean_square, small, float(np.square(gradients.mean(axis=0)).sum()), big))
    return found


def test_without_noise_the_signal_is_the_squared_norm() -> None:
    assert estimate_noise(9.0, 2, 9.0, 8) == (9.0, 0.0)


def test_without_signal_all_of_the_norm_is_noise() -> None:
    signal, noise = estimate_noise(6.0 / 2, 2, 6.0 / 8, 8)
    assert signal == pytest.approx(0.0)
    assert noise == pytest.approx(6.0)


@pytest.mark.parametrize(("small", "big"), [(1, 8), (8, 16), (2, 64)])
def test_it_does_not_depend_on_the_batches_it_is_measured_with(small: int, big: int) -> None:
    scale = GradientNoiseScale(decay=0.999)
    for step in norms(2000, small, big):
        scale.update(*step)
    assert scale.value == pytest.approx(TRUTH, rel=0.05)


def test_where_the_signal_drowns_there_is_none() -> None:
    scale = GradientNoiseScale()
    scale.update(8.0, 1, 1.0, 8)
    assert scale.signal <= 0
    assert scale.value is None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_step_that_is_not_finite_is_left_out(bad: float) -> None:
    scale, other = GradientNoiseScale(), GradientNoiseScale()
    for step in norms(5):
        scale.update(*step)
        other.update(*step)
    scale.update(bad, 4, 1.0, 32)
    scale.update(1.0, 4, bad, 32)
    assert scale == other
