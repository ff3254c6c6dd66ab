"""The gated delta rule: the memory fades before each pair, then learns the pair by its error."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pavinterp.theory.rules._stream import checked, directions, responses


def gated_delta(
    keys: Float[Tensor, "*batch n d_k"],
    values: Float[Tensor, "*batch n d_v"],
    queries: Float[Tensor, "*batch tests d_k"],
    positions: Int[Tensor, "tests"],
    *,
    first: Int[Tensor, "tests"] | None = None,
    alpha: float | Float[Tensor, "*#batch n"] = 0.99,
    beta: float | Float[Tensor, "*#batch n"] = 1.0,
) -> Float[Tensor, "*batch tests d_v"]:
    """`S = alpha (I - beta k_hat k_hat^T) S + beta k_hat v^T`, `k_hat = k / ||k||`, from `S = 0`; response `S_t^T q_t`.

    `alpha`: what is kept, in (0, 1]; 1 is `delta` with `eta = beta`. `beta`: learning rate, in [0, 2]; 0 learns
    nothing. Both are numbers, or tensors with one a pair (gates that depend on the data). CSs are normalised, queries
    not. A new `first` costs a new pass. Source: Yang et al. 2024, Gated Delta Networks (there written for `S^T`).
    Raises ValueError if the arguments do not fit.

    In blocks: `e_i = v_i - alpha_i S_i^T k_i` and `S_(i+1) = alpha_i S_i + beta_i k_i e_i^T`. With `g_i` the product of
    the alphas of the block up to i and `S` the memory before it,
    `e_i + sum_{j<i} beta_j (g_i / g_j) (k_i . k_j) e_j = v_i - g_i S^T k_i`, then
    `S = g_end S + sum_j beta_j (g_end / g_j) k_j e_j^T`. The ratios are taken as exponentials of sums of log alpha.
    """
    positions, first = checked(keys, values, queries, positions, first)
    kept, rate = _gate("alpha", alpha, keys, 1.0), _gate("beta", beta, keys, 2.0)
    if (kept == 0).any():
        raise ValueError("alpha must be above 0 and at most 1, got 0")

    def learn(memory: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, b: Tensor) -> Tensor:
        log_g = log_alpha.cumsum(-2)
        since = (log_g - log_g.mT).clamp_max(0).exp()  # g_i / g_j; above the diagonal, where it is not used, 1
        earlier = (since * (k @ k.mT) * b.mT).tril(-1)
        errors = torch.linalg.solve_triangular(earlier, v - log_g.exp() * (k @ memory), upper=False, unitriangular=True)
        end = log_g[..., -1:, :]
        return end.exp() * memory + (k * b * (end - log_g).exp()).mT @ errors

    empty = keys.new_zeros(*keys.shape[:-2], keys.shape[-1], values.shape[-1])
    pairs = (directions(keys), values, kept.log(), rate)
    return responses(learn, empty, pairs, queries, positions, first)


def _gate(name: str, gate: float | Tensor, keys: Tensor, at_most: float) -> Float[Tensor, "*batch n 1"]:
    """A number or one number a pair, as a column beside the CSs; ValueError outside [0, `at_most`]."""
    gate = torch.as_tensor(gate, dtype=keys.dtype, device=keys.device)
    if not ((gate >= 0) & (gate <= at_most)).all():
        raise ValueError(f"{name} must lie in [0, {at_most:g}], got {gate.min().item():g} to {gate.max().item():g}")
    if gate.ndim and (gate.shape[-1] != keys.shape[-2] or gate.ndim > keys.ndim - 1):
        raise ValueError(f"{name} must be a number or one a pair, {list(keys.shape[:-1])}; got {list(gate.shape)}")
    return gate.expand(keys.shape[:-1])[..., None]
