"""Decoding of USs: what the final norm does to a write is read off it correctly; what strings a page may get."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tiny
import torch

import pavinterp as pi
from pavinterp.examples import Unembedding, token_strings
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


def test_tokens_of_megabytes_make_no_page_of_megabytes(tmp_path):
    folder = tiny.model_folder(tmp_path / "model")
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text("utf-8"))
    content["model"]["merges"] = []
    content["model"]["vocab"] = {
        token if number < 290 else "x" * 10_000_000 + str(number): number
        for token, number in content["model"]["vocab"].items()
    }
    path.write_text(json.dumps(content), encoding="utf-8")
    handle = pi.load(folder)
    assert token_strings(handle, np.array([295])) == ["x" * 200 + "…"]
    run = pi.measure(handle, ["A bell rings and the meat comes. " * 40], context=32, sequences=2, progress=False)
    run.report(tmp_path / "report")
    assert "x" * 20 in json.dumps(run.details.examples)
    assert sum(file.stat().st_size for file in (tmp_path / "report").rglob("*") if file.is_file()) < 3e6
