"""Gains against closed forms in a linear model, plain loops, Jacobian-vector products, and the whole pass."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch
from architectures import ROWS, build

import pavinterp as pi
from pavinterp.capture.paths import on_path
from pavinterp.errors import UserError
from pavinterp.experiments.first_order import first_order
from pavinterp.experiments.gains import drawn, end_gains, perturbed, staged
from pavinterp.experiments.injections import Weights
from pavinterp.experiments.interventions import logits
from pavinterp.experiments.propagated import ALL, propagated
from pavinterp.models import untouched

TOKENS = torch.from_numpy(np.random.default_rng(0).integers(3, 101, (1, 24)))
FAMILIES = ["llama", "gpt2", "gemma3", "olmo2", "falcon", "mpt", "qwen3_next", "mixtral", "gpt_oss", "phi", "gemma2"]


def linear_model():
    """A GPT-2 without norms and MLPs: layer l reads dimensions 0-7 and writes 8 of its own, which nobody reads.

    A constant is added to the stream of every block, so that its norm grows and relative changes shrink.
    """
    model = tiny.gpt2(layers=3, width=32)
    rng = torch.Generator().manual_seed(0)
    for i, block in enumerate(model.transformer.h):
        block.ln_1, block.ln_2 = torch.nn.Identity(), torch.nn.Identity()
        block.attn.c_attn.weight.data[8:] = 0
        keep = torch.zeros(32)
        keep[8 * (i + 1) : 8 * (i + 2)] = 1
        block.attn.c_proj.weight.data *= keep
        block.attn.c_proj.bias.data.zero_()
        block.mlp.c_proj.weight.data.zero_()
        block.mlp.c_proj.bias.data = torch.randn(32, generator=rng) * (torch.arange(32) >= 8)
    model.transformer.ln_f = torch.nn.Identity()
    return model


def stage_of(model, layers, short=None):
    handle = on_path(pi.load(model))
    with untouched(handle.model):
        return staged(handle, TOKENS, layers, Weights.none_yet(), short)


def passed(stage, deltas, strengths):
    with untouched(stage.handle.model):
        return perturbed(stage, deltas, strengths)


def test_identity_blocks_keep_the_change_and_the_gain_is_a_ratio_of_norms():
    model = linear_model()
    stage = stage_of(model, {0, 1, 2})
    with torch.no_grad():
        streams = model(TOKENS, output_hidden_states=True).hidden_states[1:]
    for layer in range(3):
        delta = drawn(stage.sources[layer], "interference", 0, 0, 0)
        change = (delta @ model.transformer.h[layer].attn.c_proj.weight.detach()).square().sum(-1)
        for strengths in ([0.01], [0.3, 1.0]):
            got = passed(stage, {layer: delta[None]}, strengths).changes
            for row, strength in enumerate(strengths):
                expected = [
                    0.0 if to < layer else strength * float((change / streams[to][0].square().sum(-1)).mean().sqrt())
                    for to in range(3)
                ]
                np.testing.assert_allclose(got[row], expected, rtol=1e-4)  # float32 sums


def test_divergence_is_that_of_a_plain_loop():
    model = linear_model()
    stage = stage_of(model, {1})
    delta, strength = drawn(stage.sources[1], "isotropic", 0, 0, 0), 0.3
    got = passed(stage, {1: delta[None]}, [strength])
    with torch.no_grad():
        last = model(TOKENS, output_hidden_states=True).hidden_states[-1][0].double()
    moved = last + strength * (delta @ model.transformer.h[1].attn.c_proj.weight.detach()).double()
    words = model.lm_head.weight.detach().double()
    divergence, loss = 0.0, 0.0
    for t in range(24):
        one, two = (x[t] @ words.T for x in (last, moved))
        p, q = (torch.exp(x - x.max()) / torch.exp(x - x.max()).sum() for x in (one, two))
        divergence += float(sum(a * torch.log(a / b) for a, b in zip(p, q, strict=True))) / 24
        if t < 23:
            truth = TOKENS[0, t + 1]
            loss += float(torch.log(p[truth] / q[truth])) / 23
    assert got.divergence[0] == pytest.approx(divergence, rel=1e-3)
    assert got.loss_change[0] == pytest.approx(loss, rel=1e-3, abs=1e-5)


def test_orthogonal_errors_of_a_linear_model_add_up_as_squares_do():
    model = linear_model()
    handle = on_path(pi.load(model))
    with untouched(model):
        rows = propagated(
            handle, TOKENS, {0, 1, 2}, [0.01, 0.3], 2, seed=0, sequence=0, weights=Weights.none_yet(), short=set()
        )
    last = rows[rows["to"] == 2].set_index(["kind", "strength", "layer"]).sort_index()
    for kind in ("interference", "isotropic"):
        for strength in (0.01, 0.3):
            mine = last.loc[(kind, strength)]
            expected = np.sqrt((mine.loc[[0, 1, 2], "change"] ** 2).sum())
            assert mine.loc[ALL, "change"] == pytest.approx(expected, rel=1e-4)
            assert mine.loc[ALL, "sum_change"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("name", ["llama", "bloom", "falcon", "gemma3", "qwen3_next"])
def test_nothing_injected_changes_exactly_nothing_and_nothing_goes_back(name):
    layers = sorted(ROWS[name].layers)
    stage = stage_of(build(name), set(layers))
    last = layers[-1]
    delta = drawn(stage.sources[last], "interference", 0, 0, 0)
    got = passed(stage, {last: delta[None]}, [0.0, 0.1])
    assert (got.changes[0] == 0).all()
    assert (got.divergence[0], got.loss_change[0]) == (0.0, 0.0)
    assert (got.changes[1, :last] == 0).all()
    assert (got.changes[1, last:] > 0).all()


def test_blocks_in_another_order_than_layers_are_refused():
    stage = stage_of(build("llama", num_hidden_layers=3), {2}, short=set())
    backwards = replace(stage, blocks=stage.blocks[::-1])
    with pytest.raises(UserError, match="changes blocks in front of number 2"):
        passed(backwards, {2: drawn(stage.sources[2], "isotropic", 0, 0, 0)[None]}, [0.1])


def test_small_perturbations_are_answered_in_proportion_and_divergence_in_its_square():
    stage = stage_of(build("llama"), {0})
    got = passed(stage, {0: drawn(stage.sources[0], "interference", 0, 0, 0)[None]}, [0.002, 0.004])
    np.testing.assert_allclose(got.changes[1] / got.changes[0], 2, rtol=0.02)
    assert got.divergence[1] / got.divergence[0] == pytest.approx(4, rel=0.04)


@pytest.mark.parametrize("name", FAMILIES)
def test_differences_are_what_jacobian_vector_products_say(name):
    """At strength 1e-3: float32 leaves about 1e-3 of such a change, curvature as much; gates and experts a little more.

    Forward-mode derivatives, and attention by another kernel: no arithmetic in common with two passes' difference.
    """
    layers = set(ROWS[name].layers)
    stage = stage_of(build(name), layers)
    for layer in layers:
        unit = torch.stack([drawn(stage.sources[layer], kind, 0, 0, 0) for kind in ("interference", "isotropic")])
        with untouched(stage.handle.model):
            told = first_order(stage, layer, unit)
        got = passed(stage, {layer: unit}, [1e-3, 1e-3])
        np.testing.assert_allclose(got.changes[:, layer:], 1e-3 * told.changes[:, layer:], rtol=0.02)
        np.testing.assert_allclose(got.divergence, 1e-6 * told.divergence, rtol=0.04)
        apart = (got.displacement - 1e-3 * told.displacement).norm() / (1e-3 * told.displacement).norm()
        assert apart < 0.03


def test_a_derivative_that_the_model_does_not_hand_on_is_said():
    stage = stage_of(build("bloom"), {1})
    with untouched(stage.handle.model):
        told = first_order(stage, 1, drawn(stage.sources[1], "isotropic", 0, 0, 0)[None])
    assert "forward mode AD" in told


def test_a_mixture_of_experts_comes_back_as_it_was():
    model = build("mixtral")
    before, stage = model.config._experts_implementation_internal, stage_of(model, {0})
    with untouched(model):
        expected = logits(stage.handle, TOKENS)
        first_order(stage, 0, drawn(stage.sources[0], "isotropic", 0, 0, 0)[None])
        assert torch.equal(logits(stage.handle, TOKENS), expected)
    assert model.config._experts_implementation_internal == before != "eager"


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_pass_from_the_layer_on_gives_what_the_whole_pass_gives(name):
    layer = max(ROWS[name].layers)
    short, whole = stage_of(build(name), {layer}), stage_of(build(name), {layer}, short=set())
    assert short.short == {layer}
    delta = {layer: drawn(whole.sources[layer], "interference", 0, 0, 0)[None]}
    one, two = (passed(stage, delta, [0.1]) for stage in (short, whole))
    for what in ("changes", "normed", "divergence"):
        np.testing.assert_allclose(getattr(one, what), getattr(two, what), rtol=1e-4, atol=1e-9)


def test_what_a_norm_makes_of_a_change_is_computed_from_its_own_output():
    model = build("llama")
    stage = stage_of(model, {0})
    delta = drawn(stage.sources[0], "interference", 0, 0, 0)
    got = passed(stage, {0: delta[None]}, [0.3])
    write = model.model.layers[0].self_attn.o_proj

    def states():
        with torch.no_grad():
            found = model(TOKENS, output_hidden_states=True).hidden_states  # the last one is normalised
            return model.model.layers[1].input_layernorm(found[1])[0], found[2][0]

    plain = states()
    hook = write.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 0.3 * delta,))
    moved = states()
    hook.remove()
    for block in range(2):
        ratio = (moved[block] - plain[block]).square().sum(-1) / plain[block].square().sum(-1)
        assert got.normed[0, block] == pytest.approx(float(ratio.mean().sqrt()), rel=1e-3)


def test_end_gains_are_divergence_over_squares():
    handle = pi.load(build("llama"))
    with untouched(handle.model):
        table = end_gains(handle, TOKENS[0], layers={0, 1}, strength=0.05, draws=3)
    stage = stage_of(build("llama"), {0, 1})
    for layer in (0, 1):
        one = [passed(stage, {layer: drawn(stage.sources[layer], "interference", 0, 0, d)[None]}, [0.05])
               for d in range(3)]  # fmt: skip
        divergence = np.mean([p.divergence[0] for p in one])
        assert table.loc[layer, "end_gain_write"] == pytest.approx(divergence / 0.05**2, rel=1e-4)
        square = np.mean([p.changes[0, layer] ** 2 for p in one])
        assert table.loc[layer, "end_gain"] == pytest.approx(divergence / square, rel=1e-4)


def test_several_streams_a_block_are_refused_in_one_line():
    handle = pi.load(build("gemma3n"))
    with untouched(handle.model), pytest.raises(UserError, match="not one residual stream") as error:
        end_gains(handle, TOKENS[0], layers={0})
    assert "\n" not in str(error.value)
