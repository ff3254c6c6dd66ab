"""Interventions on every row: what was rebuilt, put back, changes nothing; no response is as good as no weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from architectures import ROWS
from test_architectures import DOCUMENTS, LENGTH, handle_of, trials_of

from pavinterp.experiments.interventions import logits, with_heads
from pavinterp.models import untouched

TOKENS = torch.from_numpy(np.stack(DOCUMENTS[:2]))
HEAD = 1


def difference(one, two):
    return float((one - two).norm() / two.norm())


@pytest.mark.parametrize("name", ROWS)
def test_putting_back_what_was_rebuilt_changes_no_logit(name):
    handle, seen = handle_of(name), []

    def rebuilt(call):
        seen.append(call.layer)
        own = torch.stack([trials_of(call, TOKENS, i).response for i in range(2)])  # [batch, heads, n, d_v]
        return own.transpose(1, 2).reshape(2, LENGTH, -1)

    with untouched(handle.model):
        before = logits(handle, TOKENS)
        after = logits(handle, TOKENS, rebuilt)
        some = torch.tensor([2, TOKENS.shape[1] - 1])
        kept = logits(handle, TOKENS, positions=some)
    assert kept.shape == before[:, some].shape
    assert torch.allclose(kept, before[:, some], atol=1e-5, rtol=1e-5)
    assert sorted(seen) == list(ROWS[name].layers)
    assert difference(after, before) <= 1e-5


@pytest.mark.parametrize("name", ROWS)
def test_a_head_without_response_is_a_head_without_output_weights(name):
    handle, layers = handle_of(name), set(ROWS[name].layers)
    if name != "zamba2":  # its layers share their output projection
        layers = {max(layers)}
    projection = []

    def silence(call):
        projection.append(call.projection)
        return with_heads(call, {HEAD: torch.zeros(2, LENGTH, ROWS[name].d_v)})

    with untouched(handle.model):
        before = logits(handle, TOKENS)
        silenced = logits(handle, TOKENS, silence, layers)
        weight = projection[0].weight
        kept = weight.detach().clone()
        features = slice(HEAD * ROWS[name].d_v, (HEAD + 1) * ROWS[name].d_v)
        with torch.no_grad():
            if type(projection[0]).__name__ == "Conv1D":
                weight[features] = 0
            else:
                weight[:, features] = 0
        try:
            expected = logits(handle, TOKENS)
        finally:
            with torch.no_grad():
                weight.copy_(kept)
    assert difference(silenced, expected) <= 1e-5
    assert difference(silenced, before) > 1e-4
