"""GGUF files: read exactly, dequantised once, and nothing half-written left behind."""

from __future__ import annotations

import hashlib
from pathlib import Path

import gguf
import numpy as np
import pytest
import tiny
import torch
from real_models import real_model
from transformers import LlamaForCausalLM

from pavinterp import gguf_cache
from pavinterp.errors import UserError
from pavinterp.models import load


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PAVINTERP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def folders(cache: Path) -> list[Path]:
    return [path for path in (cache / "gguf").iterdir() if path.is_dir()]


def refused(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        load(path)
    text = str(caught.value)
    assert text.isprintable()
    return text


def test_float_file(tmp_path: Path, cache: Path) -> None:
    model = tiny.llama(width=64)
    path = tiny.gguf_file(tmp_path / "tiny.gguf", model=model)
    handle = load(path)
    assert (handle.name, handle.source, handle.architecture) == ("tiny", "gguf", "LlamaForCausalLM")
    assert handle.revision == f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
    assert (handle.dtype, handle.max_context) == (torch.float32, 128)
    loaded = handle.model.state_dict()
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded[name], weight), name
    assert handle.tokenizer is not None
    assert handle.tokenizer("The bell").input_ids == tiny.tokenizer(adds_bos=False)("The bell").input_ids
    [folder] = folders(cache)
    assert not hasattr(handle.model.config, "quantization_config")
    assert (folder / "model.safetensors").is_file()


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q5_0])
def test_quantised_file_is_read_exactly(tmp_path: Path, kind: gguf.GGMLQuantizationType) -> None:
    """The float32 model holds what gguf's own reader makes of the blocks, to the last bit."""
    model = tiny.llama(width=64)
    handle = load(tiny.gguf_file(tmp_path / "tiny.gguf", model=model, kind=kind.name))
    loaded = handle.model.state_dict()
    for name in ("model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.weight"):
        blocks = gguf.quants.quantize(model.state_dict()[name].numpy(), kind)  # rows are quantised one by one
        expected = gguf.quants.dequantize(blocks, kind)
        assert np.array_equal(loaded[name].numpy(), expected), name
        assert not torch.equal(loaded[name], model.state_dict()[name])


def test_tied_weights(tmp_path: Path) -> None:
    model = tiny.llama(width=64)
    config = type(model.config)(**{**model.config.to_dict(), "tie_word_embeddings": True})
    tied = LlamaForCausalLM(config)
    handle = load(tiny.gguf_file(tmp_path / "tiny.gguf", model=tied))
    assert handle.model.lm_head.weight is handle.model.model.embed_tokens.weight
    assert torch.equal(handle.model.lm_head.weight, tied.lm_head.weight)


def test_dequantised_once(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny.gguf_file(tmp_path / "tiny.gguf")
    first = load(path)
    monkeypatch.setattr(gguf_cache, "_dequantise", lambda *arguments: pytest.fail("dequantised a second time"))
    second = load(path.rename(tmp_path / "renamed.gguf"))  # the content is the key
    assert second.name == "renamed"
    assert second.revision == first.revision
    assert len(folders(cache)) == 1


@pytest.mark.parametrize("ending", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_nothing_is_left_of_a_write_that_failed(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, ending: BaseException | type[BaseException]
) -> None:
    path = tiny.gguf_file(tmp_path / "tiny.gguf")

    def fail(model: object, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise ending

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", fail)
    with pytest.raises((KeyboardInterrupt, UserError)) as caught:
        load(path)
    assert folders(cache) == []
    if caught.type is UserError:
        assert f"cannot keep the dequantised tiny.gguf in {cache / 'gguf'}" in str(caught.value)
        assert "PAVINTERP_CACHE" in str(caught.value)
    monkeypatch.undo()
    monkeypatch.setenv("PAVINTERP_CACHE", str(cache))
    assert load(path).source == "gguf"


def test_what_a_killed_run_left_is_replaced(tmp_path: Path, cache: Path) -> None:
    path = tiny.gguf_file(tmp_path / "tiny.gguf")
    load(path)
    [folder] = folders(cache)
    folder.rename(f"{folder}.part")
    (cache / "gguf" / f"{folder.name}.part" / "model.safetensors").write_bytes(b"half")
    assert load(path).parameters > 0
    assert folders(cache) == [folder]


def test_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PAVINTERP_CACHE", str(tmp_path / "file"))
    assert "set PAVINTERP_CACHE to a folder that can be written" in refused(tiny.gguf_file(tmp_path / "tiny.gguf"))


@pytest.mark.parametrize(("content", "says"), [(b"", "is empty"), (b"PK\x03\x04" + bytes(99), "does not start as")])
def test_not_a_gguf_file(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "bad.gguf").write_bytes(content)
    assert f"{tmp_path / 'bad.gguf'} {says}" in refused(tmp_path / "bad.gguf")


@pytest.mark.parametrize("keep", [0.001, 0.02, 0.5, 0.99])
def test_cut_short(tmp_path: Path, cache: Path, keep: float) -> None:
    path = tiny.gguf_file(tmp_path / "tiny.gguf")
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * keep)])
    assert f"{path} is corrupt, cut short or not a whole model" in refused(path)
    assert folders(cache) == []


def test_unsupported_architecture(tmp_path: Path) -> None:
    path = tiny.gguf_file(tmp_path / "tiny.gguf", architecture="clip")
    assert "architecture clip is not supported yet: give the model's Hugging Face id or folder" in refused(path)


def test_part_of_a_split_file(tmp_path: Path) -> None:
    path = tiny.gguf_file(tmp_path / "tiny.gguf", more={"split.count": 2})
    assert "is one part of a file that was split: merge its parts first" in refused(path)


@pytest.mark.parametrize("how", ["metadata", "tensor"])
def test_rotary_scaling_is_not_passed_over(tmp_path: Path, how: str) -> None:
    """transformers reads neither from a GGUF file: the model would attend differently, and nothing would say so."""
    more = {"llama.rope.scaling.type": "linear"} if how == "metadata" else {"rope_freqs.weight": np.ones(8, np.float32)}
    path = tiny.gguf_file(tmp_path / "tiny.gguf", more=more)
    assert "scales its rotary positions, which transformers does not read from GGUF" in refused(path)


def test_numbers_that_have_no_place_are_not_passed_over(tmp_path: Path, cache: Path) -> None:
    path = tiny.gguf_file(tmp_path / "tiny.gguf", more={"blk.0.attn_q.bias": np.ones(64, np.float32)})
    assert "holds 64 numbers that transformers' LlamaForCausalLM leaves out" in refused(path)
    assert folders(cache) == []


def test_architecture_without_attention(tmp_path: Path) -> None:
    path = tiny.gguf_file(tmp_path / "tiny.gguf", architecture="mamba")
    assert "is a model without attention (mamba)" in refused(path)


@pytest.mark.slow
def test_smollm2(cache: Path) -> None:
    handle = load(real_model("smollm2"))
    config = handle.model.config
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (30, 9, 3)
    assert (handle.max_context, handle.parameters) == (8192, 134_515_008)
    assert handle.tokenizer is not None
    ids = handle.tokenizer("The capital of France is Paris.", return_tensors="pt").input_ids
    with torch.no_grad():
        assert handle.model(ids, labels=ids).loss < 3.0, "a trained model, read rightly, finds this sentence easy"
    assert len(folders(cache)) == 1
