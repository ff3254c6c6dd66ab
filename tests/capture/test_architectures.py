"""Tiny random models of many architectures: captured exactly, and their strengths are the model's own attention."""

from __future__ import annotations

import pytest
import torch
from architectures import ARCHITECTURES, build
from test_attention_interface import captured, trials_of

from pavinterp.capture import certificate


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_an_architecture_is_captured_exactly(kind):
    model = build(kind)
    model.set_attn_implementation("eager")
    tokens = torch.randint(3, 101, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        attentions = model.base_model(input_ids=tokens, output_attentions=True, use_cache=False).attentions
    calls, _ = captured(model, tokens)
    assert sorted(calls) == [0, 1]
    for layer, call in calls.items():
        one = trials_of(call, tokens, 1)
        assert certificate.residual(call, 1, one).max() <= 1e-5
        torch.testing.assert_close(one.strengths, attentions[layer][1][..., :24], rtol=1e-4, atol=1e-6)
        assert (one.sink_share is not None) == (kind == "gpt_oss")
        assert call.softcap == (5.0 if kind == "gemma2" else None)
        assert call.window == (
            8 if kind == "mistral" or ("layer_types" in ARCHITECTURES[kind] and layer == 0) else None
        )
