"""Capture of registry models: what is captured is what the model did, and the model is as it was afterwards."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny import gemma3, gpt2, llama

from pavinterp.capture import attention_interface, certificate
from pavinterp.capture.attention_interface import capture
from pavinterp.capture.call import trials
from pavinterp.capture.output_projection import output_weight, write_factor
from pavinterp.errors import UserError

FAMILIES = {"gpt2": gpt2, "llama": llama, "gemma3": gemma3}


@pytest.fixture(params=FAMILIES)
def model(request):
    return FAMILIES[request.param]()


def tokens_for(model, shape=(2, 24), seed=0):
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(1, model.config.get_text_config().vocab_size, shape, generator=rng)


def captured(model, tokens, layers=None, **forward):
    calls = {}
    with capture(model, lambda call: calls.update({call.layer: call}), layers), torch.no_grad():
        output = model.base_model(input_ids=tokens, use_cache=False, **forward).last_hidden_state
    return calls, output


def trials_of(call, tokens, sequence=0, tests=None):
    heads, d_v = call.queries.shape[1], call.values.shape[-1]
    n = tokens.shape[1]
    positions = torch.arange(n) if tests is None else torch.tensor(tests)
    write = write_factor(output_weight(call.projection, heads, d_v), torch.float32)
    return trials(call, sequence, tokens[sequence], positions, torch.ones(len(positions)), write, 0)


def test_every_layer_fires_once_and_the_model_computes_what_it_computed_before(model):
    tokens = tokens_for(model)
    with torch.no_grad():
        before = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
    calls, during = captured(model, tokens)
    assert sorted(calls) == list(range(model.config.num_hidden_layers))
    assert torch.equal(before, during)


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_strengths_are_the_models_own_attention_and_the_certificate_holds(model, kernel):
    model.set_attn_implementation("eager")
    tokens = tokens_for(model)
    with torch.no_grad():
        attentions = model.base_model(input_ids=tokens, output_attentions=True, use_cache=False).attentions
    model.set_attn_implementation(kernel)
    calls, _ = captured(model, tokens)
    for layer, call in calls.items():
        for sequence in range(2):
            one = trials_of(call, tokens, sequence)
            torch.testing.assert_close(one.strengths, attentions[layer][sequence], rtol=1e-4, atol=1e-6)
            assert certificate.residual(call, sequence, one).max() <= 1e-5


def test_certificate_against_the_attention_modules_own_output(model):
    """The independent recomputation: rebuilt responses through W_O equal what the attention module returned."""
    tokens = tokens_for(model)
    returned = {}
    handles = [
        m.register_forward_hook(lambda mod, _, out: returned.__setitem__(mod.layer_idx, out[0].detach()))
        for m in model.modules()
        if hasattr(m, "layer_idx") and hasattr(m, "is_causal")
    ]
    calls, _ = captured(model, tokens)
    for handle in handles:
        handle.remove()
    for layer, call in calls.items():
        one = trials_of(call, tokens, 1)
        w_o = output_weight(call.projection, one.heads, one.values.shape[-1])
        rebuilt = torch.einsum("htd,hdw->tw", one.response, w_o)
        bias = getattr(call.projection, "bias", None)
        rebuilt = rebuilt if bias is None else rebuilt + bias
        torch.testing.assert_close(rebuilt, returned[layer][1], rtol=1e-4, atol=1e-6)


def test_write_factor_keeps_the_residual_streams_inner_product(model):
    calls, _ = captured(model, tokens_for(model))
    call = calls[0]
    w_o = output_weight(call.projection, call.queries.shape[1], call.values.shape[-1]).double()
    factor = write_factor(w_o, torch.float64)
    torch.testing.assert_close(factor @ factor.mT, w_o @ w_o.mT, rtol=1e-10, atol=1e-14)


def test_write_factor_of_a_projection_without_full_rank():
    w_o = torch.zeros(2, 4, 8, dtype=torch.float64)
    w_o[0, 0, 0] = 3.0  # head 1 writes nothing at all
    factor = write_factor(w_o, torch.float64)
    torch.testing.assert_close(factor @ factor.mT, w_o @ w_o.mT)


def test_gqa_is_not_expanded_and_windows_are_seen():
    gemma = gemma3()
    calls, _ = captured(gemma, tokens_for(gemma))
    config = gemma.config
    for layer, call in calls.items():
        assert call.keys.shape[1] == config.num_key_value_heads
        assert call.keys.shape[-1] == config.head_dim
        sliding = config.layer_types[layer] == "sliding_attention"
        assert call.window == (config.sliding_window if sliding else None)
        visible = trials_of(call, tokens_for(gemma)).visible[0]
        longest = config.sliding_window if sliding else 24
        assert visible.tolist() == [min(t + 1, longest) for t in range(24)]


WRONG = {
    "unrotated or otherwise different keys": lambda c: {"keys": c.keys.roll(1, 2)},
    "wrong scale": lambda c: {"scale": c.scale * 1.1},
    "shifted mask": lambda c: {"mask": torch.ones(24, 24, dtype=torch.bool).tril(1)[None, None]},
    "sees the future": lambda c: {"mask": torch.ones(1, 1, 24, 24, dtype=torch.bool)},
    "swapped heads": lambda c: (
        {"values": c.values.flip(1)} if c.values.shape[1] > 1 else {"queries": c.queries.flip(1)}
    ),
    "sinks that are not there": lambda c: {"sinks": torch.zeros(c.queries.shape[1])},
}


@pytest.mark.parametrize("what", WRONG)
def test_the_certificate_bites(model, what):
    tokens = tokens_for(model)
    calls, _ = captured(model, tokens)
    call = calls[max(calls)]
    broken = replace(call, **WRONG[what](call))
    residual = certificate.residual(broken, 0, trials_of(broken, tokens))
    assert residual.max() > 1e-4
    with pytest.raises(UserError, match=r"certificate failed: Tiny layer \d+ head \d+"):
        certificate.require({call.layer: residual.tolist()}, torch.float32, "Tiny")


def test_unrotated_keys_fail_in_a_rotary_model():
    model = llama()
    tokens = tokens_for(model)
    raw = {}
    attention = model.model.layers[1].self_attn
    hook = attention.k_proj.register_forward_hook(lambda m, i, o: raw.__setitem__("k", o.detach()))
    calls, _ = captured(model, tokens)
    hook.remove()
    call = calls[1]
    unrotated = raw["k"].view(2, 24, -1, attention.head_dim).transpose(1, 2)
    assert not torch.allclose(unrotated, call.keys, atol=1e-3)
    broken = replace(call, keys=unrotated, queries=call.queries * 5)
    right = replace(call, queries=call.queries)
    assert certificate.residual(right, 0, trials_of(right, tokens)).max() <= 1e-5
    assert certificate.residual(broken, 0, trials_of(broken, tokens)).max() > 1e-3


def test_a_nan_is_named_not_passed():
    with pytest.raises(UserError, match="layer 3 head 1 has NaN or infinity among its queries"):
        certificate.require({3: [0.0, float("nan")]}, torch.float32, "Tiny")


def test_future_tokens_change_nothing_earlier(model):
    tokens = tokens_for(model)
    other = tokens.clone()
    other[:, 12:] = other[:, 12:].flip(-1)
    first, _ = captured(model, tokens)
    second, _ = captured(model, other)
    for layer in first:
        one, two = (trials_of(calls[layer], tokens, tests=list(range(12))) for calls in (first, second))
        torch.testing.assert_close(one.response, two.response, rtol=1e-5, atol=1e-7)


def test_right_padding_changes_nothing_before_it(model):
    tokens = tokens_for(model, (1, 24))
    padded = torch.cat([tokens, torch.zeros(1, 6, dtype=torch.long)], dim=1)
    short, _ = captured(model, tokens)
    long, _ = captured(model, padded)
    for layer in short:
        one = trials_of(short[layer], tokens)
        two = trials_of(long[layer], tokens)
        torch.testing.assert_close(one.contributions, two.contributions, rtol=1e-5, atol=1e-7)


def test_left_padding_with_a_mask_is_seen_as_the_model_sees_it(model):
    """A 2-D attention mask reaches the kernel: padded positions are invisible in the captured rows too."""
    tokens = tokens_for(model, (1, 20))
    mask = torch.ones(1, 20, dtype=torch.long)
    mask[:, :4] = 0
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    calls, _ = captured(model, tokens, attention_mask=mask, position_ids=positions)
    alone, _ = captured(model, tokens[:, 4:])
    for layer in calls:
        one = trials_of(calls[layer], tokens, tests=list(range(4, 20)))
        two = trials_of(alone[layer], tokens[:, 4:])
        assert certificate.residual(calls[layer], 0, one).max() <= 1e-5
        torch.testing.assert_close(one.strengths[..., 4:], two.strengths, rtol=1e-4, atol=1e-6)


def snapshot(model):
    return (
        [(n, m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for n, m in model.named_modules()],
        [getattr(m.config, "_attn_implementation_internal", None) for m in model.modules() if hasattr(m, "config")],
        [p.requires_grad for p in model.parameters()],
    )


def test_the_model_is_as_it_was_also_after_an_interruption(model):
    model.train()
    before = snapshot(model)

    def interrupt(call):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), capture(model, interrupt), torch.no_grad():
        model.base_model(input_ids=tokens_for(model), use_cache=False)
    assert snapshot(model) == before
    assert attention_interface._session.get() is None


def test_only_the_layers_asked_for(model):
    calls, _ = captured(model, tokens_for(model), layers={1})
    assert list(calls) == [1]


def test_linear_like_projections_are_read_off_the_unit_vectors():
    class Wrapped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(6, 5)

        def forward(self, x):
            return 2 * self.inner(x)

    wrapped = Wrapped()
    got = output_weight(wrapped, 2, 3)
    torch.testing.assert_close(got, 2 * wrapped.inner.weight.T.reshape(2, 3, 5), rtol=1e-5, atol=1e-6)
    with pytest.raises(UserError, match="does not take what the captured attention puts out"):
        output_weight(wrapped, 2, 4)
