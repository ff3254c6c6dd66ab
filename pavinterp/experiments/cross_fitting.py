"""Fit a gain (and choose parameters) on half of the clusters, judge on the other half, swap, pool: from sums alone."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int


class Judged(NamedTuple):
    """What cross-fitting gives; the first half of a pair is fitted on half a, the second on half b.

    Attributes:
        r2: pooled over both halves, each judged with what the other fitted; NaN where no response is there to explain.
        gains: of the two halves.
        chosen: index of the parameters that each half chose.
        taken: share of its own half's squares that each fit takes away, by which rules may be chosen unjudged.
    """

    r2: Float[np.ndarray, "*draws heads"]
    gains: tuple[Float[np.ndarray, "*draws heads"], Float[np.ndarray, "*draws heads"]]
    chosen: tuple[Int[np.ndarray, "*draws heads"], Int[np.ndarray, "*draws heads"]]
    taken: tuple[Float[np.ndarray, "*draws heads"], Float[np.ndarray, "*draws heads"]]


def halves(clusters: int, seed: int) -> Bool[np.ndarray, "clusters"]:
    """Which clusters are half a: a seeded random half of them (the larger one where their number is odd)."""
    in_a = np.zeros(clusters, dtype=bool)
    in_a[np.random.default_rng([seed, 2]).permutation(clusters)[: (clusters + 1) // 2]] = True
    return in_a


def cross_fit(
    xy: Float[np.ndarray, "clusters heads parameters"],
    xx: Float[np.ndarray, "clusters heads parameters"],
    yy: Float[np.ndarray, "clusters heads"],
    in_a: Bool[np.ndarray, "clusters"],
    weights: Float[np.ndarray, "*draws clusters"],
) -> Judged:
    """`R^2 = 1 - sum ||y - g x||^2 / sum ||y||^2`, `g` and the parameters taken from the half that is not judged.

    Args:
        xy, xx, yy: sums over each cluster.
        in_a: which clusters are half a.
        weights: how often each cluster counts: ones, or the draws of a bootstrap.
    """

    def over(sums: np.ndarray, half: np.ndarray) -> np.ndarray:
        flat = sums.reshape(len(sums), -1)[half]
        return (weights[..., half] @ flat).reshape(*weights.shape[:-1], *sums.shape[1:])

    a, b = ((over(xy, half), over(xx, half), over(yy, half)) for half in (in_a, ~in_a))
    gain_a, chosen_a = _fit(*a[:2])
    gain_b, chosen_b = _fit(*b[:2])
    error = _error(*b, gain_a, chosen_a) + _error(*a, gain_b, chosen_b)
    both = a[2] + b[2]
    there = (a[2] > 0) & (b[2] > 0)  # a draw without a half has nothing to fit, or nothing to judge
    r2 = np.where(there, 1 - error / np.where(both > 0, both, 1), np.nan)
    taken = (_taken(*a, gain_a, chosen_a), _taken(*b, gain_b, chosen_b))
    return Judged(r2, (gain_a, gain_b), (chosen_a, chosen_b), taken)


def _fit(xy: np.ndarray, xx: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The gain of least squares, and the parameters whose fit takes most of the squares away."""
    gain = np.where(xx > 0, xy / np.where(xx > 0, xx, 1), 0.0)  # a rule that responds nothing explains nothing
    chosen = (gain * xy).argmax(-1)
    return _of(gain, chosen), chosen


def _taken(xy: np.ndarray, xx: np.ndarray, yy: np.ndarray, gain: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    return np.where(yy > 0, 1 - _error(xy, xx, yy, gain, chosen) / np.where(yy > 0, yy, 1), 0.0)


def _error(xy: np.ndarray, xx: np.ndarray, yy: np.ndarray, gain: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    return yy - 2 * gain * _of(xy, chosen) + gain**2 * _of(xx, chosen)


def _of(values: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    return np.take_along_axis(values, chosen[..., None], axis=-1)[..., 0]
