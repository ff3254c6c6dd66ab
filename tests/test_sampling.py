"""Sampling of tests: exact inclusion probabilities, unbiased weights, short contexts seen."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pavinterp.sampling import inclusion_probabilities, sample_tests


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 3000), st.integers(1, 200))
def test_probabilities_sum_to_the_tests_asked(n, tests):
    p = inclusion_probabilities(n, tests)
    assert p.shape == (n,)
    assert (p > 0).all()
    assert (p <= 1).all()
    assert p.sum() == pytest.approx(min(n, tests), rel=1e-9)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 3000), st.integers(1, 200), st.integers(0, 1000))
def test_a_draw_has_the_size_asked(n, tests, seed):
    positions, weights = sample_tests(n, tests, np.random.default_rng(seed))
    assert abs(len(positions) - min(n, tests)) <= 1
    assert (np.diff(positions) > 0).all()
    assert len(weights) == len(positions)


def test_every_position_is_drawn_as_often_as_its_probability_says():
    n, tests, draws = 300, 24, 8_000
    counts = np.zeros(n)
    for seed in range(draws):
        counts[sample_tests(n, tests, np.random.default_rng(seed))[0]] += 1
    p = inclusion_probabilities(n, tests)
    # 5 standard errors: with 300 positions a false alarm is a one-in-6,000 event
    assert (np.abs(counts / draws - p) <= 5 * np.sqrt(p * (1 - p) / draws) + 1e-12).all()


def test_weighted_sums_are_unbiased_for_all_positions():
    n, draws = 1000, 5000
    f = np.sqrt(np.arange(n) + 1.0)
    sums = []
    for seed in range(draws):
        positions, weights = sample_tests(n, 64, np.random.default_rng(seed))
        sums.append((weights * f[positions]).sum())
    assert np.mean(sums) == pytest.approx(f.sum(), abs=4 * np.std(sums) / draws**0.5)


def test_short_contexts_are_seen():
    positions, _ = sample_tests(4096, 64, np.random.default_rng(0))
    assert (positions < 64).sum() >= 10
    assert (positions > 2048).sum() >= 15


def test_all_positions_on_request():
    positions, weights = sample_tests(50, None, np.random.default_rng(0))
    assert positions.tolist() == list(range(50))
    assert (weights == 1).all()
