"""Rescorla and Wagner (1972): all stimuli of a trial share one error of prediction.

For each US, on each trial, for each stimulus i that is present,

    dV_i = alpha_i beta (lambda - sum_j V_j),       j over all stimuli present,

with lambda = 0 where the US does not follow. `V_i` may be negative (conditioned inhibition). Source: Rescorla & Wagner
1972, in Black & Prokasy (eds), Classical Conditioning II, pp. 64-99. Similar stimuli share elements: with Gram matrix
`G`, what j learns moves every `V_i` by `G_ij`, which is gradient descent over elements (the delta rule, Widrow & Hoff
1960). Context as a cue: Chapman & Robbins 1990, Memory & Cognition 18. Configural cues: the authors' own chapter.
"""

from __future__ import annotations

import numpy as np

from pavinterp.theory.conditioning.design import Array, Design, Parameters, batch_of, column, strengths


def simulate(design: Design, parameters: Parameters) -> Array:
    """Responses `sum_j V_j` over the stimuli of each probe, [*batch, trials + 1, probes, uss].

    Reads `rate` (beta, at alpha = 1), `absent`, `lam`, `saliences` (alpha), `context`, `configural`. With a rate above
    2 over the summed salience of a compound errors grow instead of shrinking: FloatingPointError once they overflow.
    """
    batch, trials = batch_of(design, parameters), design.before.shape[-2]
    alpha = strengths(design, parameters)[..., None]
    rate, absent, lam = column(parameters.rate), column(parameters.absent), column(parameters.lam)
    v = np.zeros((*batch, len(design.cues), len(design.uss)))
    responses = np.empty((*batch, trials + 1, len(design.probes), len(design.uss)))
    for t in range(trials):
        responses[..., t, :, :] = design.probes @ v
        present = design.present[..., t, :, None] * design.predicts
        outcome = design.outcome[..., t, None, :]
        error = lam * outcome - (present * v).sum(-2, keepdims=True)
        beta = rate * np.where(outcome > 0, 1.0, absent)
        with np.errstate(over="raise", invalid="raise"):
            v = v + design.gram @ (alpha * present * beta * error)
    responses[..., trials, :, :] = design.probes @ v
    return responses
