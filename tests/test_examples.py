"""Decoding of USs: what the final norm does to a write is read off it correctly."""

from __future__ import annotations

import pytest
import tiny
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import pavinterp as pi
from pavinterp.examples import Unembedding, norm_gain


@pytest.mark.parametrize("kind", ["layer_norm", "rms", "gemma", "without weights"])
def test_gain_of_every_kind_of_norm(kind):
    weight = torch.linspace(0.5, 2, 12)
    if kind == "without weights":  # OLMo's
        gain, centres = norm_gain(torch.nn.LayerNorm(12, elementwise_affine=False), 12)
        torch.testing.assert_close(gain, torch.ones(12), rtol=1e-4, atol=1e-5)
        assert centres
        return
    if kind == "layer_norm":
        norm = torch.nn.LayerNorm(12)
        norm.bias.data.normal_()
    else:
        norm = LlamaRMSNorm(12) if kind == "rms" else Gemma3RMSNorm(12)
    norm.weight.data = weight - 1 if kind == "gemma" else weight
    gain, centres = norm_gain(norm, 12)
    torch.testing.assert_close(gain, weight, rtol=1e-4, atol=1e-5)
    assert centres == (kind == "layer_norm")


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma3"])
def test_a_writes_effect_on_the_logits_is_the_models_own(family):
    """Add a small write to the last residual stream and look at the logits: same tokens, same direction."""
    model = getattr(tiny, family)()
    handle = pi.load(model)
    unembed = Unembedding(handle)
    rng = torch.Generator().manual_seed(0)
    width = model.config.hidden_size
    stream, write = torch.randn(1, width, generator=rng), torch.randn(1, width, generator=rng)
    with torch.no_grad():
        final = unembed.norm

        def logits(x):
            return model.lm_head(final(x))[0]

        gain, centres = norm_gain(final, width)
        direct = write - write.mean() if centres else write
        direct = (direct * gain) @ unembed.weight.T
        # the norm's scale falls as the stream grows along itself: compare across the change that keeps the scale
        orthogonal = stream - stream.mean() if centres else stream
        write_kept = write - (write * orthogonal).sum() / (orthogonal * orthogonal).sum() * orthogonal
        direct_kept = write_kept - write_kept.mean() if centres else write_kept
        direct_kept = ((direct_kept * gain) @ unembed.weight.T)[0]
        step = 1e-3
        change = (logits(stream + step * write_kept) - logits(stream - step * write_kept)) / (2 * step)
    cosine = torch.nn.functional.cosine_similarity(change, direct_kept, dim=0)
    assert cosine > 0.999
    assert direct.shape == (1, tiny.VOCABULARY)
