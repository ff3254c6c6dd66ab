"""Continuations give the whole model's logits wherever they are said to, and never where they would not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from architectures import ROWS, build
from test_run import stimuli

import pavinterp as pi
from pavinterp.capture.paths import on_path
from pavinterp.experiments import cut_responses
from pavinterp.experiments.continuation import blocks_of, continued, continuing, recording
from pavinterp.experiments.interventions import logits
from pavinterp.models import untouched

TOKENS = torch.from_numpy(np.random.default_rng(0).integers(3, 101, (1, 24)))
WHOLE = {"gemma3n"}  # what blocks hand on beside their output is not recorded


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_next", "gpt_oss", "bloom", "falcon", "gemma3", "gemma3n"])
def test_layers_that_continue_do_so_and_the_model_comes_back(name):
    handle = on_path(pi.load(build(name)))
    layers = set(ROWS[name].layers)
    before = [dict(vars(module)) for module in handle.model.modules()]
    with untouched(handle.model):
        good = continuing(handle, TOKENS, layers)
    assert good == (set() if name in WHOLE else layers - {0})
    assert [set(vars(module)) for module in handle.model.modules()] == [set(kept) for kept in before]
    assert not any("forward" in vars(block) for block in blocks_of(handle))


def test_blocks_before_the_layer_are_not_run():
    handle, ran = pi.load(build("llama", num_hidden_layers=4)), []
    blocks = blocks_of(handle)
    for i, block in enumerate(blocks):
        block.mlp.register_forward_hook(lambda module, inputs, output, i=i: ran.append(i))
    with untouched(handle.model):
        with recording(blocks) as outputs:
            whole = logits(handle, TOKENS)
        ran.clear()
        with continued(blocks, outputs, 3, 2):
            got = logits(handle, TOKENS.expand(2, -1))
    assert ran == [3]
    torch.testing.assert_close(got, whole.expand(2, -1, -1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_curves_are_the_same_with_and_without(name, monkeypatch):
    handle = pi.load(build(name, num_hidden_layers=4))
    text = stimuli([np.random.default_rng(i).integers(3, 101, 24) for i in range(2)])
    with untouched(handle.model):
        short = cut_responses.curves(handle, text, [(1, 0), (3, 2)])
        monkeypatch.setattr(cut_responses, "continuing", lambda *given: set())
        full = cut_responses.curves(handle, text, [(1, 0), (3, 2)])
    np.testing.assert_allclose(short["divergence"], full["divergence"], rtol=1e-4, atol=1e-9)
    np.testing.assert_allclose(short["loss_change"], full["loss_change"], rtol=1e-4, atol=1e-6)


def test_a_model_with_hooks_is_run_as_a_whole():
    """What one hook keeps for another one in a later block would be that of another pass."""
    model = build("llama")
    handle = pi.load(model)
    tokens = torch.arange(12)[None]
    with untouched(model):
        assert continuing(handle, tokens, {1}) == {1}
        hook = model.model.layers[0].register_forward_hook(lambda module, inputs, output: None)
        assert continuing(handle, tokens, {1}) == set()
        hook.remove()
