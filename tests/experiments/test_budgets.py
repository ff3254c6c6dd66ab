"""The association budget: cutting everywhere against plain loops, allocations against search, what is promised."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from architectures import ROWS, build
from make_trials import make_trials
from test_run import stimuli

import pavinterp as pi
from pavinterp.capture.paths import on_path
from pavinterp.errors import UserError
from pavinterp.experiments.allocations import alike, by_curves, by_load, smallest, spread
from pavinterp.experiments.budgets import split
from pavinterp.experiments.cut_everywhere import STRONGEST, WINDOW, WINDOW_AND_FIRST, Cutter, cut_to, keeps
from pavinterp.experiments.cut_responses import all_tests, strongest
from pavinterp.experiments.interventions import logits, with_heads
from pavinterp.models import untouched
from pavinterp.sweep import inspect

LENGTH = 24
DOCUMENTS = [np.random.default_rng(i).integers(3, 101, LENGTH) for i in range(4)]
GRID = np.array([1, 2, 4, 8, 16])
QUIET = {"progress": False}


@pytest.fixture(scope="module")
def llama():
    return pi.association_budget(build("llama"), stimuli(DOCUMENTS), max_loss_increase=0.02, **QUIET)


@pytest.mark.parametrize("rule", [WINDOW, WINDOW_AND_FIRST])
@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_windows_equal_a_plain_loop(rule, renormalise, gated):
    one, _ = make_trials(n=9, gated=gated)
    budget = torch.arange(1, one.heads + 1) * 2 - 1
    got = cut_to(one, keeps(one, budget, rule), renormalise)
    for head, t in itertools.product(range(one.heads), range(9)):
        m = int(budget[head])
        if rule == WINDOW:
            chosen = [j for j in range(t + 1) if j > t - m]
        else:
            chosen = [j for j in range(t + 1) if j > t - max(m - 1, 1) or (j == 0 and m > 1)]
        assert len(chosen) == min(m, t + 1)
        strengths = {j: float(one.strengths[head, t, j]) for j in chosen}
        scale = float(one.strengths[head, t].sum()) / sum(strengths.values()) if renormalise else 1.0
        expected = sum(a * one.values[head // one.group, j] for j, a in strengths.items()) * scale
        expected = expected if one.gate is None else expected * one.gate[head, t]
        torch.testing.assert_close(got[head, t], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("renormalise", [False, True])
def test_the_strongest_of_all_heads_are_those_of_each_alone(renormalise):
    one, _ = make_trials(n=9)
    budget = torch.tensor([1, 2, 5, 9, 3, 4])[: one.heads]
    got = cut_to(one, keeps(one, budget, STRONGEST), renormalise)
    for head in range(one.heads):
        expected = strongest(one, head, [int(budget[head])], renormalise)[0]
        torch.testing.assert_close(got[head], expected, rtol=1e-12, atol=1e-14)


def test_a_test_that_keeps_no_strength_is_left_with_none_and_not_with_nan():
    keys, queries = torch.zeros(1, 9, 4, dtype=torch.float64), torch.zeros(1, 9, 4, dtype=torch.float64)
    keys[:, 0], queries[:] = 1e4, 1.0  # all strength is on the first position
    one, _ = make_trials(heads=1, kv_heads=1, n=9, keys=keys, queries=queries)
    got = cut_to(one, keeps(one, torch.tensor([2]), WINDOW), True)
    assert torch.isfinite(got).all()
    assert (got[0, 4] == 0).all()


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_next", "gpt_oss", "bloom", "mistral"])
@pytest.mark.parametrize("rule", [STRONGEST, WINDOW, WINDOW_AND_FIRST])
@pytest.mark.parametrize("renormalise", [False, True])
def test_a_budget_of_all_is_the_model_itself(name, rule, renormalise):
    handle, tokens = on_path(pi.load(build(name))), torch.from_numpy(DOCUMENTS[0])[None]

    def put_together(call):
        one = all_tests(call, tokens[0], {})
        responses = cut_to(one, keeps(one, torch.full((one.heads,), LENGTH), rule), renormalise)
        return with_heads(call, {head: responses[head][None] for head in range(one.heads)})

    with untouched(handle.model):
        whole = logits(handle, tokens)
        again = logits(handle, tokens, put_together)
        budgets = {info.layer: np.full(info.heads, LENGTH) for info in inspect(handle)}
        row = Cutter(handle, stimuli(DOCUMENTS[:1])).cut(budgets, rule, renormalise).iloc[0]
    assert float((again - whole).norm() / whole.norm()) <= 1e-5
    assert tuple(budgets) == ROWS[name].layers
    assert (row["divergence"], row["loss_change"]) == (0, 0)  # a head that keeps all is left alone


def test_all_heads_cut_at_once_are_what_hooks_of_ones_own_give():
    model = build("llama")
    handle, tokens = pi.load(model), torch.from_numpy(DOCUMENTS[0])[None]
    budgets = {0: np.array([1, 2, 3, 24]), 1: np.array([4, 1, 24, 2])}

    def eager(module, inputs, given):  # attention by hand, a window a head
        hidden, (cos, sin) = given["hidden_states"], given["position_embeddings"]
        shape = (1, LENGTH, -1, 8)
        q, k, v = (p(hidden).view(shape).transpose(1, 2) for p in (module.q_proj, module.k_proj, module.v_proj))
        turn = lambda x: x * cos + torch.cat([-x[..., 4:], x[..., :4]], -1) * sin  # noqa: E731
        q, k, v = turn(q), turn(k).repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        back = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
        a = (q @ k.mT * 8**-0.5).masked_fill(back < 0, -torch.inf).softmax(-1)
        a = a * torch.stack([back < m for m in budgets[module.layer_idx]])
        return module.o_proj((a @ v).transpose(1, 2).flatten(2)), None

    with untouched(model), torch.no_grad():
        row = Cutter(handle, stimuli(DOCUMENTS[:1])).cut(budgets, WINDOW, False).iloc[0]
        whole = model(input_ids=tokens).logits[0].double().log_softmax(-1)
        for layer in model.model.layers:
            layer.self_attn.register_forward_hook(
                lambda module, inputs, given, output: eager(module, inputs, given), with_kwargs=True
            )
        cut = model(input_ids=tokens).logits[0].double().log_softmax(-1)
    loss = (whole - cut)[:-1].gather(-1, tokens[0, 1:, None]).mean()
    assert row["divergence"] == pytest.approx(float((whole.exp() * (whole - cut)).sum(-1).mean()), rel=1e-4)
    assert row["loss_change"] == pytest.approx(float(loss), rel=1e-4, abs=1e-6)
    reads = [np.minimum(m, np.arange(1, LENGTH + 1)).mean() for part in budgets.values() for m in part]
    assert row["reads"] == pytest.approx(np.mean(reads), rel=1e-12)


def test_budgets_from_curves_are_the_cheapest_for_their_divergence():
    """Every candidate is on the lower convex hull of all allocations there are, found by trying them all."""
    rng = np.random.default_rng(0)
    divergence = -np.sort(-rng.uniform(0, 1, (3, 5)), axis=1)
    most, points = np.full(3, 20), np.append(GRID, 20)
    curves = np.hstack([divergence, np.zeros((3, 1))])
    every = [
        (points[list(pick)].sum(), sum(curves[head, i] for head, i in enumerate(pick)))
        for pick in itertools.product(range(6), repeat=3)
    ]
    found = by_curves(divergence, GRID, most)
    assert found[0].tolist() == [1, 1, 1]
    assert found[-1].tolist() == [20, 20, 20]
    for budgets in found:
        total = sum(curves[head, np.flatnonzero(points == m)[0]] for head, m in enumerate(budgets))
        assert total <= min(y for x, y in every if x <= budgets.sum()) + 1e-12
    assert (np.diff([budgets.sum() for budgets in found]) > 0).all()


def test_a_head_that_is_worth_nothing_keeps_one_until_all_others_keep_all():
    curves = np.array([[0.5, 0.4, 0.2, 0.1, 0.05], np.zeros(5)])
    found = by_curves(curves, GRID, np.array([20, 20]))
    assert {int(budgets[1]) for budgets in found[:-1]} == {1}
    assert found[-1].tolist() == [20, 20]
    found = by_load(np.array([3.0, np.nan]), np.array([20, 20]))
    assert {int(budgets[1]) for budgets in found[:-1]} == {1}
    assert found[-1].tolist() == [20, 20]


def test_budgets_by_load_are_proportional_to_it():
    load, most = np.array([1.2, 2.5, 10.0]), np.array([24, 24, 8])
    found = by_load(load, most)
    for budgets in found:
        low = max((b - 1) / x for b, x in zip(budgets, load, strict=True) if b > 1) if budgets.max() > 1 else 0
        high = min((b / x for b, x, m in zip(budgets, load, most, strict=True) if b < m), default=np.inf)
        assert low <= high * (1 + 1e-9)  # one factor gives them all, rounded up
    totals = [int(budgets.sum()) for budgets in found]
    assert totals == sorted(set(totals))
    assert (totals[0], totals[-1]) == (3, most.sum())


@pytest.mark.parametrize("total", [4, 5, 17, 38, 55, 56])
def test_spread_has_the_total_and_is_even(total):
    most = np.array([24, 4, 24, 4])
    got = spread(total, most)
    assert got.sum() == total
    assert (got <= most).all()
    below = got[got < most]
    assert below.size == 0 or below.max() - below.min() <= 1


def test_bisection_gives_the_first_that_is_enough_where_loss_falls():
    candidates, asked = alike(np.full(3, 24)), []

    def loss_of(budgets):
        asked.append(int(budgets[0]))
        return 1 / budgets[0]

    budgets, loss = smallest(candidates, loss_of, 0.1)
    assert (budgets.tolist(), loss) == ([10, 10, 10], 0.1)
    assert len(asked) <= 5
    assert smallest(candidates, lambda budgets: 0.0 if budgets[0] == 24 else 1.0, 0.1)[0].tolist() == [24] * 3


def test_what_is_promised_of_a_result(llama):
    methods = llama.methods.set_index(["matched", "method", "renormalised"])
    own = llama.methods[llama.methods["matched"] == "loss"]
    assert (own["calibration_loss"] <= 0.02).all()
    assert own["chosen"].sum() == 1
    total = int(llama.heads["budget"].sum())
    assert (llama.methods.loc[llama.methods["matched"] == "total", "total"] == total).all()
    assert own.loc[own["chosen"], "total"].item() == total == own["total"].iloc[:2].min()
    assert methods.loc[("loss", llama.manifest["chosen"], False), "over_budget"] == 0
    assert (llama.methods["reads"] <= llama.methods["mean"] + 1e-9).all()
    assert llama.heads["budget"].between(1, LENGTH).all()
    curve = llama.curve[~llama.curve["renormalised"]].set_index("kept")
    assert curve.loc[16, "divergence"] < 0.1 * curve.loc[1, "divergence"]
    assert np.isnan(own["loss_increase_lo"]).all()  # two documents are held out
    assert "No intervals" in llama.manifest["intervals"]


def test_the_same_seed_gives_the_same_and_the_halves_share_no_document(llama):
    again = pi.association_budget(build("llama"), stimuli(DOCUMENTS), max_loss_increase=0.02, **QUIET)
    pd.testing.assert_frame_equal(again.heads, llama.heads)
    pd.testing.assert_frame_equal(again.methods, llama.methods)
    text = replace(stimuli(DOCUMENTS * 2), document=np.array([0, 0, 1, 1, 2, 2, 3, 3]))
    first, second = split(text, 0)
    assert sorted(first + second) == list(range(8))
    assert not set(text.document[first]) & set(text.document[second])
    one = replace(text, document=np.zeros(8, int))
    assert [len(half) for half in split(one, 0)] == [4, 4]


def test_intervals_are_over_eight_held_out_documents():
    text = stimuli([np.random.default_rng(i).integers(3, 101, 12) for i in range(16)])
    found = pi.association_budget(build("llama"), text, max_loss_increase=0.05, by="load", **QUIET)
    row = found.methods[found.methods["chosen"]].iloc[0]
    assert row["method"] == "load"
    assert row["loss_increase_lo"] <= row["loss_increase"] <= row["loss_increase_hi"]
    assert row["divergence_lo"] < row["divergence"] < row["divergence_hi"]
    assert "divergence" not in found.heads
    assert "bootstrap over 8 documents" in found.manifest["intervals"]


def test_a_head_that_writes_nothing_gets_the_smallest_budget():
    model = build("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight[:, 16:24] = 0  # head 2
    found = pi.association_budget(model, stimuli(DOCUMENTS), max_loss_increase=0.02, **QUIET)
    assert found.heads.loc[(1, 2), ["budget", "budget_curves", "budget_load"]].tolist() == [1, 1, 1]
    assert found.heads.loc[(1, 2), "divergence"] == 0


def test_only_some_layers_and_windows_are_all_that_a_head_has():
    found = pi.association_budget(build("mistral"), stimuli(DOCUMENTS), layers=[1], by="load", **QUIET)
    assert set(found.heads.index.get_level_values("layer")) == {1}
    assert set(found.heads["most"]) == {8}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_loss_increase": 0}, "positive number"),
        ({"max_loss_increase": float("nan")}, "positive number"),
        ({"max_loss_increase": "little"}, "positive number"),
        ({"by": "size"}, "by must be one of"),
    ],
)
def test_arguments_that_are_none(options, said):
    with pytest.raises(UserError, match=said):
        pi.association_budget(build("llama"), stimuli(DOCUMENTS), **QUIET, **options)


def test_one_sequence_is_not_enough():
    with pytest.raises(UserError, match="at least two sequences"):
        pi.association_budget(build("llama"), stimuli(DOCUMENTS[:1]), **QUIET)
    with pytest.raises(UserError, match="one length"):
        pi.association_budget(build("llama"), stimuli([DOCUMENTS[0], DOCUMENTS[1][:9]]), **QUIET)


def test_a_window_and_the_first_position_seen_are_all_that_a_windowed_head_sees():
    one, _ = make_trials(n=20, window=8)
    keep = keeps(one, torch.full((one.heads,), 8), "window_and_first")
    visible = one.bias > float("-inf")
    assert bool((keep | ~visible).all())
    fewer = keeps(one, torch.full((one.heads,), 3), "window_and_first")
    assert (fewer & visible)[0, 15].nonzero().flatten().tolist() == [8, 14, 15]
