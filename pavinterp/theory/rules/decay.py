"""Hebbian learning with forgetting: what was learned fades by a factor with each new pair."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pavinterp.theory.rules._stream import number, visible


def decay(
    keys: Float[Tensor, "*batch n d_k"],
    values: Float[Tensor, "*batch n d_v"],
    queries: Float[Tensor, "*batch tests d_k"],
    positions: Int[Tensor, "tests"],
    *,
    first: Int[Tensor, "tests"] | None = None,
    lam: float = 0.99,
) -> Float[Tensor, "*batch tests d_v"]:
    """`S = lam S + k v^T`: response `sum_j lam^(positions[t] - j) (q_t . k_j) v_j` over the pairs that test t sees.

    `lam`: what is kept from one pair to the next, in (0, 1]; 1 is `hebbian`. About `1 / (1 - lam)` pairs are
    remembered. Windows at no cost. Source: the retention of RetNet (Sun et al. 2023). Raises ValueError if the
    arguments do not fit.
    """
    seen = visible(keys, values, queries, positions, first)
    age = positions.to(keys.device)[:, None] - torch.arange(keys.shape[-2], device=keys.device)
    kept = number("lam", lam, above=0, at_most=1) ** age.clamp_min(0).to(keys.dtype)
    return torch.where(seen, (queries @ keys.mT) * kept, 0) @ values
