"""The Hebbian memory read as attention reads it: pairs are weighed by softmax of similarity, beside a sink.

Response `sum_j a_j v_j`, `a_j = w_j / (w_0 + sum_i w_i)`, `w_j = exp(sharpness (cos(q, k_j) - 1))`. Keys and values are
those of `hebbian`; the cosine is 0 with a key of no length (US alone), and filler has no weight. A trial with no US
takes weight and gives nothing. The sink `w_0 = (1 - rate) / rate` makes the response to the first pairing
`rate * lam`; n pairings of one CS give `n / (n + w_0)`. Nothing is corrected: the only competition is for weight.
"""

from __future__ import annotations

import numpy as np

from pavinterp.theory.conditioning.design import Array, Design, Parameters, batch_of, column, keys


def simulate(design: Design, parameters: Parameters) -> Array:
    """Responses of each probe to what came before, [*batch, trials + 1, probes, uss].

    Reads `rate` (through the sink), `lam`, `sharpness`, `saliences`, `configural`.
    """
    batch, trials = batch_of(design, parameters), design.before.shape[-2]
    shown = (keys(design, parameters, presented) for presented in (design.before, design.probes))
    stored, queries = (_unit(x, design.gram) for x in shown)
    cosine = queries @ design.gram @ np.swapaxes(stored, -1, -2)
    stored_at_all = np.swapaxes(np.any(design.before > 0, axis=-1, keepdims=True), -1, -2)  # not filler
    weights = np.exp(column(parameters.sharpness) * (cosine - 1)) * stored_at_all  # [*batch, probes, trials]
    rate = column(parameters.rate)
    total = (1 - rate) / rate + weights.cumsum(-1)
    with_us = (weights[..., None] * design.outcome[..., None, :, :]).cumsum(-2)  # [*batch, probes, trials, uss]
    shares = column(parameters.lam, 3) * np.moveaxis(with_us / total[..., None], -2, -3)
    nothing = np.zeros((*shares.shape[:-3], 1, *shares.shape[-2:]))
    return np.broadcast_to(
        np.concatenate([nothing, shares], -3), (*batch, trials + 1, len(design.probes), len(design.uss))
    )


def _unit(x: Array, gram: Array) -> Array:
    """Scaled to length 1 in the similarity of cues; what has no length stays."""
    length = np.sqrt(((x @ gram) * x).sum(-1, keepdims=True))
    return x / np.where(length > 0, length, 1)
