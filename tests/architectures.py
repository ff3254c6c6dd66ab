"""Tiny random models of many architectures, made from transformers' configurations."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

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


def build(kind: str, **options: Any) -> torch.nn.Module:
    """A model with two layers; `options` go into its configuration."""
    config = AutoConfig.for_model(kind, **(TINY | ARCHITECTURES.get(kind, {}) | options))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):  # learned sinks start at zero or unset: make them count
                torch.nn.init.normal_(parameter)
    return model
