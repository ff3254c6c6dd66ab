"""Oja's rule: Hebbian learning whose weights stay bounded, for what a US already accounts for is not added again."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pavinterp.theory.rules._stream import checked, directions, number, responses


def oja(
    keys: Float[Tensor, "*batch n d_k"],
    values: Float[Tensor, "*batch n d_v"],
    queries: Float[Tensor, "*batch tests d_k"],
    positions: Int[Tensor, "tests"],
    *,
    first: Int[Tensor, "tests"] | None = None,
    eta: float = 0.1,
) -> Float[Tensor, "*batch tests d_v"]:
    """`S += eta (k - S v_hat) v_hat^T`, `v_hat = v / ||v||`, pair by pair from `S = 0`; response `S_t^T q_t`.

    `eta`: learning rate, in (0, 2]. USs are normalised, so their lengths are lost; CSs are as they come. Along each
    `v_hat` the update is a weighted mean of old and new (`eta <= 1`): pairs that come again and again leave the weights
    bounded, at the regression of CSs on US directions, where `hebbian` grows for ever. With one output fed back as its
    own US it is Oja's neuron and turns to the CSs' leading direction. A new `first` costs a new pass.
    Source: Oja 1982. Raises ValueError if the arguments do not fit.

    In blocks, as `delta` with the roles of CS and US exchanged: `e_i = k_i - S_i v_hat_i` obey
    `e_i + eta sum_{j<i} (v_hat_i . v_hat_j) e_j = k_i - S v_hat_i`, then `S += eta E^T V_hat`.
    """
    positions, first = checked(keys, values, queries, positions, first)
    number("eta", eta, above=0, at_most=2)

    def learn(memory: Tensor, k: Tensor, v: Tensor) -> Tensor:
        earlier = eta * (v @ v.mT).tril(-1)
        errors = torch.linalg.solve_triangular(earlier, k - v @ memory.mT, upper=False, unitriangular=True)
        return memory + eta * errors.mT @ v

    empty = keys.new_zeros(*keys.shape[:-2], keys.shape[-1], values.shape[-1])
    return responses(learn, empty, (keys, directions(values)), queries, positions, first)
