"""error_propagation as a whole: its tables from its rows by hand, calibration, what it says of itself and refuses."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from architectures import build
from hypothesis import given
from hypothesis import strategies as st
from make_trials import make_trials
from scipy import stats
from test_run import stimuli

import pavinterp as pi
from pavinterp.errors import UserError
from pavinterp.experiments.gain_tables import joint_table, linearity_table
from pavinterp.experiments.infidelity import Infidelity, calibration, with_predictions
from pavinterp.measures.load import Load

DOCUMENTS = [np.random.default_rng(i).integers(3, 101, 24) for i in range(9)]
TEXT = stimuli(DOCUMENTS)
STRENGTHS = [0.01, 0.1, 1.0]


@pytest.fixture(scope="module")
def found():
    return pi.error_propagation(pi.load(build("llama")), TEXT, strengths=STRENGTHS, progress=False)


def test_gains_are_means_over_sequences_of_ratios_of_changes(found):
    rows = found.rows[(found.rows["kind"] == "interference") & (found.rows["strength"] == 0.1)]
    changes = rows[rows["layer"] == 0].pivot(index="sequence", columns="to", values="change")
    row = found.gain.loc[("interference", 0.1, 0, 1)]
    assert row["gain"] == pytest.approx((changes[1] / changes[0]).mean())
    assert row["gain_lo"] < row["gain"] < row["gain_hi"]
    assert (found.gain.xs(1, level="to").xs(1, level="layer")["gain"] == 1).all()
    assert (1, 0) not in set(found.gain.index.droplevel(["kind", "strength"]))


def test_ends_are_those_of_the_rows(found):
    rows = found.rows[(found.rows["kind"] == "isotropic") & (found.rows["strength"] == 0.01)]
    rows = rows[(rows["layer"] == 0) & (rows["to"] == 0)]
    ends = found.ends.loc[("isotropic", 0.01, 0)]
    assert ends["divergence"] == pytest.approx(rows["divergence"].mean())
    assert ends["end_gain"] == pytest.approx(rows["divergence"].mean() / (rows["change"] ** 2).mean())
    assert ends["end_gain_write"] == pytest.approx(rows["divergence"].mean() / 0.01**2)


def test_the_witness_agrees_to_a_few_per_cent(found):
    assert (found.witness["difference"].abs() < 0.03).all()
    assert (found.witness["divergence_difference"].abs() < 0.06).all()  # a square
    assert (found.witness["apart"] < 0.05).all()
    assert found.manifest["first_order"] == "Jacobian-vector products"


def test_where_there_is_no_derivative_there_is_no_witness_and_a_line_says_so():
    bloom = pi.error_propagation(pi.load(build("bloom")), TEXT, strengths=[0.01, 0.1], draws=1, progress=False)
    assert bloom.witness[["first_order", "difference", "apart"]].isna().all(axis=None)
    assert bloom.manifest["first_order"].startswith("no first-order predictions: ")
    assert (bloom.linearity["linear_to"] >= 0.01).all()  # against the smallest strength then
    assert (bloom.gain["gain"] > 0).all()


def made(change):
    """Rows of one layer and nine sequences in which the last block's change is `change(strength)`."""
    rows = [
        {"kind": "interference", "strength": s, "layer": layer, "to": 0, "change": change(s), "normed": change(s),
         "divergence": change(s) ** 2, "loss_change": 0.0, "first_order": np.nan, "first_order_divergence": np.nan,
         "apart": np.nan, "sum_change": np.nan, "sequence": i}
        for s in STRENGTHS for layer in (0,) for i in range(9)
    ]  # fmt: skip
    return pd.DataFrame(rows)


@pytest.mark.parametrize(("change", "expected"), [
    (lambda s: s, 1.0), (lambda s: s * (1 + 0.5 * s), 0.1), (lambda s: s * (1 + 2 * s), 0.01),
    (lambda s: s if s < 0.1 else 1.2 * s if s < 1 else s, 0.01),
])  # fmt: skip
def test_linear_up_to_the_first_strength_that_is_out_of_proportion(change, expected):
    table = linearity_table(made(change), np.ones((1, 9)))
    assert table.loc[("interference", 0, "stream"), "linear_to"] == expected
    rows = made(change).assign(first_order=lambda r: 2 * r["change"], first_order_divergence=lambda r: r["divergence"])
    assert linearity_table(rows, np.ones((1, 9))).loc[("interference", 0, "stream"), "linear_to"] == 0.0


def test_joint_errors_against_the_root_of_the_sum_of_squares(found):
    rows = found.rows[(found.rows["kind"] == "interference") & (found.rows["strength"] == 0.1)]
    last = rows[rows["to"] == 1].pivot(index="sequence", columns="layer", values="change")
    row = found.joint.loc[("interference", 0.1)]
    predicted = np.sqrt(last[0] ** 2 + last[1] ** 2).mean()
    assert row["predicted_change"] == pytest.approx(predicted)
    assert row["change_ratio"] == pytest.approx(last[-1].mean() / predicted)
    table = rows[rows["to"] == 1].pivot(index="sequence", columns="layer", values="divergence").mean()
    assert row["divergence_ratio"] == pytest.approx(np.sqrt(table[-1] / (table[0] + table[1])))
    assert row["change_ratio_lo"] <= row["change_ratio"] <= row["change_ratio_hi"]
    shuffled = found.rows.sample(frac=1, random_state=0)
    pd.testing.assert_frame_equal(joint_table(shuffled, np.ones((1, 9))), joint_table(found.rows, np.ones((1, 9))))


def test_infidelity_is_one_less_the_square_of_the_cosine_and_of_orthogonal_uss_what_contributions_say():
    trials, w_o = make_trials(n=24, heads=4, kv_heads=4)
    got = Infidelity()(trials)
    fidelity = Load()(trials)["fidelity"]
    torch.testing.assert_close(got["infidelity"], 1 - fidelity.clamp_min(0).square())
    for head, t in ((0, 5), (3, 23)):
        written = trials.strengths[head, t, :, None] * (trials.values[head] @ w_o[head])
        star = written.norm(dim=-1).argmax()
        cosine = torch.nn.functional.cosine_similarity(written.sum(0), written[star], dim=0)
        assert float(got["infidelity"][head, t]) == pytest.approx(1 - max(0, float(cosine)) ** 2)
    eye = torch.eye(6, dtype=torch.float64).repeat(2, 1, 1)
    orthogonal, _ = make_trials(n=6, heads=2, kv_heads=2, d_v=6, width=6, values=eye, w_o=eye)
    got = Infidelity()(orthogonal)
    torch.testing.assert_close(got["infidelity"], got["infidelity_orthogonal"])


@given(st.floats(1, 1e4), st.floats(1, 512), st.integers(1, 512))
def test_the_theorem_predicts_a_half_at_its_capacity_and_grows_with_load(load, d_eff, d_k):
    records = pd.DataFrame({"layer": [0, 0, 0], "effective_load": [load, 2 * load, 1 + d_k], "d_eff": d_eff})
    told = with_predictions(records, {0: d_k})
    one, more, half = told["infidelity_theorem"]
    assert 0 <= one < more < 1
    assert half == pytest.approx(0.5)
    assert one == pytest.approx((load - 1) / (load - 1 + d_k))
    assert told["infidelity_theorem_own"][0] == pytest.approx((load - 1) / (load - 1 + d_eff))


def test_calibration_is_scipys_over_heads():
    rng = np.random.default_rng(0)
    heads = pd.DataFrame({"layer": 0, "head": np.arange(12), "infidelity": rng.uniform(0, 1, 12)})
    for name in ("theorem", "theorem_own", "orthogonal"):
        heads[f"infidelity_{name}"] = 0.5 * heads["infidelity"] + 0.1 * rng.uniform(0, 1, 12)
    records = pd.concat([heads.assign(sequence=i) for i in range(9)], ignore_index=True)
    got = calibration(records, np.ones((1, 9))).loc["theorem"]
    one, two = heads["infidelity"], heads["infidelity_theorem"]
    assert got["rank_correlation"] == pytest.approx(stats.spearmanr(one, two).statistic)
    assert got["error"] == pytest.approx((two - one).abs().mean())
    assert got["bias"] == pytest.approx((two - one).mean())
    assert got["slope"] == pytest.approx(stats.linregress(two, one).slope)
    assert got["heads"] == 12


def test_layers_chosen_are_measured_and_perturbed_alone():
    found = pi.error_propagation(
        pi.load(build("llama")), TEXT, layers=[1], strengths=[0.1], draws=1, progress=False
    )  # fmt: skip
    assert found.layers.index.tolist() == [1]
    assert set(found.gain.index.get_level_values("layer")) == {1}
    np.testing.assert_allclose(found.joint["change_ratio"], 1, rtol=1e-4)  # all of one layer is that layer


def test_both_capture_paths_find_the_same_gains():
    one, two = (
        pi.error_propagation(
            pi.load(build("llama")), TEXT, strengths=[0.1], draws=1, capture=capture, progress=False
        ).gain
        for capture in ("attention_interface", "transformer_lens")
    )
    np.testing.assert_allclose(one[["change", "gain"]], two[["change", "gain"]], rtol=2e-3)
    there = two["damping"].notna()
    np.testing.assert_allclose(one["damping"][there], two["damping"][there], rtol=2e-3)
    assert one["damping"].notna().all()


def test_tables_say_what_their_columns_are(found):
    for name in ("heads", "calibration", "layers", "gain", "ends", "linearity", "witness", "joint"):
        table = getattr(found, name)
        plain = [c for c in table.columns if not c.endswith(("_lo", "_hi")) and c != "strength"]
        assert set(plain) <= set(table.attrs["descriptions"]), name
        assert table.attrs["intervals"] == found.manifest["intervals"]
    experiment = found.experiment()
    assert experiment.name == "propagate"
    assert {"infidelity", "infidelity_lo", "infidelity_theorem"} <= set(experiment.numbers.columns)
    assert "ErrorPropagation(LlamaForCausalLM: 2 layers, 9 sequences" in repr(found)


@pytest.mark.parametrize("strengths", [[], [0.0], [-1], [float("nan")], [float("inf")], "ab", 0.1, None])
def test_strengths_must_be_positive_numbers(strengths):
    with pytest.raises(UserError, match="strengths must be numbers above 0"):
        pi.error_propagation(pi.load(build("llama")), TEXT, strengths=strengths, progress=False)


def test_what_cannot_be_followed_is_refused_in_one_line():
    with pytest.raises(UserError, match="not one residual stream") as error:
        pi.error_propagation(pi.load(build("gemma3n")), TEXT, strengths=[0.1], draws=1, progress=False)
    assert "\n" not in str(error.value)
