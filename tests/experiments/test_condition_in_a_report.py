"""Pavlov's experiments beside a run: its table, its folder, its pages and pictures."""

from __future__ import annotations

import re

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

import pavinterp as pi
from pavinterp.plots import conditioning as pictures
from pavinterp.plots.marks import Points
from pavinterp.report.conditioning_section import verdicts


@pytest.fixture(scope="module")
def run(demo):
    run = pi.measure(demo, "demo", context=64, sequences=8, progress=False)
    run.add(
        pi.condition(
            demo, paradigms=["acquisition", "blocking"], draws=16, layouts=["sentence", "line"], progress=False
        )
    )
    return run


def test_written_and_read_back(run, tmp_path):
    index = run.report(tmp_path / "run").read_text(encoding="utf-8")
    again = pi.Run.load(tmp_path / "run")
    assert {"us_attribution", "us_attribution_lo", "us_strength"} <= set(again.heads().columns)
    for name, table in run.experiments["condition"].frames.items():
        read = again.experiments["condition"].frames[name]
        assert read.index.names == table.index.names
        pd.testing.assert_frame_equal(read, table, check_dtype=False, check_index_type=False)
    assert 'id="conditioning"' in index
    assert index.count('<tr><th scope="row">acquisition</th>') == 1
    for name in ("paradigm_effects", "acquisition_curve", "conditioning_ablation", "us_attribution_map"):
        assert f'id="{name}"' in index
        assert (tmp_path / "run" / "figures" / f"{name}.svg").exists()
    first = run.heads()["us_attribution"].idxmax()
    page = (tmp_path / "run" / "heads" / f"L{first[0]:02d}H{first[1]:02d}.html").read_text(encoding="utf-8")
    assert "Part in conditioning" in page
    assert "us_attribution" in page


def test_verdict_rows_are_the_tables(run):
    table = run.experiments["condition"].frames["verdicts"]
    rows = verdicts(table, ["rescorla_wagner", "hebbian"])
    assert [row.paradigm for row in rows] == ["acquisition", "blocking"]
    assert rows[1].theories == ("−", "0")  # blocking tells the rules apart
    assert rows[0].verdict == table.loc[("acquisition", "control", "conditioning"), "verdict"]


def test_pictures_hold_the_numbers(run):
    frames = run.experiments["condition"].frames
    effects = pictures.paradigm_effects(frames["verdicts"])
    seen = [mark for mark in effects.marks if isinstance(mark, Points)][-1]
    np.testing.assert_allclose(seen.x, frames["verdicts"].xs("conditioning", level="model")["observed"])
    curve = pictures.acquisition_curve(frames["acquisition"])
    np.testing.assert_allclose(curve.marks[-1].y, frames["acquisition"]["difference"])
    left = pictures.conditioning_ablation(frames["ablations"])
    assert not left.missing
    shown = {mark.label for mark in left.marks if mark.label}
    assert {"largest direct attribution", "largest previous-token score", "random others"} <= shown
    assert pictures.conditioning_ablation(frames["ablations"].drop("acquisition")).missing
    responses = pictures.response_curves(frames["trials"].loc["blocking"], "blocking")
    assert re.search(r"experimental −?[\d.]+, control", responses.description)


def test_pictures_for_notebooks(run):
    frames = run.experiments["condition"].frames
    for draw, name in (
        (pi.plots.acquisition_curve, "acquisition"),
        (pi.plots.paradigm_effects, "verdicts"),
        (pi.plots.conditioning_ablation, "ablations"),
    ):
        ax = draw(frames[name], plt.figure().gca())
        assert ax.get_xlabel()
        plt.close(ax.figure)
