"""The Hebbian rule: each pair adds its outer product to the memory."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pavinterp.theory.rules._stream import visible


def hebbian(
    keys: Float[Tensor, "*batch n d_k"],
    values: Float[Tensor, "*batch n d_v"],
    queries: Float[Tensor, "*batch tests d_k"],
    positions: Int[Tensor, "tests"],
    *,
    first: Int[Tensor, "tests"] | None = None,
) -> Float[Tensor, "*batch tests d_v"]:
    """`S += k v^T`: response `S_t^T q_t = sum_j (q_t . k_j) v_j` over the pairs that test t sees.

    CSs and USs as they come, neither centred nor normalised. Exact recall of pairs whose CSs are orthonormal. Windows
    at no cost. Source: linear attention without feature map or normaliser (Katharopoulos et al. 2020; Schlag et al.
    2021), the memory of the theory. Raises ValueError if the arguments do not fit.
    """
    seen = visible(keys, values, queries, positions, first)
    return torch.where(seen, queries @ keys.mT, 0) @ values
