"""Mackintosh (1975): attention goes to the stimulus that predicts best among those present.

Each stimulus learns by its own error, not by a shared one,

    dV_i = alpha_i theta (lambda - V_i),

and its associability alpha_i rises where it predicts what follows better than all others present together, and falls
where it does not:

    d alpha_i > 0 where |lambda - V_i| <  |lambda - V_X|,
    d alpha_i < 0 where |lambda - V_i| >= |lambda - V_X|,       V_X = sum of V_j over the others.

Source: Mackintosh 1975, Psychological Review 82, 276-298, which leaves the size of d alpha open. Chosen here: the
difference of the two sides, summed over USs, as a share of lambda and times the parameter `attention`; where the
stimulus is no better, `TIE` more is taken off, so that equals lose too. alpha stays between
a tenth and twice its start.
"""

from __future__ import annotations

import numpy as np

from pavinterp.theory.conditioning.design import Array, Design, Parameters, batch_of, column, strengths

TIE = 0.1
LEAST, MOST = 0.1, 2.0


def simulate(design: Design, parameters: Parameters) -> Array:
    """Summed associative strengths of each probe, [*batch, trials + 1, probes, uss].

    Reads `rate` (theta times the alpha of a CS of salience 1 at first), `attention`, `absent`, `lam`, `saliences`
    (alpha at first), `context`, `configural`.
    """
    batch, trials = batch_of(design, parameters), design.before.shape[-2]
    salience = strengths(design, parameters)
    rate, absent, lam = column(parameters.rate), column(parameters.absent), column(parameters.lam)
    v = np.zeros((*batch, len(design.cues), len(design.uss)))
    alpha = np.ones((*batch, len(design.cues)))  # relative to what it was at first
    responses = np.empty((*batch, trials + 1, len(design.probes), len(design.uss)))
    for t in range(trials):
        responses[..., t, :, :] = design.probes @ v
        there = design.present[..., t, :]
        present = there[..., None] * design.predicts
        outcome = design.outcome[..., t, None, :]
        own = lam * outcome - v
        others = lam * outcome - ((present * v).sum(-2, keepdims=True) - present * v)
        beta = rate * salience[..., None] * np.where(outcome > 0, 1.0, absent)
        v = v + design.gram @ (beta * alpha[..., None] * present * own)
        lead = (design.predicts * (abs(others) - abs(own)) / lam).sum(-1)
        change = column(parameters.attention, 1) * np.where(lead > 1e-12, lead, lead - TIE)
        alpha = np.where(there > 0, (alpha + change).clip(LEAST, MOST), alpha)
    responses[..., trials, :, :] = design.probes @ v
    return responses
