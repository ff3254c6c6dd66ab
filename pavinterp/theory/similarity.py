"""Similarity of representations: linear CKA by an unbiased estimate over independent units, and what follows from it.

HSIC of two representations with linear kernels `k(i, j) = x_i.x_j` and `l(i, j) = y_i.y_j` (Gretton et al. 2005) is

    HSIC = E[k(1,2) l(1,2)] + E[k(1,2)] E[l(3,4)] - 2 E[k(1,2) l(1,3)] = || cov(x, y) ||_F^2,

samples 1 to 4 independent. Averages over distinct samples estimate it without bias (Song et al. 2012, eq. 4); linear
CKA is `HSIC(x, y) / sqrt(HSIC(x, x) HSIC(y, y))` (Kornblith et al. 2019; with these estimates Nguyen et al. 2021).
Positions of one document are not independent, and pairs of them would count what neighbours have in common as
similarity. So the averages here go over positions of *distinct units* (documents); with one position a unit they are
Song's.

No n x n matrix is made. With `A_u = mean_i x_i y_i^T` over a unit's positions and `s_u`, `t_u` the means of both:

    E[k(1,2) l(1,2)]    mean over u != v of <A_u, A_v>
    E[k(1,2) l(1,3)]    mean over u, v, w distinct of s_v^T A_u t_w
    E[k(1,2)] E[l(3,4)] mean over u, v, w, z distinct of (s_u.s_v)(t_w.t_z)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from jaxtyping import Float

FEWEST_UNITS = 4  # of which the estimate takes distinct ones

Array = npt.NDArray[np.float64]


def cka(
    units: Sequence[Float[np.ndarray, "n heads d"]],
    weights: Float[np.ndarray, "draws units"] | None = None,
    rounding: float = 0.0,
) -> Float[np.ndarray, "draws heads heads"]:
    """Linear CKA of every two heads, with each unit counted as often as `weights` say.

    Unbiased estimates are not bounded: one of two unrelated heads is as often below zero as above it.

    Args:
        units: each unit's samples of all heads; units count alike, however many samples they have.
        weights: whole numbers, as a bootstrap draws them; copies of a unit are not distinct from it. None counts each
            once.
        rounding: heads whose samples vary by less than this, relative to their size, are constant.

    Returns:
        Symmetric, 1 on the diagonal; NaN for heads that are constant, or where an estimate of their own HSIC is not
        positive.

    Raises:
        ValueError: fewer than four units in a draw.
    """
    found = hsic(units, weights)
    own = np.einsum("bhh->bh", found)
    size = sum(np.square(unit, dtype=np.float64).sum((0, 2)) / len(unit) for unit in units)
    about = np.mean([unit.mean(0, dtype=np.float64) for unit in units], axis=0)
    spread = sum(np.square(unit - about).sum((0, 2)) / len(unit) for unit in units)
    varies = (own > 0) & (spread > rounding**2 * size)
    scale = np.sqrt(np.where(varies, own, np.nan))
    return found / (scale[:, :, None] * scale[:, None, :])


def hsic(
    units: Sequence[Float[np.ndarray, "n heads d"]], weights: Float[np.ndarray, "draws units"] | None = None
) -> Float[np.ndarray, "draws heads heads"]:
    """The unbiased estimate of HSIC of every two heads; arguments as for `cka`."""
    weights = np.ones((1, len(units))) if weights is None else np.asarray(weights, np.float64)
    if (np.count_nonzero(weights, axis=1) < FEWEST_UNITS).any():
        raise ValueError(f"the unbiased estimate of HSIC needs {FEWEST_UNITS} distinct units")
    # Units counted once, a constant added to all samples changes nothing: without one, nothing large cancels. Where
    # some count twice, averages over tuples without copies are not quite blind to it: one mean is taken off all draws.
    about = np.mean([unit.mean(0, dtype=np.float64) for unit in units], axis=0)
    centred = [unit - about for unit in units]
    means = np.stack([unit.mean(0) for unit in centred])  # [units, heads, d]
    grams = _hollow(np.einsum("uhi,vhi->huv", means, means))
    two, three, four = _distinct_tuples(weights)
    heads = means.shape[1]
    found = np.empty((len(weights), heads, heads))
    totals = _quadratic(grams, weights)
    rows = weights[:, None] * (weights @ grams).transpose(1, 0, 2)  # [draws, heads, units]
    for g in range(heads):
        both = _quadratic(grams[g:] * grams[g], weights**2)
        apart = totals[:, g:] * totals[:, [g]] - 4 * np.einsum("bu,bhu->bh", rows[:, g], rows[:, g:]) + 2 * both
        crossed = [np.einsum("ni,nhj->hij", unit[:, g], unit[:, g:], optimize=True) / len(unit) for unit in centred]
        flat = np.stack(crossed).reshape(len(units), heads - g, -1).transpose(1, 0, 2)
        pairs = _quadratic(_hollow(flat @ flat.transpose(0, 2, 1)), weights)
        triples = np.zeros_like(pairs)
        for u, cross in enumerate(crossed):
            between = _hollow(means[:, g] @ cross @ means[:, g:].transpose(1, 2, 0))
            between[:, u] = between[:, :, u] = 0
            triples += weights[:, [u]] * _quadratic(between, weights)
        found[:, g, g:] = pairs / two + apart / four - 2 * triples / three
        found[:, g:, g] = found[:, g, g:]
    return found


def distinct(similarity: Float[np.ndarray, "*draws heads heads"]) -> Float[np.ndarray, "*draws"]:
    """Effective number of distinct heads: the participation ratio of the eigenvalues of their similarity matrix.

    `(sum lambda)^2 / sum lambda^2 = (trace S)^2 / ||S||_F^2`, between 1 (all alike) and the number of heads (no two
    have anything in common). Heads without similarity (NaN on the diagonal) are left out; noise of the similarities,
    squared, makes it a little smaller than it is.
    """
    diagonal = np.einsum("...hh->...h", similarity)
    there = ~np.isnan(diagonal)
    known = np.where(there[..., :, None] & there[..., None, :], similarity, 0.0)
    heads = there.sum(-1)
    squares = np.square(known).sum((-1, -2))
    ratio = np.where(heads > 0, heads**2 / np.where(heads > 0, squares, 1), np.nan)
    return np.clip(ratio, 1, np.maximum(heads, 1))


def overlap(
    bases: Float[np.ndarray, "heads d width"],
) -> tuple[Float[np.ndarray, "heads heads"], Float[np.ndarray, "heads heads"]]:
    """Mean squared cosine of the principal angles between every two subspaces, and what random ones would show.

    Args:
        bases: orthonormal rows; rows of zeros where a subspace has fewer dimensions.

    Returns:
        `||V_g V_h^T||_F^2 / min(r_g, r_h)`, in [0, 1], and its expectation for random subspaces of the same
        dimensions, `max(r_g, r_h) / width`; NaN for a subspace of no dimension.
    """
    heads, _, width = bases.shape
    ranks = np.square(bases).sum((1, 2)).round()
    flat = bases.reshape(-1, width)
    squares = np.square(flat @ flat.T).reshape(heads, -1, heads, bases.shape[1]).sum((1, 3))
    least = np.minimum.outer(ranks, ranks)
    least = np.where(least > 0, least, np.nan)
    return squares / least, np.maximum.outer(ranks, ranks) / width + 0 * least


def _quadratic(matrices: Array, weights: Array) -> Array:
    """`w M w` for every draw and matrix, [draws, matrices]."""
    return np.asarray(np.einsum("kbu,bu->bk", weights @ matrices, weights))


def _hollow(matrices: Array) -> Array:
    """The same with zeros on the diagonals."""
    return matrices * (1 - np.eye(matrices.shape[-1]))


def _distinct_tuples(weights: Array) -> tuple[Array, Array, Array]:
    """Sums of products of weights over two, three and four distinct units, by Newton's identities, [draws, 1] each."""
    p1, p2, p3, p4 = ((weights**power).sum(1, keepdims=True) for power in (1, 2, 3, 4))
    four = p1**4 - 6 * p1**2 * p2 + 3 * p2**2 + 8 * p1 * p3 - 6 * p4
    return p1**2 - p2, p1**3 - 3 * p1 * p2 + 2 * p3, four
