"""Models in memory in other forms (compiled, off-loaded, with adapters, resized): the records are the plain model's.

Tolerance of records: 1e-5 where the very same kernels run on the very same numbers, 1e-4 where weights are summed in
another order (adapters beside the weight or merged into it).
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import tiny
import torch
from formats import DOCUMENTS, TOKENS, assert_measured_like, assert_same_records, build, logits, measured, package

import pavinterp as pi
from pavinterp.capture.call import output_weight
from pavinterp.compiled import is_compiled
from pavinterp.errors import UserError

SAME, MERGED = 1e-5, 1e-4
FAMILIES = ("llama", "gemma3", "gpt2", "falcon", "bloom")


# ------------------------------------------------------------------------------------------------ compiled


def blocks(model):
    return next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))


def compiled_blocks(model):
    inside = blocks(model)
    for i, block in enumerate(inside):
        inside[i] = torch.compile(block, backend="eager")
    return model


def blocks_compiled_in_place(model):
    for block in blocks(model):
        block.compile(backend="eager")
    return model


def model_compiled_in_place(model):
    model.compile(backend="eager")
    return model


def compiled_forward(model):
    model.base_model.forward = torch.compile(model.base_model.forward, backend="eager")
    return model


COMPILED = {
    "torch.compile(model)": lambda model: torch.compile(model, backend="eager"),
    "model.compile()": model_compiled_in_place,
    "blocks": compiled_blocks,
    "blocks in place": blocks_compiled_in_place,
    "forward": compiled_forward,
}


@pytest.mark.parametrize(
    ("name", "how"), [("llama", how) for how in COMPILED] + [("gpt2", "blocks"), ("falcon", "blocks in place")]
)
def test_compiled(name, how):
    """The backend is dynamo's "eager": graphs and guards are those of any, and no compiler is needed."""
    torch._dynamo.reset()
    model = COMPILED[how](build(name))
    assert any(is_compiled(module) for module in model.modules())
    assert_measured_like(model, build(name), SAME)
    assert torch._dynamo.eval_frame._stance.stance == "default"


@pytest.mark.slow
def test_compiled_by_inductor():
    torch._dynamo.reset()
    model = torch.compile(build("llama"))
    try:
        logits(model)
    except Exception as error:
        pytest.skip(f"torch's default compiler does not run here: {error!r:.80}")
    assert_measured_like(model, build("llama"), SAME)


def test_a_compiled_model_in_training_is_left_in_training():
    model = torch.compile(build("llama"), backend="eager").train()
    measured(model)
    assert model.training
    assert model._orig_mod.training


# ------------------------------------------------------------------------------------------------ off-loaded


def on_disk(model, folder):
    import accelerate

    return accelerate.disk_offload(model, folder)


def in_memory(model, folder):
    import accelerate

    return accelerate.cpu_offload(model)


def some_on_disk(model, folder):
    """What `device_map` makes of a model too large for its devices: some blocks here, others fetched when called."""
    import accelerate

    places = {}
    for name, module in model.named_modules():
        if not list(module.children()) and any(True for _ in module.parameters()):
            places[name] = "disk" if len(places) % 2 else "cpu"
    owned = {name for place in places for name, _ in model.get_submodule(place).named_parameters(prefix=place)}
    places |= {name: "cpu" for name, _ in model.named_parameters() if name not in owned}
    return accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=folder, force_hooks=True)


@pytest.mark.parametrize("how", [in_memory, on_disk, some_on_disk])
@pytest.mark.parametrize("name", FAMILIES)
def test_off_loaded(name, how, tmp_path):
    model = how(build(name), str(tmp_path))
    if name == "bloom":  # by a bridge, which would take modules apart that accelerate has wrapped
        with pytest.raises(UserError, match="no TransformerBridge is made around a model that is spread over devices"):
            measured(model)
        return
    assert_measured_like(model, build(name), SAME)


def test_loaded_with_a_device_map(tmp_path):
    folder = tiny.model_folder(tmp_path / "model", tiny.llama())
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "disk"}
    places |= {"model.rotary_emb": "cpu", "lm_head": "disk"}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        handle = pi.load(folder, device_map=places)
    assert_same_records(measured(handle), measured(pi.load(folder, device="cpu")), SAME)


def test_a_model_without_weights_is_told_so():
    with torch.device("meta"):
        model = build("llama")
    with pytest.raises(UserError, match="holds no weights"):
        measured(model)


# ------------------------------------------------------------------------------------------------ adapters

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


def test_adapters_that_scale_activations():
    options = {"target_modules": ["k_proj", "v_proj"], "feedforward_modules": [], "init_ia3_weights": False}
    merged = with_adapters("llama", "IA3Config", **options).merge_and_unload()
    assert_measured_like(with_adapters("llama", "IA3Config", **options), merged, MERGED)


REFUSED = {
    "PrefixTuningConfig": {"num_virtual_tokens": 4},
    "PromptTuningConfig": {"num_virtual_tokens": 4},
    "PromptEncoderConfig": {"num_virtual_tokens": 4, "encoder_hidden_size": 16},
    "LoraConfig": {"alora_invocation_tokens": [5, 6]},
}


@pytest.mark.parametrize("kind", REFUSED)
def test_adapters_that_are_more_than_weights_are_refused(kind):
    with pytest.raises(UserError, match="computes something else than the model inside it") as error:
        measured(with_adapters("llama", kind, **REFUSED[kind]))
    assert "\n" not in str(error.value)


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


# ------------------------------------------------------------------------------------------------ resized


@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom"])
@pytest.mark.parametrize("size", [90, 131])
def test_resized_vocabularies(name, size):
    documents = [document % 80 + 3 for document in DOCUMENTS[:3]]
    model = build(name)
    model.resize_token_embeddings(size)
    plain = measured(build(name), documents)
    for declared in (size, 101):  # a configuration that was forgotten
        model.config.vocab_size = declared
        assert_same_records(measured(model, documents), plain, SAME, kind="text")
        beyond = [np.full(20, min(size, declared))]
        with pytest.raises(UserError, match=rf"token id {min(size, declared)} at position 0 is out of range"):
            measured(model, beyond)
    assert TOKENS.max() > 90
