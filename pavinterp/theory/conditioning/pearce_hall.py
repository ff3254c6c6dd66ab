"""Pearce and Hall (1980): a stimulus is learned about as long as what follows it is surprising.

For each US, with `sum V` the net prediction (excitation minus inhibition) of all stimuli present, stimulus i gains

    excitation   S_i alpha_i lambda             where the US follows and is not over-predicted,
    inhibition   S_i alpha_i (sum V - lambda)   where less follows than was predicted,

and after each trial in which it was present

    alpha_i = gamma |lambda - sum V| + (1 - gamma) alpha_i,     alpha_i = 1 at first.

Sources: Pearce & Hall 1980, Psychological Review 87, 532-552 (gamma = 1); gamma: Pearce, Kaye & Hall 1982, in Commons,
Herrnstein & Wagner (eds), Quantitative Analyses of Behavior 3. Chosen here, where the papers leave it open: surprise is
taken as a share of lambda, at most 1, and of several USs the largest counts. Excitation does not fade as the error
does, so responses jump where a prediction passes lambda: they are not continuous in the rate.
"""

from __future__ import annotations

import numpy as np

from pavinterp.theory.conditioning.design import Array, Design, Parameters, batch_of, column, strengths


def simulate(design: Design, parameters: Parameters) -> Array:
    """Net predictions of each probe, [*batch, trials + 1, probes, uss].

    Reads `rate` (the intensity S, for a salience of 1), `attention` (gamma), `absent` (of inhibition), `lam`,
    `saliences`, `context`, `configural`. With rates beyond 0.5 or so, excitation overshoots and swings.
    """
    batch, trials = batch_of(design, parameters), design.before.shape[-2]
    salience = strengths(design, parameters)
    intensity = column(parameters.rate) * salience[..., None]
    gamma, lam = column(parameters.attention, 1), column(parameters.lam)
    v = np.zeros((*batch, len(design.cues), len(design.uss)))
    alpha = np.ones((*batch, len(design.cues)))
    responses = np.empty((*batch, trials + 1, len(design.probes), len(design.uss)))
    for t in range(trials):
        responses[..., t, :, :] = design.probes @ v
        there = design.present[..., t, :]
        present = there[..., None] * design.predicts
        outcome = lam * design.outcome[..., t, None, :]
        error = outcome - (present * v).sum(-2, keepdims=True)
        gain = np.where(error < 0, column(parameters.absent) * error, outcome)
        v = v + design.gram @ (intensity * alpha[..., None] * present * gain)
        surprise = (abs(error) / lam).max(-1).clip(max=1)  # [*batch, 1]
        alpha = np.where(there > 0, gamma * surprise + (1 - gamma) * alpha, alpha)
    responses[..., trials, :, :] = design.probes @ v
    return responses
