"""Experiments beside a run: in its table, its folder and its pages, and back."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from architectures import build
from test_run import stimuli

import pavinterp as pi
from pavinterp.errors import UserError
from pavinterp.plots.experiments import MAPS, capacity_curves, number_map, rule_r2
from pavinterp.plots.marks import Points
from pavinterp.plots.propagation import end_gains, gain_map, infidelity_calibration
from pavinterp.plots.redundancy import distinct_heads, redundancy_of_pairs
from pavinterp.report.index_page import OF_EXPERIMENTS

DOCUMENTS = [np.random.default_rng(i).integers(3, 101, 24) for i in range(8)]


@pytest.fixture(scope="module")
def run():
    handle, text = pi.load(build("llama")), stimuli(DOCUMENTS)
    run = pi.measure(handle, text, progress=False)
    run.add(pi.memory_capacity(handle, text, rules=["hebbian", "softmax"], progress=False))
    run.add(pi.explain(handle, text, rules=["covariance", "delta"], progress=False))
    run.add(pi.needed_associations(handle, text, progress=False))
    run.add(pi.linearisation_cost(handle, text, rules=["covariance"], progress=False))
    run.add(pi.association_budget(handle, text, by="load", progress=False))
    run.add(pi.head_redundancy(handle, text, pairs=3, progress=False))
    run.add(pi.error_propagation(handle, text, strengths=[0.1, 0.3], draws=1, progress=False))
    return run


def test_numbers_stand_in_the_table_with_their_definitions(run):
    heads = run.heads()
    for name in ("capacity_hebbian", "linearity", "needed_5", "linearisation_cost", "associations_worth", "infidelity"):
        assert {name, f"{name}_lo", f"{name}_hi"} <= set(heads.columns)
        assert heads.attrs["units"][name]
        assert heads.attrs["descriptions"][name]
    assert (heads["budget"] >= 1).all()
    assert heads.attrs["units"]["effective_load"] == "associations"


def test_written_and_read_back(run, tmp_path):
    page = run.report(tmp_path / "run")
    again = pi.Run.load(tmp_path / "run")
    assert sorted(again.experiments) == ["budget", "capacity", "needed", "propagate", "redundancy", "rules", "swap"]
    pd.testing.assert_frame_equal(again.heads(), run.heads())
    assert again.heads().attrs["descriptions"] == run.heads().attrs["descriptions"]
    for name, experiment in run.experiments.items():
        for frame, table in experiment.frames.items():
            read = again.experiments[name].frames[frame]
            assert read.index.names == table.index.names
            plain = [x.astype(object).where(x.notna(), None) for x in (read, table)]  # NA of several kinds
            pd.testing.assert_frame_equal(*plain, check_dtype=False, check_index_type=False)
    index = page.read_text()
    maps = {column: name for column, (name, _, _) in MAPS.items() if column != "us_attribution"}  # of condition
    assert all(f'id="{name}"' in index for name in maps.values())
    assert all(title in index for title, _, _ in OF_EXPERIMENTS.values())
    head = (tmp_path / "run" / "heads" / "L01H02.html").read_text()
    assert "Capacity of its own pairs" in head
    assert "Learning rules" in head
    assert "linearisation_cost" in head
    run.report(tmp_path / "run", overwrite=True)  # experiments are part of a run, not somebody's own files


def test_experiments_of_another_model_are_refused(run):
    other = build("llama")
    other.model.layers[0].self_attn.q_proj.weight.data *= 2
    found = pi.explain(pi.load(other), stimuli(DOCUMENTS), rules=["covariance"], progress=False)
    with pytest.raises(UserError, match=r"rules was found on .* add what is of one model"):
        run.add(found)


def test_pictures(run):
    curves = run.experiments["capacity"].frames["curves"].xs((1, 2), level=["layer", "head"])
    picture = capacity_curves(curves)
    assert not picture.missing
    labels = {mark.label for mark in picture.marks if mark.label}
    assert labels == {
        "softmax", "Hebbian", "Hebbian, isotropic CSs", "Hebbian, random weights", "capacity: f² = 1/2",
    }  # fmt: skip
    rules = run.experiments["rules"].frames["rules"].xs((1, 2), level=["layer", "head"])
    assert set(rule_r2(rules).y.names) == {"covariance", "delta"}
    heads = run.heads()
    cells = number_map(heads, "needed_5").marks[0]
    values = heads["needed_5"].to_numpy()
    shown = values / np.median(values[np.isfinite(values)])
    np.testing.assert_allclose(cells.value, np.where(np.isfinite(values), shown, np.nan))
    tables = run.experiments["redundancy"].frames
    distinct = distinct_heads(tables["layers"])
    np.testing.assert_array_equal(distinct.marks[1].y, tables["layers"]["distinct"])
    known = tables["pairs"][tables["pairs"]["ablated"]]
    drawn = [mark for mark in redundancy_of_pairs(tables["pairs"]).marks if isinstance(mark, Points)]
    assert sorted(y for mark in drawn for y in mark.y) == sorted(known["mean_interaction"].dropna())
    assert redundancy_of_pairs(tables["pairs"].assign(mean_interaction=np.nan)).missing
    tables = run.experiments["propagate"].frames
    measured = infidelity_calibration(tables["heads"]).marks[1]
    np.testing.assert_array_equal(measured.x, tables["heads"]["infidelity_theorem"])
    np.testing.assert_array_equal(measured.y, tables["heads"]["infidelity"])
    least = tables["gain"].xs(("interference", 0.1), level=["kind", "strength"])
    cells = gain_map(tables["gain"]).marks[0]
    np.testing.assert_array_equal(cells.value, least["gain"])
    assert list(zip(cells.column, cells.row, strict=True)) == list(least.index)
    np.testing.assert_array_equal(
        end_gains(tables["ends"]).marks[1].y, tables["ends"].loc[("interference", 0.1), "end_gain"]
    )
    for draw, table in (
        (pi.plots.infidelity_calibration, tables["heads"]),
        (pi.plots.gain_map, tables["gain"]),
        (pi.plots.end_gains, tables["ends"]),
        (pi.plots.distinct_heads, run.experiments["redundancy"].frames["layers"]),
        (pi.plots.redundancy_of_pairs, run.experiments["redundancy"].frames["pairs"]),
    ):
        _, ax = plt.subplots()
        assert draw(table, ax=ax) is ax
        draw(table).figure.canvas.draw()
    nothing = heads.assign(linearisation_cost=-1.0)
    assert number_map(nothing, "linearisation_cost").missing
