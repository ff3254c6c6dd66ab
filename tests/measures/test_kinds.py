"""Scores of head kinds and sinks, on strengths made by hand."""

from __future__ import annotations

import pytest
import torch
from make_trials import make_trials

from pavinterp.measures.kinds import Kinds, last_occurrence
from pavinterp.measures.sinks import Sinks
from pavinterp.sweep import weighted_mean


def test_last_occurrence_is_the_plain_one():
    tokens = torch.tensor([3, 1, 3, 3, 2, 1, 3])
    last, seen = last_occurrence(tokens)
    for t in range(len(tokens)):
        before = [s for s in range(t) if tokens[s] == tokens[t]]
        assert bool(seen[t]) == bool(before)
        if before:
            assert last[t] == before[-1]


def _looking_at(positions, tokens):
    """Trials of one head whose test t puts (nearly) all of its strength on positions[t]."""
    n = len(tokens)
    queries = 200 * torch.eye(n, dtype=torch.float64)[None]
    keys = torch.zeros(1, n, n, dtype=torch.float64)
    for t, j in enumerate(positions):
        keys[0, j, t] = 1.0
    return make_trials(n=n, heads=1, kv_heads=1, d_k=n, queries=queries, keys=keys, tokens=torch.tensor(tokens))[0]


def _scores(trials):
    return {k: weighted_mean(v, trials.weights).item() for k, v in Kinds()(trials).items()}


def test_each_kind_scores_one_on_its_own_head_and_nothing_on_the_others():
    tokens = [7, 1, 2, 3, 4, 1, 2, 3, 4]
    previous = _scores(_looking_at([0, 0, 1, 2, 3, 4, 5, 6, 7], tokens))
    assert previous["previous_token_score"] == pytest.approx(1, abs=1e-3)
    assert previous["induction_score"] == pytest.approx(0, abs=1e-3)
    induction = _scores(_looking_at([0, 0, 0, 0, 0, 2, 3, 4, 5], tokens))
    assert induction["induction_score"] == pytest.approx(1, abs=1e-3)
    assert induction["duplicate_token_score"] == pytest.approx(0, abs=1e-3)
    duplicate = _scores(_looking_at([0, 0, 0, 0, 0, 1, 2, 3, 4], tokens))
    assert duplicate["duplicate_token_score"] == pytest.approx(1, abs=1e-3)
    assert duplicate["induction_score"] == pytest.approx(0, abs=1e-3)


def test_sink_strength_counts_position_zero_and_the_learned_sink():
    trials, _ = make_trials(sinks=True)
    got = Sinks()(trials)["sink_strength"]
    torch.testing.assert_close(got, 1 - trials.strengths[..., 1:].sum(-1))
