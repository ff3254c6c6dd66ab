"""Direct logit attribution: parts sum up, and heads and MLPs get what hooks of one's own say."""

from __future__ import annotations

from functools import partial

import architectures
import numpy as np
import pytest
import tiny
import torch
from test_conditioned_responses import LAYOUTS, PARADIGM, draws

import pavinterp as pi
from pavinterp.errors import UserError
from pavinterp.experiments.additive_stream import stream_of
from pavinterp.experiments.conditioned_responses import prompts
from pavinterp.experiments.logit_attribution import attributions
from pavinterp.models import untouched

BIG = {"vocab_size": 300, "max_position_embeddings": 128}
built = partial(partial, architectures.build)


def parts_of(model):
    made = prompts(PARADIGM, PARADIGM.groups[0], draws(), LAYOUTS[0], [0])
    handle = pi.load(model)
    with untouched(model):
        stream = stream_of(handle, torch.from_numpy(made[0].prompt.tokens)[None])
        return made, attributions(handle, made, stream)


def biased_gpt2():
    model = tiny.gpt2(positions=128)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(1)
        for name, parameter in model.named_parameters():
            if "ln_" in name or name.endswith("bias"):  # initialised to ones and zeros
                parameter += 0.3 * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize(
    "build",
    [
        tiny.llama, biased_gpt2, tiny.gemma3, built("opt", **BIG), built("olmo2", **BIG), built("phi", **BIG),
        built("gpt_neox", **BIG, use_parallel_residual=True), built("granite", **BIG),
    ],
)  # fmt: skip
def test_parts_sum_up_to_the_difference_of_logits(build):
    model = build()
    made, found = parts_of(model)
    total = found.groupby("draw")["attribution"].sum()
    for number, one in enumerate(made):
        with torch.no_grad():
            last = model(input_ids=torch.from_numpy(one.prompt.tokens)[None]).logits[0, -1].double()
        expected = float(last[one.us] - last[one.foils.tolist()].mean())
        assert total[number] == pytest.approx(expected, abs=1e-4)
    layers = model.config.num_hidden_layers
    counts = found[found["draw"] == 0].groupby("component").size().to_dict()
    assert counts == {"embedding": 1, "head": 4 * layers, "attention_bias": layers, "mlp": layers, "constant": 1}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_heads_and_mlps_are_what_hooks_say(family):
    """Writes from hooks on the modules, through the norm's formula and the unembedding written out."""
    model = tiny.llama() if family == "llama" else biased_gpt2()
    made, found = parts_of(model)
    blocks = model.model.layers if family == "llama" else model.transformer.h
    norm = model.model.norm if family == "llama" else model.transformer.ln_f
    seen = {}
    for i, block in enumerate(blocks):
        projection = block.self_attn.o_proj if family == "llama" else block.attn.c_proj
        projection.register_forward_pre_hook(lambda m, x, i=i: seen.__setitem__(("response", i), x[0][0, -1]))
        block.mlp.register_forward_hook(lambda m, x, y, i=i: seen.__setitem__(("mlp", i), y[0, -1]))
    norm.register_forward_pre_hook(lambda m, x: seen.__setitem__("last", x[0][0, -1]))
    one = made[1]
    with torch.no_grad():
        model(input_ids=torch.from_numpy(one.prompt.tokens)[None])
    x, w = seen["last"].double(), model.lm_head.weight.detach().double()
    u = (w[one.us] - w[one.foils.tolist()].mean(0)) * norm.weight.detach().double()
    if family == "llama":
        through = lambda c: float(c.double() @ u / (x.square().mean() + norm.variance_epsilon).sqrt())  # noqa: E731
    else:
        through = lambda c: float(  # noqa: E731
            (c.double() - c.double().mean()) @ u / (x.var(correction=0) + norm.eps).sqrt()
        )
    own = found[found["draw"] == 1].set_index(["component", "layer", "head"])["attribution"]
    for i, block in enumerate(blocks):
        assert own["mlp", i, -1] == pytest.approx(through(seen["mlp", i]), abs=1e-5)
        for head in range(4):
            response = torch.zeros(32)
            response[8 * head : 8 * head + 8] = seen["response", i][8 * head : 8 * head + 8]
            if family == "llama":
                write = response @ block.self_attn.o_proj.weight.detach().T
            else:
                write = response @ block.attn.c_proj.weight.detach()
            assert own["head", i, head] == pytest.approx(through(write), abs=1e-5)
        if family == "gpt2":
            assert own["attention_bias", i, -1] == pytest.approx(through(block.attn.c_proj.bias.detach()), abs=1e-5)


@pytest.mark.parametrize(
    "build",
    [built("granite", **BIG, residual_multiplier=0.5), built("opt", **BIG, do_layer_norm_before=False)],
)
def test_blocks_that_do_more_than_add_are_refused(build):
    with pytest.raises(UserError, match="no direct logit attribution"):
        parts_of(build())


def test_strengths_are_attention_on_the_us_at_the_last_position():
    model = tiny.llama()
    made, found = parts_of(model)
    model.set_attn_implementation("eager")
    for number, one in enumerate(made):
        with torch.no_grad():
            seen = model(input_ids=torch.from_numpy(one.prompt.tokens)[None], output_attentions=True).attentions
        on_us = one.prompt.tokens == one.us
        assert on_us.any()
        mine = found[(found["draw"] == number) & (found["component"] == "head")].set_index(["layer", "head"])
        for layer, strengths in enumerate(seen):
            for head in range(4):
                expected = float(strengths[0, head, -1][torch.from_numpy(on_us)].sum())
                assert mine.loc[(layer, head), "us_strength"] == pytest.approx(expected, abs=1e-6)
    assert found.loc[found["component"] != "head", "us_strength"].isna().all()


def test_strengths_without_parts():
    model = tiny.llama()
    made, whole = parts_of(model)
    with untouched(model):
        found = attributions(pi.load(model), made, None)
    heads = whole[whole["component"] == "head"].reset_index(drop=True)
    assert found["attribution"].isna().all()
    assert len(found) == len(heads)
    np.testing.assert_allclose(
        found.sort_values(["draw", "layer", "head"])["us_strength"],
        heads.sort_values(["draw", "layer", "head"])["us_strength"], atol=1e-6,
    )  # fmt: skip


def test_logits_that_are_scaled_are_refused():
    model = tiny.llama()
    model.lm_head.register_forward_hook(lambda m, x, y: 2 * y)
    with pytest.raises(UserError, match="not linear"):
        parts_of(model)


def test_nothing_is_left_on_the_model():
    model = tiny.llama()
    before = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    _, one = parts_of(model)
    _, two = parts_of(model)
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()) == before
    np.testing.assert_array_equal(one["attribution"], two["attribution"])
