"""Deliberate faults of a capture, of kinds that have gone unnoticed somewhere: the certificate catches every one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_architectures import DOCUMENTS, LENGTH, captured, handle_of, trials_of

from pavinterp.capture import certificate

TOKENS = torch.stack([torch.from_numpy(document) for document in DOCUMENTS[:2]])
TEST, CS = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)[None]


def masked(call, seen):
    """The call with other visible CSs."""
    return replace(call, mask=seen[None, None], window=None)


def window(call, size):
    return masked(call, (CS <= TEST) & (CS + size > TEST))


def kv_heads_in_turn(call):
    """Query head h on KV head h % kv_heads instead of h // group."""
    order = torch.arange(call.queries.shape[1]) % call.keys.shape[1]
    return replace(call, keys=call.keys[:, order], values=call.values[:, order])


def interleaved(tensor):
    """As if a fused projection were read [d, heads] instead of [heads, d]."""
    batch, heads, n, d = tensor.shape
    return tensor.permute(0, 2, 3, 1).reshape(batch, n, heads, d).transpose(1, 2)


# name: (architecture, layer, fault of the call)
FAULTS = {
    "KV heads repeated in the wrong order": ("llama", 0, kv_heads_in_turn),
    "scale off by sqrt(2)": ("gpt2", 0, lambda c: replace(c, scale=c.scale * 2**0.5)),
    "1/sqrt(d_k) where the model has a scale of its own": ("granite", 0, lambda c: replace(c, scale=8**-0.5)),
    "window one too long": ("mistral", 0, lambda c: window(c, 9)),
    "window one too short": ("mistral", 1, lambda c: window(c, 7)),
    "window dropped": ("gemma3", 0, lambda c: window(c, LENGTH)),
    "window on the wrong layer": ("gemma3", 1, lambda c: window(c, 8)),
    "chunk taken for a sliding window": ("llama4", 0, lambda c: window(c, 8)),
    "sink dropped": ("gpt_oss", 1, lambda c: replace(c, sinks=None)),
    "soft-cap dropped": ("gemma2", 1, lambda c: replace(c, softcap=None)),
    "no mask": ("llama", 0, lambda c: replace(c, mask=None, causal=False)),
    "mask shifted by one": ("llama", 1, lambda c: masked(c, (CS < TEST) | (CS == 0))),
    "positions shifted, as by padding": ("gpt_neox", 0, lambda c: replace(c, queries=c.queries.roll(1, 2))),
    "ALiBi dropped": ("bloom", 0, lambda c: replace(c, mask=None)),
    "values of a fused projection interleaved": ("gpt2", 0, lambda c: replace(c, values=interleaved(c.values))),
    "queries of a fused projection interleaved": ("gpt2", 1, lambda c: replace(c, queries=interleaved(c.queries))),
    "MLA's values taken from its keys": ("deepseek_v3", 0, lambda c: replace(c, values=c.keys[..., :6])),
    "gate dropped": ("qwen3_next", 1, lambda c: replace(c, attended=None)),
    "another sequence's keys": ("olmoe", 0, lambda c: replace(c, keys=c.keys.flip(0))),
}  # fmt: skip


def residual(call):
    return float(certificate.residual(call, 1, trials_of(call, TOKENS, 1)).max())


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught(name):
    architecture, layer, fault = FAULTS[name]
    call = captured(handle_of(architecture), TOKENS)[0][layer]
    assert residual(call) <= 1e-5
    assert residual(fault(call)) > 1e-3


def no_rotation(module, inputs, output):
    return tuple(torch.full_like(x, i == 0) for i, x in enumerate(output))  # cos 1, sin 0


# name: (architecture, module, what a hook makes of its output): keys of layer 0 as they are without that step
STEPS = {
    "unrotated keys": ("llama", "model.rotary_emb", no_rotation),
    "q/k normalisation skipped": ("qwen3", "model.layers.0.self_attn.k_norm", lambda module, inputs, output: inputs[0]),
    "normalisation over all heads at once skipped": (
        "olmo2", "model.layers.0.self_attn.k_norm", lambda module, inputs, output: inputs[0],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_a_step_left_out_is_caught(name):
    architecture, module, hook = STEPS[name]
    handle = handle_of(architecture)
    right = captured(handle, TOKENS)[0][0]
    left_out = handle.model.get_submodule(module).register_forward_hook(hook)
    try:
        wrong = captured(handle, TOKENS)[0][0]
    finally:
        left_out.remove()
    assert residual(wrong) <= 1e-5  # of the model without the step it would be the truth
    assert residual(replace(right, keys=wrong.keys)) > 1e-3
