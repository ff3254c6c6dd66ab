"""Models in memory in other forms (compiled, off-loaded, resized): the records are the plain model's.

Tolerance of records: 1e-5, as the very same kernels run on the very same numbers.
"""

from __future__ import annotations

import numpy as np
import pytest
import tiny
import torch
from formats import DOCUMENTS, TOKENS, assert_measured_like, assert_same_records, build, logits, measured

import pavinterp as pi
from pavinterp.compiled import is_compiled
from pavinterp.errors import UserError

SAME = 1e-5
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
