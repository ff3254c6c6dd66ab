"""Capture inside a TransformerBridge: a second witness of the same numbers, with the user's hooks in force."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch
import transformers
from test_run import assert_same_records, documents, stimuli
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources import build_bridge_from_module

import pavinterp as pi
from pavinterp.capture import bridge_attention, certificate, transformer_lens
from pavinterp.capture.call import trials
from pavinterp.capture.output_projection import output_weight, write_factor
from pavinterp.capture.paths import capture_for, forward, on_path
from pavinterp.errors import UserError
from pavinterp.measuring import measure
from pavinterp.models import ModelHandle
from pavinterp.verification import verify

LENGTH = 32  # tokens a sequence: four windows
SIZE = {"vocab_size": tiny.VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
OF_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.3} | SIZE
OF_LLAMA = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "max_position_embeddings": 64, "initializer_range": 0.3, **SIZE,
}  # fmt: skip


def made(kind, config, **arguments):
    """A builder of a tiny model by the names of its class and configuration."""
    return lambda: tiny._build(getattr(transformers, kind), getattr(transformers, config)(**arguments), 0)


# Attention computed by TransformerLens (fused and split projections, rotary embedding with and without hooks on it, q/k
# normalisation, windows, soft-cap, learned sinks, d_k != d_v), or left to Hugging Face's module (OPT, GPT-J).
BOTH_PATHS = {
    "gpt2": tiny.gpt2,
    "llama": tiny.llama,
    "gemma3": tiny.gemma3,
    "gemma2": made(
        "Gemma2ForCausalLM", "Gemma2Config", head_dim=16, sliding_window=8, query_pre_attn_scalar=24,
        attn_logit_softcapping=5.0, **OF_LLAMA,
    ),
    "mistral": made("MistralForCausalLM", "MistralConfig", sliding_window=8, **OF_LLAMA),
    "gpt_neox": made(
        "GPTNeoXForCausalLM", "GPTNeoXConfig", hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=64, initializer_range=0.3, **SIZE,
    ),
    "gpt_oss": made(
        "GptOssForCausalLM", "GptOssConfig", head_dim=8, num_local_experts=2, num_experts_per_tok=1, sliding_window=8,
        **OF_LLAMA,
    ),
    "deepseek_v3": made(
        "DeepseekV3ForCausalLM", "DeepseekV3Config", moe_intermediate_size=16, n_routed_experts=4,
        num_experts_per_tok=2, n_group=2, topk_group=1, kv_lora_rank=16, q_lora_rank=24, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=12, first_k_dense_replace=1, **(OF_LLAMA | {"num_key_value_heads": 4}),
    ),
    "opt": made(
        "OPTForCausalLM", "OPTConfig", hidden_size=32, word_embed_proj_dim=32, num_hidden_layers=2,
        num_attention_heads=4, ffn_dim=64, max_position_embeddings=64, init_std=0.3, **SIZE,
    ),
    "gptj": made("GPTJForCausalLM", "GPTJConfig", rotary_dim=4, **OF_GPT),
}  # fmt: skip

# Families whose attention never reaches transformers' registry.
ONLY_HERE = {
    "bloom": made(
        "BloomForCausalLM", "BloomConfig", hidden_size=32, n_layer=2, n_head=4, initializer_range=0.3, **SIZE
    ),
    "mpt": made("MptForCausalLM", "MptConfig", d_model=32, n_layers=2, n_heads=4, max_seq_len=64, **SIZE),
    "gpt_neo": made(
        "GPTNeoForCausalLM", "GPTNeoConfig", hidden_size=32, num_layers=2, attention_types=[[["global", "local"], 1]],
        num_heads=4, window_size=8, max_position_embeddings=64, initializer_range=0.3, **SIZE,
    ),
    "openai_gpt": made("OpenAIGPTLMHeadModel", "OpenAIGPTConfig", **OF_GPT),
    "xglm": made(
        "XGLMForCausalLM", "XGLMConfig", d_model=32, num_layers=2, attention_heads=4, ffn_dim=64,
        max_position_embeddings=64, init_std=0.3, **SIZE,
    ),
}  # fmt: skip


def bridge_of(model):
    return build_bridge_from_module(model, type(model).__name__, hf_config=model.config)


@pytest.fixture(params=["gpt2", "llama", "opt"])
def bridge(request):
    """A bridge that has run once (its blocks set up hooks of their own then)."""
    made_bridge = bridge_of(BOTH_PATHS[request.param]())
    with torch.no_grad():
        made_bridge(torch.tensor([[1, 2, 3]]))
    return made_bridge


def run_on(model, **options):
    return measure(pi.load(model), stimuli(documents(3, LENGTH)), **({"examples": False, "bos": "never"} | options))


def text_records(run):
    records = run.records
    return records[records["stimuli"] == "text"].set_index(["layer", "head", "sequence"]).sort_index()


def hooks_of(bridge):
    modules = [*bridge.modules(), *bridge.original_model.modules()]
    return [
        (list(m._forward_hooks.values()), list(m._forward_pre_hooks.values()), m.training)
        for m in dict.fromkeys(modules)
    ]


@pytest.mark.parametrize("family", BOTH_PATHS)
def test_both_paths_agree_in_every_record(family):
    model = BOTH_PATHS[family]()
    here = run_on(model, capture="transformer_lens")
    there = run_on(model, capture="attention_interface")
    assert here.manifest["model"] == there.manifest["model"] | {"path": "transformer_lens"}
    assert here.layers == there.layers
    assert here.manifest["certificate"]["largest"] <= 1e-5
    assert_same_records(here.records, there.records, 1e-4)


@pytest.mark.parametrize("family", ONLY_HERE)
def test_families_that_bypass_the_registry(family):
    model = ONLY_HERE[family]()
    run = run_on(model)  # found out without being told
    assert run.manifest["model"]["path"] == "transformer_lens"
    assert run.manifest["arguments"]["capture"] == "auto"
    assert run.manifest["certificate"]["largest"] <= 1e-5
    assert len(run.heads()) == 8
    assert run.heads()["window"].dropna().tolist() == ([8] * 4 if family == "gpt_neo" else [])
    with pytest.raises(
        UserError, match=r"no attention layer could be captured by the path attention_interface.*--capture"
    ):
        run_on(model, capture="attention_interface")


def test_examples_are_the_same_by_both_paths():
    model, words = tiny.gemma3(), tiny.tokenizer()
    here, there = (
        measure(
            pi.load(model, tokenizer=words), stimuli(documents(3, LENGTH)), bos="never", capture=path
        ).details.examples
        for path in ("transformer_lens", "attention_interface")
    )
    assert len(here) == len(there) > 0
    for one, two in zip(here, there, strict=True):
        assert [a["promotes"] for a in one["associations"]] == [a["promotes"] for a in two["associations"]]
        np.testing.assert_allclose(one["strengths"], two["strengths"], atol=2e-5)


def test_a_bridge_that_takes_its_projection_apart_is_told_how_to_put_it_together():
    made_bridge = bridge_of(BOTH_PATHS["llama"]())
    made_bridge.set_use_attn_result(True)
    with pytest.raises(UserError, match=r"set_use_attn_result\(False\)"):
        run_on(made_bridge)
    made_bridge.set_use_attn_result(False)
    assert len(run_on(made_bridge).records)


def test_a_bridge_from_the_usual_door_is_measured_itself(tmp_path):
    folder = tiny.model_folder(tmp_path)
    bridge = TransformerBridge.boot_transformers(str(folder), device="cpu")
    run = run_on(bridge)
    assert (run.manifest["model"]["source"], run.manifest["model"]["path"]) == ("bridge", "transformer_lens")
    assert run.manifest["model"]["parameters"] == pi.load(str(folder)).parameters
    assert run.manifest["versions"]["transformer_lens"].startswith("4.")
    assert run.manifest["notes"] == []
    assert_same_records(run.records, run_on(str(folder)).records, 1e-4)
    answer = verify(bridge, length=32)
    assert (answer["passed"], answer["path"]) == (True, "transformer_lens")


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_bridge_with_processed_weights(family):
    """Norms folded in, weights centred, value biases moved: other queries, keys, values and W_O, the same strengths."""
    bridge = bridge_of(BOTH_PATHS[family]())
    before = text_records(run_on(bridge))
    bridge.enable_compatibility_mode(disable_warnings=True)
    run = run_on(bridge)
    assert run.manifest["certificate"]["largest"] <= 1e-5
    after = text_records(run)
    np.testing.assert_allclose(after["sink_strength"], before["sink_strength"], rtol=1e-4)
    handle, tokens = pi.load(bridge), torch.arange(2, 26)[None]
    calls = {}
    with capture_for(handle, lambda call: calls.update({call.layer: call})):
        forward(handle, tokens)
    for layer, call in calls.items():
        w_o = output_weight(call.projection, call.queries.shape[1], call.values.shape[-1])
        one = trials(call, 0, tokens[0], torch.arange(24), torch.ones(24), write_factor(w_o, torch.float32), 0)
        projection = bridge.blocks[layer].attn.o.original_component
        with torch.no_grad():
            written = projection(call.response)[0] - projection(torch.zeros_like(call.response))[0]
        torch.testing.assert_close(torch.einsum("htd,hdw->tw", one.response, w_o), written, rtol=1e-4, atol=1e-5)


def test_a_pattern_hook_is_in_force_and_stays():
    bridge = bridge_of(tiny.llama())
    plain = text_records(run_on(bridge))

    def ablate(pattern, hook):
        pattern[:, 2] = 0  # in place, as many hooks do
        return pattern

    bridge.add_hook("blocks.0.attn.hook_pattern", ablate)
    before = hooks_of(bridge)
    run = run_on(bridge)
    assert hooks_of(bridge) == before
    records = text_records(run)
    assert records.loc[(0, 2), "effective_load"].isna().all()
    assert (records.loc[(0, 2), ["response_norm", "sink_strength", "top_strength"]] == 0).all(axis=None)
    for head in (0, 1, 3):  # that layer's other heads see what they saw before
        np.testing.assert_allclose(records.loc[(0, head)].iloc[:, 3:], plain.loc[(0, head)].iloc[:, 3:], rtol=1e-4)
    assert not np.allclose(records.loc[1, "response_norm"], plain.loc[1, "response_norm"], rtol=1e-3)
    assert run.manifest["certificate"]["largest"] <= 1e-5
    assert run.manifest["notes"] == [
        "The TransformerBridge was measured with the hooks that were on it: blocks.0.attn.hook_pattern.",
        "1 heads write nothing in some sequences (no US reaches the residual stream, or none that float32 tells from "
        "zero): L0H2.",
    ]
    bridge.reset_hooks()
    assert_same_records(run_on(bridge).records, run_on(tiny.llama()).records, 1e-4)


def test_edited_scores_give_edited_strengths():
    bridge = bridge_of(tiny.gpt2())

    def uniform(scores, hook):
        scores[:, 0] = scores[:, 0].where(scores[:, 0] < -1e9, 0.0)  # what is masked stays so
        return scores

    with bridge.hooks(fwd_hooks=[("blocks.1.attn.hook_attn_scores", uniform)]):
        run = run_on(bridge, tests=None)
    records = text_records(run)
    expected = np.mean(1 / np.arange(1, LENGTH + 1))
    np.testing.assert_allclose(records.loc[(1, 0), "sink_strength"], expected, rtol=1e-5)
    assert not np.isclose(records.loc[(1, 1), "sink_strength"], expected, rtol=1e-2).any()
    assert run.manifest["certificate"]["largest"] <= 1e-5


def test_scaled_values_are_measured_as_scaled():
    bridge = bridge_of(tiny.llama())
    plain = text_records(run_on(bridge, layers=[1]))
    bridge.add_hook("blocks.1.attn.hook_v", lambda values, hook: 3 * values)
    run = run_on(bridge, layers=[1])
    scaled = text_records(run)
    np.testing.assert_allclose(scaled["response_norm"], 3 * plain["response_norm"], rtol=1e-4)
    np.testing.assert_allclose(scaled["effective_load"], plain["effective_load"], rtol=1e-4)
    assert run.manifest["certificate"]["largest"] <= 1e-5


def test_edited_keys_are_taken_after_the_edit():
    bridge = bridge_of(tiny.llama())
    plain = text_records(run_on(bridge, layers=[0]))
    bridge.add_hook("blocks.0.attn.hook_rot_k", lambda keys, hook: 0 * keys)
    run = run_on(bridge, layers=[0], tests=None)
    uniform = text_records(run)
    np.testing.assert_allclose(uniform["sink_strength"], np.mean(1 / np.arange(1, LENGTH + 1)), rtol=1e-5)
    assert not np.allclose(plain["sink_strength"], uniform["sink_strength"], rtol=1e-2)


def test_a_replaced_response_is_refused_by_name_but_other_layers_are_measured(bridge):
    plain = text_records(run_on(bridge, layers=[1]))

    def ablate(z, hook):
        z = z.clone()
        z[:, :, 3] = 0
        return z

    bridge.add_hook("blocks.0.attn.hook_z", ablate)
    with pytest.raises(
        UserError, match=r"layer 0: a hook on hook_z replaces the response of heads \[3\].*hook_pattern"
    ):
        run_on(bridge)
    run = run_on(bridge, layers=[1])
    assert not np.allclose(text_records(run)["response_norm"], plain["response_norm"], rtol=1e-3)
    assert run.manifest["certificate"]["largest"] <= 1e-5
    bridge.reset_hooks()
    bridge.add_hook("blocks.0.attn.hook_z", lambda z, hook: None)  # looks on
    run_on(bridge)


def test_the_bridge_has_the_users_hooks_and_no_others_after_an_interruption(bridge):
    seen = []
    bridge.add_hook("blocks.0.attn.hook_q", lambda q, hook: seen.append(q.shape))
    bridge.add_perma_hook("blocks.1.attn.hook_z", lambda z, hook: None)
    bridge.train()
    before, handle = hooks_of(bridge), pi.load(bridge)

    def interrupt(call):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), transformer_lens.capture(bridge, interrupt):
        forward(handle, torch.tensor([[1, 2, 3]]))
    assert hooks_of(bridge) == before
    with pytest.raises(KeyboardInterrupt):
        run_on(bridge, progress=lambda stage, done, total: interrupt(None) if done else None)
    assert hooks_of(bridge) == before
    run_on(bridge)
    assert hooks_of(bridge) == before
    assert len(seen) > 2
    logits = bridge(torch.tensor([[1, 2, 3]]))  # a whole pass again, of which autograd can make use
    assert logits.shape == (1, 3, tiny.VOCABULARY)
    logits.sum().backward()


def test_every_layer_fires_once_and_the_bridge_computes_what_it_computed_before(bridge):
    tokens = torch.arange(1, 41).view(2, 20)
    with torch.no_grad():
        before = bridge(tokens)
    calls, handle = [], pi.load(bridge)
    with capture_for(handle, lambda call: calls.append(call.layer)):
        hidden = forward(handle, tokens)
    assert calls == [0, 1]
    head = bridge_attention.original(handle.model.get_output_embeddings())
    assert torch.equal(head(hidden), before)
    assert all(getattr(block.attn, "_pattern", None) is None for block in bridge.blocks)


def test_the_check_of_the_scores_bites(monkeypatch):
    """A release that renames a hook point shows other queries: caught also where the pattern is given."""
    bridge = bridge_of(tiny.llama())
    bridge.add_hook("blocks.1.attn.hook_pattern", lambda pattern, hook: None)
    monkeypatch.setitem(bridge_attention.ON_THE_WAY, "queries", ("q.hook_out", "hook_q"))
    with pytest.raises(
        UserError, match=r"layer 0 head \d: the scores of PositionEmbeddingsAttentionBridge do not follow"
    ):
        run_on(bridge)
    with (
        pytest.raises(UserError, match=r"layer 1 head \d: the scores"),
        transformer_lens.capture(bridge, lambda call: None, {1}),
    ):
        forward(pi.load(bridge), torch.arange(1, 20)[None])


def test_a_swapped_head_in_a_given_pattern_fails_the_certificate():
    bridge = bridge_of(tiny.llama())
    bridge.add_hook("blocks.0.attn.hook_pattern", lambda pattern, hook: None)
    handle, tokens, calls = pi.load(bridge), torch.arange(1, 25)[None], {}
    with capture_for(handle, lambda call: calls.update({call.layer: call})):
        forward(handle, tokens)
    call = calls[0]
    for pattern, holds in ((call.pattern, True), (call.pattern.flip(1), False)):
        given = replace(call, pattern=pattern)
        write = write_factor(output_weight(call.projection, 4, 8), torch.float32)
        one = trials(given, 0, tokens[0], torch.arange(24), torch.ones(24), write, 0)
        assert bool(certificate.residual(given, 0, one).max() <= 1e-5) == holds


def test_a_bridge_around_a_copy_leaves_the_live_model_alone():
    model = tiny.gemma3().train()
    model.set_attn_implementation("sdpa")
    seen = []
    hook = model.model.layers[0].register_forward_hook(lambda m, i, o: seen.append(1))

    def state():
        return (
            [
                (n, type(m), m.training, len(m._forward_hooks), len(m._forward_pre_hooks))
                for n, m in model.named_modules()
            ],
            [(n, p.data_ptr(), p.requires_grad) for n, p in model.named_parameters()],
            [n for n, _ in model.named_buffers()],
            (model.config.to_json_string(), model.config._attn_implementation),
        )

    before, weights = state(), {n: p.clone() for n, p in model.state_dict().items()}
    handle = pi.load(model)
    wrapped = on_path(handle, "transformer_lens")
    assert wrapped.model is not model
    assert {p.data_ptr() for p in model.parameters()} <= {p.data_ptr() for p in wrapped.model.parameters()}
    run_on(model, capture="transformer_lens")
    assert state() == before
    assert all(torch.equal(weights[n], p) for n, p in model.state_dict().items())
    assert seen  # hooks on the live model are on its copy too
    hook.remove()


REFUSED = {
    "falcon with ALiBi, which TransformerLens 4.3 adds twice": (
        made(
            "FalconForCausalLM", "FalconConfig", hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
            alibi=True, multi_query=False, new_decoder_architecture=False, initializer_range=0.3, **SIZE,
        ),
        "transformer_lens computes something else than FalconForCausalLM",
    ),
    "codegen, whose rotary embedding has moved": (
        made("CodeGenForCausalLM", "CodeGenConfig", rotary_dim=4, **OF_GPT),
        "transformer_lens cannot make a bridge around CodeGenForCausalLM",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_transformer_lens_cannot_do_is_refused_in_one_line(what):
    build, message = REFUSED[what]
    with pytest.raises(UserError, match=message) as refusal:
        on_path(pi.load(build()), "transformer_lens")
    assert "\n" not in str(refusal.value)


def test_choices_that_cannot_be():
    bridge = bridge_of(tiny.gpt2())
    with pytest.raises(UserError, match="a TransformerBridge computes attention itself"):
        run_on(bridge, capture="attention_interface")
    with pytest.raises(UserError, match="--capture hooks: choose among auto, attention_interface, transformer_lens"):
        run_on(tiny.gpt2(), capture="hooks")
    spread = tiny.gpt2()
    spread.transformer.h[0]._hf_hook = object()
    with pytest.raises(UserError, match="spread over devices"):
        on_path(ModelHandle(spread, None, "gpt2", "live", "sha256:"), "transformer_lens")


def test_the_command_line(capsys):
    from pavinterp.cli import main

    with pytest.raises(SystemExit) as ended:
        main(["verify", "demo", "--capture", "transformer_lens", "--json", "--quiet"])
    assert ended.value.code == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["path"], answer["passed"]) == ("transformer_lens", True)
