"""Plain-loop float64 references: the definitions of theory sections 2 and 3, one number at a time."""

from __future__ import annotations

import math

import numpy as np


def strengths(q, k, bias, scale, softcap=None, sink=None):
    """a_j for one test: q [d_k], k [n, d_k], bias [n]."""
    scores = []
    for j in range(len(k)):
        s = scale * float(np.dot(q, k[j]))
        if softcap is not None:
            s = softcap * math.tanh(s / softcap)
        scores.append(s + float(bias[j]))
    everything = scores + ([] if sink is None else [float(sink)])
    top = max(everything)
    total = sum(math.exp(s - top) for s in everything)
    return [math.exp(s - top) / total for s in scores]


def load_of_test(a, v, w_o, d_k):
    """Every per-test number of the load measure from strengths, USs [n, d_v] and W_O [d_v, width]."""
    writes = [v[j] @ w_o for j in range(len(v))]
    c = [a[j] * math.sqrt(float(writes[j] @ writes[j])) for j in range(len(v))]
    effective = sum(c) ** 2 / sum(x * x for x in c)
    target = max(range(len(c)), key=lambda j: c[j])
    response = sum((a[j] * writes[j] for j in range(len(v))), np.zeros(w_o.shape[1]))
    signal = a[target] * writes[target]
    interference = response - signal
    fidelity = float(response @ writes[target]) / math.sqrt(
        float(response @ response) * float(writes[target] @ writes[target])
    )
    return {
        "effective_load": effective,
        "interference_load": 1 + d_k * float(interference @ interference) / float(signal @ signal),
        "fidelity": fidelity,
        "retrieval_error": float(not (fidelity > 0 and fidelity**2 >= 0.5)),
        "top_strength": max(a),
        "response_norm": math.sqrt(float(response @ response)),
    }


def weighted_median(values, weights):
    """Smallest value with at least half of the weight at or below it."""
    pairs = sorted(zip(values, weights, strict=True))
    total, running = sum(weights), 0.0
    for value, weight in pairs:
        running += weight
        if running >= total / 2:
            return value
    raise AssertionError


def log_log_fit(positions, loads, weights):
    """Slope and intercept of the weighted least-squares line of log load on log position, by the normal equations."""
    x, y, w = np.log(positions), np.log(loads), np.asarray(weights)
    design = np.stack([x, np.ones_like(x)], axis=1)
    slope, intercept = np.linalg.solve(design.T @ (w[:, None] * design), design.T @ (w * y))
    return float(slope), float(intercept)


def pair_means(vectors, metric=None):
    """Mean |cos| and mean cos^2 over pairs of different vectors, in the inner product x M y."""
    metric = np.eye(vectors.shape[1]) if metric is None else metric
    absolute, square, pairs = 0.0, 0.0, 0
    for i in range(len(vectors)):
        for j in range(len(vectors)):
            if i != j:
                cosine = (vectors[i] @ metric @ vectors[j]) / math.sqrt(
                    (vectors[i] @ metric @ vectors[i]) * (vectors[j] @ metric @ vectors[j])
                )
                absolute, square, pairs = absolute + abs(cosine), square + cosine**2, pairs + 1
    return absolute / pairs, square / pairs
