"""Decoding of USs: what the final norm does to a write is read off it correctly."""

from __future__ import annotations

import pytest
import tiny
import torch

import pavinterp as pi
from pavinterp.examples import Unembedding
from pavinterp.norms import find_norms, norm_gain


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma3"])
def test_a_writes_effect_on_the_logits_is_the_models_own(family):
    """Add a small write to the last residual stream and look at the logits: same tokens, same direction."""
    model = getattr(tiny, family)()
    handle = pi.load(model)
    unembed = Unembedding(handle, find_norms(handle, torch.arange(8)[None]))
    rng = torch.Generator().manual_seed(0)
    width = model.config.hidden_size
    stream, write = torch.randn(1, width, generator=rng), torch.randn(1, width, generator=rng)
    with torch.no_grad():
        final = unembed.norms.final

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
