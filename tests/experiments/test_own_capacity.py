"""Memories of a head's own pairs: against plain loops and the theorem, invariances, controls, tables."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from architectures import build
from make_trials import make_trials
from test_run import stimuli

import pavinterp as pi
from pavinterp.errors import UserError
from pavinterp.experiments.capacities import crossing
from pavinterp.experiments.own_memories import (
    Memory,
    Retrieval,
    error_free,
    memories,
    rows_of,
    stored_probes,
    test_probes,
)
from pavinterp.experiments.random_weights import untrained
from pavinterp.theory.capacity import expected_squared_fidelity
from pavinterp.theory.rules import RULES

test_probes.__test__ = False  # a function of the package, not a test
DOCUMENTS = [np.random.default_rng(i).integers(3, 101, 24) for i in range(9)]
LOADS = (1, 2, 3, 5, 8)


def cos(a, b):
    return float(a @ b / (a.norm() * b.norm()))


@pytest.mark.parametrize("cs", ["centred", "raw"])
def test_stored_probes_equal_a_plain_loop(cs):
    one, w_o = make_trials(n=9)
    found = stored_probes(one, Memory("stored", "hebbian", cs), LOADS)
    order = torch.randperm(9, generator=one.generator())
    for head in range(one.heads):
        kv = head // one.group
        keys = one.keys[kv] - one.keys[kv].mean(0) if cs == "centred" else one.keys[kv]
        values = one.values[kv] - one.values[kv].mean(0)
        for load, got in zip(LOADS, found, strict=True):
            chosen = sorted(order[:load].tolist())
            for place, i in enumerate(chosen):
                response = sum(cos(keys[i], keys[j]) * (values[j] @ w_o[head]) for j in chosen)
                assert float(got[head, place]) == pytest.approx(cos(response, values[i] @ w_o[head]), abs=1e-9)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rule", ["softmax", "hebbian"])
def test_real_tests_equal_a_plain_loop(rule, gated):
    one, w_o = make_trials(n=9, gated=gated)
    found = test_probes(one, Memory("tests", rule), LOADS)
    seen = (one.bias > float("-inf"))[0]
    ready = [t for t in range(len(one.tests)) if int(seen[t].sum()) >= 4.5]
    rank = torch.rand(len(ready), 9, generator=one.generator())
    for head in range(one.heads):
        kv = head // one.group
        keys = one.keys[kv] - one.keys[kv].mean(0)
        for row, t in enumerate(ready):
            visible = [j for j in range(9) if seen[t, j]]
            target = int(one.target[head, t])
            others = sorted((j for j in visible if j != target), key=lambda j: float(rank[row, j]))
            gate = one.gate[head, t] if gated else torch.ones_like(one.values[0, 0])
            mean = one.values[kv][visible].mean(0)
            us = {j: ((one.values[kv, j] - mean) * gate) @ w_o[head] for j in visible}
            for load, got in zip(LOADS, found, strict=True):
                if load > min(int(seen[i].sum()) for i in ready):
                    assert got.isnan().all()
                    continue
                stored = [target, *others[: load - 1]]
                weight = {
                    j: float(
                        one.strengths[head, t, j] if rule == "softmax" else one.queries[head, one.tests[t]] @ keys[j]
                    )
                    for j in stored
                }
                response = sum(weight[j] * us[j] for j in stored)
                assert float(got[head, row]) == pytest.approx(cos(response, us[target]), abs=1e-9)


def test_isotropic_pairs_obey_the_theorem():
    """f^2 = 1 / (1 + (N - 1) / d_k) in expectation of a ratio of means; 40 memories of 128 random pairs."""
    d, loads, f2 = 32, (2, 8, 33, 128), []
    for seed in range(40):
        one = replace(make_trials(n=128, d_k=d, d_v=64, width=256, seed=seed)[0], rng_seed=seed)
        f2.append(
            [float(f.clamp_min(0).square().mean()) for f in stored_probes(one, Memory("stored", "hebbian"), loads)]
        )
    expected = [float(expected_squared_fidelity(float(n), float(d))) for n in loads]
    # crosstalk has a part along the stored US by chance, 1/64 of its power and a little more with unequal lengths
    np.testing.assert_allclose(np.mean(f2, 0), expected, atol=0.03)


def test_every_rule_holds_one_pair_and_the_pseudoinverse_as_many_as_dimensions():
    one, _ = make_trials(n=9)
    for rule in RULES:
        assert float(stored_probes(one, Memory("stored", rule), (1,))[0].min()) == pytest.approx(1, abs=1e-6)
    within = stored_probes(one, Memory("stored", "pseudoinverse"), (1, 2, 3, 4))
    assert min(float(f.min()) for f in within) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("metric", ["euclidean", "query"])
def test_invariances(metric):
    """A constant added to all CSs, another basis of the USs, and in the query metric another basis of the CSs."""
    one, w_o = make_trials(n=9)
    memory = Memory("stored", "hebbian", "centred", metric)
    expected = stored_probes(one, memory, LOADS)
    shifted = replace(one, keys=one.keys + 3.0)
    generator = torch.Generator().manual_seed(5)
    basis = (
        torch.linalg.qr(torch.randn(one.values.shape[-1], one.values.shape[-1], generator=generator).double())[0] * 2
    )
    from pavinterp.capture.output_projection import write_factor

    write = write_factor(torch.linalg.inv(basis).to(w_o) @ w_o, torch.float64)
    turned = replace(one, values=one.values @ basis.to(one.values), write=write)
    changed = [shifted, turned]
    if metric == "query":
        a = torch.randn(one.keys.shape[-1], one.keys.shape[-1], generator=generator).to(one.keys)
        changed.append(replace(one, keys=one.keys @ a, queries=one.queries @ torch.linalg.inv(a).T))
    for other in changed:
        for got, want in zip(stored_probes(other, memory, LOADS), expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    raw = Memory("stored", "hebbian", "raw", metric)
    one_way, other_way = (stored_probes(x, raw, LOADS)[-1] for x in (one, shifted))
    assert float((one_way - other_way).abs().max()) > 0.01  # the raw figure is of the parametrisation


def test_error_free():
    fidelities = [torch.tensor([[1.0, 1.0]]), torch.tensor([[0.9, 0.8]]), torch.tensor([[0.6, 0.9]])]
    assert error_free(fidelities, (1, 2, 4), together=True).tolist() == [2.0]
    assert error_free(fidelities, (1, 2, 4), together=False).tolist() == [3.0]  # 2 and 4
    wrong = [torch.tensor([[-1.0, 1.0]]), *fidelities[1:]]
    assert error_free(wrong, (1, 2, 4), together=True).tolist() == [0.0]
    missing = [*fidelities[:2], torch.full((1, 2), float("nan"))]
    assert error_free(missing, (1, 2, 4), together=False).tolist() == [2.0]


def test_crossing():
    loads = (1, 2, 4, 8)
    curves = np.array([[1, 0.75, 0.25, 0.2], [1, 0.9, 0.8, 0.7], [0.4, 0.3, 0.2, 0.1], [1, 0.5, 0.4, np.nan]])
    np.testing.assert_allclose(crossing(curves, loads), [2 * 2**0.5, np.inf, 1, 2])


def test_rows_of():
    x = torch.arange(12.0).view(2, 3, 2)
    index = torch.tensor([[[0, 2]], [[1, 1]]])
    assert rows_of(x, index).tolist() == [[[[0, 1], [4, 5]]], [[[8, 9], [8, 9]]]]


def test_memories_of_rules():
    of = memories(["hebbian", "softmax"])
    assert len(set(of)) == len(of) == 4 + 2 + 2 + 2
    assert {m.metric for m in of if m.rule == "softmax"} == {"euclidean"}
    measure = Retrieval(of, (1, 2))
    assert len({column.name for column in measure.columns}) == len(of) * 3


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "qwen3_next", "bloom", "mistral", "deepseek_v3"])
def test_an_architecture(name):
    """Grouped queries, sinks and windows, gates, ALiBi inside a bridge, d_k != d_v."""
    model = build(name)
    found = pi.memory_capacity(pi.load(model), stimuli(DOCUMENTS), rules=["hebbian", "softmax"], progress=False)
    assert found.manifest["certificate"]["largest"] <= 1e-5
    heads = found.heads.index
    assert set(found.memories.index.droplevel([2, 3, 4, 5, 6])) == set(heads)
    assert set(found.memories.index.get_level_values("weights")) == {"trained", "random"}
    stored = found.memories.xs("stored", level="probe")
    assert (stored["capacity"] >= 1).all()
    assert (stored["capacity_lo"] <= stored["capacity"]).all()
    assert (stored["capacity"] <= stored["capacity_hi"]).all()
    finite = np.isfinite(stored["capacity"])
    assert (stored.loc[finite, "capacity"] <= stored.loc[finite, "largest"]).all()
    assert found.curves["f2"].between(0, 1 + 1e-6).all()
    assert found.memories.attrs["units"]["capacity"] == "associations"
    again = pi.memory_capacity(pi.load(model), stimuli(DOCUMENTS), rules=["hebbian", "softmax"], progress=False)
    np.testing.assert_array_equal(again.memories.to_numpy(), found.memories.to_numpy())


def test_a_models_own_weights_are_random_already():
    """The control of a model with random weights: the same up to chance, so the interval of most ratios holds 1."""
    documents = [np.random.default_rng(i).integers(3, 101, 64) for i in range(12)]
    found = pi.memory_capacity(
        pi.load(build("gpt2", n_positions=64)), stimuli(documents), rules=["hebbian"], progress=False
    )
    ratio = found.memories.xs(("hebbian", "isotropic"), level=("rule", "cs"))["trained_over_random"].dropna()
    assert len(ratio) == 8
    assert ratio.median() == pytest.approx(1, abs=0.2)


def test_untrained_weights_are_others_and_seeded():
    handle = pi.load(build("llama"))
    before = torch.random.get_rng_state()
    one, same, other = untrained(handle, 1), untrained(handle, 1), untrained(handle, 2)
    assert torch.equal(before, torch.random.get_rng_state())
    weights = [x.model.model.layers[0].self_attn.q_proj.weight for x in (handle, one, same, other)]
    assert torch.equal(weights[1], weights[2])
    assert not torch.equal(weights[1], weights[3])
    assert not torch.equal(weights[0], weights[1])
    assert one.dtype == handle.dtype
    assert not one.model.training


def test_what_cannot_be_asked():
    model = build("llama")
    with pytest.raises(UserError, match="rules"):
        pi.memory_capacity(pi.load(model), stimuli(DOCUMENTS), rules=["nonsense"], progress=False)
    with pytest.raises(UserError, match="layers"):
        pi.memory_capacity(pi.load(model), stimuli(DOCUMENTS), layers=[7], progress=False)


def test_isotropic_keys_of_a_head_know_nothing_of_other_heads(monkeypatch):
    one = replace(make_trials(n=24)[0], keys=make_trials(n=24)[0].keys * torch.tensor([10.0, 1.0]).view(2, 1, 1))
    memory = Memory("stored", "softmax", "isotropic")
    whole = stored_probes(one, memory, LOADS)
    monkeypatch.setattr("pavinterp.trials.TILE", 1)
    tiles = [stored_probes(tile, memory, LOADS) for tile in one.tiles()]
    for load, found in enumerate(whole):
        torch.testing.assert_close(torch.cat([tile[load] for tile in tiles]), found)
