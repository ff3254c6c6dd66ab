"""Softmax attention: the head itself, without what models add to it (soft-cap, biases, sinks)."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pavinterp.theory.rules._stream import visible


def softmax(
    keys: Float[Tensor, "*batch n d_k"],
    values: Float[Tensor, "*batch n d_v"],
    queries: Float[Tensor, "*batch tests d_k"],
    positions: Int[Tensor, "tests"],
    *,
    first: Int[Tensor, "tests"] | None = None,
    scale: float | None = None,
) -> Float[Tensor, "*batch tests d_v"]:
    """`sum_j a_tj v_j`, `a_tj = softmax_j(scale * q_t . k_j)` over the pairs that test t sees.

    `scale`: inverse temperature of the scores, any real number; None for the usual `1 / sqrt(d_k)`. Windows at no cost.
    Source: Vaswani et al. 2017; as an associative memory, Ramsauer et al. 2021. Raises ValueError if the arguments do
    not fit.
    """
    seen = visible(keys, values, queries, positions, first)
    scale = keys.shape[-1] ** -0.5 if scale is None else scale
    scores = (scale * queries) @ keys.mT
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ values
