"""Gates between the attention and its output projection: read exactly, and told from anything else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from architectures import build
from test_architectures import DOCUMENTS, captured, handle_of, trials_of

import pavinterp as pi
from pavinterp.capture.output_projection import output_weight
from pavinterp.capture.paths import on_path
from pavinterp.errors import UserError
from pavinterp.sweep import inspect

TOKENS = torch.from_numpy(np.stack(DOCUMENTS[:2]))


def measured(model):
    return pi.measure(pi.load(model), DOCUMENTS, context=20, tests=None, examples=False, progress=False)


def test_the_gate_is_the_models_own():
    handle = handle_of("qwen3_next")
    projected = {}
    attention = handle.model.model.layers[1].self_attn
    hook = attention.q_proj.register_forward_hook(lambda m, i, output: projected.update(q=output))
    try:
        call = captured(handle, TOKENS)[0][1]
    finally:
        hook.remove()
    expected = projected["q"][1].view(20, 4, 2, 8)[:, :, 1].sigmoid().transpose(0, 1)  # [heads, n, d_v]
    torch.testing.assert_close(trials_of(call, TOKENS, 1).gate, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_verify_says_that_a_layer_is_gated(dtype):
    found = pi.verify(build("qwen3_next").to(dtype), length=32)
    assert found["passed"]
    assert [(layer["layer"], layer["between"]) for layer in found["layers"]] == [(1, "gate"), (3, "gate")]
    assert found["agreement"] is None  # TransformerLens shows no response from before the gate
    if dtype == torch.float32:
        assert "certificate failed" in found["no_other_path"]


def test_contributions_of_a_gated_head_add_up_to_what_it_writes():
    handle = handle_of("qwen3_next")
    calls, written = captured(handle, TOKENS)
    one = trials_of(calls[1], TOKENS, 1)
    w_o = calls[1].projection.weight.detach().T.view(4, 8, -1)
    uss = one.values.repeat_interleave(2, 0)[:, None] * one.gate[:, :, None]  # [heads, tests, n, d_v]
    writes = one.strengths[..., None] * torch.einsum("htnd,hdw->htnw", uss, w_o)
    torch.testing.assert_close(writes.sum((0, 2)), written[1][1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(writes.norm(dim=-1), one.contributions, rtol=1e-4, atol=1e-6)


def test_an_ablation_before_the_output_projection_is_a_gate_of_zero():
    model = build("llama")
    before = measured(model).records.set_index(["sequence", "layer", "head"])["effective_load"]
    projection = model.model.layers[1].self_attn.o_proj
    without_head_2 = torch.ones(32).index_fill_(0, torch.arange(16, 24), 0.0)
    hook = projection.register_forward_pre_hook(lambda module, inputs: (inputs[0] * without_head_2,))
    try:
        run = measured(model)
    finally:
        hook.remove()
    after = run.records.set_index(["sequence", "layer", "head"])["effective_load"]
    assert after.xs((1, 2), level=("layer", "head")).isna().all()
    rest = after.index[after.notna()]
    np.testing.assert_allclose(after[rest], before[rest], rtol=1e-5)
    assert any("with a gate before W_O" in note for note in run.manifest["notes"])


def test_a_whole_layer_ablated_is_a_gate_of_zero():
    model = build("llama")
    model.model.layers[1].self_attn.o_proj.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0,))
    run = measured(model)
    loads = run.records.query("stimuli == 'text'").set_index("layer")["effective_load"]
    assert loads.loc[1].isna().all()
    assert loads.loc[0].notna().all()


@pytest.mark.parametrize(
    "change",
    [
        lambda x: torch.nn.functional.rms_norm(x, x.shape[-1:]),
        lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]),
        lambda x: x - x.flip(-1),
        lambda x: x + 1,
        lambda x: x.relu(),
        lambda x: x + 0.01 * x.abs(),
        lambda x: torch.cat([x[..., 8:], x[..., :8]], dim=-1),
    ],
    ids=["rms norm", "layer norm", "difference", "constant", "rectifier", "a little of one", "heads moved"],
)
def test_anything_else_is_refused(change):
    model = build("llama")
    projection = model.model.layers[1].self_attn.o_proj
    projection.register_forward_pre_hook(lambda module, inputs: (change(inputs[0]),))
    assert [info.between for info in inspect(pi.load(model))] == [None, "unknown"]
    with pytest.raises(UserError, match="layer 1: between the attention and its output projection"):
        measured(model)
    found = pi.measure(pi.load(model), DOCUMENTS, context=20, layers=[0], examples=False, progress=False)
    assert set(found.records["layer"]) == {0}


def from_position_8(change):
    """A hook that begins after the few tokens with which `inspect` looks at a model."""

    def late(module, inputs):
        changed = inputs[0].clone()
        changed[:, 8:] = change(changed[:, 8:])
        return (changed,)

    return late


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])  # one without a gate, one with gates in layers 1 and 3
def test_what_changes_later_positions_only_is_tested_there(name):
    model = build(name)
    projection = model.model.layers[1].self_attn.o_proj
    hook = projection.register_forward_pre_hook(
        from_position_8(lambda x: torch.nn.functional.rms_norm(x, x.shape[-1:]))
    )
    with pytest.raises(UserError, match="layer 1: between the attention and its output projection"):
        measured(model)
    found = pi.verify(model, length=32)
    assert not found["passed"]
    assert {row["layer"]: row["residual"] for row in found["layers"]}[1] == float("inf")
    other = 0 if name == "llama" else 3
    run = pi.measure(pi.load(model), DOCUMENTS, context=20, layers=[other], progress=False)
    assert set(run.records["layer"]) == {other}
    hook.remove()
    projection.register_forward_pre_hook(from_position_8(lambda x: x * torch.linspace(-2, 3, x.shape[-1])))
    run = measured(model)
    assert run.layers[1].between == "gate"
    assert run.manifest["certificate"]["largest"] <= 1e-5


# by path: transformers' registry, the hooks of a bridge made for it (TransformerLens or Hugging Face's module computes)
PROJECTIONS = {
    "llama": lambda model: model.model.layers[1].self_attn.o_proj,
    "gpt2": lambda model: model.transformer.h[1].attn.c_proj,
    "bloom": lambda model: model.transformer.h[1].self_attention.dense,
    "gpt_neo": lambda model: model.transformer.h[1].attn.attention.out_proj,
    "mpt": lambda model: model.transformer.blocks[1].attn.out_proj,
    "xglm": lambda model: model.model.layers[1].self_attn.out_proj,
    "openai-gpt": lambda model: model.transformer.h[1].attn.c_proj,
}


@pytest.mark.parametrize("in_place", [False, True], ids=["new tensor", "in place"])
@pytest.mark.parametrize("name", PROJECTIONS)
def test_hooks_on_the_projection_are_seen_on_every_path(name, in_place):
    """Negative factors, and zero for head 2: the measured responses are the hooked model's."""
    model = build(name)
    factors = torch.linspace(-2, 3, 32).index_fill_(0, torch.arange(16, 24), 0.0)
    change = (lambda x: x.mul_(factors)) if in_place else (lambda x: x * factors)
    PROJECTIONS[name](model).register_forward_pre_hook(lambda module, inputs: (change(inputs[0]),))
    handle = on_path(pi.load(model))
    calls, written = captured(handle, TOKENS)
    call = calls[1]
    assert float(call.response[..., 16:24].abs().max()) == 0
    w_o = output_weight(call.projection, 4, 8).flatten(0, 1)
    steady = written[1] - call.response @ w_o  # a bias, at most
    torch.testing.assert_close(steady, steady[:1, :1].expand_as(steady), rtol=0, atol=1e-5)
    gate = trials_of(call, TOKENS, 1).gate.transpose(0, 1).flatten(1)
    torch.testing.assert_close(gate, factors.expand_as(gate), rtol=1e-5, atol=1e-6)
    run = measured(model)
    assert [info.between for info in run.layers] == [None, "gate"]
    assert run.records.query("layer == 1 and head == 2")["effective_load"].isna().all()
    PROJECTIONS[name](model).register_forward_pre_hook(lambda module, inputs: (inputs[0].relu(),))
    with pytest.raises(UserError, match="layer 1: between the attention and its output projection"):
        measured(model)


def test_a_gate_where_the_attention_puts_out_zero_is_zero():
    """What it is there shows in nothing, and 0 / 0 would be NaN."""
    call = captured(handle_of("llama"), TOKENS)[0][1]
    attended = torch.tensor([0.0, -2.0, 4.0, 0.0])
    call = replace(call, attended=attended, response=torch.tensor([0.0, 1.0, -8.0, 3.0]))
    assert call.gate(...).tolist() == [0.0, -0.5, -2.0, 0.0]


def test_tiles_of_a_gated_head_are_the_whole(monkeypatch):
    one = trials_of(captured(handle_of("qwen3_next"), TOKENS)[0][1], TOKENS, 1)
    monkeypatch.setattr("pavinterp.trials.TILE", 1)
    tiles = list(one.tiles())
    assert len(tiles) == one.kv_heads > 1
    torch.testing.assert_close(torch.cat([tile.response for tile in tiles]), one.response)
    torch.testing.assert_close(torch.cat([tile.us_norms for tile in tiles]), one.us_norms)


CONDITIONAL = {
    "in large batches": lambda x: x.relu() if len(x) > 2 else x,
    "of some content": lambda x: torch.where((x.abs().amax((1, 2), keepdim=True) > 0.5), x.relu(), x),
    "over the whole batch": lambda x: x / x.norm(),
    "over the batch at each position": lambda x: x / x.norm(dim=(0, 2), keepdim=True),
}


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
@pytest.mark.parametrize("change", CONDITIONAL)
def test_what_happens_in_some_batches_only_is_not_taken_for_a_gate(change, name):
    model = build(name)
    projection = model.model.layers[1].self_attn.o_proj
    projection.register_forward_pre_hook(lambda module, inputs: (CONDITIONAL[change](inputs[0]),))
    with pytest.raises(UserError, match="layer 1: between the attention and its output projection"):
        pi.measure(pi.load(model), DOCUMENTS, context=20, batch=4, tests=None, examples=False, progress=False)


@pytest.mark.parametrize("late", [False, True])
def test_hooks_that_a_bridge_passes_by_are_refused(late):
    """BLOOM's fused projection is computed by the bridge itself: a hook on it would do nothing."""
    model = build("bloom")

    def change(module, inputs, output):
        changed = output.clone()
        changed[:, 40 if late else 0 :] = 0
        return changed

    model.transformer.h[1].self_attention.query_key_value.register_forward_hook(change)
    documents = [np.random.default_rng(i).integers(3, 100, 48) for i in range(2)]
    with pytest.raises(UserError, match=r"computes something else|hooks that do nothing in the TransformerBridge"):
        pi.measure(pi.load(model), documents, context=48, examples=False, progress=False)
