"""The norms between attention's write and the logits: found in every family, and read off correctly."""

from __future__ import annotations

import pytest
import tiny
import torch
from architectures import build
from transformers import (
    BioGptConfig,
    BioGptForCausalLM,
    Glm4Config,
    Glm4ForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
)
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import pavinterp as pi
from pavinterp.capture.paths import on_path
from pavinterp.measuring import measure
from pavinterp.norms import find_norms, is_norm, norm_gain

TOKENS = torch.arange(3, 11)[None]
NORMED = (
    "cohere", "exaone4", "gemma", "gemma2", "glm", "gpt_neox", "gpt_oss", "granite", "llama", "mistral", "mixtral",
    "nemotron", "olmo", "olmo2", "opt", "phi", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3", "stablelm",
    "starcoder2",
)  # fmt: skip
ON_THE_WRITE = {
    "exaone4": "post_attention_layernorm",
    "gemma2": "post_attention_layernorm",
    "olmo2": "post_attention_layernorm",
}
SIZE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 101,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def name_of(model, module):
    return next((name for name, m in model.named_modules() if m is module), None)


@pytest.mark.parametrize("kind", ["layer_norm", "rms", "gemma", "without weights"])
def test_gain_of_every_kind_of_norm(kind):
    weight = torch.linspace(0.5, 2, 12)
    if kind == "without weights":  # OLMo's
        gain, centres = norm_gain(torch.nn.LayerNorm(12, elementwise_affine=False), 12)
        torch.testing.assert_close(gain, torch.ones(12), rtol=1e-4, atol=1e-5)
        assert centres
        return
    if kind == "layer_norm":
        norm = torch.nn.LayerNorm(12)
        norm.bias.data.normal_()
    else:
        norm = LlamaRMSNorm(12) if kind == "rms" else Gemma3RMSNorm(12)
    norm.weight.data = weight - 1 if kind == "gemma" else weight
    assert is_norm(norm, 12)
    assert not is_norm(norm, 8)
    gain, centres = norm_gain(norm, 12)
    torch.testing.assert_close(gain, weight, rtol=1e-4, atol=1e-5)
    assert centres == (kind == "layer_norm")


@pytest.mark.parametrize(
    "module", [torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Identity(), torch.nn.Embedding(8, 8)]
)
def test_what_is_no_norm(module):
    assert not is_norm(module, 8)


@pytest.mark.parametrize("kind", NORMED)
def test_norms_of_every_architecture(kind):
    model = build(kind)
    found = find_norms(pi.load(model), TOKENS)
    final = name_of(model, found.final)
    last = [name for name, module in model.named_modules() if is_norm(module, 32)][-1]
    assert final is not None
    if kind != "opt":  # its decoder makes the final norm before its layers
        assert final == last
    assert "layers" not in final
    expected = ON_THE_WRITE.get(kind)
    assert sorted(found.on_write) == ([0, 1] if expected else [])
    assert all(name_of(model, norm).endswith(f"layers.{layer}.{expected}") for layer, norm in found.on_write.items())


@pytest.mark.parametrize(
    ("kind", "config", "final", "on_write"),
    [
        (BioGptForCausalLM, BioGptConfig(**SIZE), "biogpt.layer_norm", []),
        (Lfm2ForCausalLM, Lfm2Config(**SIZE, num_key_value_heads=2, full_attn_idxs=[1]), "model.embedding_norm", []),
        (Glm4ForCausalLM, Glm4Config(**SIZE, num_key_value_heads=2, head_dim=8), "model.norm", [0, 1]),
    ],
)  # fmt: skip
def test_final_norms_with_names_of_their_own(kind, config, final, on_write):
    model = kind(config).eval()
    found = find_norms(pi.load(model), TOKENS)
    assert name_of(model, found.final) == final
    assert sorted(found.on_write) == on_write


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma3"])
def test_a_bridge_has_the_norms_of_its_model(family):
    model = getattr(tiny, family)()
    one, two = pi.load(model), on_path(pi.load(model), "transformer_lens")
    plain, bridged = find_norms(one, TOKENS), find_norms(two, TOKENS)
    assert torch.equal(norm_gain(plain.final, 32)[0], norm_gain(bridged.final, 32)[0])
    assert bridged.final.weight.data_ptr() == plain.final.weight.data_ptr()
    assert sorted(plain.on_write) == sorted(bridged.on_write) == (list(range(4)) if family == "gemma3" else [])


def test_a_norm_on_the_write_is_noted():
    for model, noted in ((build("olmo2"), True), (build("llama"), False)):
        run = measure(pi.load(model), [[*range(3, 20)]] * 2, context=16, examples=False)
        assert any("normalises the attention's output after W_O" in note for note in run.manifest["notes"]) == noted


def test_hooks_on_the_output_projection_are_noted():
    model = tiny.llama()
    tokens = [[*range(3, 20)]] * 2
    assert not any("orward hooks" in n for n in measure(pi.load(model), tokens, context=16).manifest["notes"])
    model.model.layers[1].self_attn.o_proj.register_forward_hook(lambda m, i, o: 2 * o)
    notes = measure(pi.load(model), tokens, context=16).manifest["notes"]
    assert any("hooks are on model.layers.1.self_attn.o_proj; what" in note for note in notes)
