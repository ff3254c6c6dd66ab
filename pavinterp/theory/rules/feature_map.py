"""Kernelised linear attention: positive features of CSs and queries stand in for the exponential."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pavinterp.theory.rules._stream import visible


def elu_plus_one(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """`x + 1` above zero and `exp(x)` below: elu(x) + 1, without the rounding of that sum near zero."""
    return x.clamp_min(0) + x.clamp_max(0).exp()


def feature_map(
    keys: Float[Tensor, "*batch n d_k"],
    values: Float[Tensor, "*batch n d_v"],
    queries: Float[Tensor, "*batch tests d_k"],
    positions: Int[Tensor, "tests"],
    *,
    first: Int[Tensor, "tests"] | None = None,
    phi: Callable[[Tensor], Tensor] = elu_plus_one,
) -> Float[Tensor, "*batch tests d_v"]:
    """`sum_j a_tj v_j`, `a_tj = phi(q_t) . phi(k_j) / sum_i phi(q_t) . phi(k_i)` over the pairs that test t sees.

    `phi`: maps the last dimension to features, which must not be negative (else ValueError), such as `elu_plus_one` or
    `torch.exp`. NaN where a query's features meet none of the CSs'. Windows at no cost. Source: Katharopoulos et al.
    2020. Raises ValueError if the arguments do not fit.
    """
    seen = visible(keys, values, queries, positions, first)
    probe, cue = phi(queries), phi(keys)
    if (probe < 0).any() or (cue < 0).any():
        lowest = min(probe.min().item(), cue.min().item())
        raise ValueError(f"phi must give features of at least 0, got {lowest:g}")
    strengths = torch.where(seen, probe @ cue.mT, 0)
    return (strengths / strengths.sum(-1, keepdim=True)) @ values
