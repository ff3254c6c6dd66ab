"""Needed associations: cutting against plain loops, the count against closed forms, intervals, and a known head."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from architectures import build
from make_trials import make_trials
from test_run import stimuli

import pavinterp as pi
from pavinterp.errors import UserError
from pavinterp.experiments.cut_responses import KEPT, chosen_heads, curves, strongest
from pavinterp.experiments.needed import needed, rank_correlations, summary
from pavinterp.experiments.rivals import Rivals
from pavinterp.models import untouched
from pavinterp.sweep import inspect

RNG = np.random.default_rng(0)
DOCUMENTS = [np.random.default_rng(i).integers(3, 101, 24) for i in range(3)]
GRID = np.array([1, 2, 4, 8, 16, 32])


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("renormalise", [False, True])
def test_cutting_equals_a_plain_loop(renormalise, gated):
    one, w_o = make_trials(n=9, gated=gated)
    got = strongest(one, 3, [1, 2, 5, 9], renormalise)
    values = one.values[1]
    for i, m in enumerate((1, 2, 5, 9)):
        for t in range(9):
            gate = one.gate[3, t] if gated else torch.ones(6)
            sizes = [float(one.strengths[3, t, j] * ((gate * values[j]) @ w_o[3]).norm()) for j in range(9)]
            best = sorted(range(t + 1), key=lambda j: -sizes[j])[:m]
            kept = sum(float(one.strengths[3, t, j]) for j in best)
            expected = sum(one.strengths[3, t, j] * values[j] for j in best) * gate / (kept if renormalise else 1)
            torch.testing.assert_close(got[i, t], expected, rtol=1e-9, atol=1e-12)


@pytest.fixture(scope="module")
def llama():
    model = build("llama")
    handle, text = pi.load(model), stimuli(DOCUMENTS)
    with untouched(model):
        return model, curves(handle, text, [(0, 1), (1, 2)])


def test_mean_ablation_is_what_a_hook_of_ones_own_gives(llama):
    model, frame = llama
    projection, seen = model.model.layers[1].self_attn.o_proj, []
    tokens = torch.from_numpy(np.stack(DOCUMENTS))
    with torch.no_grad():
        hook = projection.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
        whole = model(input_ids=tokens).logits.double().log_softmax(-1)
        hook.remove()
        mean = seen[0][..., 16:24].mean((0, 1))  # head 2
        put = lambda module, inputs: (torch.cat([inputs[0][..., :16], mean.expand(3, 24, 8), inputs[0][..., 24:]], -1),)  # noqa: E731
        hook = projection.register_forward_pre_hook(put)
        ablated = model(input_ids=tokens).logits.double().log_softmax(-1)
        hook.remove()
    divergence = torch.nn.functional.kl_div(ablated, whole, reduction="none", log_target=True).sum(-1).mean(-1)
    got = frame.query("layer == 1 and head == 2 and kept == 0").sort_values("sequence")
    np.testing.assert_allclose(got["divergence"], divergence, rtol=1e-4)
    truth = tokens[:, 1:, None]
    loss = (whole - ablated)[:, :-1].gather(-1, truth).mean((1, 2))
    np.testing.assert_allclose(got["loss_change"], loss, rtol=1e-3, atol=1e-6)


def test_divergence_falls_and_more_associations_than_a_window_holds_change_nothing(llama):
    _, frame = llama
    mean = frame.groupby(["layer", "head", "kept"])["divergence"].mean()
    for key in ((0, 1), (1, 2)):
        curve = mean.loc[key].loc[1:]
        assert curve.loc[16] < 0.1 * curve.loc[1]
        assert (curve >= -1e-12).all()  # a Kullback-Leibler divergence, but for rounding in float64
    handle = pi.load(build("mistral"))  # a window of 8
    with untouched(handle.model):
        frame = curves(handle, stimuli(DOCUMENTS[:1]), [(0, 0)])
    of = frame.set_index("kept")["divergence"]
    assert of.loc[6] > 1e-6
    assert of.loc[[8, 12, 16]].max() < 1e-9


def test_sequences_of_several_lengths_are_refused():
    handle = pi.load(build("llama"))
    with pytest.raises(UserError, match="sequences of one length"):
        curves(handle, stimuli([DOCUMENTS[0], DOCUMENTS[1][:9]]), [(0, 0)])


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("share", [0.2, 0.05])
def test_a_power_law_has_its_closed_form(power, share):
    """Divergence m^-power of the ablation's falls to `share` at share^(-1/power): a straight line in logarithms."""
    got = needed(0.3 * GRID**-power, 0.3, GRID, share)
    exact = share ** (-1 / power)
    assert got == (pytest.approx(exact, rel=1e-12) if exact <= 32 else np.inf)


def test_the_ends_of_the_scale():
    assert needed(np.zeros(6), 0.1, GRID, 0.05) == 1
    assert needed(np.full(6, 0.1), 0.1, GRID, 0.05) == np.inf
    assert np.isnan(needed(np.zeros(6), 0.0, GRID, 0.05))
    assert needed(np.array([0.1, 0.1, 0.004, 0.1, 0.0, 0.0]), 0.1, GRID, 0.05) < 4  # the first crossing


def frame_of(scales, documents):
    """Curves scale / m of the ablation's, by head and sequence: needed 20 scale at 5 %, where scales are constant."""
    rows = [
        (0, head, sequence, m, 1.0 if m == 0 else scale[sequence] / m, 0.0, documents[sequence])
        for head, scale in enumerate(scales)
        for sequence in range(len(documents))
        for m in (0, *GRID)
    ]
    return pd.DataFrame(rows, columns=["layer", "head", "sequence", "kept", "divergence", "loss_change", "document"])


def test_intervals_are_over_documents():
    same = summary(frame_of([np.full(16, 0.4)], list(range(16))))
    assert same.loc[(0, 0), ["needed_5", "needed_5_lo", "needed_5_hi"]].tolist() == pytest.approx([8, 8, 8])
    scales = RNG.uniform(0.2, 0.6, 16)
    one_each = summary(frame_of([scales], list(range(16)))).iloc[0]
    assert one_each["needed_5_lo"] < one_each["needed_5"] < one_each["needed_5_hi"]
    assert one_each["needed_5"] == pytest.approx(20 * scales.mean(), rel=1e-9)
    # the mean of 16 has this standard error; 1,000 draws know a percentile to some 5 % of it
    spread = (one_each["needed_5_hi"] - one_each["needed_5_lo"]) / (2 * 1.96)
    assert spread == pytest.approx(20 * scales.std() / 4, rel=0.15)
    assert np.isnan(summary(frame_of([scales], [i // 4 for i in range(16)])).loc[(0, 0), "needed_5_lo"])


def test_ranks_are_those_of_the_heads():
    scales = [np.full(8, x) for x in (0.1, 0.2, 0.3, 0.4, 0.5)]
    frame = frame_of(scales, list(range(8)))
    records = pd.DataFrame(
        [
            (0, head, sequence, 10 * (head + 1), -1 - head)
            for head in range(5)
            for sequence in range(8)
        ],
        columns=["layer", "head", "sequence", "same", "opposite"],
    )  # fmt: skip
    got = rank_correlations(frame, records, ["same", "opposite"])
    assert got.loc[
        "same", ["rank_correlation", "rank_correlation_lo", "rank_correlation_hi"]
    ].tolist() == pytest.approx([1, 1, 1])
    assert got.loc["opposite", "rank_correlation"] == pytest.approx(-1)
    assert got.loc["same", "ratio"] == pytest.approx(0.2)  # 2, 4, ..., 10 over 10, 20, ..., 50
    assert got["heads"].tolist() == [5, 5]


def test_rivals_of_uniform_contributions_are_their_number():
    values = torch.ones(1, 24, 6, dtype=torch.float64)
    keys = torch.zeros(1, 24, 8, dtype=torch.float64)
    one, _ = make_trials(heads=1, kv_heads=1, tests=[11], keys=keys, values=values)
    got = Rivals()(one)
    for name in ("load_order_1", "load_order_inf", "strength_entropy_exp", "strength_participation"):
        assert got[name].item() == pytest.approx(12, rel=1e-9)
    assert got["top_4_share"].item() == pytest.approx(1 / 3, rel=1e-9)


@pytest.mark.slow
def test_the_demo_models_previous_token_head_needs_few(demo):
    probe = pi.tokenise(pi.corpus("demo"), demo.tokenizer, context=96, sequences=2)
    with untouched(demo.model):
        heads = chosen_heads(inspect(demo), {1})
        table = summary(curves(demo, probe, heads))
    assert table["needed_5"].min() < 3
    assert (table["needed_20"] <= table["needed_5"]).all()
    assert max(KEPT) > 96
