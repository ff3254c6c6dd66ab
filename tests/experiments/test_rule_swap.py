"""Rule swaps: a head's own rule changes nothing, no rule is the mean US, gains are least squares, costs are losses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from architectures import ROWS, build
from make_trials import make_trials
from test_run import stimuli

import pavinterp as pi
from pavinterp import cli
from pavinterp.capture.paths import on_path
from pavinterp.errors import UserError
from pavinterp.experiments.association_terms import Learned, SumsOfSquares, Variant, variants
from pavinterp.experiments.cut_responses import all_tests, chosen_heads
from pavinterp.experiments.fitted_rules import BEST, MEAN_US, fit_rules
from pavinterp.experiments.interventions import logits
from pavinterp.experiments.resampling import resampled, spearman
from pavinterp.experiments.swap_orders import numbers_swapped, orders
from pavinterp.experiments.swap_tables import correlations, curve_table
from pavinterp.experiments.swapped_responses import Replacement, losses, some_kv_heads, stacked, swapped
from pavinterp.models import untouched
from pavinterp.sweep import inspect, sweep

LENGTH = 20  # two windows of 8, and a part of a third
DOCUMENTS = [np.random.default_rng(i).integers(3, 101, LENGTH) for i in range(9)]
TOKENS = torch.from_numpy(DOCUMENTS[0])
SOFTMAX, COVARIANCE = Replacement(Variant("softmax", "either"), 1.0), Replacement(Variant("covariance", "either"), 1.1)
DELTA = Replacement(Variant("delta", "centred", {"eta": 0.3}), 0.7)
NOTHING = Replacement(None, 0.0)
EVERY_KIND = ("llama", "gpt2", "qwen3_next", "gpt_oss", "mistral", "bloom")  # the last by way of a bridge


def handle_of(name):
    return on_path(pi.load(build(name)))


def logits_of(handle, plans):
    layers = {layer for plan in plans for layer, _ in plan}
    with untouched(handle.model):
        edit = (lambda call: swapped(call, TOKENS, plans, {})) if layers else None
        return logits(handle, TOKENS.expand(len(plans), -1), edit, layers or None)


def places_of(name):
    return [(layer, head) for layer in ROWS[name].layers for head in range(4)]


# --- Responses ---


@pytest.mark.parametrize("name", EVERY_KIND)
def test_a_head_swapped_for_softmax_is_itself(name):
    handle = handle_of(name)
    one, every = {places_of(name)[1]: SOFTMAX}, dict.fromkeys(places_of(name), SOFTMAX)
    whole, *changed = logits_of(handle, [{}, one, every])
    for got in changed:
        assert float((got - whole).norm() / whole.norm()) <= 1e-5
    assert float((logits_of(handle, [dict.fromkeys(places_of(name), NOTHING)])[0] - whole).norm() / whole.norm()) > 1e-2


@pytest.mark.parametrize("name", EVERY_KIND)
def test_no_gain_is_the_mean_us_by_a_plain_loop(name):
    handle, seen = handle_of(name), {}
    layer, head = places_of(name)[-1]

    def keep(call):
        seen["call"], seen["put"] = call, swapped(call, TOKENS, [{(layer, head): NOTHING}], {})
        return seen["put"]

    with untouched(handle.model):
        logits(handle, TOKENS[None], keep, {layer})
    call, put = seen["call"], seen["put"].unflatten(-1, (4, -1))[0]
    window, kv_head = ROWS[name].windows[-1] or LENGTH, head // (4 // ROWS[name].kv_heads)
    one = all_tests(call, TOKENS, {})
    for t in range(LENGTH):
        mean = sum(call.values[0, kv_head, j] for j in range(max(0, t + 1 - window), t + 1)) / min(t + 1, window)
        left = one.strengths[head, t].sum()  # 1, less a sink's share
        gate = 1 if one.gate is None else one.gate[head, t]
        torch.testing.assert_close(put[t, head], left * mean * gate, rtol=1e-4, atol=1e-6)
    own = call.response.unflatten(-1, (4, -1))[0]
    assert torch.equal(put[:, [h for h in range(4) if h != head]], own[:, [h for h in range(4) if h != head]])
    assert ROWS[name].sinks == bool((one.strengths.sum(-1) < 0.99).any())


@pytest.mark.parametrize("rule", ["covariance", "decay", "delta", "oja", "pseudoinverse", "softmax"])
@pytest.mark.parametrize("options", [{}, {"gated": True}, {"sinks": True, "window": 9}])
def test_terms_before_and_after_w_o_are_the_same(rule, options):
    one, _ = make_trials(tests=[0, 3, 7, 12, 17, 23], seed=1, **options)
    learned = Learned(one)
    for variant in variants([rule]):
        written = learned.rule_response(variant) @ learned.trials.write
        torch.testing.assert_close(written, learned.rule_term(variant), rtol=1e-9, atol=1e-9)


def test_heads_put_beside_each_other_and_taken_out_again_are_the_same():
    ones = [make_trials(tests=[3, 11], seed=seed, sinks=True, gated=True)[0] for seed in range(3)]
    both = stacked(ones)
    assert (both.heads, both.kv_heads, both.group) == (12, 6, 2)
    torch.testing.assert_close(both.response, torch.cat([one.response for one in ones]))
    some = some_kv_heads(both, [5, 2])
    expected = torch.cat([ones[2].response[2:], ones[1].response[:2]])
    torch.testing.assert_close(some.response, expected)


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "qwen3_next"])
def test_plans_together_are_plans_alone(name):
    """What rows share is shared rightly: later layers see what earlier swaps made of their inputs."""
    handle = handle_of(name)
    places = places_of(name)
    first, last = places[0], places[-1]
    plans = [
        {},
        {first: COVARIANCE},
        {first: COVARIANCE, last: DELTA},
        {last: DELTA},
        dict.fromkeys(places, DELTA),
        dict(zip(places, [COVARIANCE, DELTA, NOTHING, SOFTMAX] * 2, strict=True)),
    ]
    together = logits_of(handle, plans)
    for got, plan in zip(together, plans, strict=True):
        torch.testing.assert_close(got, logits_of(handle, [plan])[0], rtol=1e-4, atol=1e-4)
    with untouched(handle.model):
        got = losses(handle, TOKENS, [*plans, {first: COVARIANCE}])
    expected = [
        torch.nn.functional.cross_entropy(row[:-1].double(), TOKENS[1:], reduction="mean").item() for row in together
    ]
    np.testing.assert_allclose(got, [*expected, expected[1]], rtol=1e-5)


def test_covariance_does_not_see_later_tokens():
    handle = handle_of("llama")
    plan = dict.fromkeys(places_of("llama"), COVARIANCE)
    before = logits_of(handle, [plan])[0]
    other = TOKENS.clone()
    other[12:] = (other[12:] + 7) % 101
    with untouched(handle.model):
        after = logits(handle, other[None], lambda call: swapped(call, other, [plan], {}))[0]
    torch.testing.assert_close(after[:12], before[:12], rtol=1e-4, atol=1e-4)
    assert float((after[12:] - before[12:]).abs().max()) > 1e-2


# --- Fits ---


def measured(name="llama", rules=("covariance", "decay", "delta")):
    handle, text = handle_of(name), stimuli(DOCUMENTS)
    of = [variant for variant in variants(rules) if variant.cs != "raw"]
    with untouched(handle.model):
        parts = sweep(handle, text, [SumsOfSquares(of)], tests=None, layers=None, batch=1, seed=0, dtype=torch.float64)
        records = pd.concat([part.records for part in parts], ignore_index=True)
    return handle, records, of


def test_the_gain_is_that_of_least_squares_on_the_other_half():
    handle, records, of = measured(rules=("covariance", "delta"))
    fitted = fit_rules(records, of, resampled(records, 0), 0)
    pairs = {}

    def keep(call, sequence):
        learned = Learned(all_tests(call, torch.from_numpy(DOCUMENTS[sequence]), {}))
        x, y = learned.rule_term(Variant("covariance", "either")), learned.response_term()
        for head in range(4):
            pairs.setdefault((call.layer, head, bool(fitted.in_a[sequence])), []).append((x[head], y[head]))

    with untouched(handle.model):
        for i, tokens in enumerate(DOCUMENTS):
            logits(handle, torch.from_numpy(tokens)[None], lambda call, i=i: keep(call, i))
    assert fitted.in_a.sum() == 5
    for half in (True, False):
        sequence = int(np.flatnonzero(fitted.in_a != half)[0])
        plan = fitted.plan("covariance", sequence, set(fitted.heads))
        for place in fitted.heads:
            x, y = (torch.cat([pair[i] for pair in pairs[(*place, half)]]).reshape(-1, 1) for i in (0, 1))
            assert plan[place].gain == pytest.approx(float(torch.linalg.lstsq(x, y).solution), rel=1e-5)
    assert set(fitted.rules[BEST][0]) <= {"covariance", "delta"}
    assert {new.gain for new in fitted.plan(MEAN_US, 0, set(fitted.heads)).values()} == {0.0}


def test_the_best_rule_takes_most_of_the_squares_away_where_it_is_fitted():
    _, records, of = measured()
    fitted = fit_rules(records, of, np.ones((1, 9)), 0)
    for half, inside in enumerate((fitted.in_a, ~fitted.in_a)):
        mine = records[inside[records["sequence"].to_numpy()]].groupby(["layer", "head"]).sum(numeric_only=True)
        left = {
            variant.columns: (mine["yy"] - mine[variant.columns[0]] ** 2 / mine[variant.columns[1]]) / mine["yy"]
            for variant in of
        }
        expected = pd.DataFrame(left).idxmin(axis=1)
        got = [new.variant.columns for new in fitted.fits[BEST][half]]
        assert got == expected.tolist()


# --- Costs ---


@pytest.fixture(scope="module")
def llama():
    model = build("llama")
    with torch.no_grad():  # head 2 of layer 0 writes nothing
        model.model.layers[0].self_attn.o_proj.weight[:, 16:24] = 0
    return model, pi.linearisation_cost(
        model, stimuli(DOCUMENTS), rules=["covariance", "delta", "softmax"], progress=False
    )


def test_a_head_that_writes_nothing_costs_nothing_and_softmax_costs_nothing(llama):
    _, found = llama
    silent = found.heads.loc[(0, 2)]
    for rule in ("covariance", "delta", "best", "mean_us"):
        assert silent[f"cost_{rule}"] == pytest.approx(0, abs=1e-6)
        assert abs(found.total[f"cost_{rule}"].iloc[0]) > 1e-4
    for table in (found.heads, found.layers, found.total):
        assert table["cost_softmax"].abs().max() <= 1e-5
    assert not found.heads["best_rule"].str.contains("softmax").any()


def test_the_tables_hold_together(llama):
    model, found = llama
    tokens = torch.from_numpy(np.stack(DOCUMENTS))
    with torch.no_grad():
        whole = torch.nn.functional.cross_entropy(
            model(input_ids=tokens).logits[:, :-1].double().flatten(0, 1), tokens[:, 1:].flatten()
        )
    assert found.manifest["loss"]["nats_per_token"] == pytest.approx(float(whole), rel=1e-5)
    assert found.manifest["intervals"].startswith("95 % percentile intervals of a bootstrap over 9 documents")
    for table in (found.heads, found.layers, found.total):
        for rule in ("covariance", "delta", "best", "mean_us"):
            cost = table[f"cost_{rule}"]
            assert ((table[f"cost_{rule}_lo"] <= cost) & (cost <= table[f"cost_{rule}_hi"])).all()
            assert table.attrs["units"][f"cost_{rule}"] == "nats per token"
    mean = found.costs.query("rule == 'best' and layer == 1 and head == 3")["cost"].mean()
    assert found.heads.loc[(1, 3), "cost_best"] == pytest.approx(mean, rel=1e-9)
    for order in ("cost", "load", "load_descending", "random"):
        curve = found.curve.loc[order]["loss_change"]
        assert curve.index.tolist() == list(range(9))
        assert curve.loc[0] == pytest.approx(0, abs=1e-6)
        assert curve.loc[8] == pytest.approx(found.total["cost_best"].iloc[0], abs=1e-6)
    predictors = set(found.correlations.loc["best"].index)
    assert predictors == {"effective_load", "top_strength", "r2", "worth", "effective_load given worth"}
    assert "softmax" not in found.correlations.index.get_level_values("rule")


def test_the_same_seed_gives_the_same(llama):
    model, found = llama
    again = pi.linearisation_cost(model, stimuli(DOCUMENTS), rules=["softmax", "delta", "covariance"], progress=False)
    for name in ("heads", "layers", "total", "correlations", "curve", "costs"):
        pd.testing.assert_frame_equal(getattr(found, name), getattr(again, name))


def test_layers_chosen_and_few_clusters(llama):
    model, _ = llama
    found = pi.linearisation_cost(model, stimuli(DOCUMENTS[:3]), layers=[1], rules=["covariance"], progress=False)
    assert found.heads.index.tolist() == [(1, head) for head in range(4)]
    assert found.heads.filter(regex="_(lo|hi)$").isna().all(axis=None)
    assert found.manifest["intervals"].startswith("No intervals: the text has 3 documents")
    only = pi.linearisation_cost(model, stimuli(DOCUMENTS[:3]), layers=[1], rules=["softmax"], progress=False)
    assert only.curve is None
    assert only.total.columns.tolist()[::3] == ["cost_softmax", "cost_mean_us"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rules": ["backprop"]}, "choose among"),
        ({"layers": [7]}, "choose among the attention layers"),
        ({"corpus": stimuli([DOCUMENTS[0], DOCUMENTS[1][:9]])}, "sequences of one length"),
        ({"corpus": stimuli(DOCUMENTS[:1])}, "no second half"),
    ],
)
def test_what_makes_no_sense_is_refused(llama, options, words):
    with pytest.raises(UserError, match=words):
        pi.linearisation_cost(llama[0], **({"corpus": stimuli(DOCUMENTS), "progress": False} | options))


# --- Orders, correlations, curves ---


def test_orders_come_from_the_other_half_alone():
    rows = [(0, head, sequence) for head in range(5) for sequence in range(4)]
    frame = pd.DataFrame(rows, columns=["layer", "head", "sequence"])
    in_a = np.array([True, False, True, False])
    upwards = frame["sequence"].isin([0, 2])  # half a says 0 1 2 3 4, half b the opposite
    costs = frame.assign(cost=np.where(upwards, frame["head"], -frame["head"]).astype(float))
    loads = frame.assign(effective_load=np.where(upwards, -frame["head"], frame["head"]).astype(float))
    for judged_a in (True, False):
        found = orders(costs, loads, in_a, judged_a, seed=0)
        expected = [(0, head) for head in (range(4, -1, -1) if judged_a else range(5))]
        assert found["cost", 0] == expected
        assert found["load", 0] == expected[::-1]
        assert found["load_descending", 0] == expected
        assert sorted(found["random", 1]) == [(0, head) for head in range(5)]
    assert orders(costs, loads, in_a, True, 0)["random", 2] == orders(costs, loads, in_a, False, 0)["random", 2]
    assert numbers_swapped(3) == [0, 1, 2, 3]
    assert numbers_swapped(32) == list(range(0, 33, 4))


def test_rank_correlations_are_those_of_scipy_and_none_of_two_heads():
    rng = np.random.default_rng(0)
    one, two = rng.integers(0, 4, (9, 3)).astype(float), rng.normal(size=(9, 3))
    from scipy import stats

    expected = [stats.spearmanr(one[:, i], two[:, i]).statistic for i in range(3)]
    np.testing.assert_allclose(spearman(one, two), expected, rtol=1e-12)
    assert np.isnan(spearman(one[:2], two[:2])).all()
    assert np.isnan(spearman(np.ones((5, 1)), two[:5, :1])).all()


def test_the_order_that_is_better_than_random_is_below_it():
    rows = [
        (order, draw, k, sequence, k * (1.0 if order == "cost" else 2.0 + draw) + 0.01 * sequence * k)
        for order, draw in (("cost", 0), ("random", 0), ("random", 1))
        for k in (0, 2)
        for sequence in range(8)
    ]
    curve = pd.DataFrame(rows, columns=["order", "draw", "swapped", "sequence", "loss_change"])
    table = curve_table(curve, resampled(curve.assign(document=curve["sequence"]), 0))
    assert table.loc[("cost", 2), ["below_random", "below_random_lo", "below_random_hi"]].tolist() == pytest.approx(
        [3] * 3
    )
    assert table.loc[("random", 2), ["least", "most"]].tolist() == pytest.approx([4.07, 6.07])
    assert table.loc[("cost", 2), "loss_change_lo"] < table.loc[("cost", 2), "loss_change"]


def test_a_load_that_is_worth_alone_predicts_nothing_more():
    """Cost = worth + noise, load = worth + noise: they correlate, and do not once worth is held fixed."""
    rng = np.random.default_rng(1)
    worth = rng.normal(size=400)
    numbers = pd.DataFrame(
        {"layer": 0, "head": range(400), "sequence": 0, "effective_load": worth + rng.normal(size=400)}
    )
    numbers["top_strength"] = -numbers["effective_load"]
    cost = pd.DataFrame(
        {"layer": 0, "head": range(400), "sequence": 0, "rule": "best", "cost": worth + rng.normal(size=400)}
    )
    costs = pd.concat([cost, cost.assign(rule="mean_us", cost=worth)])
    _, records, of = measured(rules=("covariance",))
    fitted = fit_rules(records, of, np.ones((1, 9)), 0)
    fitted.r2["covariance"] = np.zeros((400, 1))  # all rank alike
    table = correlations(costs, numbers, fitted, ["best", "mean_us"], np.ones((1, 1)))["rank_correlation"]
    assert table["best", "effective_load"] == pytest.approx(0.48, abs=0.1)
    assert table["best", "top_strength"] == -table["best", "effective_load"]
    assert abs(table["best", "effective_load given worth"]) < 0.15  # 0 within 3 / sqrt(400)
    assert np.isnan(table["best", "r2"])


# --- The command ---


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["swap", *map(str, arguments)])
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    return run


SMALL = ("demo", "--layers", 1, "--context", 24, "--sequences", 8, "--rules", "covariance,delta")


def test_the_command_prints_and_writes(command, tmp_path: Path):
    file = tmp_path / "swap.csv"
    code, out, err = command(*SMALL, "--csv", file)
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0].split()[:3] == ["layer", "head", "cost_covariance"]
    assert [line.split()[:2] for line in lines[1:9]] == [["1", str(head)] for head in range(8)]
    assert lines[9].split()[:2] == ["1", "all"]
    assert lines[10].startswith("all ")
    assert "bootstrap over 8 documents" in err
    table = pd.read_csv(file)
    assert {"cost_best", "cost_best_lo", "cost_mean_us", "r2_delta", "best_rule", "effective_load"} <= {*table.columns}
    code, out, err = command(*SMALL, "--csv", file)
    assert (code, out, len(err.splitlines())) == (2, "", 1)


def test_the_command_as_json_and_what_it_refuses(command):
    code, out, err = command(*SMALL, "--json", "--quiet")
    assert code == 0, err
    told = json.loads(out)
    assert told["arguments"]["rules"] == ["covariance", "delta"]
    assert [len(told[name]) for name in ("heads", "layers", "total", "curve")] == [8, 1, 1, 4 * 9]
    assert told["loss"]["lo"] < told["loss"]["nats_per_token"] < told["loss"]["hi"]
    code, out, err = command("demo", "--rules", "hope")
    assert (code, out, len(err.splitlines())) == (2, "", 1)


def test_every_head_is_swapped():
    handle = handle_of("llama")
    with untouched(handle.model):
        assert chosen_heads(inspect(handle), None) == places_of("llama")
