"""Adapters of PEFT: a model that has them gives the records of the one they were merged into, or is refused.

Tolerance of records: 1e-5 where the very same numbers are computed, 1e-4 where an adapter is summed beside its weight
or into it.
"""

from __future__ import annotations

import json

import pytest
import tiny
import torch
from formats import assert_measured_like, assert_same_records, build, measured, package

import pavinterp as pi
from pavinterp.capture.output_projection import output_weight
from pavinterp.errors import UserError

SAME, MERGED = 1e-5, 1e-4
TARGETS = {"gpt2": ["c_attn", "c_proj"], "falcon": ["query_key_value", "dense"], "bloom": ["query_key_value", "dense"]}
LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj"]


def with_adapters(name, kind="LoraConfig", **options):
    peft = package("peft")
    if kind == "LoraConfig":
        options = {"r": 4, "init_lora_weights": False, "fan_in_fan_out": name == "gpt2"} | options
    if kind in ("LoraConfig", "IA3Config"):
        options = {"target_modules": TARGETS.get(name, LLAMA)} | options
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return peft.get_peft_model(build(name), getattr(peft, kind)(task_type="CAUSAL_LM", **options)).eval()


ADAPTED = [(name, {}) for name in ("llama", "gemma3", "gpt2", "falcon")]
ADAPTED += [("llama", {"use_dora": True}), ("llama", {"use_rslora": True}), ("gpt2", {"lora_bias": True})]
ADAPTED += [("llama", {"modules_to_save": ["lm_head"]}), ("llama", {"trainable_token_indices": [5, 6]})]


@pytest.mark.parametrize(("name", "options"), ADAPTED)
def test_adapters_are_measured_as_if_merged(name, options):
    merged = with_adapters(name, **options).merge_and_unload()
    run = assert_measured_like(with_adapters(name, **options), merged, MERGED)
    assert_same_records(measured(with_adapters(name, **options).get_base_model()), run, SAME)
    with pytest.raises(AssertionError):  # the adapters were there
        assert_same_records(run, measured(build(name)), 0.01)


def test_the_output_projection_has_its_adapter():
    """In bfloat16 beside a bias a thousand times its weights: the bias must not round them away."""
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2)):  # half an epsilon of the merged weight
        inner, merged = with_adapters("gpt2"), with_adapters("gpt2").merge_and_unload()
        projection = inner.get_base_model().transformer.h[1].attn.c_proj.to(dtype)
        with torch.no_grad():
            projection.base_layer.bias.fill_(300.0)
        weight = output_weight(projection, 4, 8).float().flatten(0, 1)
        expected = merged.transformer.h[1].attn.c_proj.weight
        assert float((weight - expected).norm() / expected.norm()) <= tolerance
        assert float(projection.base_layer.bias.min()) == 300.0  # put back


def test_disabled_adapters_are_not_measured():
    model = with_adapters("llama")
    with model.disable_adapter():
        assert_measured_like(model, build("llama"), SAME)


def test_tokens_that_were_trained_anew():
    options = {"token_indices": [5, 6, 7], "target_modules": ["embed_tokens"]}
    merged = with_adapters("llama", "TrainableTokensConfig", **options).merge_and_unload()
    assert_measured_like(with_adapters("llama", "TrainableTokensConfig", **options), merged, SAME)


def test_adapters_that_scale_activations():
    options = {"target_modules": ["k_proj", "v_proj"], "feedforward_modules": [], "init_ia3_weights": False}
    merged = with_adapters("llama", "IA3Config", **options).merge_and_unload()
    assert_measured_like(with_adapters("llama", "IA3Config", **options), merged, MERGED)


REFUSED = {
    "PrefixTuningConfig": {"num_virtual_tokens": 4},
    "PromptTuningConfig": {"num_virtual_tokens": 4},
    "PromptEncoderConfig": {"num_virtual_tokens": 4, "encoder_hidden_size": 16},
    "AdaptionPromptConfig": {"adapter_len": 4, "adapter_layers": 1},  # prompts behind the output projection
    "LoraConfig": {"alora_invocation_tokens": [5, 6]},
    "PolyConfig": {"r": 4, "n_tasks": 2, "target_modules": ["q_proj"]},  # wants the number of a task
}


@pytest.mark.parametrize("kind", REFUSED)
def test_adapters_that_are_more_than_weights_are_refused(kind):
    said = "computes something else than the model inside it|does more than change weights"
    with pytest.raises(UserError, match=said) as error:
        measured(with_adapters("llama", kind, **REFUSED[kind]))
    assert "\n" not in str(error.value)


def test_adapters_that_are_more_than_weights_are_refused_without_their_wrapper_too():
    inner = with_adapters("llama", "AdaptionPromptConfig", **REFUSED["AdaptionPromptConfig"]).get_base_model()
    with pytest.raises(UserError, match=r"AdaptedAttention of PEFT at model\.layers\.1\.self_attn"):
        measured(inner)


def test_no_bridge_reads_past_adapters():
    with pytest.raises(UserError, match=r"a model with adapters: merge them \(merge_and_unload\)"):
        measured(with_adapters("bloom"))
    merged = with_adapters("bloom").merge_and_unload()
    assert_measured_like(merged, merged, SAME)


def test_adapter_folders(tmp_path):
    """Without a model: no model. Beside one transformers loads it where PEFT is installed, and drops it elsewhere."""
    with_adapters("llama").save_pretrained(tmp_path / "adapter")
    with pytest.raises(UserError, match="is an adapter, not a model: merge it"):
        pi.load(tmp_path / "adapter")
    folder = tiny.model_folder(tmp_path / "both", tiny.llama())
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    with pytest.raises(UserError, match=r"holds an adapter .* beside the model: merge it"):
        pi.load(folder)
