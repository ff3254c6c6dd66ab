"""Effects and verdicts of conditioning: crossed random effects against loops and simulation, Hedges' g, Holm, words."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from pavinterp import paradigms as library
from pavinterp.experiments.conditioning_tables import (
    crossed,
    direction,
    effect_table,
    equivalence_margin,
    hedges_g,
    holm,
    outcome_table,
    verdict,
)


def simulated(rng, layouts=4, draws=30, mean=0.0, of_layout=1.0, of_draw=1.0, rest=1.0):
    return (
        mean
        + of_layout * rng.normal(size=(layouts, 1))
        + of_draw * rng.normal(size=(1, draws))
        + rest * rng.normal(size=(layouts, draws))
    )


def test_crossed_equals_loops_over_the_table():
    values = simulated(np.random.default_rng(0), of_layout=2.0)
    mean, error, df, p = crossed(values)
    a, b = values.shape
    grand = sum(values[i, j] for i in range(a) for j in range(b)) / (a * b)
    rows = [sum(values[i]) / b for i in range(a)]
    columns = [sum(values[:, j]) / a for j in range(b)]
    ss = sum((values[i, j] - rows[i] - columns[j] + grand) ** 2 for i in range(a) for j in range(b))
    ms_rows = b * sum((r - grand) ** 2 for r in rows) / (a - 1)
    ms_columns = a * sum((c - grand) ** 2 for c in columns) / (b - 1)
    ms_rest = ss / ((a - 1) * (b - 1))
    total = ms_rows + ms_columns - ms_rest
    spread = ms_rows**2 / (a - 1) + ms_columns**2 / (b - 1) + ms_rest**2 / ((a - 1) * (b - 1))
    assert mean == pytest.approx(grand)
    assert error == pytest.approx(np.sqrt(total / (a * b)))
    assert df == pytest.approx(total**2 / spread)
    assert p == pytest.approx(2 * stats.t.sf(abs(grand) / error, df))


@pytest.mark.parametrize("of_layout", [0.0, 0.5, 2.0])
def test_intervals_over_layouts_and_draws_hold_the_truth(of_layout):
    """95 % over 1,000 simulations is within [93, 99]; draws alone would hold it rarely where layouts differ much."""
    rng = np.random.default_rng(1)
    inside = narrow = 0
    for _ in range(1000):
        values = simulated(rng, of_layout=of_layout)
        mean, error, df, _ = crossed(values)
        inside += abs(mean) <= stats.t.ppf(0.975, df) * error
        of_draws = values.mean(0)
        narrow += abs(mean) <= stats.t.ppf(0.975, 29) * of_draws.std(ddof=1) / np.sqrt(30)
    assert 930 <= inside <= 990
    if of_layout == 2.0:
        assert narrow < 400


def test_one_layout_is_a_plain_paired_test():
    values = np.random.default_rng(2).normal(0.4, 1, (1, 25))
    mean, error, df, p = crossed(values)
    expected = stats.ttest_1samp(values[0], 0)
    assert (mean, df, p) == pytest.approx((values.mean(), 24, expected.pvalue))
    assert error == pytest.approx(stats.sem(values[0]))


def test_differences_that_never_vary():
    assert crossed(np.full((3, 9), 2.0))[3] == 0
    assert crossed(np.zeros((3, 9)))[3] == 1
    assert np.isnan(hedges_g(np.full(9, 2.0)))


def test_hedges_g_is_unbiased():
    """Five draws of a normal with mean one standard deviation: the plain ratio is a quarter too large, g is not."""
    rng = np.random.default_rng(3)
    samples = rng.normal(1, 1, (40_000, 5))
    plain = np.mean(samples.mean(1) / samples.std(1, ddof=1))
    assert plain > 1.2
    assert np.mean([hedges_g(row) for row in samples[:20_000]]) == pytest.approx(1, abs=0.02)


def test_holm_by_hand():
    p = np.array([0.01, 0.04, np.nan, 0.03, 0.005])
    np.testing.assert_allclose(holm(p), [0.03, 0.06, np.nan, 0.06, 0.02])
    np.testing.assert_allclose(holm(np.array([0.6, 0.7])), [1, 1])


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (-0.1, 0.1, "0"), (0.05, 0.15, "0"), (0.05, 0.4, "+"), (0.5, 0.9, "+"), (-0.9, -0.3, "-"), (-0.1, 0.5, "?"),
        (-5, 5, "?"), (np.nan, np.nan, "?"),
    ],
)  # fmt: skip
def test_direction(low, high, expected):
    assert direction(low, high, 0.2) == expected


def test_verdicts():
    words = {
        "++": "as predicted", "--": "as predicted", "00": "as predicted", "+0": "absent", "-0": "absent",
        "+-": "opposite", "-+": "opposite", "0+": "present", "0-": "present", "+?": "undecided", "0?": "undecided",
    }  # fmt: skip
    assert {both: verdict(*both) for both in words} == words


def frame(effect, draws=40, seed=0):
    """Tests of blocking in two layouts: control N(0, 1), experimental the same plus `effect` and a little noise."""
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(draws):
        base = rng.normal()
        for layout in ("b", "a"):
            rows.append(("blocking", "control", layout, number, base))
            rows.append(("blocking", "experimental", layout, number, base + effect + 0.1 * rng.normal()))
    return pd.DataFrame(rows, columns=["paradigm", "group", "layout", "draw", "response"])


def test_effects_are_paired():
    table = effect_table(frame(-0.5), [library.builtin()["blocking"]])
    assert list(table.index) == [("blocking", "control", layout) for layout in ("b", "a", "all")]
    for _, row in table.iterrows():
        assert row["effect"] == pytest.approx(-0.5, abs=0.06)  # its standard error is 0.016
        assert row["effect_lo"] < row["effect"] < row["effect_hi"]
    within = table.iloc[:2]  # over two layouts there is next to no degree of freedom
    assert (within["effect_hi"] - within["effect_lo"] < 0.15).all()  # unpaired it would be 0.9
    assert table["effect"].iloc[2] == pytest.approx(table["effect"].iloc[:2].mean())
    assert list(table["effect"]) == pytest.approx(list(table["experimental"] - table["control_response"]))
    assert table["p_holm"].notna().tolist() == [False, False, True]
    assert table["us_as_often"].all()


def test_whether_the_us_comes_as_often_is_said():
    tests = frame(0.0)
    for name, often in (("unblocking", False), ("overshadowing", True), ("partial_reinforcement", False)):
        one = effect_table(tests.assign(paradigm=name), [library.builtin()[name]])
        assert one["us_as_often"].tolist() == [often] * 3


def test_baselines_are_taken_off():
    rows = [
        ("p", g, "a", d, b, True, 10.0 * d + (3 if b else 5)) for g in "xy" for d in range(3) for b in (False, True)
    ]
    columns = ["paradigm", "group", "layout", "draw", "baseline", "test", "response"]
    records = pd.DataFrame(rows, columns=columns)
    records = records[~(records["baseline"] & (records["group"] == "y"))]
    found = outcome_table(records).set_index(["group", "draw"])["response"]
    assert found.loc["x"].tolist() == [2, 2, 2]
    assert found.loc["y"].tolist() == [5, 15, 25]


def test_the_margin():
    index = pd.MultiIndex.from_tuples([("acquisition", "control", "all")])
    strong, weak = (pd.DataFrame({"effect": [x]}, index=index) for x in (10.0, 1.0))
    assert equivalence_margin(strong) == pytest.approx(0.5)
    assert equivalence_margin(weak) == 0.2
    assert equivalence_margin(strong, 0.3) == 0.3
