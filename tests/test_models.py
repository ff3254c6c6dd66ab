"""Loading: every kind of model, what the handle says of it, and that a live model is left as it was."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BertConfig, BertLMHeadModel
from transformers.utils import logging

import pavinterp
from pavinterp import models
from pavinterp.models import check_finite, fingerprint, load, untouched


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny.model_folder(tmp_path / "tiny-gpt2")


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hugging Face cache, used offline."""
    cache = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return cache


def same_weights(first: torch.nn.Module, second: torch.nn.Module) -> bool:
    a, b = first.state_dict(), second.state_dict()
    return set(a) == set(b) and all(torch.equal(a[name], b[name]) for name in a)


def test_folder(folder: Path) -> None:
    handle = load(folder)
    assert (handle.name, handle.source, handle.architecture) == ("tiny-gpt2", "folder", "GPT2LMHeadModel")
    assert (handle.device, handle.dtype, handle.max_context) == (torch.device("cpu"), torch.float32, 64)
    assert handle.revision == f"sha256:{hashlib.sha256((folder / 'model.safetensors').read_bytes()).hexdigest()}"
    assert handle.parameters == sum(p.numel() for p in tiny.gpt2().parameters())
    assert same_weights(handle.model, tiny.gpt2())
    assert not handle.model.training
    assert handle.tokenizer is not None
    assert handle.tokenizer("The bell").input_ids == tiny.tokenizer()("The bell").input_ids
    assert len(repr(handle)) < 400, "the repr of a handle is for a notebook cell"


@pytest.mark.parametrize("build", [tiny.gpt2, tiny.llama, tiny.gemma3])
def test_families(build, tmp_path: Path) -> None:
    model = build()
    handle = load(str(tiny.model_folder(tmp_path / "m", model)))
    assert same_weights(handle.model, model)
    assert handle.max_context == model.config.max_position_embeddings


def test_shards(tmp_path: Path) -> None:
    model = tiny.gpt2()
    tiny.model_folder(tmp_path / "m", model)
    (tmp_path / "m" / "model.safetensors").unlink()
    model.save_pretrained(tmp_path / "m", max_shard_size="30KB")
    shards = sorted((tmp_path / "m").glob("*.safetensors"))
    assert len(shards) > 1
    handle = load(tmp_path / "m")
    assert same_weights(handle.model, model)
    printed = "".join(f"{hashlib.sha256(s.read_bytes()).hexdigest()}  {s.name}\n" for s in shards)
    assert handle.revision == f"sha256:{hashlib.sha256(printed.encode()).hexdigest()}"


def test_half_precision_on_disk_is_float32_unless_asked(tmp_path: Path) -> None:
    tiny.model_folder(tmp_path / "m", tiny.gpt2().half())
    handle = load(tmp_path / "m")
    assert handle.dtype == torch.float32
    assert same_weights(handle.model, tiny.gpt2().half().float())
    assert load(tmp_path / "m", dtype="bfloat16").dtype == torch.bfloat16
    assert load(tmp_path / "m", dtype=torch.float64, device="cpu").dtype == torch.float64


def test_pickled_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(tiny.gpt2().state_dict(), folder / "pytorch_model.bin")
    assert same_weights(load(folder).model, tiny.gpt2())


def test_safetensors_are_preferred(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"not read")
    assert same_weights(load(folder).model, tiny.gpt2())


def test_device_map(folder: Path) -> None:
    handle = load(folder, device_map={"": "cpu"})
    assert same_weights(handle.model, tiny.gpt2())


def test_demo_is_found_in_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.model_folder(tmp_path / "demo")
    monkeypatch.setattr(models, "files", lambda package: {"pavinterp": tmp_path}[package])
    monkeypatch.chdir(tmp_path)  # a folder named demo does not take its place
    handle = load()
    assert (handle.name, handle.source) == ("demo", "demo")
    assert same_weights(handle.model, tiny.gpt2())


def test_hub_id_from_the_cache_without_network(folder: Path, hub_cache: Path) -> None:
    commit = tiny.hub_cache(hub_cache, "org/name", folder)
    other = tiny.model_folder(folder.parent / "other", tiny.gpt2(seed=1))
    branch = tiny.hub_cache(hub_cache, "org/name", other, branch="step1000")
    handle = load("org/name")
    assert (handle.name, handle.source, handle.revision) == ("org/name", "hub", commit)
    assert same_weights(handle.model, tiny.gpt2())
    assert handle.tokenizer is not None
    handle = load("org/name", revision="step1000")
    assert handle.revision == branch
    assert same_weights(handle.model, tiny.gpt2(seed=1))
    assert load("org/name", revision=commit).revision == commit


@pytest.mark.slow
def test_hub_id_offline_by_environment(folder: Path, tmp_path: Path) -> None:
    commit = tiny.hub_cache(tmp_path / "hub", "org/name", folder)
    code = "import pavinterp; h = pavinterp.load('org/name'); print(h.revision, h.source, h.parameters)"
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [commit, "hub", str(sum(p.numel() for p in tiny.gpt2().parameters()))]
    assert done.stderr == ""


def test_tokenizer_of_ones_own(folder: Path, tmp_path: Path) -> None:
    words = tiny.tokenizer(adds_bos=False)
    assert load(folder, tokenizer=words).tokenizer is words
    assert load(folder, tokenizer=False).tokenizer is None
    words.save_pretrained(tmp_path / "words")
    found = load(folder, tokenizer=str(tmp_path / "words")).tokenizer
    assert found is not None
    assert found("The bell").input_ids == words("The bell").input_ids


def state_of(model: torch.nn.Module) -> list[object]:
    """What must not change: modes, gradients, hooks, configuration, attention, types, places, values."""
    state: list[object] = [model.config.to_dict(), model.config._attn_implementation]
    for name, module in model.named_modules():
        state.append((name, module.training, list(module._forward_hooks), list(module._forward_pre_hooks)))
    for name, p in model.named_parameters():
        state.append((name, p.requires_grad, p.dtype, p.device, p.data_ptr(), p.sum().item()))
    return state


def live_model() -> torch.nn.Module:
    model = tiny.gpt2().half()
    model.train()
    model.transformer.h[0].eval()
    model.transformer.wte.requires_grad_(False)
    model.set_attn_implementation("eager")
    model.transformer.h[1].attn.register_forward_hook(lambda module, inputs, output: None)
    return model


def test_live_model_is_taken_as_it_is() -> None:
    model = live_model()
    before = state_of(model)
    handle = load(model)
    assert handle.model is model
    assert state_of(model) == before
    assert (handle.name, handle.source, handle.dtype) == ("GPT2LMHeadModel", "live", torch.float16)
    assert handle.tokenizer is None
    assert handle.bridge is None
    words = tiny.tokenizer()
    assert load(model, tokenizer=words).tokenizer is words


def test_fingerprint_tells_models_apart() -> None:
    assert fingerprint(tiny.gpt2()) == fingerprint(tiny.gpt2())
    assert fingerprint(tiny.gpt2()) != fingerprint(tiny.gpt2(seed=1))
    assert load(tiny.gpt2()).revision == fingerprint(tiny.gpt2())
    changed = tiny.gpt2()
    changed.transformer.h[1].attn.c_proj.bias.data[-1] += 1.0  # the last value is among the samples
    assert fingerprint(changed) != fingerprint(tiny.gpt2())
    assert fingerprint(tiny.gpt2()).startswith("sha256:")


def test_bridge_is_taken_as_it_is(folder: Path) -> None:
    from transformer_lens.model_bridge import TransformerBridge

    words = AutoTokenizer.from_pretrained(folder)  # transformer_lens takes none that was not loaded from somewhere
    bridge = TransformerBridge.boot_transformers("tiny", hf_model=tiny.gpt2(), tokenizer=words, device="cpu")
    seen = []
    bridge.add_hook("blocks.0.attn.hook_pattern", lambda pattern, hook: seen.append(hook.name))
    handle = load(bridge)
    assert handle.bridge is bridge
    assert handle.model is bridge.original_model
    assert (handle.source, handle.name, handle.max_context) == ("bridge", "GPT2LMHeadModel", 64)
    assert handle.tokenizer is bridge.tokenizer
    bridge(torch.tensor([[0, 1, 2]]))
    assert seen, "the user's hooks stay"


def test_decoder_of_a_bidirectional_family() -> None:
    config = BertConfig(
        num_hidden_layers=1, num_attention_heads=2, hidden_size=16, intermediate_size=32, vocab_size=50, is_decoder=True
    )
    assert load(BertLMHeadModel(config)).architecture == "BertLMHeadModel"


@pytest.mark.parametrize("ending", [None, ValueError, KeyboardInterrupt])
def test_untouched(ending: type[BaseException] | None) -> None:
    model = live_model()
    before = state_of(model)
    try:
        with untouched(model):
            assert not any(module.training for module in model.modules())
            model.config._attn_implementation_internal = "pavinterp"
            model.transformer.h[0].attn.config._attn_implementation = "pavinterp"
            model.requires_grad_(True)
            if ending:
                raise ending
    except (ValueError, KeyboardInterrupt):
        pass
    assert state_of(model) == before


def test_untouched_restores_sub_configurations_one_by_one() -> None:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration, SiglipVisionConfig

    vision = SiglipVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    config = Gemma3Config(text_config=tiny.gemma3().config, vision_config=vision, mm_tokens_per_image=1)
    model = Gemma3ForConditionalGeneration(config)
    model.config.text_config._attn_implementation = "eager"
    implementations = (model.config._attn_implementation, "eager", model.config.vision_config._attn_implementation)
    with untouched(model):
        model.config._attn_implementation = "pavinterp"  # spreads to both sub-configurations
    found = (
        model.config._attn_implementation,
        model.config.text_config._attn_implementation,
        model.config.vision_config._attn_implementation,
    )
    assert found == implementations


def test_loading_says_nothing_and_leaves_verbosity_alone(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    logging.set_verbosity_info()
    try:
        load(folder)
        assert logging.get_verbosity() == logging.INFO
        assert logging.set_tqdm_hook(None) is None
        with pytest.raises(pavinterp.UserError):
            load(folder, tokenizer="/nowhere")
        assert logging.get_verbosity() == logging.INFO
    finally:
        logging.set_verbosity_warning()
    assert "DISABLE_SAFETENSORS_CONVERSION" not in os.environ
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""


def test_weights_that_are_not_used_are_told(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights["transformer.h.0.attn.gate.weight"] = torch.zeros(2)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.warns(UserWarning, match=r"no use for 1 weight \(transformer.h.0.attn.gate.weight\)"):
        load(folder)


def test_finite_values_with_an_infinite_sum_are_finite() -> None:
    model = tiny.gpt2().half()
    model.transformer.wte.weight.data.fill_(60_000.0)  # overflows in float16, not in float32
    check_finite(model)
    model = tiny.gpt2()
    model.transformer.wte.weight.data.fill_(3e38)  # overflows in float32 too: every value is looked at
    check_finite(model)


def test_own_code_of_a_repository_runs_only_when_trusted(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A custom class is imported with `trust_remote_code=True`; without it the library's own class is used."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    ran = tmp_path / "ran"
    code = f"open({str(ran)!r}, 'w').close()\nfrom transformers import GPT2LMHeadModel as Base\nclass Own(Base): pass\n"
    (folder / "modeling_own.py").write_text(code)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_own.Own"}
    (folder / "config.json").write_text(json.dumps(config))
    assert load(folder).architecture == "GPT2LMHeadModel"
    assert not ran.exists()
    assert load(folder, trust_remote_code=True).architecture == "Own"
    assert ran.exists()


def test_a_kernel_named_by_the_configuration_is_not_fetched(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "attn_implementation": "stranger/kernel"}))
    assert load(folder).model.config._attn_implementation == "sdpa"


def test_import_is_light() -> None:
    code = "import pavinterp, sys, pavinterp.models; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_real_classes_only() -> None:
    """What AutoModelForCausalLM makes in memory loads too, whatever its attention implementation."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = AutoModelForCausalLM.from_config(tiny.llama().config, attn_implementation="eager")
        assert load(model).model.config._attn_implementation == "eager"


def test_threads_have_a_model_one_after_another():
    """Two measurements of one live model at once: the second waits, and the model comes back as it was."""
    model = tiny.llama()
    attention = model.config._attn_implementation
    tokens = [np.arange(40)] * 2
    with ThreadPoolExecutor(4) as pool:
        runs = list(pool.map(lambda _: pavinterp.measure(model, tokens, progress=False, examples=False), range(4)))
    assert all(run.records.equals(runs[0].records) for run in runs)
    assert model.config._attn_implementation == attention
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
