"""The pseudoinverse memory: the best that a linear memory of the pairs can do."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pavinterp.theory.rules._stream import checked, number, responses


def pseudoinverse(
    keys: Float[Tensor, "*batch n d_k"],
    values: Float[Tensor, "*batch n d_v"],
    queries: Float[Tensor, "*batch tests d_k"],
    positions: Int[Tensor, "tests"],
    *,
    first: Int[Tensor, "tests"] | None = None,
    rtol: float | None = None,
) -> Float[Tensor, "*batch tests d_v"]:
    """`S = K^+ V`, response `S_t^T q_t`: the smallest memory with the least squared error over the pairs test t sees.

    `rtol`: singular values of K at or below `rtol` times the largest count as zero, in (0, 1]; None for
    `max(n, d_k)` machine epsilons of the dtype. Recall is exact while the CSs are independent (so up to `d_k` of
    them); CSs as they come. A new `first` costs a new pass. Source: Kohonen & Ruohonen 1973. Raises ValueError if the
    arguments do not fit.

    `K^T K`, which would square the condition number, is never formed: blocks are added to a QR decomposition
    `[K | V] = Q [R | Z]`, of which only `[R | Z]`, the first `d_k` rows, is kept; then `K^+ V = R^+ Z`.
    """
    positions, first = checked(keys, values, queries, positions, first)
    n, d_k = keys.shape[-2:]
    rtol = max(n, d_k) * torch.finfo(keys.dtype).eps if rtol is None else number("rtol", rtol, above=0, at_most=1)

    def learn(triangle: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = torch.cat([triangle, torch.cat([k, v], dim=-1)], dim=-2)
        return torch.linalg.qr(rows, mode="r").R[..., :d_k, :]

    def recall(triangle: Tensor, query: Tensor) -> Tensor:
        u, s, vh = torch.linalg.svd(triangle[..., :d_k], full_matrices=False)
        found = s > rtol * s[..., :1]
        inverse = torch.where(found, 1 / torch.where(found, s, 1), 0)
        return ((query @ vh.mT) * inverse[..., None, :]) @ (u.mT @ triangle[..., d_k:])

    nothing = keys.new_zeros(*keys.shape[:-2], d_k, d_k + values.shape[-1])
    return responses(learn, nothing, (keys, values), queries, positions, first, recall=recall)
