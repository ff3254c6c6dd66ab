"""What experiments leave undefined or refuse: heads without a US of their own, hooks on some rows, odd arguments."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from architectures import build
from test_run import stimuli

import pavinterp as pi
from pavinterp.errors import UserError
from pavinterp.experiments.needed import needed
from pavinterp.experiments.random_weights import untrained

DOCUMENTS = [np.random.default_rng(i).integers(3, 101, 24) for i in range(9)]
TEXT = stimuli(DOCUMENTS)


def with_equal_uss(bias: float, dtype: torch.dtype = torch.float32) -> pi.models.ModelHandle:
    """KV head 0 of layer 0 (heads 0 and 1) finds one US everywhere: no weight from the stream, only a bias."""
    model = build("qwen2").to(dtype)
    attention = model.model.layers[0].self_attn
    width = attention.head_dim
    with torch.no_grad():
        attention.v_proj.weight[:width] = 0
        attention.v_proj.bias[:width] = bias * torch.linspace(1, 2, width)
    return pi.load(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [0.0, 0.37])
def test_a_head_whose_uss_are_one_has_no_numbers_made_of_rounding(bias, dtype):
    handle = with_equal_uss(bias, dtype)
    held = pi.memory_capacity(handle, TEXT, rules=["hebbian", "softmax"], control=False, progress=False).memories
    explained = pi.explain(handle, TEXT, rules=["covariance", "delta"], progress=False)
    cost = pi.linearisation_cost(handle, TEXT, layers=[0], rules=["covariance"], progress=False)
    for head in (0, 1):
        assert held.loc[(0, head), ["capacity", "error_free"]].isna().all(axis=None)
        assert np.isnan(explained.heads.loc[(0, head), ["linearity", "best_r2"]].astype(float)).all()
        assert np.isnan(cost.heads.loc[(0, head), "r2_covariance"])
    needed_here = pi.needed_associations(handle, TEXT, layers=[0], progress=False)
    assert needed_here.heads["needed_5"].isna().tolist() == [True, True, False, False]
    assert (needed_here.correlations["heads"] == 2).all()
    assert cost.correlations.index.size
    assert held.loc[(0, 2), "error_free"].notna().all()
    assert explained.heads.loc[(0, 2), "linearity"] > 0
    assert cost.heads.loc[(0, 2), "r2_covariance"] > 0


def test_uss_that_differ_by_what_matrix_products_round():
    """The same token everywhere: USs of layer 0 are equal, but perhaps for the last bit."""
    found = pi.memory_capacity(
        pi.load(build("llama")), stimuli([np.full(24, 7)] * 9), layers=[0], rules=["hebbian"], control=False,
        progress=False,
    )  # fmt: skip
    assert found.memories["capacity"].isna().all()


def test_no_head_that_writes_has_needed_associations(recwarn):
    model = build("llama")
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    found = pi.needed_associations(pi.load(model), TEXT, progress=False)
    assert (found.heads["ablation"] == 0).all()
    assert found.heads["needed_5"].isna().all()
    assert found.correlations[["rank_correlation", "ratio"]].isna().all(axis=None)
    assert not [warning for warning in recwarn if issubclass(warning.category, RuntimeWarning)]


def test_the_logarithm_of_a_divergence_that_is_rounding_tells_nothing():
    """12 % of the ablation's with 6, nothing but rounding with 8: log(12 / 5) / log(1200 / 5) of the way."""
    kept = np.array([1, 2, 4, 6, 8])
    at = 6 * (8 / 6) ** (np.log(12 / 5) / np.log(1200 / 5))
    for last in (0.0, 1e-17, 1e-9):
        assert needed(np.array([0.9, 0.5, 0.3, 0.12, last]), 1.0, kept, 0.05) == pytest.approx(at, rel=1e-12)


@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_hooks_on_some_rows_of_a_batch_are_refused(name):
    model = build(name)
    blocks = model.model.layers if name == "llama" else model.transformer.h

    def hook(module, inputs, output):
        whole = isinstance(output, tuple)
        states = (output[0] if whole else output).clone()
        states[1:] += torch.linspace(-1, 1, states.shape[-1])
        return (states, *output[1:]) if whole else states

    blocks[0].register_forward_hook(hook)
    for experiment in (
        pi.needed_associations,
        pi.linearisation_cost,
        pi.association_budget,
        pi.head_redundancy,
        pi.head_importance,
    ):
        with pytest.raises(UserError, match=r"some rows of a batch only|hooks that do nothing") as error:
            experiment(pi.load(model), TEXT, progress=False)
        assert "\n" not in str(error.value)


def test_a_hook_that_treats_all_rows_alike_is_measured():
    model = build("llama")
    model.model.layers[0].register_forward_hook(lambda module, inputs, output: output + 1)
    assert pi.needed_associations(pi.load(model), TEXT, layers=[1], progress=False).heads["ablation"].gt(0).all()


def test_the_control_keeps_the_number_format_of_every_tensor():
    model = build("llama").to(torch.bfloat16)
    rotary = model.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq.float()
    model.model.norm.float()
    theirs = untrained(pi.load(model)).model
    assert theirs.model.rotary_emb.inv_freq.dtype == torch.float32
    torch.testing.assert_close(
        theirs.model.rotary_emb.inv_freq, build("llama").model.rotary_emb.inv_freq, rtol=0, atol=0
    )
    assert theirs.model.norm.weight.dtype == torch.float32
    assert theirs.model.layers[0].self_attn.q_proj.weight.dtype == torch.bfloat16


EXPERIMENTS = {
    pi.memory_capacity: {"rules": ["hebbian"], "control": False},
    pi.explain: {"rules": ["covariance"]},
    pi.needed_associations: {"heads": np.int64(2)},
    pi.error_propagation: {"strengths": np.array([0.1], np.float32), "draws": np.int64(1)},
    pi.linearisation_cost: {"rules": ["covariance"]},
    pi.head_redundancy: {"pairs": np.int64(2), "tests": np.int32(8)},
    pi.head_importance: {},
    pi.association_budget: {"by": "load", "max_loss_increase": np.float32(0.5)},
}


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda function: function.__name__)
@pytest.mark.parametrize("kind", [iter, np.array, set], ids=["iterator", "array", "set"])
def test_numbers_of_any_kind_are_taken_and_written_down(experiment, kind):
    found = experiment(
        pi.load(build("llama")), TEXT, layers=kind([1]), seed=np.int32(0), progress=False, **EXPERIMENTS[experiment]
    )
    assert json.loads(json.dumps(found.manifest))["arguments"]["layers"] == [1]


@pytest.mark.parametrize(
    ("experiment", "argument"),
    [(pi.memory_capacity, "control"), (pi.needed_associations, "renormalise"), (pi.association_budget, "renormalise")],
)
def test_a_word_is_no_yes_or_no(experiment, argument):
    with pytest.raises(UserError, match=rf"{argument} must be True or False, got 'no'"):
        experiment(pi.load(build("llama")), TEXT, progress=False, **{argument: "no"})
