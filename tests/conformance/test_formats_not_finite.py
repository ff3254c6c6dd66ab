"""NaN and infinity, in whatever tensor and on both paths: named by layer and head, never measured."""

from __future__ import annotations

import pytest
import torch
from formats import TOKENS, build, measured
from test_architectures import captured, trials_of

import pavinterp as pi
from pavinterp.capture import certificate
from pavinterp.capture.paths import on_path
from pavinterp.errors import UserError

NAN, INF = float("nan"), float("inf")
# projection, feature (heads are 8 wide; 4 query heads on 2 KV heads), value, what is named first
SPOILT = {
    "queries of head 1": ("q_proj", 8, NAN, "layer 1 head 1"),
    "keys of KV head 1": ("k_proj", 8, NAN, "layer 1 head 2"),
    "infinite keys": ("k_proj", 8, INF, "layer 1 head 2"),
    "values of KV head 0": ("v_proj", 3, NAN, "layer 1 head 0"),
    "infinite values": ("v_proj", 11, -INF, "layer 1 head 2"),
}


def spoilt(projection, feature, value, layer=1):
    """A Llama whose projection puts out the value in one feature, of finite weights."""
    model = build("llama")

    def spoil(module, inputs, output):
        output = output.clone()
        output[..., feature] = value
        return output

    getattr(model.model.layers[layer].self_attn, projection).register_forward_hook(spoil)
    return model


@pytest.mark.parametrize("what", SPOILT)
def test_named_by_layer_and_head(what):
    projection, feature, value, named = SPOILT[what]
    with pytest.raises(UserError, match=f"LlamaForCausalLM: {named} has NaN or infinity among its queries, keys, "):
        measured(spoilt(projection, feature, value))
    found = pi.verify(spoilt(projection, feature, value), length=32)
    assert not found["passed"]


@pytest.mark.parametrize("what", SPOILT)
def test_named_on_the_bridge_path(what):
    projection, feature, value, named = SPOILT[what]
    with pytest.raises(UserError, match=named) as error:
        measured(spoilt(projection, feature, value), capture="transformer_lens")
    assert "NaN" in str(error.value)
    assert "\n" not in str(error.value)


def test_what_an_output_projection_spoils_is_named_where_it_is_read():
    with pytest.raises(UserError, match="layer 1 head 0 has NaN or infinity"):
        measured(spoilt("o_proj", 5, NAN, layer=0))


# Weights of size 6e4 on 32 inputs of size 1: float16 ends at 65504.
@pytest.mark.parametrize("projection", ["q_proj", "k_proj", "v_proj"])
def test_float16_that_overflows(projection):
    model = build("llama").half()
    weight = getattr(model.model.layers[1].self_attn, projection).weight
    with torch.no_grad():
        weight[8:16] = weight[8:16].sign() * 6e4
    assert torch.isfinite(weight).all()
    head = 1 if projection == "q_proj" else 2
    with pytest.raises(UserError, match=f"layer 1 head {head} has NaN or infinity .* or measure in float32"):
        measured(model)


def test_float16_scores_that_overflow_in_the_eager_kernel():
    """Finite queries and keys of size 2000, whose products (8 terms of 4e6) float16 does not hold."""
    model = build("qwen3").half()
    model.set_attn_implementation("eager")
    attention = model.model.layers[1].self_attn
    with torch.no_grad():
        attention.q_norm.weight.fill_(2000.0)
        attention.k_norm.weight.fill_(2000.0)
    with pytest.raises(UserError, match=r"layer 1 head 0 has NaN or infinity .* or measure in float32"):
        measured(model)
    assert measured(model.float()).manifest["certificate"]["largest"] <= certificate.tolerance(torch.float32)


def test_an_infinite_key_that_gets_no_strength():
    """The response is finite and rebuilt exactly; what the head stores is not a number all the same."""
    handle = on_path(pi.load(build("llama")))
    call = captured(handle, TOKENS)[0][1]
    one = trials_of(call, TOKENS, 0)
    assert float(certificate.residual(call, 0, one).max()) <= 1e-5
    one.response  # noqa: B018 (kept: as if the key had changed nothing)
    one.keys[1, 4, 2] = -INF
    residual = certificate.residual(call, 0, one)
    assert torch.isnan(residual).tolist() == [False, False, True, True]


@pytest.mark.parametrize("projection", ["q_proj", "k_proj", "v_proj", "o_proj"])
def test_nan_weights_are_named_by_parameter(projection):
    model = build("llama")
    with torch.no_grad():
        getattr(model.model.layers[1].self_attn, projection).weight[3, 5] = NAN
    with pytest.raises(UserError, match=rf"layers\.1\.self_attn\.{projection}\.weight holds 1 NaN or infinite value"):
        measured(model)
