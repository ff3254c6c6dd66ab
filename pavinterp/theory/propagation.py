"""Reliability of retrieval through depth: how layers, heads and `d_k` trade off, and what a design costs in parameters.

A layer retrieves with error `eps`, the share of its response's power that is not the stored US:

    eps(N, d_k) = 1 - f^2(N) = (N - 1) / (N - 1 + d_k)                      one head, the capacity theorem
    any:        eps_l = eps(N, d_k)^r_l                                     lost only if all of r heads lose it
    summed:     eps_l = eps(N, r_l d_k) = (N - 1) / (N - 1 + r_l d_k)       r heads write, and what they write adds up
    series:     reliability = prod_l (1 - min(1, G_l^2 eps_l))              every layer's retrieval is needed

`any` is the model of "Understanding Transformers through the Lens of Pavlovian Conditioning" (arXiv 2508.08289). It
takes for granted that something picks the head that is right, and that heads fail independently. `summed` is what an
attention layer does with heads that hold the same associations under independent isotropic CSs: signals add in
amplitude, crosstalk in power, so that `r` heads of `d_k` are one memory of `r d_k` (simulated in the tests). The two
part at small errors, where `any` falls as the r-th power of `N / d_k` and `summed` only as `1 / r`.

`G_l` is the gain of an error of layer `l`, as a ratio of amplitudes (norms) at the last block and at its own. `eps` is
a share of power, so that the gain enters squared; without gains all are 1. Norms of independent errors add as
`sqrt(sum_l (G_l a_l)^2)`, with `a_l` an amplitude: `sqrt(eps_l)` times the norm of what the layer writes.

Numbers or arrays, which broadcast; NaN passes through; a value out of range raises ValueError.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pavinterp.theory.decoding import decoding_success

Real = float | npt.NDArray[Any]
Combination = Literal["any", "summed"]
COMBINATIONS = ("any", "summed")


def retrieval_error(load: Real, d_k: Real) -> Any:
    """`eps(N, d_k) = 1 - f^2(N)`: the share of a linear memory's response that is crosstalk.

    `load`: associations N, at least 1. `d_k`: dimensions, at least 1; `d_eff` of CSs that are not isotropic. In [0, 1):
    0 at N = 1, 1/2 at N = 1 + d_k. Not the share of answers that are wrong, for which see `decoding_error`.
    """
    others, width = _at_least("load", load, 1) - 1, _at_least("d_k", d_k, 1)
    return (others / (others + width))[()]  # not 1 - f^2, whose last digits are lost where the error is small


def decoding_error(load: float, d_k: float, d_v: float) -> float:
    """P(the nearest stored US is a wrong one): what a recall task counts. From `theory.decoding`, whose limits it has.

    `load`: associations, at least 1; 0 up to 2. `d_k`, `d_v`: dimensions of CSs and USs, at least 3.
    """
    return float(np.clip(1 - decoding_success(load, d_k, d_v), 0.0, 1.0))


def layer_error(load: Real, d_k: Real, redundancy: Real, combination: Combination = "any") -> Any:
    """Error of a layer of `redundancy` independent heads that all hold the same `load` associations, in [0, 1].

    `redundancy`: heads that fail independently, at least 0 (need not be whole; at 0 nothing is retrieved: 1).
    `combination`: "any" is `eps(N, d_k)^r`, "summed" is `eps(N, r d_k)`.
    """
    copies = _at_least("redundancy", redundancy, 0)
    if combination == "any":
        return retrieval_error(load, d_k) ** copies
    if combination != "summed":
        raise ValueError(f"combination must be one of {', '.join(COMBINATIONS)}, got {combination!r}")
    others, width = _at_least("load", load, 1) - 1, _at_least("d_k", d_k, 1)
    with np.errstate(invalid="ignore"):
        found = others / (others + copies * width)
    return np.where((copies == 0) & ~np.isnan(others + width), 1.0, found)[()]


def log_reliability(errors: Real, redundancy: Real = 1.0, gains: Real = 1.0) -> float:
    """Natural logarithm of `reliability`; -inf where that is 0. For products too small for a float."""
    eps, copies = _at_least("errors", errors, 0), _at_least("redundancy", redundancy, 0)
    if (eps > 1).any():
        raise ValueError(f"errors must lie in [0, 1], got {eps[eps > 1].flat[0]}")
    lost = np.minimum(1.0, _at_least("gains", gains, 0) ** 2 * eps**copies)
    with np.errstate(divide="ignore"):
        return float(np.log1p(-lost).sum())


def reliability(errors: Real, redundancy: Real = 1.0, gains: Real = 1.0) -> float:
    """`prod_l (1 - min(1, G_l^2 eps_l^r_l))`: the chance that all layers in series retrieve.

    `errors`: `eps_l` in [0, 1], one a layer (at least one of the three has an entry a layer; they broadcast).
    `redundancy`: `r_l`, at least 0. `gains`: `G_l`, ratio of amplitudes, at least 0. Source: arXiv 2508.08289, with
    gains (this module).
    """
    return float(np.exp(log_reliability(errors, redundancy, gains)))


def joint_amplitude(amplitudes: Real, gains: Real = 1.0) -> float:
    """`sqrt(sum_l (G_l a_l)^2)`: norm at the last block of errors that are independent from layer to layer.

    `amplitudes`: `a_l`, norms of the errors after their own block, in any unit, which the result has too. `gains`: G_l.
    """
    return float(np.sqrt(((_at_least("gains", gains, 0) * _at_least("amplitudes", amplitudes, 0)) ** 2).sum()))


def llama_parameters(
    *, depth: int, d_model: int, heads: int, kv_heads: int, d_k: int, mlp: int, vocabulary: int, tied: bool = True
) -> int:
    """Parameters of a Llama-style decoder: embedding, `depth` blocks, final RMSNorm, output matrix unless `tied`.

    A block has W_Q and W_O (`d_model x heads d_k`), W_K and W_V (`d_model x kv_heads d_k`), three matrices of a gated
    MLP (`d_model x mlp`) and two RMSNorms (`d_model`), and no biases. Equal to `sum(p.numel())` of transformers'
    LlamaForCausalLM (tests). Raises ValueError if `kv_heads` does not divide `heads` or a count is below 1.
    """
    counts = {"depth": depth, "d_model": d_model, "heads": heads, "kv_heads": kv_heads, "d_k": d_k, "mlp": mlp}
    for name, count in (counts | {"vocabulary": vocabulary}).items():
        if count < 1:
            raise ValueError(f"{name} must be at least 1, got {count}")
    if heads % kv_heads:
        raise ValueError(f"kv_heads must divide heads, got {kv_heads} and {heads}")
    block = 2 * d_model * heads * d_k + 2 * d_model * kv_heads * d_k + 3 * d_model * mlp + 2 * d_model
    return (1 if tied else 2) * vocabulary * d_model + depth * block + d_model


def _at_least(name: str, value: Any, least: float) -> npt.NDArray[np.float64]:
    numbers = np.asarray(value, dtype=np.float64)
    wrong = numbers < least
    if wrong.any():
        raise ValueError(f"{name} must be at least {least:g}, got {numbers[wrong].flat[0]}")
    return numbers
