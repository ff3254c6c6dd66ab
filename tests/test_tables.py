"""The heads table: means, cluster bootstrap, horizons, regimes."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from pavinterp import tables
from pavinterp.measures import all_measures
from pavinterp.sweep import LayerInfo
from pavinterp.theory.capacity import isotropic_average_case_capacity, isotropic_worst_case_capacity

LAYERS = [LayerInfo(layer=0, heads=4, kv_heads=2, d_k=64, d_v=64, window=None)]


def made_records(documents=12, each=3, heads=4, seed=0):
    """Records with a document effect, so that sequences of one document are not independent."""
    rng = np.random.default_rng(seed)
    rows = []
    for kind in ("text", "repeated_random_tokens"):
        columns = [c.name for m in all_measures() if m.stimuli == kind for c in m.columns]
        for document in range(documents):
            shared = rng.normal(0, 1.0, heads)
            for s in range(each):
                for head in range(heads):
                    value = 8 + head + shared[head] + rng.normal(0, 0.1)
                    row = {"stimuli": kind, "sequence": document * each + s, "document": document, "layer": 0}
                    rows.append(row | {"head": head, "kv_head": head // 2} | dict.fromkeys(columns, value))
    records = pd.DataFrame(rows)
    records[["load_growth", "load_intercept"]] = [0.3, 0.5]
    return records


def test_a_heads_value_is_the_mean_of_its_records_and_the_interval_that_of_documents():
    records = made_records()
    table = tables.heads_table(records, LAYERS)
    text = records[records["stimuli"] == "text"]
    for head in range(4):
        mine = text[text["head"] == head]
        row = table.loc[(0, head)]
        assert row["effective_load"] == pytest.approx(mine["effective_load"].mean(), rel=1e-12)
        means = mine.groupby("document")["effective_load"].mean()
        # 12 documents of equal size: the bootstrap's spread is that of a mean of 12 (percentiles: 25 %)
        half = (row["effective_load_hi"] - row["effective_load_lo"]) / 2
        assert half == pytest.approx(1.96 * means.std(ddof=0) / 12**0.5, rel=0.25)
    assert table.attrs["intervals"].startswith("95 % percentile intervals of a bootstrap over 12 documents")
    assert (table["clusters"] == 12).all()
    assert (table["sequences"] == 36).all()


@pytest.mark.parametrize("kind", ["as they are", "some missing", "a silent head", "far from zero", "huge"])
def test_the_bootstrap_is_the_plain_loop(kind):
    """Deviations from the mean are summed in float32: to 1e-6 of a draw's deviation, whatever the mean."""
    records = made_records(documents=9, each=2, heads=2)
    mine = records[records["stimuli"] == "text"].copy()
    if kind == "some missing":
        mine.loc[mine.index[[0, 5, 6, 11]], "effective_load"] = np.nan
    elif kind == "a silent head":
        mine.loc[mine["head"] == 1, "effective_load"] = np.nan
    elif kind == "far from zero":
        mine["effective_load"] += 1e6
    elif kind == "huge":
        mine["effective_load"] *= 1e36
    mine = mine.sample(frac=1, random_state=0)  # records may come in any order
    estimate, drawn, _ = tables.bootstrap(mine, ["effective_load"], mine["document"], seed=3)
    rng = np.random.default_rng(3)
    weights = rng.multinomial(9, np.full(9, 1 / 9), size=tables.DRAWS)
    for head in (0, 1):
        of_head = mine[mine["head"] == head]
        middle = of_head["effective_load"].mean()
        assert estimate.loc[(0, head), "effective_load"] == pytest.approx(middle, rel=1e-12, nan_ok=True)
        for draw in (0, 17, 999):
            values = [
                v
                for document, times in enumerate(weights[draw])
                for v in np.tile(of_head[of_head["document"] == document]["effective_load"], times)
            ]
            expected = np.nan if kind == "a silent head" and head == 1 else np.nanmean(values)
            assert drawn[draw, head, 0] - middle == pytest.approx(expected - middle, rel=1e-5, nan_ok=True)


def test_sequences_are_resampled_where_there_is_one_document():
    table = tables.heads_table(made_records(documents=1, each=10), LAYERS)
    assert "over 10 sequences (all of one document)" in table.attrs["intervals"]
    assert table["effective_load_lo"].notna().all()


def test_no_interval_under_eight_clusters():
    table = tables.heads_table(made_records(documents=7), LAYERS)
    assert table["effective_load_lo"].isna().all()
    assert (table["regime"] == "undefined").all()
    assert table.attrs["intervals"].startswith("No intervals: the text has 7 documents")


def test_nan_records_do_not_count():
    records = made_records()
    records.loc[(records["head"] == 1) & (records["sequence"] < 3), "fidelity"] = np.nan
    table = tables.heads_table(records, LAYERS)
    rest = records[(records["stimuli"] == "text") & (records["head"] == 1) & (records["sequence"] >= 3)]
    assert table.loc[(0, 1), "fidelity"] == pytest.approx(rest["fidelity"].mean())
    records.loc[records["head"] == 2, "fidelity"] = np.nan
    assert np.isnan(tables.heads_table(records, LAYERS).loc[(0, 2), "fidelity"])


def test_capacities_utilisations_and_regimes():
    table = tables.heads_table(made_records(), LAYERS)
    worst, average = isotropic_worst_case_capacity(64), isotropic_average_case_capacity(64)
    np.testing.assert_allclose(table["capacity_worst"], worst)
    np.testing.assert_allclose(table["utilisation_average"], table["effective_load"] / average)
    np.testing.assert_allclose(table["utilisation_worst_hi"], table["effective_load_hi"] / worst)
    assert table["kv_head"].tolist() == [0, 0, 1, 1]
    assert set(table["regime"]) <= {"graded", "error-free/graded"}


@pytest.mark.parametrize(
    ("growth", "intercept", "load", "expected"),
    [
        (0.5, np.log(2.0), 20.0, 16.0),  # 2 sqrt(t) = 8 at t = 16
        (0.0, np.log(2.0), 2.0, np.inf),
        (-0.1, np.log(2.0), 2.0, np.inf),
        (0.5, np.log(9.0), 30.0, 8.0),  # above from the start, but fewer than 8 positions cannot hold 8
        (-0.5, np.log(9.0), 1.0, np.inf),  # it falls below the bound and stays there
        (-0.01, np.log(90.0), 85.0, 8.0),  # it lies above the bound throughout
        (np.nan, 0.0, 1.0, np.nan),
    ],
)
def test_horizons(growth, intercept, load, expected):
    got = tables.horizon(8.0, np.array(growth), np.array(intercept), np.array(load))
    np.testing.assert_allclose(got, expected, rtol=1e-12)


def test_every_column_has_a_unit_and_a_description():
    table = tables.heads_table(made_records(), LAYERS)
    described = tables.describe()
    for column in table.columns:
        name = column.removesuffix("_lo").removesuffix("_hi")
        assert described.loc[name, "units"]
        assert described.loc[name, "description"].endswith(".")
    assert table.attrs["units"]["effective_load"] == "associations"


def test_a_thousand_heads_are_aggregated_at_once():
    layers = [LayerInfo(layer=i, heads=32, kv_heads=8, d_k=64, d_v=64, window=None) for i in range(32)]
    one = made_records(documents=8, each=1, heads=32)
    records = pd.concat([one.assign(layer=i) for i in range(32)], ignore_index=True)
    assert len(tables.heads_table(records, layers)) == 1024
