"""Masks that are not what the first tokens of the first head show, and hooks behind the output projection."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from architectures import build
from test_run import stimuli

import pavinterp as pi
from pavinterp.errors import UserError

DOCUMENTS = [np.random.default_rng(i).integers(3, 101, 40) for i in range(3)]
WINDOWED = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}


def measured(model, batch=2):
    return pi.measure(pi.load(model), stimuli(DOCUMENTS), tests=16, batch=batch, examples=False, progress=False)


def with_mask(change):
    """A model whose attention in layer 0 gets a mask of its own, [batch, 1, n, n] made of the causal one by a hook."""
    model = build("llama")

    def hook(module, inputs, given):
        n = given["hidden_states"].shape[1]
        mask = torch.zeros(1, 4, n, n).masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf"))
        change(mask)
        return inputs, given | {"attention_mask": mask}

    model.model.layers[0].self_attn.register_forward_pre_hook(hook, with_kwargs=True)
    return model


def one_head(mask):
    mask[:, 2] = 0


def one_edge(mask):
    if mask.shape[-1] > 30:
        mask[:, :, 10, 30] = 0


@pytest.mark.parametrize("change", [one_head, one_edge])
def test_later_positions_are_seen_wherever_they_are(change):
    model = with_mask(change)
    with pytest.raises(UserError, match="layer 0 attends to later positions; pavinterp measures decoders"):
        pi.measure(pi.load(model), stimuli(DOCUMENTS), tests=None, examples=False, progress=False)


def test_a_causal_mask_of_ones_own_is_measured():
    expected = measured(build("llama")).records["effective_load"]
    found = measured(with_mask(lambda mask: None)).records["effective_load"]
    np.testing.assert_allclose(found, expected, rtol=1e-4)


@pytest.mark.parametrize("now", [4, 16])
@pytest.mark.parametrize("name", ["qwen2", "gemma2", "gpt_oss", "cohere2"])
def test_a_window_changed_behind_the_modules_back_is_refused(name, now):
    """The mask follows the configuration, the module keeps the window it was made with: which was meant?"""
    options = WINDOWED | ({"use_sliding_window": True, "max_window_layers": 0} if name == "qwen2" else {})
    model = build(name, **options)
    assert measured(model).heads().loc[(0, 0), "window"] == 8
    model.config.sliding_window = now
    with pytest.raises(UserError, match="layer 0: the sliding window in its mask is not the one"):
        measured(model)


def test_hooks_around_the_output_projection_are_told():
    model = build("llama")
    model.model.layers[1].self_attn.register_forward_hook(lambda module, inputs, output: (output[0] * 0, *output[1:]))
    model.model.layers[0].register_forward_hook(lambda module, inputs, output: output)
    model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: output)
    (note,) = [note for note in measured(model).manifest["notes"] if "hooks" in note]
    assert "on model.layers.0, model.layers.1.self_attn; what those change after W_O" in note
    assert not [note for note in measured(build("llama")).manifest["notes"] if "hooks" in note]


def test_two_threads_and_a_model_inside_anothers_hook():
    """Lookups in the registry are watched for all models; only the captured one's calls are handed on."""
    outer, inner = build("llama"), build("qwen3")
    expected = measured(build("llama")).records
    loads = []

    def run_another(module, inputs):
        inner(torch.arange(12)[None])
        loads.append(measured(inner).records["effective_load"].mean())

    outer.model.layers[0].register_forward_pre_hook(run_another)
    found = measured(outer).records
    np.testing.assert_allclose(found["effective_load"], expected["effective_load"], rtol=1e-5)
    assert len(set(np.round(loads, 6))) == 1
