"""The delta rule: each pair is learned by the error of what the memory expected of it."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pavinterp.theory.rules._stream import checked, directions, number, responses


def delta(
    keys: Float[Tensor, "*batch n d_k"],
    values: Float[Tensor, "*batch n d_v"],
    queries: Float[Tensor, "*batch tests d_k"],
    positions: Int[Tensor, "tests"],
    *,
    first: Int[Tensor, "tests"] | None = None,
    eta: float = 1.0,
    passes: int = 1,
) -> Float[Tensor, "*batch tests d_v"]:
    """`S += eta k_hat (v - S^T k_hat)^T`, `k_hat = k / ||k||`, pair by pair from `S = 0`; response `S_t^T q_t`.

    `eta`: learning rate, in (0, 2], beyond which errors grow. `passes`: how often the stream up to each test is gone
    through, at least 1; with more than one, every test has a pass of its own. CSs are normalised, queries not. A CS
    paired again and again is acquired as `1 - (1 - eta)^n`; with many passes over independent CSs the memory becomes
    the `pseudoinverse` of the unit CSs. A new `first` costs a new pass. Source: Rescorla & Wagner 1972; Widrow & Hoff
    1960; in attention, Schlag et al. 2021. Raises ValueError if the arguments do not fit.

    Blocks of pairs are learned at once. With `S` the memory before a block, the errors `e_i = v_i - S_i^T k_i` obey
    `e_i + eta sum_{j<i} (k_i . k_j) e_j = v_i - S^T k_i`: one triangular solve, then `S += eta K^T E`.
    """
    positions, first = checked(keys, values, queries, positions, first)
    number("eta", eta, above=0, at_most=2)
    if passes < 1 or passes != int(passes):
        raise ValueError(f"passes must be a whole number of at least 1, got {passes}")

    def learn(memory: Tensor, k: Tensor, v: Tensor) -> Tensor:
        earlier = eta * (k @ k.mT).tril(-1)  # the solve takes the diagonal to be one
        errors = torch.linalg.solve_triangular(earlier, v - k @ memory, upper=False, unitriangular=True)
        return memory + eta * k.mT @ errors

    empty = keys.new_zeros(*keys.shape[:-2], keys.shape[-1], values.shape[-1])
    return responses(learn, empty, (directions(keys), values), queries, positions, first, passes=passes)
