"""Ablations: groups of heads replaced side by side are what hooks of one's own give, on every capture path."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from architectures import ROWS, build
from test_run import stimuli

import pavinterp as pi
from pavinterp.capture.paths import on_path
from pavinterp.errors import UserError
from pavinterp.experiments.ablations import ablated_losses, mean_replacement, responses
from pavinterp.experiments.continuation import continuing
from pavinterp.experiments.cut_responses import curves
from pavinterp.models import untouched

DOCUMENTS = [np.random.default_rng(i).integers(3, 101, 24) for i in range(3)]
TOKENS = torch.from_numpy(DOCUMENTS[0])
GROUPS = [[], [(0, 1)], [(1, 2)], [(0, 1), (1, 2)], [(1, 0), (1, 2)], [(1, 2)], [(0, 0), (0, 3), (1, 1)]]
EVERY_KIND = ("llama", "gpt2", "gpt_oss", "mistral", "gemma3n", "deepseek_v3", "falcon", "bloom")


def by_hooks(model, group, replacement):
    """Loss and divergence of DOCUMENTS[0] by pre-hooks on a Llama's output projections: nothing of pavinterp's."""
    with torch.no_grad():
        whole = model(input_ids=TOKENS[None]).logits[0].double().log_softmax(-1)
        hooks = []
        for layer in {layer for layer, _ in group}:

            def put(module, inputs, layer=layer):
                changed = inputs[0].clone()
                for of, head in group:
                    if of == layer:
                        changed[..., 8 * head : 8 * head + 8] = replacement[layer, head].to(changed)
                return (changed,)

            hooks.append(model.model.layers[layer].self_attn.o_proj.register_forward_pre_hook(put))
        changed = model(input_ids=TOKENS[None]).logits[0].double().log_softmax(-1)
        for hook in hooks:
            hook.remove()
    loss = -changed[:-1].gather(-1, TOKENS[1:, None]).mean()
    before = -whole[:-1].gather(-1, TOKENS[1:, None]).mean()
    return float(loss), float(loss - before), float((whole.exp() * (whole - changed)).sum(-1).mean())


@pytest.mark.parametrize("kind", ["mean", "mean per position", "resampled"])
def test_a_group_is_what_hooks_of_ones_own_give(kind):
    model = build("llama")
    handle, heads = pi.load(model), {head for group in GROUPS for head in group}
    with untouched(model):
        if kind == "resampled":
            replacement = responses(handle, DOCUMENTS[1], heads)
        else:
            replacement = mean_replacement(handle, stimuli(DOCUMENTS), heads, per_position=kind != "mean")
        got = ablated_losses(handle, TOKENS, GROUPS, replacement, short=continuing(handle, TOKENS[None], {0, 1}))
    for group, row in zip(GROUPS, got.to_numpy(), strict=True):
        loss, change, divergence = by_hooks(model, group, replacement)
        # Predictions: 1e-5 of a divergence; float32 logits of two orders of summation beside it
        np.testing.assert_allclose(row, [loss, change, divergence], rtol=1e-3, atol=2e-6)
    assert got.iloc[0, 1:].tolist() == [0, 0]
    assert got.iloc[2].equals(got.iloc[5])


def test_means_are_those_of_plain_loops():
    handle, text = pi.load(build("llama")), stimuli([DOCUMENTS[0], DOCUMENTS[1][:9]])
    with untouched(handle.model):
        every = [responses(handle, ids, [(1, 3)])[1, 3] for ids in text.tokens]
        got = mean_replacement(handle, text, [(1, 3)])[1, 3]
        same = mean_replacement(handle, stimuli(DOCUMENTS), [(1, 3)], per_position=True)[1, 3]
        of_all = torch.stack([responses(handle, ids, [(1, 3)])[1, 3] for ids in DOCUMENTS])
    # over positions, not over sequences: 24 of the one and 9 of the other
    expected = sum(row for response in every for row in response) / 33
    torch.testing.assert_close(got, expected[None].double(), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(same, of_all.double().mean(0), rtol=1e-5, atol=1e-7)


def test_the_mean_ablation_is_that_of_needed_associations():
    handle, text = pi.load(build("gpt2")), stimuli(DOCUMENTS)
    with untouched(handle.model):
        expected = curves(handle, text, [(1, 2)]).query("kept == 0")
        means = mean_replacement(handle, text, [(1, 2)])
        for i, ids in enumerate(DOCUMENTS):
            got = ablated_losses(handle, torch.from_numpy(ids), [[(1, 2)]], means)
            row = expected[expected["sequence"] == i]
            np.testing.assert_allclose(got["divergence"], row["divergence"], rtol=1e-5)
            np.testing.assert_allclose(got["loss_change"], row["loss_change"], rtol=1e-5)


@pytest.mark.parametrize("name", EVERY_KIND)
def test_side_by_side_from_a_layer_on_is_alone_through_the_whole_model(name):
    handle = on_path(pi.load(build(name)))
    layers = list(ROWS[name].layers)
    groups = [[(layers[layer], head) for layer, head in group] for group in GROUPS]
    heads = {head for group in groups for head in group}
    with untouched(handle.model):
        replacement = responses(handle, DOCUMENTS[1], heads)
        short = continuing(handle, TOKENS[None], set(layers))
        got = ablated_losses(handle, TOKENS, groups, replacement, short=short, together=3)
        alone = [ablated_losses(handle, TOKENS, [group], replacement) for group in groups]
    # a batch of other size takes other kernels: 1e-4 of float32 logits
    np.testing.assert_allclose(got, pd.concat(alone), rtol=1e-4, atol=1e-6)
    assert (got["divergence"].iloc[1:] > 1e-5).all()


@pytest.mark.parametrize("name", ["gpt2", "llama", "gpt_oss"])
def test_both_capture_paths_agree(name):
    found = []
    for capture in ("attention_interface", "transformer_lens"):
        handle = on_path(pi.load(build(name)), capture)
        with untouched(handle.model):
            replacement = mean_replacement(handle, stimuli(DOCUMENTS), {head for group in GROUPS for head in group})
            found.append(ablated_losses(handle, TOKENS, GROUPS, replacement))
    np.testing.assert_allclose(found[0], found[1], rtol=1e-4, atol=1e-6)


def test_what_cannot_be_replaced_is_named():
    handle = pi.load(build("llama"))
    with untouched(handle.model):
        with pytest.raises(UserError, match="no heads L1H4, L7H0 that"):
            responses(handle, DOCUMENTS[0], [(0, 0), (1, 4), (7, 0)])
        given = responses(handle, DOCUMENTS[0][:9], [(0, 0)])
        with pytest.raises(UserError, match="no replacement is given for L0H1"):
            ablated_losses(handle, TOKENS, [[(0, 0)], [(0, 1)]], given)
        with pytest.raises(UserError, match="L0H0 is of 9 positions, the sequence has 24"):
            ablated_losses(handle, TOKENS, [[(0, 0)]], given)
        with pytest.raises(UserError, match="sequences of one length"):
            mean_replacement(handle, stimuli([DOCUMENTS[0], DOCUMENTS[1][:9]]), [(0, 0)], per_position=True)
        broken = {(0, 0): torch.full((1, 8), float("nan"))}
        with pytest.raises(UserError, match="without L0H0 next-token predictions are not finite"):
            ablated_losses(handle, TOKENS, [[(0, 0)]], broken)
