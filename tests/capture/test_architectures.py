"""Tiny random models of many architectures: captured exactly, and their strengths are the model's own attention."""

from __future__ import annotations

import pytest
import torch
from test_attention_interface import captured, trials_of
from transformers import AutoConfig, AutoModelForCausalLM

from pavinterp.capture import certificate

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 101,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
WINDOW = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
ARCHITECTURES = {
    "cohere": {},
    "exaone4": WINDOW,
    "gemma": {},
    "gemma2": WINDOW | {"attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 24},
    "glm": {"partial_rotary_factor": 0.5},
    "gpt_neox": {},
    "gpt_oss": WINDOW | EXPERTS,
    "granite": {"attention_multiplier": 0.2},
    "llama": {},
    "mistral": {"sliding_window": 8},
    "mixtral": EXPERTS,
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "phi": {},
    "phi3": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": EXPERTS,
    "smollm3": {"no_rope_layers": [1, 0]},
    "stablelm": {},
    "starcoder2": {},
}


def build(kind: str) -> torch.nn.Module:
    config = AutoConfig.for_model(kind, **(TINY | ARCHITECTURES[kind]))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):  # learned sinks start at zero or unset: make them count
                torch.nn.init.normal_(parameter)
    return model


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_an_architecture_is_captured_exactly(kind):
    model = build(kind)
    model.set_attn_implementation("eager")
    tokens = torch.randint(3, 101, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        attentions = model.base_model(input_ids=tokens, output_attentions=True, use_cache=False).attentions
    calls, _ = captured(model, tokens)
    assert sorted(calls) == [0, 1]
    for layer, call in calls.items():
        one = trials_of(call, tokens, 1)
        assert certificate.residual(call, 1, one).max() <= 1e-5
        torch.testing.assert_close(one.strengths, attentions[layer][1][..., :24], rtol=1e-4, atol=1e-6)
        assert (one.sink_share is not None) == (kind == "gpt_oss")
        assert call.softcap == (5.0 if kind == "gemma2" else None)
        assert call.window == (
            8 if kind == "mistral" or ("layer_types" in ARCHITECTURES[kind] and layer == 0) else None
        )
