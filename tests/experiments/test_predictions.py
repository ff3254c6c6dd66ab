"""Divergences in float32 against float64, from small ones to ones beyond float32."""

from __future__ import annotations

import pytest
import torch

from pavinterp.experiments.predictions import Predictions

N, VOCABULARY = 64, 5000


def in_float64(whole, changed, tokens):
    one, two = whole.double().log_softmax(-1), changed.double().log_softmax(-1)
    loss = (one - two)[:-1].gather(-1, tokens[1:, None]).mean()
    return float((one.exp() * (one - two)).sum(-1).mean()), float(loss)


@pytest.mark.parametrize("noise", [1e-3, 1e-2, 0.1, 1.0, 5.0])
@pytest.mark.parametrize("shift", [0.0, 7.0])
def test_float32_is_exact_to_1e_5_of_the_divergence(noise, shift):
    rng = torch.Generator().manual_seed(0)
    whole = 4 * torch.randn(N, VOCABULARY, generator=rng)
    changed = whole + noise * torch.randn(N, VOCABULARY, generator=rng) + shift
    tokens = torch.randint(0, VOCABULARY, (N,), generator=rng)
    divergence, loss = in_float64(whole, changed, tokens)
    got = Predictions.of(whole, tokens).against(changed)
    assert got[0] == pytest.approx(divergence, rel=1e-5)
    assert got[1] == pytest.approx(loss, rel=1e-5, abs=1e-6)


def test_no_change_is_exactly_none_and_what_is_beyond_float32_is_found_in_float64():
    whole, tokens = 4 * torch.randn(N, VOCABULARY), torch.randint(0, VOCABULARY, (N,))
    assert Predictions.of(whole, tokens).against(whole.clone()) == (0.0, 0.0)
    changed = whole.clone()
    changed[3, 7] += 500
    got = Predictions.of(whole, tokens).against(changed)
    assert got == pytest.approx(in_float64(whole, changed, tokens), rel=1e-9)
