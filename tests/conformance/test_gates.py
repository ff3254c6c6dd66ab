"""Gates between the attention and its output projection: read exactly, and told from anything else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from architectures import build
from test_architectures import DOCUMENTS, captured, handle_of, trials_of

import pavinterp as pi
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
        lambda x: torch.cat([x[..., 8:], x[..., :8]], dim=-1),
    ],
    ids=["rms norm", "layer norm", "difference", "constant", "rectifier", "heads moved"],
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


def test_what_changes_responses_of_some_passes_only_is_refused():
    """A hook that begins after the few tokens on which gates are told from other things."""
    model = build("llama")

    def late(module, inputs):
        changed = inputs[0].clone()
        changed[:, 8:] = torch.nn.functional.rms_norm(changed[:, 8:], changed.shape[-1:])
        return (changed,)

    model.model.layers[1].self_attn.o_proj.register_forward_pre_hook(late)
    with pytest.raises(UserError, match=r"layers \[1\]: something .* did not on a few random tokens"):
        measured(model)
    assert set(pi.measure(pi.load(model), DOCUMENTS, context=20, layers=[0], progress=False).records["layer"]) == {0}
