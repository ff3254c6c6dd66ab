"""Fits to acquisition, and the table of predictions: the verdicts that are known of each theory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from pavinterp.paradigms import builtin
from pavinterp.theory.conditioning import HIGHEST_RATE, MODELS, Parameters
from pavinterp.theory.conditioning.fitting import Fit, fit
from pavinterp.theory.conditioning.groups import difference, full_response, learning_curve, response
from pavinterp.theory.conditioning.predictions import WITH_CONTEXT, predict, predictions, predictions_table
from pavinterp.theory.schedules import parse

ACQUISITION = builtin()["acquisition"]

# What is known of each theory, and at which rates it holds. Rescorla & Wagner: cue competition and inhibition, but
# nothing from CSs alone, none of second order (inhibition instead), no recovery: Miller, Barnet & Grahame 1995,
# Psychological Bulletin 117. Pearce & Hall, Mackintosh: latent inhibition; Mackintosh, whose errors are each
# stimulus's own: neither overexpectation nor inhibition. Hebbian: no competition of any kind.
KNOWN = {
    "rescorla_wagner": {
        "acquisition": "+", "extinction": "-", "reversal": "+", "spontaneous_recovery": "0", "latent_inhibition": "0",
        "overshadowing": "-", "blocking": "-", "unblocking": "+", "overexpectation": "-",
        "conditioned_inhibition": "-", "retardation": "-", "superconditioning": "+", "second_order": "-",
        "sensory_preconditioning": "0", "generalisation": "+", "discrimination": "+", "partial_reinforcement": "-",
        "contingency": "-",
    },
    "pearce_hall": {
        "acquisition": "+", "extinction": "-", "spontaneous_recovery": "0", "latent_inhibition": "-",
        "overshadowing": "-", "blocking": "-", "unblocking": "+", "conditioned_inhibition": "-",
        "sensory_preconditioning": "0", "generalisation": "+",
    },
    "mackintosh": {
        "acquisition": "+", "extinction": "-", "spontaneous_recovery": "0", "latent_inhibition": "-",
        "overshadowing": "-", "blocking": "-", "unblocking": "+", "overexpectation": "+", "second_order": "0",
        "sensory_preconditioning": "0", "generalisation": "+",
    },
    "hebbian": {
        "acquisition": "+", "extinction": "0", "reversal": "0", "latent_inhibition": "0", "overshadowing": "0",
        "blocking": "0", "unblocking": "0", "overexpectation": "+", "conditioned_inhibition": "0", "retardation": "0",
        "superconditioning": "0", "second_order": "0", "sensory_preconditioning": "0", "generalisation": "+",
        "contingency": "0", "capacity": "0",
    },
    "hebbian_softmax": {
        "acquisition": "+", "extinction": "-", "reversal": "0", "latent_inhibition": "-", "overshadowing": "-",
        "blocking": "0", "unblocking": "0", "second_order": "0", "sensory_preconditioning": "0", "generalisation": "+",
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    return predictions_table(builtin().values())


@pytest.mark.parametrize("model", KNOWN)
def test_the_verdicts_that_are_known(table, model):
    found = table.loc[list(KNOWN[model]), model].to_dict()
    assert found == KNOWN[model]


def test_the_table_tells_error_correction_from_hebbian_memories(table):
    assert list(table.columns) == ["expected", *MODELS]
    assert list(table.index) == list(builtin())
    assert set(np.unique(table.to_numpy().astype(str))) == {"+", "-", "0"}
    assert (table["expected"] == [{1: "+", -1: "-", 0: "0"}[p.direction] for p in builtin().values()]).all()
    for rate in (0.1, 0.2, 0.3):  # faster, and Mackintosh's B has learned before its attention falls
        listed = [builtin()[name] for name in ("blocking", "unblocking", "superconditioning")]
        found = predictions_table(listed, replace(WITH_CONTEXT, rate=rate))
        assert (found.loc["blocking", ["rescorla_wagner", "pearce_hall", "mackintosh"]] == "-").all()
        assert (found[["hebbian", "hebbian_softmax"]] == "0").all(axis=None)
        assert (found["rescorla_wagner"] == found["expected"]).all()
    for one in MODELS:
        assert all((table[one] != table[other]).any() for other in MODELS if other != one)


def test_effects_are_shares_of_what_eight_pairings_give():
    found = predictions([builtin()["overshadowing"], builtin()["generalisation"]], Parameters(rate=0.3))
    rows = found.set_index(["paradigm", "control", "model"])["effect"]
    full = 1 - 0.7**8
    assert rows["overshadowing", "control", "rescorla_wagner"] == pytest.approx(((1 - 0.4**8) / 2 - full) / full)
    assert rows["generalisation", "control", "rescorla_wagner"] == pytest.approx(0.8)
    assert rows["generalisation", "far", "rescorla_wagner"] == pytest.approx(0.4)
    assert len(found) == 3 * len(MODELS)


def test_the_tolerance_is_where_an_effect_begins():
    listed = [builtin()["overshadowing"]]
    effect = predictions(listed).set_index("model").loc["rescorla_wagner", "effect"]
    for tolerance, expected in ((abs(effect) * 0.999, "-"), (abs(effect) * 1.001, "0")):
        assert predictions_table(listed, tolerance=tolerance).loc["overshadowing", "rescorla_wagner"] == expected


def test_alike_css_cost_capacity_whatever_learns():
    """With orthogonal CSs and no context no theory but softmax, whose weights are shared out, loses anything."""
    listed = [builtin()["capacity"]]
    apart, alike = (predictions(listed, Parameters(), overlap=overlap) for overlap in (0.0, 0.3))
    apart, alike = (x[x["control"] == "control"].set_index("model")["effect"] for x in (apart, alike))
    np.testing.assert_allclose(apart[["rescorla_wagner", "pearce_hall", "mackintosh", "hebbian"]], 0, atol=1e-9)
    assert apart["hebbian_softmax"] < -0.05
    assert alike["hebbian_softmax"] < 2 * apart["hebbian_softmax"]
    assert alike["rescorla_wagner"] < -0.01


def test_baselines_and_missing_uss():
    contingency = builtin()["contingency"]
    group = contingency.groups[0]
    tested = response("rescorla_wagner", contingency, replace(group, baseline=None), WITH_CONTEXT)
    novel = response("rescorla_wagner", contingency, replace(group, test=("D",), baseline=None), WITH_CONTEXT)
    assert response("rescorla_wagner", contingency, group, WITH_CONTEXT) == pytest.approx(tested - novel)
    assert novel > 0.1  # the context, which US alone has reinforced
    never = replace(group, response="Z")
    assert response("rescorla_wagner", contingency, never, WITH_CONTEXT) == 0


def test_learning_curves_are_read_at_the_presentations():
    table = {"name": "x", "about": "x", "source": "x", "test": "A", "response": "X", "predicts": "higher"}
    groups = {"experimental": ["A -> X x4, B -> Y x9", "AB -> X"], "control": ["B -> X"]}
    paradigm = parse(table | {"groups": groups})
    parameters = Parameters(rate=np.array([0.1, 0.5]))
    found = learning_curve("rescorla_wagner", paradigm, paradigm.groups[0], parameters)
    n = np.arange(4)
    np.testing.assert_allclose(found[:, :4], 1 - (1 - parameters.rate[:, None]) ** n, atol=1e-12)
    after = 1 - (1 - parameters.rate) ** 4
    np.testing.assert_allclose(found[:, 4], after + parameters.rate * (1 - after), atol=1e-12)  # B predicts no X
    compound = learning_curve("rescorla_wagner", paradigm, paradigm.groups[0], parameters, cs=("A", "B"))
    assert compound.shape == (2, 2)
    np.testing.assert_allclose(compound[:, 0], after, atol=1e-12)


# --- fits


def observed(model: str, parameters: Parameters, scale: float) -> np.ndarray:
    one, two = (learning_curve(model, ACQUISITION, group, parameters) for group in ACQUISITION.groups)
    return scale * (one - two)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("rate", [0.05, 0.31])
def test_a_fit_finds_the_rate_and_scale_that_made_the_curve(model, rate):
    curve = observed(model, replace(WITH_CONTEXT, rate=rate), 3.7)
    found = fit(model, curve, ACQUISITION, WITH_CONTEXT)
    # between knots the theory is interpolated; pearce_hall jumps there, and knots are 0.6 % apart
    within = 6e-3 if model == "pearce_hall" else 1e-3
    assert found.scale == pytest.approx(3.7, rel=within)
    assert found.explained == pytest.approx(1, abs=within**2)
    assert found.acquired
    assert not found.at_bound
    if model in HIGHEST_RATE:
        assert found.rate == found.parameters.rate == pytest.approx(rate, rel=within)
    else:
        assert np.isnan(found.rate)


@pytest.mark.parametrize("model", MODELS)
def test_no_other_rate_and_scale_fit_better(model):
    """Against a plain search: every rate of a fine grid, each with the scale that is best for it."""
    rng = np.random.default_rng(1)
    curve = observed(model, replace(WITH_CONTEXT, rate=0.2), 2.0) + rng.normal(0, 0.3, 9)
    found = fit(model, curve, ACQUISITION, WITH_CONTEXT)
    rates = np.geomspace(1e-3, HIGHEST_RATE.get(model, 1.0), 3000)
    theory = np.broadcast_to(observed(model, replace(WITH_CONTEXT, rate=rates), 1.0), (3000, 9))
    best = np.clip((theory @ curve) / (theory**2).sum(1), 0, None)
    errors = ((best[:, None] * theory - curve) ** 2).sum(1)
    mine = ((found.scale * observed(model, found.parameters, 1.0) - curve) ** 2).sum()
    # pearce_hall jumps between the knots of the fit, which are five times as far apart as here
    assert mine <= errors.min() * (1.01 if model == "pearce_hall" else 1 + 1e-5)
    assert found.explained == pytest.approx(1 - mine / (curve**2).sum(), abs=1e-5)


def test_units_of_the_response_change_the_scale_and_nothing_else():
    curve = observed("rescorla_wagner", Parameters(rate=0.2), 2.0) + np.random.default_rng(2).normal(0, 0.2, 9)
    one, other = (fit("rescorla_wagner", factor * curve, ACQUISITION) for factor in (1.0, 1e-4))
    assert other.rate == pytest.approx(one.rate, rel=1e-6)
    assert other.scale == pytest.approx(1e-4 * one.scale, rel=1e-6)


@pytest.mark.slow
def test_intervals_hold_the_rate_as_often_as_they_say():
    """40 noisy curves of 40 draws each, bootstrapped: the 95 % interval misses the true rate in 2 on average."""
    rng = np.random.default_rng(0)
    truth = observed("rescorla_wagner", Parameters(rate=0.25), 2.0)
    held = 0
    for _ in range(40):
        data = truth + rng.normal(0, 1, (40, 9))
        draws = data[rng.integers(40, size=(80, 40))].mean(1)
        found = fit("rescorla_wagner", data.mean(0), ACQUISITION, draws=draws)
        low, high = found.rate_interval
        assert low < high
        held += low <= 0.25 <= high
    assert held >= 32  # P(fewer) is 0.001 at 92 %, which percentile intervals of 40 draws come to


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("curve", [np.zeros(9), -np.arange(9.0)])
def test_where_nothing_was_acquired_nothing_is_predicted_in_size(model, curve):
    found = fit(model, curve, ACQUISITION, WITH_CONTEXT, draws=np.stack([curve, curve]))
    assert (found.acquired, found.scale, found.parameters) == (False, 0.0, WITH_CONTEXT)
    assert np.isnan(found.rate)
    rows = predict([found], [builtin()["blocking"]])
    assert rows[["size", "size_lo", "size_hi"]].isna().all(axis=None)
    assert rows["predicted"].tolist() == [predictions_table([builtin()["blocking"]])[model].item()]


def test_a_curve_that_is_there_at_once_ends_at_the_bound():
    found = fit("rescorla_wagner", [0, *[5.0] * 8], ACQUISITION)
    assert found.at_bound
    assert found.rate == pytest.approx(1, rel=1e-6)
    assert not np.isfinite(Fit("hebbian", Parameters(), np.nan, 1.0, 1.0, False).rate_interval).any()


def test_sizes_are_in_units_of_the_response_with_the_draws_interval():
    rng = np.random.default_rng(4)
    listed = [builtin()[name] for name in ("blocking", "latent_inhibition")]
    for model in MODELS:
        curve = observed(model, replace(WITH_CONTEXT, rate=0.2), 3.0)
        draws = curve + rng.normal(0, 0.2, (50, 9))
        found = fit(model, curve, ACQUISITION, WITH_CONTEXT, draws=draws)
        rows = predict([found], listed).set_index("paradigm")
        for paradigm in listed:
            exact = float(difference(model, paradigm, found.parameters))
            row = rows.loc[paradigm.name]
            assert row["size"] == pytest.approx(found.scale * exact, abs=1e-12)
            assert row["effect"] == pytest.approx(exact / float(full_response(model, found.parameters)), abs=1e-12)
            rates = np.where(np.isnan(found.rates), 0.3, found.rates)
            each = found.scales * difference(model, paradigm, replace(WITH_CONTEXT, rate=rates))
            # the effect is interpolated between 33 rates; that of pearce_hall jumps between them
            ends, within = row[["size_lo", "size_hi"]].astype(float), 0.05 if model == "pearce_hall" else 0.005
            np.testing.assert_allclose(ends, np.quantile(each, [0.025, 0.975]), atol=within)


@pytest.mark.parametrize(
    ("curve", "draws", "message"),
    [
        (np.zeros(8), None, r"curve must have 9 points .* got \(8,\)"),
        (np.full(9, np.nan), None, "curve holds 9 numbers that are not finite"),
        (np.zeros(9), np.zeros(9), r"draws must have 9 points .* got \(9,\)"),
    ],
)
def test_a_wrong_curve_is_named(curve, draws, message):
    with pytest.raises(ValueError, match=message):
        fit("rescorla_wagner", curve, ACQUISITION, draws=draws)
