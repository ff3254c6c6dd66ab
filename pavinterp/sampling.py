"""Which positions of a sequence are tested, and the weight each carries."""

from __future__ import annotations

from functools import lru_cache

import numpy as np


@lru_cache(maxsize=256)
def inclusion_probabilities(n: int, tests: int) -> np.ndarray:
    """Probability that each of `n` positions is tested when `tests` are drawn.

    Half of the tests are spread evenly over the positions and half over their logarithm, so that short
    contexts are seen too while long ones keep most of the precision. Where that would test a position
    more than once its probability is 1 and the rest is shared out again.

    Returns:
        [n], in (0, 1], summing to min(tests, n).
    """
    if n < 1 or tests < 1:
        raise ValueError(f"need at least one position and one test, got n={n}, tests={tests}")
    if tests >= n:
        return _frozen(np.ones(n))
    density = 0.5 / n + 0.5 / (np.arange(1, n + 1) * (1.0 / np.arange(1, n + 1)).sum())
    low, high = float(tests), float(tests) / density.min()
    for _ in range(200):  # bisection on the scale at which the capped densities sum to `tests`
        scale = 0.5 * (low + high)
        if np.minimum(1.0, scale * density).sum() < tests:
            low = scale
        else:
            high = scale
    return _frozen(np.minimum(1.0, high * density))


def _frozen(values: np.ndarray) -> np.ndarray:
    values.flags.writeable = False  # shared by every sequence of this length
    return values


def sample_tests(n: int, tests: int | None, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw test positions by systematic sampling: exact inclusion probabilities, one random number.

    Args:
        n: positions of the sequence.
        tests: how many to draw; None tests every position.
        rng: seeded generator.

    Returns:
        positions: [tests] int64, increasing.
        weights: [tests] float64, inverse inclusion probabilities: a weighted sum over the tests has the
            sum over all positions as its expectation (Horvitz-Thompson).
    """
    if tests is None or tests >= n:
        return np.arange(n), np.ones(n)
    probability = inclusion_probabilities(n, tests)
    edges = np.floor(rng.random() + np.concatenate([[0.0], np.cumsum(probability)]))
    positions = np.flatnonzero(np.diff(edges) > 0)
    return positions, 1.0 / probability[positions]
