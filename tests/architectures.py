"""Tiny random models of many architectures, one row each: its configuration, and what capture must find in it."""
# ruff: noqa: E501 (a row is a line)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY = 101
TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
NEW = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "initializer_range": 0.3, **TOKENS,
}  # fmt: skip
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_ctx": 64, "initializer_range": 0.3, **TOKENS}
FALCON = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.3, "alibi": False,
    "multi_query": True, "new_decoder_architecture": False, **TOKENS,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTED = {
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6,
    "head_dim": 4, "num_key_value_heads": 4,
}  # fmt: skip
INDEXED = {"index_topk": 8, "index_n_heads": 2, "index_head_dim": 8}
WINDOW = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
SHARED_KV = {
    "num_hidden_layers": 4, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2, "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8,
}  # fmt: skip
LINEAR_ATTENTION = {
    "num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 16,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_n_groups": 1}


@dataclass(frozen=True)
class Row:
    """One architecture.

    Attributes:
        model_type: transformers' name.
        options: its configuration.
        path: by which it is captured.
        bridge: whether TransformerLens can capture it (too).
        layers: those with attention.
        kv_heads, d_k, d_v: of every layer.
        windows: of each layer with attention; None sees all.
        chunked: whether the windows are chunks that do not slide.
        softcap: of the scores.
        sinks: whether strengths of a row may sum to less than one.
        scheme: how positions enter, for people to read.
        gated: whether a gate multiplies each response before the output projection.
        most: positions that a test sees at most in each layer, where the model chooses them by content (sparse attention).
    """

    model_type: str
    options: dict[str, Any]
    path: str = "attention_interface"
    bridge: bool = True
    layers: tuple[int, ...] = (0, 1)
    kv_heads: int = 2
    d_k: int = 8
    d_v: int = 8
    windows: tuple[int | None, ...] = (None, None)
    chunked: bool = False
    softcap: float | None = None
    sinks: bool = False
    scheme: str = "rotary"
    gated: bool = False
    most: tuple[int | None, ...] = ()


ROWS = {
    "afmoe": Row("afmoe", NEW | ROUTED | WINDOW | {"num_dense_layers": 1, "num_shared_experts": 1}, windows=(8, None), gated=True),
    "apertus": Row("apertus", NEW),
    "arcee": Row("arcee", NEW),
    "bamba": Row("bamba", NEW | MAMBA | {"attn_layer_indices": [1], "mamba_expand": 2}, layers=(1,), windows=(None,)),
    "biogpt": Row("biogpt", NEW, kv_heads=4, scheme="learned", bridge=False),
    "bloom": Row("bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3, **TOKENS}, path="transformer_lens", kv_heads=4, scheme="ALiBi"),
    "codegen": Row("codegen", GPT | {"rotary_dim": 4}, kv_heads=4, bridge=False),
    "cohere": Row("cohere", NEW),
    "cohere2": Row("cohere2", NEW | WINDOW, windows=(8, None)),
    "ctrl": Row("ctrl", {"n_embd": 32, "dff": 48, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": VOCABULARY, "initializer_range": 0.3}, kv_heads=4, scheme="sinusoidal", bridge=False),
    "deepseek_v2": Row("deepseek_v2", NEW | ROUTED | LATENT, kv_heads=4, d_k=12, d_v=6),
    "deepseek_v32": Row("deepseek_v32", NEW | ROUTED | LATENT | INDEXED, kv_heads=4, d_k=12, d_v=6, most=(8, 8), bridge=False),
    "deepseek_v3": Row("deepseek_v3", NEW | ROUTED | LATENT, kv_heads=4, d_k=12, d_v=6),
    "doge": Row("doge", NEW, bridge=False),
    "dots1": Row("dots1", NEW | ROUTED, bridge=False),
    "ernie4_5": Row("ernie4_5", NEW),
    "ernie4_5_moe": Row("ernie4_5_moe", NEW | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_num_shared_experts": 1}),
    "exaone4": Row("exaone4", NEW | WINDOW, windows=(8, None)),
    "falcon": Row("falcon", FALCON, path="module_hooks", kv_heads=1),
    "falcon (new_decoder_architecture)": Row("falcon", FALCON | {"num_kv_heads": 2, "new_decoder_architecture": True}, path="module_hooks", bridge=False),
    "falcon (alibi)": Row("falcon", FALCON | {"alibi": True, "multi_query": False}, path="module_hooks", bridge=False, kv_heads=4, scheme="ALiBi"),
    "falcon_h1": Row("falcon_h1", NEW | MAMBA | {"mamba_d_ssm": 32, "mamba_n_heads": 4}),
    "gemma": Row("gemma", NEW),
    "gemma2": Row("gemma2", NEW | WINDOW | {"attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 24}, windows=(8, None), softcap=5.0),
    "gemma3": Row("gemma3_text", NEW | WINDOW | {"head_dim": 16}, windows=(8, None), d_k=16, d_v=16),
    "gemma3n": Row("gemma3n_text", NEW | SHARED_KV | {"laurel_rank": 4, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 4}, layers=(0, 1, 2, 3), windows=(8, None) * 2, bridge=False),
    "gemma4": Row("gemma4_text", NEW | SHARED_KV | {"global_head_dim": 8}, layers=(0, 1, 2, 3), windows=(8, None) * 2),
    "glm": Row("glm", NEW | {"partial_rotary_factor": 0.5}),
    "glm4": Row("glm4", NEW),
    "glm4_moe": Row("glm4_moe", NEW | ROUTED),
    "glm_moe_dsa": Row("glm_moe_dsa", NEW | ROUTED | LATENT | INDEXED, kv_heads=4, d_k=12, d_v=6, most=(8, 8), bridge=False),
    "gpt2": Row("gpt2", GPT, kv_heads=4, scheme="learned"),
    "gpt_bigcode": Row("gpt_bigcode", GPT | {"multi_query": True}, kv_heads=1, scheme="learned"),
    "gpt_neo": Row("gpt_neo", {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 64, "attention_types": [[["global", "local"], 1]], "window_size": 8, "intermediate_size": 48, "initializer_range": 0.3, **TOKENS}, path="transformer_lens", kv_heads=4, windows=(None, 8), scheme="learned"),
    "gpt_neox": Row("gpt_neox", {name: value for name, value in NEW.items() if name not in ("num_key_value_heads", "head_dim")}, kv_heads=4),
    "gpt_neox_japanese": Row("gpt_neox_japanese", {name: value for name, value in NEW.items() if name not in ("num_key_value_heads", "head_dim")} | {"intermediate_multiple_size": 2}, path="module_hooks", kv_heads=4, bridge=False),
    "gpt_oss": Row("gpt_oss", NEW | WINDOW | EXPERTS, windows=(8, None), sinks=True),
    "gptj": Row("gptj", GPT | {"rotary_dim": 4}, kv_heads=4),
    "granite": Row("granite", NEW | {"attention_multiplier": 0.2}),
    "granitemoe": Row("granitemoe", NEW | EXPERTS),
    "helium": Row("helium", NEW, bridge=False),
    "hunyuan_v1_dense": Row("hunyuan_v1_dense", NEW),
    "jamba": Row("jamba", NEW | {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 2, "mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False}, layers=(1, 3), scheme="none"),
    "laguna": Row("laguna", NEW | ROUTED, gated=True),
    "lfm2": Row("lfm2", NEW | {"layer_types": ["conv", "full_attention"]}, layers=(1,), windows=(None,)),
    "lfm3": Row("lfm3", NEW | {"layer_types": ["conv", "full_attention"]}, layers=(1,), windows=(None,), gated=True, bridge=False),
    "llama": Row("llama", NEW),
    "llama4": Row("llama4_text", NEW | {"attention_chunk_size": 8, "intermediate_size_mlp": 48, "layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0], "num_local_experts": 2}, windows=(8, None), chunked=True, bridge=False),
    "minimax": Row("minimax", NEW | EXPERTS, layers=(0,), windows=(None,), bridge=False),
    "minimax_m3": Row("minimax_m3_vl_text", NEW | EXPERTS | {"layer_types": ["full_attention", "minimax_m3_sparse"], "index_block_size": 4, "index_topk_blocks": 2}, scheme="not told", most=(None, 8), bridge=False),
    "ministral": Row("ministral", NEW | WINDOW, windows=(8, None), bridge=False),
    "mistral": Row("mistral", NEW | {"sliding_window": 8}, windows=(8, 8)),
    "mixtral": Row("mixtral", NEW | EXPERTS),
    "mpt": Row("mpt", {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64, "expansion_ratio": 2, "initializer_range": 0.3, "vocab_size": VOCABULARY}, path="transformer_lens", kv_heads=4, scheme="ALiBi"),
    "nemotron": Row("nemotron", NEW),
    "nemotron_h": Row("nemotron_h", NEW | {"hybrid_override_pattern": "M*-", "num_hidden_layers": 3, "ssm_state_size": 4, "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 1}, layers=(1,), windows=(None,), scheme="none", bridge=False),
    "olmo": Row("olmo", NEW),
    "olmo2": Row("olmo2", NEW),
    "olmo3": Row("olmo3", NEW | WINDOW, windows=(8, None)),
    "olmoe": Row("olmoe", NEW | EXPERTS),
    "openai-gpt": Row("openai-gpt", GPT, path="transformer_lens", kv_heads=4, scheme="learned"),
    "opt": Row("opt", NEW | {"ffn_dim": 48, "word_embed_proj_dim": 32}, kv_heads=4, scheme="learned"),
    "persimmon": Row("persimmon", NEW, kv_heads=4, bridge=False),
    "phi": Row("phi", NEW),
    "phi3": Row("phi3", NEW),
    "phimoe": Row("phimoe", NEW | EXPERTS, bridge=False),
    "qwen2": Row("qwen2", NEW),
    "qwen2_moe": Row("qwen2_moe", NEW | EXPERTS | {"shared_expert_intermediate_size": 16}),
    "qwen3": Row("qwen3", NEW),
    "qwen3_moe": Row("qwen3_moe", NEW | EXPERTS),
    "qwen3_5": Row("qwen3_5_text", NEW | LINEAR_ATTENTION, layers=(1, 3), gated=True, bridge=False),
    "qwen3_5_moe": Row("qwen3_5_moe_text", NEW | EXPERTS | LINEAR_ATTENTION, layers=(1, 3), gated=True, bridge=False),
    "qwen3_next": Row("qwen3_next", NEW | EXPERTS | LINEAR_ATTENTION, layers=(1, 3), gated=True, bridge=False),
    "recurrent_gemma": Row("recurrent_gemma", NEW | {"num_hidden_layers": 3, "block_types": ["recurrent", "recurrent", "attention"], "attention_window_size": 8, "lru_width": 32}, layers=(2,), windows=(8,), bridge=False),
    "seed_oss": Row("seed_oss", NEW),
    "smollm3": Row("smollm3", NEW | {"no_rope_layers": [1, 0]}),
    "stablelm": Row("stablelm", NEW),
    "starcoder2": Row("starcoder2", NEW),
    "vaultgemma": Row("vaultgemma", NEW | WINDOW, windows=(8, None), softcap=50.0),
    "xglm": Row("xglm", {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4, "max_position_embeddings": 64, "init_std": 0.3, **TOKENS}, path="transformer_lens", kv_heads=4, scheme="sinusoidal"),
    "zamba2": Row("zamba2", NEW | {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "hybrid_layer_ids": [1, 3], "mamba_d_state": 4, "n_mamba_heads": 8, "mamba_ngroups": 1, "num_mem_blocks": 1, "num_key_value_heads": 4}, layers=(1, 3), kv_heads=4, scheme="none", bridge=False),
}  # fmt: skip


@dataclass(frozen=True)
class Refused:
    """An architecture that is not measured: why, for people to read, and what the one line says."""

    model_type: str
    options: dict[str, Any]
    why: str
    message: str


BETWEEN = "between the attention and its output projection stands something else than a gate"
REFUSED = {
    "bitnet": Refused("bitnet", NEW, "normalises between attention and output projection", BETWEEN),
    "diffllama": Refused("diffllama", NEW, "a head is the difference of two attentions, normalised", BETWEEN),
    "jetmoe": Refused("jetmoe", NEW | EXPERTS, "bypasses the registry; TransformerLens shows no attention of a known form", "attention of an unknown form"),
    "mamba": Refused("mamba", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "vocab_size": VOCABULARY}, "no attention", "model without attention"),
    "mamba2": Refused("mamba2", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "vocab_size": VOCABULARY, "num_heads": 8, "head_dim": 8, "n_groups": 1}, "no attention", "model without attention"),
    "rwkv": Refused("rwkv", {"hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2, "vocab_size": VOCABULARY, "context_length": 64}, "no attention", "model without attention"),
}  # fmt: skip


def build(name: str, **options: Any) -> torch.nn.Module:
    """A model of a row; `options` go into its configuration."""
    row = ROWS.get(name) or REFUSED[name]
    config = AutoConfig.for_model(row.model_type, **(row.options | options))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("sinks"):  # learned sinks start at zero or unset: make them count
                torch.nn.init.normal_(parameter)
    return model
