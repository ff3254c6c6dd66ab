"""The Hebbian memory of linearised attention: every pairing adds its own product, and nothing is corrected.

`S = sum_j k_j v_j^T`, response `S^T q` (theory section 1). The key of a trial is the sum of its CSs, each with its
salience as its length; the value of a US is `lam` along an axis of its own, and a trial with no US adds nothing.
"""

from __future__ import annotations

import numpy as np

from pavinterp.theory.conditioning.design import Array, Design, Parameters, batch_of, column, keys


def simulate(design: Design, parameters: Parameters) -> Array:
    """Responses `sum_j (q . k_j) v_j` of each probe to what came before, [*batch, trials + 1, probes, uss].

    Reads `lam`, `saliences`, `configural`. It has no rate: a pairing adds `lam`, without limit.
    """
    batch, trials = batch_of(design, parameters), design.before.shape[-2]
    stored, queries = (keys(design, parameters, presented) for presented in (design.before, design.probes))
    scores = queries @ design.gram @ np.swapaxes(stored, -1, -2)  # [*batch, probes, trials]
    added = scores[..., None] * design.outcome[..., None, :, :]  # [*batch, probes, trials, uss]
    summed = column(parameters.lam, 3) * np.moveaxis(added.cumsum(-2), -2, -3)
    nothing = np.zeros((*summed.shape[:-3], 1, *summed.shape[-2:]))
    return np.broadcast_to(
        np.concatenate([nothing, summed], -3), (*batch, trials + 1, len(design.probes), len(design.uss))
    )
