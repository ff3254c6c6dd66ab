"""Coherence of given CSs, in any inner product: what `capacity` needs to know, from the CSs or their Gram matrix.

    units = cosines(keys)                      # or cosines(keys, metric=M), or cosines_of_gram(gram)
    absolute, square = pair_means(units)       # E|cos|, E[cos^2] over pairs of different CSs
    worst_case_capacity(absolute)              # 1 + rho / E|cos|
    average_case_capacity(1 / square)          # 1 + d_eff / tau
    strict_capacity(largest_coherence(units))  # 1 + rho / mu

All take leading batch dimensions. CSs come as they are to be compared: centre them first where a constant added to
every CS should not count (theory section 1). A zero vector has no direction and is left out.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def cosines(
    keys: Float[Tensor, "*batch n d_k"], metric: Float[Tensor, "*#batch d_k d_k"] | None = None
) -> Float[Tensor, "*batch n n"]:
    """Cosines between CSs in the inner product `k^T M k'`; the Euclidean one where `metric` is None.

    `metric`: symmetric and positive semidefinite, as `E[q q^T]` (the query metric). A CS that it sends to zero has no
    direction: its row, column and diagonal element are 0; every other diagonal element is 1. Raises ValueError for
    shapes that do not fit and a metric that is none.
    """
    if keys.ndim < 2 or (metric is not None and metric.shape[-2:] != 2 * keys.shape[-1:]):
        came = f"keys {list(keys.shape)}" + (f", metric {list(metric.shape)}" if metric is not None else "")
        raise ValueError(f"expected keys [*batch, n, d_k] and a metric [*batch, d_k, d_k], got {came}")
    if metric is None:
        return cosines_of_gram(keys @ keys.mT)
    eigenvalues = torch.linalg.eigvalsh(_symmetric("metric", metric))
    if (eigenvalues[..., 0] < -_rounding(metric) * eigenvalues[..., -1].abs()).any():
        raise ValueError(f"the metric must be positive semidefinite, got an eigenvalue of {eigenvalues.min():g}")
    return cosines_of_gram(keys @ metric @ keys.mT)


def cosines_of_gram(gram: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n n"]:
    """Cosines from inner products `k_i . k_j`: each divided by both lengths.

    Raises ValueError if `gram` is not square and symmetric, or holds what inner products cannot be (a negative square
    length; a cosine beyond 1 by more than rounding).
    """
    gram = _symmetric("gram", gram)
    square_lengths = gram.diagonal(dim1=-2, dim2=-1)
    largest = square_lengths.amax(-1, keepdim=True)
    if (square_lengths < -_rounding(gram) * largest.abs()).any():
        raise ValueError(f"a square length in the Gram matrix is negative: {square_lengths.min():g}")
    there = square_lengths > _rounding(gram) ** 2 * largest
    inverse = torch.where(there, torch.where(there, square_lengths, 1).rsqrt(), 0)
    found = inverse[..., :, None] * gram * inverse[..., None, :]
    if found.numel() and found.abs().max() > 1 + _rounding(gram):
        raise ValueError(f"not a Gram matrix: a cosine of {found.abs().max():g}, beyond 1")
    return found.clamp(-1, 1).diagonal_scatter(there.to(gram.dtype), dim1=-2, dim2=-1)


def pair_means(units: Float[Tensor, "*batch n n"]) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch"]]:
    """`E|cos|` and `E[cos^2]` over pairs of different CSs (U-statistics); NaN with fewer than two directions."""
    count = _count(units)
    pairs = count * (count - 1)
    return _off_diagonal(units).abs().sum((-2, -1)) / pairs, _off_diagonal(units).square().sum((-2, -1)) / pairs


def largest_coherence(units: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch"]:
    """`mu`: the largest |cos| over pairs of different CSs; NaN with fewer than two directions."""
    return torch.where(_count(units) > 1, _off_diagonal(units).abs().amax((-2, -1)), torch.nan)


def cumulative_coherence(units: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n"]:
    """`sum_{j != i} |cos_ij|` for each probe i: the crosstalk it meets if all other USs are aligned against it."""
    return _off_diagonal(units).abs().sum(-1)


def babel(units: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n"]:
    """Tropp's Babel function: at `m = 0..n-1`, the most that any m CSs can be coherent with another one, together.

    `mu_1(m) = max_i` (sum of the m largest `|cos_ij|`, `j != i`); at most `m * largest_coherence`. Source: Tropp 2004,
    "Greed is good".
    """
    strongest_first = _off_diagonal(units).abs().sort(-1, descending=True).values.cumsum(-1)
    return torch.nn.functional.pad(strongest_first.amax(-2)[..., :-1], (1, 0))


def guaranteed_capacity(units: Float[Tensor, "*batch n n"], rho: float = 0.5) -> Float[Tensor, "*batch"]:
    """The largest N such that any N of these CSs hold any USs without error: `mu_1(N - 1) <= rho`; at most n.

    `rho`: crosstalk allowed, as a share of the signal. At least the whole part of `strict_capacity`, which bounds
    `mu_1(m)` by `m mu` (or n, where that is more). Raises ValueError unless `rho > 0`.
    """
    if not rho > 0:
        raise ValueError(f"rho must be a number above 0, got {rho}")
    return torch.minimum((babel(units) <= rho).sum(-1).to(units.dtype), _count(units))


def _off_diagonal(units: Tensor) -> Tensor:
    return units - torch.diag_embed(units.diagonal(dim1=-2, dim2=-1))


def _count(units: Tensor) -> Tensor:
    """CSs that have a direction: the diagonal is 1 for them."""
    return units.diagonal(dim1=-2, dim2=-1).sum(-1)


def _symmetric(name: str, matrix: Tensor) -> Tensor:
    if matrix.ndim < 2 or matrix.shape[-1] != matrix.shape[-2]:
        raise ValueError(f"{name} must be square, [*batch, n, n]; got {list(matrix.shape)}")
    if not matrix.is_floating_point():
        raise ValueError(f"{name} must hold real floating-point numbers, got {matrix.dtype}")
    if ((matrix - matrix.mT).abs() > _rounding(matrix) * matrix.abs().amax((-2, -1), keepdim=True)).any():
        raise ValueError(f"{name} must be symmetric; it differs from its transpose by {(matrix - matrix.mT).max():g}")
    return matrix


def _rounding(matrix: Tensor) -> float:
    """What sums of products may be off by, relative to the largest."""
    return 1e3 * torch.finfo(matrix.dtype).eps
