"""What a user can get wrong in `load`: one line each, that says what, where and what to do."""

from __future__ import annotations

import json
import os
import pickle
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import huggingface_hub
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Model

from pavinterp.errors import UserError
from pavinterp.models import load


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny.model_folder(tmp_path / "tiny-gpt2")


def message(spec: object, **options: object) -> str:
    """The error's message, which must be one line without control characters."""
    with pytest.raises(UserError) as caught:
        load(spec, **options)
    text = str(caught.value)
    assert text.isprintable()
    assert len(text) < 600
    return text


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def edit_weights(folder: Path, change: object) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


# ------------------------------------------------------------------------------------------------ what is not there


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("./nowhere", "no folder './nowhere': check the path"),
        ("/nowhere/at/all", "no folder '/nowhere/at/all'"),
        ("a/b/c", "no folder 'a/b/c'"),
        ("", "no model given: give demo, a Hugging Face id"),
        ("nowhere.gguf", "no file nowhere.gguf: check the path"),
        ("not a name", "no Hugging Face id looks like that: check the path"),
    ],
)
def test_nothing_there(spec: str, says: str) -> None:
    assert says in message(spec)


def test_file_that_is_no_model(folder: Path) -> None:
    assert "is a file, not a model: give its folder" in message(folder / "model.safetensors")


def test_folder_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "no weights in" in message(folder)
    assert str(folder) in message(folder)


def test_folder_without_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert f"no config.json in {folder}" in message(folder)
    (folder / "adapter_config.json").write_text("{}")
    assert "is an adapter, not a model: merge it" in message(folder)
    (folder / "m.gguf").touch()
    assert f"give the file itself, {folder / 'm.gguf'}" in message(folder)


def test_shard_that_is_not_there(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}))
    assert "names model-00001-of-00002.safetensors, which is not there" in message(folder)
    index.write_text("[]")
    assert "is not an index of weights" in message(folder)


@pytest.mark.parametrize("absolute", [False, True])
def test_shard_outside_of_the_folder(folder: Path, absolute: bool) -> None:
    outside = folder.parent / "outside.safetensors"
    (folder / "model.safetensors").rename(outside)
    names = dict.fromkeys(tiny.gpt2().state_dict(), str(outside) if absolute else "../outside.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    assert "outside.safetensors, which lies outside its folder: it is not read" in message(folder)


def test_missing_tokenizer(folder: Path) -> None:
    """transformers makes a tokenizer of one token where there are no files: that is not one."""
    for path in folder.glob("tokenizer*"):
        path.unlink()
    assert "no tokenizer files with" in message(folder)
    assert "name one with --tokenizer" in message(folder)
    assert load(folder, tokenizer=False).tokenizer is None
    assert "tokenizer=True is no tokenizer" in message(folder, tokenizer=True)
    (folder / "tokenizer.json").write_text("{")
    assert "no tokenizer to be had from" in message(folder)


# ------------------------------------------------------------------------------------------------ the hub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, str]]]:
    """A hub on this machine that answers every request with the status and error code put into the list."""
    answer: list[tuple[int, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, code = answer[0]
            body = b""
            if code == "EntryNotFound" and self.path.startswith("/api/"):  # the repository is there, its files are not
                status, body = 200, json.dumps({"id": "org/name", "sha": "a" * 40}).encode()
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *arguments: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    use_hub(monkeypatch, tmp_path, f"http://127.0.0.1:{server.server_port}")
    yield answer
    server.shutdown()


def use_hub(monkeypatch: pytest.MonkeyPatch, cache: Path, endpoint: str) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", endpoint)


@pytest.mark.parametrize(
    ("status", "code", "says"),
    [
        (404, "RepoNotFound", "no such model on the Hugging Face hub: check the name"),
        (401, "RepoNotFound", "a private one needs HF_TOKEN"),
        (403, "GatedRepo", "org/name is gated: accept its terms"),
        (404, "RevisionNotFound", "org/name has no revision 'v9'"),
        (404, "EntryNotFound", "no config.json or no weights in org/name: check the name"),
    ],
)
def test_hub_refuses(hub: list[tuple[int, str]], status: int, code: str, says: str) -> None:
    hub.append((status, code))
    assert says in message("org/name", revision="v9")


def test_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_hub(monkeypatch, tmp_path, "http://127.0.0.1:9")
    text = message("org/name")
    assert "no folder 'org/name' here, and the Hugging Face hub cannot be reached: check the network" in text


def test_offline_and_not_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_hub(monkeypatch, tmp_path, "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "nor in the Hugging Face cache, and offline mode is on: unset HF_HUB_OFFLINE" in message("org/name")


def test_cached_repository_without_weights(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_hub(monkeypatch, tmp_path / "hub", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    (folder / "model.safetensors").unlink()
    tiny.hub_cache(tmp_path / "hub", "org/name", folder)
    assert "no config.json or no weights in org/name" in message("org/name")


# ------------------------------------------------------------------------------------------------ damaged files


@pytest.mark.parametrize("content", [b"", b"x" * 1000, None])
def test_corrupt_safetensors(folder: Path, content: bytes | None) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2] if content is None else content)
    assert f"the weights of {folder} are corrupt or cut short" in message(folder)


@pytest.mark.parametrize("lie", ["length", "offsets", "shape"])
def test_safetensors_with_a_header_that_lies(folder: Path, lie: str) -> None:
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8 : 8 + size]), raw[8 + size :]
    one = next(value for name, value in header.items() if name != "__metadata__")
    if lie == "offsets":
        one["data_offsets"][1] += 1 << 40
    if lie == "shape":
        one["shape"][0] *= 2
    text = json.dumps(header).encode()
    length = (1 << 60) if lie == "length" else len(text)
    path.write_bytes(length.to_bytes(8, "little") + text + data)
    assert f"the weights of {folder} are corrupt or cut short" in message(folder)


def test_config_that_makes_no_sense(folder: Path) -> None:
    edit_config(folder, n_head="four")
    assert f"cannot load {folder}" in message(folder)
    edit_config(folder, n_head=3)
    assert f"cannot load {folder}" in message(folder)
    edit_config(folder, model_type="from-the-future")
    assert f"config.json of {folder} has a model_type that this transformers does not know" in message(folder)
    (folder / "config.json").write_text("{")
    assert "not a valid JSON file" in message(folder)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("half", [False, True])
def test_not_finite(folder: Path, bad: float, half: bool) -> None:
    def spoil(weights: dict[str, torch.Tensor]) -> None:
        weights["transformer.h.1.attn.c_attn.weight"][3, 5] = bad
        if half:
            weights.update({name: weight.half() for name, weight in weights.items()})

    edit_weights(folder, spoil)
    text = message(folder)
    assert "transformer.h.1.attn.c_attn.weight holds 1 NaN or infinite values of 3072" in text


def test_not_finite_in_memory() -> None:
    model = tiny.llama()
    model.model.layers[1].self_attn.k_proj.weight.data[0] = torch.nan
    assert "LlamaForCausalLM: model.layers.1.self_attn.k_proj.weight holds 32 NaN" in message(model)


def test_missing_weights_are_not_made_up(folder: Path) -> None:
    edit_weights(folder, lambda weights: weights.pop("transformer.h.0.attn.c_attn.weight"))
    assert "lacks 1 weight (transformer.h.0.attn.c_attn.weight), which would be random" in message(folder)


def test_weights_of_another_shape(folder: Path) -> None:
    edit_weights(folder, lambda weights: weights.update({"transformer.wpe.weight": torch.zeros(8, 32)}))
    assert "holds transformer.wpe.weight as [8, 32] where config.json makes it [64, 32]" in message(folder)


class Hostile:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.mark}",)


@pytest.mark.parametrize("form", ["zip", "legacy", "bare"])
def test_malicious_pickle_is_not_run(folder: Path, tmp_path: Path, form: str) -> None:
    (folder / "model.safetensors").unlink()
    mark, path = tmp_path / "ran", folder / "pytorch_model.bin"
    weights = {**tiny.gpt2().state_dict(), "transformer.extra": Hostile(mark)}
    if form == "bare":
        path.write_bytes(pickle.dumps(Hostile(mark), protocol=2))
    else:
        torch.save(weights, path, _use_new_zipfile_serialization=form == "zip")
    for trust in (False, True):  # trusting a repository's code is not trusting its pickles
        text = message(folder, trust_remote_code=trust)
        assert "hold more than numbers and were not loaded" in text or "are corrupt" in text
    assert not mark.exists()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04" + b"x" * 99, b"x" * 99])
def test_corrupt_pickle(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(content)
    assert f"the weights of {folder} are corrupt or cut short" in message(folder)


# ------------------------------------------------------------------------------------------------ not a decoder


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (tiny.bert, "is an encoder-only model (bert)"),
        (tiny.t5, "is an encoder-decoder model (t5)"),
        (tiny.mamba, "is a model without attention (mamba)"),
    ],
)
def test_not_a_decoder(build: object, says: str, tmp_path: Path) -> None:
    model = build()
    assert f"{type(model).__name__} {says}" in message(model)
    model.save_pretrained(tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").write_bytes(b"")  # refused by the configuration, before any weights are read
    assert f"{tmp_path / 'm'} {says}" in message(tmp_path / "m")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "roberta", "architectures": ["RobertaForCausalLM"]}, "is an encoder-only model"),
        ({"model_type": "distilbert"}, "is an encoder-only model"),
        ({"model_type": "bart"}, "is an encoder-decoder model"),
        ({"model_type": "rwkv"}, "is a model without attention"),
        ({"model_type": "mamba2"}, "is a model without attention"),
        ({"model_type": "vit"}, "is not a causal language model"),
    ],
)
def test_not_a_decoder_by_its_configuration(folder: Path, config: dict[str, object], says: str) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    assert says in message(folder)


def test_not_a_model() -> None:
    assert "Linear is not a Hugging Face model" in message(torch.nn.Linear(2, 2))
    assert "int is not a Hugging Face model" in message(3)
    assert "GPT2Model has no language-model head" in message(GPT2Model(tiny.gpt2().config))
    with torch.device("meta"):
        empty = type(tiny.gpt2())(tiny.gpt2().config)
    assert "holds no weights" in message(empty)


# ------------------------------------------------------------------------------------------------ arguments


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_no_cuda(folder: Path) -> None:
    assert "no device 'cuda' here: give one of auto, cpu" in message(folder, device="cuda")


@pytest.mark.parametrize("device", ["tpu", "cuda:99", "meta", "", "gpu 0"])
def test_unknown_device(folder: Path, device: str) -> None:
    assert f"no device {device!r} here: give one of auto, cpu" in message(folder, device=device)


@pytest.mark.parametrize("dtype", ["float8", "int32", torch.int64, "Tensor", ""])
def test_unknown_dtype(folder: Path, dtype: object) -> None:
    assert "give one of float32, bfloat16, float16, float64" in message(folder, dtype=dtype)


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float16"},
        {"device": "cpu"},
        {"revision": "main"},
        {"device_map": "auto"},
        {"trust_remote_code": True},
    ],
)
def test_live_model_with_arguments(options: dict[str, object]) -> None:
    assert f"{next(iter(options))}= with a model in memory: it is taken as it is" in message(tiny.gpt2(), **options)
    load(tiny.gpt2(), dtype=torch.float32, device="auto")


def test_arguments_that_do_not_go_together(folder: Path) -> None:
    assert "only a Hugging Face id has revisions" in message(folder, revision="main")
    assert "give one of them" in message(folder, device="cpu", device_map="auto")


def test_device_map_needs_accelerate(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.utils.is_accelerate_available", lambda: False)
    assert "device_map needs the package accelerate: pip install accelerate" in message(folder, device_map="auto")
    load(folder)


def test_device_map_of_no_sense(folder: Path) -> None:
    assert f"cannot load {folder}" in message(folder, device_map="everywhere")


# ------------------------------------------------------------------------------------------------ code and packages


def test_own_code_without_trust(folder: Path) -> None:
    (folder / "evil.py").write_text("raise SystemExit('run')")
    edit_config(folder, model_type="own", auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"})
    assert "needs Python code of its own repository: read it, then allow it with --trust-remote-code" in message(folder)


def test_own_code_of_the_tokenizer_without_trust(folder: Path) -> None:
    (folder / "evil.py").write_text("raise SystemExit('run')")
    (folder / "tokenizer.json").unlink()
    settings = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["evil.T", "evil.T"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert "tokenizer" in message(folder)


def test_package_that_is_not_installed(folder: Path) -> None:
    edit_config(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    assert "package" in message(folder)


def test_out_of_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*arguments: object, **options: object) -> None:
        torch.empty(2**60)  # more than can be addressed: torch's own error

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", too_large)
    text = message(folder)
    assert f"out of memory loading {folder} as float32 on cpu: try --dtype bfloat16" in text


@pytest.mark.parametrize("name", ["n_layer", "num_hidden_layers", "num_labels"])
def test_sizes_that_no_model_has(folder: Path, name: str) -> None:
    edit_config(folder, **{name: 10**9})
    assert f"{name} is 1,000,000,000, more than any model has" in message(folder)
