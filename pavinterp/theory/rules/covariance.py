"""The covariance rule: the memory holds how CSs and USs vary together, about their means."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pavinterp.theory.rules._stream import visible


def covariance(
    keys: Float[Tensor, "*batch n d_k"],
    values: Float[Tensor, "*batch n d_v"],
    queries: Float[Tensor, "*batch tests d_k"],
    positions: Int[Tensor, "tests"],
    *,
    first: Int[Tensor, "tests"] | None = None,
) -> Float[Tensor, "*batch tests d_v"]:
    """`v_bar_t + C_t^T q_t`, `C_t = mean (k - k_bar_t)(v - v_bar_t)^T`, all means over the pairs that test t sees.

    Exactly the first-order expansion of `softmax` with scale 1 in the score, so `covariance(..., scale * queries, ...)`
    is that of any scale; a gain is fitted on the response minus `mean_us`. Blind to constants added to every CS, as
    softmax is. Windows at no cost. Source: the expansion is derived below; covariance learning in Hebbian memories is
    Sejnowski's (1977). Raises ValueError if the arguments do not fit.

    Derivation: with scores `s_j = q . k_j` and `n` pairs, `softmax(s)_j = (1 + s_j - s_bar) / n + O(s^2)`, and
    `sum_j (s_j - s_bar) v_j / n = mean (s_j - s_bar)(v_j - v_bar) = C^T q`.
    """
    seen = visible(keys, values, queries, positions, first)
    count = seen.sum(-1, keepdim=True)
    scores = torch.where(seen, queries @ keys.mT, 0)
    mean_score = scores.sum(-1, keepdim=True) / count
    return torch.where(seen, (1 + scores - mean_score) / count, 0) @ values
