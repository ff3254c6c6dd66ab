"""Head importance: derivatives against differences, plain loops, dead heads, every family, and the command."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import torch
from architectures import ROWS, build
from test_run import stimuli

import pavinterp as pi
from pavinterp import cli
from pavinterp.errors import UserError
from pavinterp.experiments import pruning
from pavinterp.experiments.ablations import ablated_losses, mean_replacement, responses
from pavinterp.experiments.cross_fitting import halves
from pavinterp.experiments.gains import end_gains
from pavinterp.experiments.head_scores import SCORES, first_order_losses, numbers_removed, order, uniqueness, writes
from pavinterp.experiments.pruning_tables import predictor_table
from pavinterp.models import untouched

LENGTH = 20
DOCUMENTS = [np.random.default_rng(i).integers(3, 101, LENGTH) for i in range(9)]
TEXT = stimuli(DOCUMENTS)
HEADS = [(layer, head) for layer in (0, 1) for head in range(4)]


@pytest.fixture(scope="module")
def found():
    return pi.head_importance(pi.load(build("llama")), TEXT, progress=False)


def without_output(layer, head, d_v=8):
    """A Llama of which one head writes nothing."""
    model = build("llama")
    with torch.no_grad():
        model.model.layers[layer].self_attn.o_proj.weight[:, d_v * head : d_v * head + d_v] = 0
    return model


# --- Scores ---


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_oss", "qwen3_next"])
def test_gradient_times_activation_is_the_slope_of_the_loss(name):
    """By central differences along the way from the responses to their mean.

    Norms compute in float32 whatever the model does: rounding of the loss over the step, and curvature, are 5e-6 each.
    """
    model = build(name).double()
    model.config._experts_implementation_internal = "eager"  # the grouped kernel of experts does not take float64
    handle, step = pi.load(model), 1e-2
    layer = ROWS[name].layers[-1]
    with untouched(model):
        heads = [(layer, head) for head in range(model.config.num_attention_heads)]
        mean = mean_replacement(handle, TEXT, heads)
        got = first_order_losses(handle, DOCUMENTS[0], {layer}, mean)
        assert not isinstance(got, str), got
        own = responses(handle, DOCUMENTS[0], heads)
        tokens = torch.from_numpy(DOCUMENTS[0])
        ends = []
        for sign in (1, -1):
            moved = {head: own[head] + sign * step * (mean[head] - own[head]) for head in heads}
            ends.append(ablated_losses(handle, tokens, [[head] for head in heads], moved)["loss_change"].to_numpy())
    slope = (ends[0] - ends[1]) / (2 * step)
    np.testing.assert_allclose(got["first_order"].to_numpy(), slope, rtol=1e-3, atol=2e-5)


def test_writes_by_a_plain_loop():
    model, seen = build("llama"), []
    handle, projection = pi.load(model), model.model.layers[1].self_attn.o_proj
    with untouched(model):
        mean = mean_replacement(handle, TEXT, HEADS)
        got = writes(handle, DOCUMENTS[2], {1}, mean)
        hook = projection.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0][0].detach().double()))
        model(input_ids=torch.from_numpy(DOCUMENTS[2])[None])
        hook.remove()
    weight = projection.weight.detach().double()
    for head in range(4):
        mine = slice(8 * head, 8 * head + 8)
        share, norm, product = [], [], []
        for row in seen[0]:
            about = weight[:, mine] @ (row[mine] - mean[1, head][0])
            other = weight[:, :8] @ (row[:8] - mean[1, 0][0])
            share.append(float(about @ about / (weight @ row).square().sum()))
            norm.append(float((weight[:, mine] @ row[mine]).norm()))
            product.append(float(about @ other))
        assert got.loc[head, "relative"] == pytest.approx(np.mean(share), rel=1e-5)
        assert got.loc[head, "write_norm"] == pytest.approx(np.mean(norm), rel=1e-5)
        assert got.loc[head, "product_0"] == pytest.approx(np.mean(product), rel=1e-4, abs=1e-6)


def test_uniqueness_is_one_less_r_squared():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 4))
    x[:, 3] = x[:, 0] + 0.5 * x[:, 1] + rng.normal(size=200)
    expected = []
    for head in range(4):
        others = np.delete(x, head, axis=1)
        left = x[:, head] - others @ np.linalg.lstsq(others, x[:, head], rcond=None)[0]
        expected.append(left @ left / (x[:, head] @ x[:, head]))
    np.testing.assert_allclose(uniqueness(x.T @ x), expected, rtol=1e-9)
    twins = np.column_stack([x[:, 0], -2 * x[:, 0], np.zeros(200)])
    np.testing.assert_allclose(uniqueness(twins.T @ twins), 0, atol=1e-9)
    np.testing.assert_allclose(uniqueness(np.diag([2.0, 3.0])), 1)
    np.testing.assert_allclose(uniqueness(np.array([[2.0]])), 1)  # alone in its layer


def test_the_predicted_divergence_is_end_gain_times_the_relative_square(found):
    """Half by half from the parts, by plain means."""
    model = build("llama")
    handle = pi.load(model)
    in_a = halves(9, 0)
    expected = np.zeros(8)
    with untouched(model):
        for half in (in_a, ~in_a):
            mine = np.flatnonzero(half)
            mean = mean_replacement(handle, stimuli([DOCUMENTS[i] for i in mine]), HEADS)
            share = np.mean([writes(handle, DOCUMENTS[i], {0, 1}, mean)["relative"] for i in mine], axis=0)
            gains = [end_gains(handle, torch.from_numpy(DOCUMENTS[i]), layers=[0, 1], sequence=i) for i in mine]
            gain = np.mean([one["end_gain_write"] for one in gains], axis=0)
            expected += share * np.repeat(gain, 4) / 2
    np.testing.assert_allclose(found.heads["gain"], expected, rtol=1e-4)


def test_a_random_like_write_has_the_divergence_predicted(found):
    """Random weights: a head's write is as good as a random direction, so that scale and order are right."""
    ratio = found.heads["gain"] / found.heads["divergence"]
    assert ((ratio > 0.5) & (ratio < 2)).all()


# --- What is removed ---


def test_orders_and_numbers():
    index = pd.MultiIndex.from_tuples(HEADS[:4], names=["layer", "head"])
    assert order(pd.Series([3.0, 1.0, np.nan, 1.0], index=index)) == [(0, 2), (0, 1), (0, 3), (0, 0)]
    assert numbers_removed(9) == [0, 1, 2, 4, 8, 9]
    assert numbers_removed(8) == [0, 1, 2, 4, 8]
    assert numbers_removed(1) == [0, 1]


def test_a_head_that_writes_nothing_comes_first_and_costs_nothing():
    found = pi.head_importance(pi.load(without_output(1, 2)), TEXT, progress=False)
    dead = found.heads.loc[(1, 2)]
    for name in ("loss_change", "divergence", "gain", "gain_uniqueness", "write_norm", "centred_norm", "gradient"):
        assert dead[name] == pytest.approx(0, abs=1e-12), name
    assert (found.heads.drop((1, 2))["divergence"] > 1e-6).all()
    for name in (*(name for name in SCORES if name not in ("attention_entropy", "effective_load")), "oracle"):
        assert found.curve.loc[(name, 1), "loss_change"] == pytest.approx(0, abs=1e-12), name


def test_each_half_is_judged_by_the_other_and_all_at_once_is_the_plain_ablation(found):
    model = build("llama")
    handle, in_a = pi.load(model), halves(9, 0)
    ends = found.curves[found.curves["removed"] == 8].groupby(["sequence", "order"])["loss_change"].mean().unstack()
    single = found.effects.set_index(["sequence", "layer", "head"])
    with untouched(model):
        for sequence in (0, 1, 2, 3):
            other = np.flatnonzero(in_a != in_a[sequence])
            mean = mean_replacement(handle, stimuli([DOCUMENTS[i] for i in other]), HEADS)
            tokens = torch.from_numpy(DOCUMENTS[sequence])
            plain = ablated_losses(handle, tokens, [HEADS, [(1, 3)]], mean)
            np.testing.assert_allclose(ends.loc[sequence], plain.loc[0, "loss_change"], rtol=1e-4, atol=1e-6)
            got = single.loc[(sequence, 1, 3), ["loss_change", "divergence"]].astype(float)
            np.testing.assert_allclose(got, plain.loc[1, ["loss_change", "divergence"]].astype(float), rtol=1e-4)
    nothing = found.curve.xs(0, level="removed")
    assert (nothing[["loss_change", "loss_change_lo", "loss_change_hi", "below_random"]] == 0).all(axis=None)
    assert found.curve.xs(8, level="removed")["below_random"].abs().max() < 1e-6


def test_scores_of_a_half_are_found_on_it_alone(monkeypatch):
    given, plain = [], pruning.scores

    def watched(*frames):
        given.append([set(frame["sequence"]) for frame in frames])
        return plain(*frames)

    monkeypatch.setattr(pruning, "scores", watched)
    pi.head_importance(pi.load(build("llama")), TEXT, layers=[1], progress=False)
    in_a = halves(9, 0)
    for sets, half in zip(given, (in_a, ~in_a), strict=True):
        assert all(one == set(np.flatnonzero(half)) for one in sets)


def test_a_half_is_ordered_by_what_was_found_on_the_other(monkeypatch):
    made, given, plain_scores, plain_orders = [], [], pruning.scores, pruning._orders

    def scored(*frames):
        made.append((set(frames[1]["sequence"]), plain_scores(*frames)))
        return made[-1][1]

    def ordered(scores, known, seed):
        own = next(sequences for sequences, one in made if one is scores)
        orders = plain_orders(scores, known, seed)
        given.append((own, set(known["sequence"]), orders))
        return orders

    monkeypatch.setattr(pruning, "scores", scored)
    monkeypatch.setattr(pruning, "_orders", ordered)
    judged: list[dict] = []
    plain_curve = pruning._curve
    monkeypatch.setattr(pruning, "_curve", lambda *args: judged.append(args[2]) or plain_curve(*args))
    pi.head_importance(pi.load(build("llama")), TEXT, layers=[1], progress=False)
    assert len(judged) == len(DOCUMENTS)
    for sequence, orders in enumerate(judged):
        (own, known) = next((own, known) for own, known, made_here in given if made_here is orders)
        assert own == known == set(np.flatnonzero(halves(9, 0) != halves(9, 0)[sequence]))


def test_predictors_are_judged_on_the_half_they_were_not_found_on():
    """Half a's scores rise over heads and its outcomes fall, half b's the other way: 1 across halves, -1 within."""
    in_a, up = np.array([True, False]), np.arange(4.0)
    index = pd.MultiIndex.from_tuples(HEADS[:4], names=["layer", "head"])
    table = {half: pd.DataFrame(dict.fromkeys(SCORES, up if half else -up), index=index) for half in (True, False)}
    outcomes = {0: 4 - up, 1: 1 + up}
    rows = [
        {"sequence": i, "layer": 0, "head": head, "loss_change": value, "divergence": value}
        for i, values in outcomes.items()
        for head, value in enumerate(values)
    ]
    found = predictor_table(pd.DataFrame(rows), table, in_a, np.ones((1, 2)), 0.0)["rank_correlation"]
    for outcome in ("loss_change", "divergence"):
        assert found[("gain", outcome)] == pytest.approx(1)
        assert found[("oracle", outcome)] == pytest.approx(-1)  # one half's outcomes against the other's


# --- The whole experiment ---


def test_capture_paths_agree():
    one, two = (
        pi.head_importance(pi.load(build("llama")), TEXT, capture=capture, progress=False)
        for capture in ("attention_interface", "transformer_lens")
    )
    names = ["loss_change", "divergence", "gain", "centred_norm", "uniqueness", "gradient"]
    # two implementations in float32
    np.testing.assert_allclose(one.heads[names], two.heads[names], rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "gpt_oss", "qwen3_next", "gemma3", "deepseek_v3"])
def test_every_family(name):
    found = pi.head_importance(pi.load(build(name)), TEXT, progress=False)
    assert np.isfinite(found.heads.drop(columns="gradient")).all(axis=None)
    assert found.manifest["gradient"] == "reverse-mode derivatives"
    assert np.isfinite(found.predictors["rank_correlation"]).all()
    assert sorted(set(found.heads.index.get_level_values("layer"))) == sorted(ROWS[name].layers)
    assert (found.curve.xs(0, level="removed")["loss_change"] == 0).all()


def test_two_halves_and_one_length_are_needed():
    with pytest.raises(UserError, match="two sequences at least"):
        pi.head_importance(pi.load(build("llama")), stimuli(DOCUMENTS[:1]), progress=False)
    with pytest.raises(UserError, match="one length"):
        pi.head_importance(pi.load(build("llama")), stimuli([DOCUMENTS[0], DOCUMENTS[1][:12]]), progress=False)


def test_the_command(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("PAVINTERP_CACHE", str(tmp_path))
    words = ["prune", "demo", "--context", "24", "--sequences", "8", "--layers", "0", "--quiet"]
    with pytest.raises(SystemExit) as ended:
        cli.main([*words, "--csv", str(tmp_path / "heads.csv")])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "gain_uniqueness_fidelity" in said
    assert "below random order" in said
    assert "gradient" in (tmp_path / "heads.csv").read_text().splitlines()[0]
    with pytest.raises(SystemExit) as ended:
        cli.main([*words, "--json"])
    assert ended.value.code == 0
    assert {"heads", "predictors", "curve"} <= set(json.loads(capsys.readouterr().out))
