"""Which rule explains a head: against plain loops, on heads made from a known rule, under the theory's invariances."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import tiny
import torch
from make_trials import make_trials
from reference import strengths

import pavinterp as pi
from pavinterp import cli
from pavinterp.capture.output_projection import write_factor
from pavinterp.errors import UserError
from pavinterp.experiments.association_terms import GRIDS, Learned, SumsOfSquares, Variant, stretches, variants
from pavinterp.experiments.cross_fitting import cross_fit, halves
from pavinterp.experiments.rules import COLUMNS, tables
from pavinterp.theory.rules import RULES
from pavinterp.trials import Trials

TESTS = [0, 3, 7, 12, 17, 23]


def many(sequences: int, **options) -> list[tuple[Trials, torch.Tensor]]:
    """Sequences of one synthetic layer, with unequal weights; all share W_O."""
    _, w_o = make_trials(seed=99)
    weights = 1 + torch.arange(len(TESTS), dtype=torch.float64) / 5
    return [make_trials(tests=TESTS, seed=seed, weights=weights, w_o=w_o, **options) for seed in range(sequences)]


def records_of(trials: list[Trials], of: list[Variant]) -> pd.DataFrame:
    """What a sweep would hand over, a document a sequence."""
    measure = SumsOfSquares(of)
    frames = []
    for i, one in enumerate(trials):
        numbers = {name: value.numpy() for name, value in measure(one).items()}
        frames.append(pd.DataFrame({"sequence": i, "document": i, "layer": 0, "head": range(one.heads)} | numbers))
    return pd.concat(frames, ignore_index=True)


def explained(trials: list[Trials], rules: list[str]) -> tuple[pd.DataFrame, pd.DataFrame]:
    of = variants(rules)
    return tables(records_of(trials, of), of, seed=0)


# --- Against plain loops ---


def term_of_rule(rule: str, parameters: dict, k: np.ndarray, v: np.ndarray, q: np.ndarray) -> np.ndarray:
    """A rule's response to the USs of the pairs seen, about their mean, by its definition."""
    v = v - v.mean(0)
    memory = np.zeros((k.shape[1], v.shape[1]))
    if rule == "covariance":
        for j in range(len(k)):
            memory += np.outer(k[j] - k.mean(0), v[j]) / len(k)
        return memory.T @ q
    if rule == "decay":
        lam, weight = parameters["lam"], 0.0
        for j in range(len(k)):
            memory, weight = lam * memory + np.outer(k[j], v[j]), lam * weight + 1
        return memory.T @ q / weight
    for j in range(len(k)):
        unit = k[j] / np.linalg.norm(k[j])
        memory += parameters["eta"] * np.outer(unit, v[j] - memory.T @ unit)
    return memory.T @ q


def term_of_oja(eta, k, v, seen, q, w_o, gate) -> np.ndarray:
    """Oja's rule on what the USs write, about the mean of the sequence; with a gate, on the USs themselves."""
    v = v - v.mean(0) if gate is not None else (v - v.mean(0)) @ w_o
    memory = np.zeros((k.shape[1], v.shape[1]))
    for j in seen:
        unit = v[j] / np.linalg.norm(v[j])
        memory += eta * np.outer(k[j] - memory @ unit, unit)
    return memory.T @ q if gate is None else (memory.T @ q * gate) @ w_o


def r2_by_loops(sequences: list[tuple[Trials, torch.Tensor]], rule: str, cs: str, head: int) -> float:
    """Cross-fitted R^2 with W_O itself, every test's vectors written out."""
    half_a = halves(len(sequences), 0)
    pairs: dict[tuple[bool, int], list[tuple[np.ndarray, np.ndarray, float]]] = {}
    grid = GRIDS.get(rule, ({},))
    for i, (one, w_o) in enumerate(sequences):
        keys, values = one.keys[head // one.group].numpy(), one.values[head // one.group].numpy()
        for row, t in enumerate(one.tests.tolist()):
            bias = one.bias[0, row].numpy()
            seen = np.flatnonzero(np.isfinite(bias))
            sink = None if one.sinks is None else one.sinks[head]
            a = strengths(one.queries[head, t].numpy(), keys, bias, one.scale, one.softcap, sink)
            us = values if one.gate is None else values * one.gate[head, row].numpy()
            y = sum(a[j] * (us[j] - us[seen].mean(0)) for j in seen) @ w_o[head].numpy()
            k = keys - keys.mean(0) if cs == "centred" else keys
            for p, parameters in enumerate(grid):
                query = one.scale * one.queries[head, t].numpy()
                if rule == "oja":
                    gate = None if one.gate is None else one.gate[head, row].numpy()
                    x = term_of_oja(parameters["eta"], k, values, seen, query, w_o[head].numpy(), gate)
                else:
                    x = term_of_rule(rule, parameters, k[seen], us[seen], query) @ w_o[head].numpy()
                pairs.setdefault((bool(half_a[i]), p), []).append((x, y, float(one.weights[row])))
    error = size = 0.0
    for fitted, judged in ((True, False), (False, True)):
        fits = []
        for p in range(len(grid)):
            gain = sum(w * x @ y for x, y, w in pairs[fitted, p]) / sum(w * x @ x for x, _, w in pairs[fitted, p])
            left = sum(w * np.sum((y - gain * x) ** 2) for x, y, w in pairs[fitted, p])
            fits.append((left, gain, p))
        _, gain, p = min(fits)
        error += sum(w * np.sum((y - gain * x) ** 2) for x, y, w in pairs[judged, p])
        size += sum(w * y @ y for _, y, w in pairs[judged, p])
    return 1 - error / size


@pytest.mark.parametrize(
    "options", [{}, {"kv_heads": 1}, {"softcap": 2.0}, {"sinks": True}, {"window": 9}, {"gated": True}]
)
def test_r2_equals_the_plain_loop(options):
    sequences = many(5, **options)
    table, _ = explained([one for one, _ in sequences], ["covariance", "decay", "delta", "oja"])
    for (_, head, rule, cs), row in table.iterrows():
        assert row["r2"] == pytest.approx(r2_by_loops(sequences, rule, cs, head), abs=1e-9), (head, rule, cs)


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"sinks": True}, {"window": 5}, {"gated": True}])
def test_softmax_is_the_head_itself(options):
    table, _ = explained([one for one, _ in many(4, **options)], ["softmax"])
    assert table["r2"].to_numpy() == pytest.approx(1, abs=1e-12)
    assert table[["gain_a", "gain_b"]].to_numpy() == pytest.approx(1, abs=1e-12)


def test_softmax_is_the_head_itself_with_biases_of_the_scores_and_edited_strengths():
    (one, _), *_ = many(1)
    slope = torch.arange(24.0, dtype=torch.float64)[None] - one.tests[:, None]
    biased = replace(one, bias=one.bias + slope * torch.tensor([0.1, 0.2, 0.3, 0.4])[:, None, None])
    edited = replace(one, given_strengths=one.strengths * 0.3)
    for trials in (biased, edited):
        learned = Learned(trials)
        x, y = learned.rule_term(Variant("softmax", "either")), learned.response_term()
        assert torch.allclose(x, y, rtol=0, atol=1e-12)


# --- Heads that are a known rule ---


def test_a_head_of_tiny_scores_is_covariance():
    trials = [replace(one, queries=one.queries * 1e-3) for one, _ in many(8)]
    table, heads = explained(trials, ["covariance", "delta", "oja", "softmax"])
    r2 = table["r2"].unstack(["rule", "cs"])
    assert (r2["covariance", "either"] > 1 - 1e-5).all()
    gains = table.xs("covariance", level="rule")[["gain_a", "gain_b"]]
    assert gains.to_numpy() == pytest.approx(1, abs=1e-3), "queries carry the head's own scale"
    assert (heads["linearity"] == r2["covariance", "either"]).all()
    assert (heads["best_rule"] == "covariance").all()
    assert (heads["best_share"] == 1).all()
    assert r2["delta"].to_numpy().max() < 0.99


@pytest.mark.parametrize(("rule", "parameters"), [("delta", {"eta": 0.3}), ("decay", {"lam": 0.75})])
def test_a_head_made_from_a_rule_is_explained_by_it(rule, parameters):
    trials = []
    for one, _ in many(8):
        keys = (one.keys - one.keys.mean(1, keepdim=True)).repeat_interleave(one.group, dim=0)
        unit_us = torch.eye(24, dtype=torch.float64).expand(one.heads, 24, 24)
        made = RULES[rule](keys, unit_us, one.queries[:, one.tests], one.tests, **parameters)
        if rule == "decay":
            made = made * 0.25 / (1 - 0.75 ** (one.tests + 1.0))[:, None]
        trials.append(replace(one, given_strengths=made))
    table, heads = explained(trials, list(RULES))
    assert (heads["best_rule"] == rule).all()
    assert heads["best_r2"].to_numpy() == pytest.approx(1, abs=1e-9)
    ((name, value),) = parameters.items()
    assert (table.xs((rule, "centred"), level=("rule", "cs"))["parameter"] == f"{name}={value:g}").all()
    assert (heads["compared"] == 7).all(), "nine rules but softmax and hebbian"


def test_hebbian_and_covariance_are_one_about_the_mean_us():
    table, heads = explained([one for one, _ in many(4)], ["covariance", "hebbian"])
    r2 = table["r2"].droplevel("cs").unstack("rule")
    assert r2["hebbian"].to_numpy() == pytest.approx(r2["covariance"].to_numpy(), abs=1e-12)
    assert (heads["compared"] == 1).all()


# --- What may be measured (theory section 1) ---


def test_another_basis_of_the_uss_changes_nothing():
    sequences = many(4)
    basis = torch.randn(6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    changed = []
    for one, w_o in sequences:
        write = write_factor(torch.linalg.inv(basis) @ w_o, torch.float64)
        changed.append(replace(one, values=one.values @ basis, write=write))
    before, _ = explained([one for one, _ in sequences], list(RULES))
    after, _ = explained(changed, list(RULES))
    assert after["r2"].to_numpy() == pytest.approx(before["r2"].to_numpy(), abs=1e-7)


def test_a_constant_added_to_every_cs_changes_raw_figures_only():
    sequences = [one for one, _ in many(4)]
    constant = torch.randn(8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    before, heads = explained(sequences, list(RULES))
    after, heads_after = explained([replace(one, keys=one.keys + constant) for one in sequences], list(RULES))
    assert (heads_after["best_rule"] == heads["best_rule"]).all()
    raw = before.index.get_level_values("cs") == "raw"
    assert after["r2"][~raw].to_numpy() == pytest.approx(before["r2"][~raw].to_numpy(), abs=1e-7)
    assert (after["r2"][raw] - before["r2"][raw]).abs().groupby("rule").max().min() > 1e-3


# --- Fitting, judging, intervals ---


def test_the_judged_half_has_no_part_in_the_gain():
    of = variants(["covariance", "delta"])
    records = records_of([one for one, _ in many(8)], of)
    half_a = pd.Series(halves(8, 0)[records["sequence"]])
    sums = ["yy", *(name for variant in of for name in variant.columns)]
    shuffled = records.copy()
    other = records.loc[~half_a, sums].sample(frac=1, random_state=1)  # over heads and sequences
    shuffled.loc[~half_a, sums] = other.to_numpy()
    before, after = tables(records, of, 0)[0], tables(shuffled, of, 0)[0]
    assert (after["gain_a"] == before["gain_a"]).all()
    assert (after["gain_b"] != before["gain_b"]).any()
    assert (after["r2"] != before["r2"]).any()


def test_halves_are_halves():
    for clusters in (2, 7, 16):
        assert halves(clusters, 3).sum() == (clusters + 1) // 2
    assert (halves(16, 1) != halves(16, 2)).any()


def test_nothing_to_explain_is_nan_and_a_silent_rule_explains_nothing():
    ones = np.ones((2, 1, 1))
    in_a = np.array([True, False])
    assert np.isnan(cross_fit(ones, ones, np.zeros((2, 1)), in_a, np.ones(2)).r2).all()
    silent = cross_fit(0 * ones, 0 * ones, np.ones((2, 1)), in_a, np.ones(2))
    assert silent.r2 == [0]
    assert silent.gains[0] == [0]


def test_intervals_hold_the_truth_about_as_often_as_they_say():
    """y = x + noise of twice its variance, clusters of different size: R^2 is 1/3; 120 texts of 40 documents."""
    rng = np.random.default_rng(0)
    of = [Variant("covariance", "either")]
    xy_name, xx_name = of[0].columns
    held = 0
    for repeat in range(120):
        scale = rng.uniform(0.5, 1.5, (40, 1))
        x = rng.normal(size=(40, 60)) * scale
        y = x + rng.normal(size=(40, 60)) * scale * np.sqrt(2)
        sums = {"yy": (y * y).sum(1), xy_name: (x * y).sum(1), xx_name: (x * x).sum(1)}
        frame = pd.DataFrame({"sequence": range(40), "document": range(40), "layer": 0, "head": 0} | sums)
        row = tables(frame, of, seed=repeat)[0].iloc[0]
        held += row["r2_lo"] <= 1 / 3 <= row["r2_hi"]
    assert 104 <= held <= 119, f"{held} of 120"


def test_few_clusters_give_no_interval_and_one_gives_no_answer():
    table, heads = explained([one for one, _ in many(7)], ["delta"])
    assert table["r2"].notna().all()
    assert table[["r2_lo", "r2_hi"]].isna().to_numpy().all()
    assert heads["linearity"].isna().all()
    assert heads["best_share"].isna().all()
    assert "No intervals" in table.attrs["intervals"]
    with pytest.raises(UserError, match="no second half"):
        explained([one for one, _ in many(1)], ["delta"])


def test_what_no_stream_leads_to_is_refused():
    (one, _), *_ = many(1)
    first, last = stretches(make_trials(tests=[0, 9, 23], window=5)[0])
    assert (first.tolist(), last.tolist()) == ([0, 5, 19], [0, 9, 23])
    bias = one.bias.clone()
    bias[:, -1, 4] = float("-inf")
    with pytest.raises(UserError, match="no single stretch"):
        stretches(replace(one, bias=bias))


# --- On the embedded model ---


def test_a_batch_changes_nothing_and_the_tables_say_what_they_are(demo):
    options = {"context": 48, "sequences": 9, "tests": 6, "layers": [1], "progress": False}
    rules = ["covariance", "delta", "oja", "pseudoinverse", "softmax"]
    one, four = (pi.explain(demo, rules=rules, batch=batch, **options) for batch in (1, 4))
    assert four.rules["r2"].to_numpy() == pytest.approx(one.rules["r2"].to_numpy(), abs=1e-4)
    assert (four.heads["best_rule"] == one.heads["best_rule"]).all()
    r2 = one.rules["r2"].unstack(["rule", "cs"])
    assert r2["softmax", "either"].to_numpy() == pytest.approx(1, abs=1e-9)
    described = {*COLUMNS, "layer", "head"}
    for table in (one.rules, one.heads):
        names = {name.removesuffix("_lo").removesuffix("_hi") for name in (*table.columns, *table.index.names)}
        assert names <= described
        assert "documents" in table.attrs["intervals"]
    assert (one.rules["r2_lo"] <= one.rules["r2"]).mean() > 0.9
    assert list(one.by_layer().columns) == [*rules, "best_rule"]
    assert len(one.flat()) == len(one.rules)
    assert "8 heads" in repr(one)


def test_grouped_queries_windows_and_few_documents():
    handle = pi.load(tiny.gemma3())
    text = [np.random.default_rng(i).integers(1, tiny.VOCABULARY, 32).tolist() for i in range(3)]
    found = pi.explain(handle, text, context=32, bos="never", tests=6, progress=False)
    softmax = found.rules.xs("softmax", level="rule")["r2"]
    assert softmax.to_numpy() == pytest.approx(1, abs=1e-9)
    assert found.rules["r2"].notna().all()
    assert found.manifest["intervals"].startswith("No intervals")


Command = Callable[..., tuple[int, str, str]]
SMALL = ("--context", 48, "--sequences", 8, "--tests", 6, "--layers", 0, "--rules", "covariance,decay,softmax")


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["rules", *map(str, arguments)])
        assert isinstance(ended.value.code, int)
        printed = capsys.readouterr()
        return ended.value.code, printed.out, printed.err

    return run


def test_the_command_prints_a_table_and_writes_all_of_it(command, tmp_path: Path):
    file = tmp_path / "rules.csv"
    code, out, err = command("demo", *SMALL, "--csv", file)
    assert code == 0, err
    assert sum(line.strip()[:1].isdigit() for line in out.splitlines()) == 8
    assert max(map(len, out.splitlines())) <= 80
    assert "of 2 linear-memory rules" in err
    table = pd.read_csv(file)
    assert len(table) == 8 * 4
    assert {"rule", "cs", "r2", "r2_lo", "linearity", "best_rule"} <= {*table.columns}
    code, out, err = command("demo", *SMALL, "--csv", file)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].endswith("exists: replace it with --overwrite or choose another name")
    assert [path.name for path in tmp_path.iterdir()] == ["rules.csv"]


def test_the_command_by_layer_and_as_json(command):
    code, out, err = command("demo", *SMALL, "--by", "layer", "--quiet")
    assert code == 0, err
    assert sum(line.strip()[:1].isdigit() for line in out.splitlines()) == 1
    code, out, err = command("demo", *SMALL, "--json", "--quiet")
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert len(result["heads"]) == 8
    assert len(result["rules"]) == 8 * 4
    assert result["arguments"]["rules"] == ["covariance", "decay", "softmax"]
    assert result["certificate"]["largest"] <= result["certificate"]["tolerance"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "MODEL"),
        (["demo", "--rules", "dleta"], "choose among covariance, decay"),
        (["demo", "--rules", ""], "choose among covariance, decay"),
        (["demo", "--by", "week"], "--by must be one of head, layer"),
        (["demo", "--layers", "a"], "0,3,5-8"),
        (["demo", "--csv", "no/such/file.csv"], "is not a folder"),
        (["demo", "--csv", "."], "it is a folder"),
    ],
)
def test_what_makes_no_sense_is_one_line_before_the_work(command, in_tmp: Path, arguments: list[str], words: str):
    code, out, err = command(*arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert len(err.splitlines()) == 1
    assert list(in_tmp.iterdir()) == []
