"""Pictures: the numbers they show, what they return, and that nothing written in them is clipped or overlaps."""

from __future__ import annotations

import itertools
import math
import xml.etree.ElementTree as ElementTree

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest

mpl.use("Agg")

import matplotlib.pyplot as plt
import synthetic
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection

from pavinterp import plots
from pavinterp.plots import across_heads, one_head
from pavinterp.plots.as_svg import svg
from pavinterp.plots.experiments import number_map
from pavinterp.plots.look import DARK, LIGHT, OUTLINES, ROLES
from pavinterp.plots.marks import Axis, Line, Picture, Points
from pavinterp.plots.on_axes import draw
from pavinterp.plots.svg_text import LETTER, stacked, wrapped
from pavinterp.plots.ticks import ticks
from pavinterp.plots.words import estimate, fixed, head_name, horizon, interval, number, percent
from pavinterp.theory.capacity import REGIMES

SIZES = {"one": (1, 1), "twelve": (2, 6), "demo": (4, 8), "tall": (30, 9), "large": (32, 32)}


@pytest.fixture(scope="module")
def run():
    return synthetic.run(seed=1)


@pytest.fixture(scope="module")
def row(run):
    return run.heads().loc[(1, 3)]


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (7.3149, "7.31"),
        (12.34, "12.3"),
        (999.6, "1,000"),
        (1234.5, "1,234"),
        (0.01234, "0.0123"),
        (3.1e-7, "3.10 × 10⁻⁷"),
        (9.999e-5, "1.00 × 10⁻⁴"),
        (2.5e9, "2.50 × 10⁹"),
        (-0.5, "−0.500"),
        (0, "0"),
        (math.nan, "–"),
        (None, "–"),
        (pd.NA, "–"),
        (math.inf, "∞"),
        (-math.inf, "−∞"),
    ],
)
def test_number(value, text):
    assert number(value) == text


def test_other_words():
    assert fixed(-0.001, 2) == "0.00"
    assert fixed(1234.56, 1) == "1,234.6"
    assert percent(0.123) == "12 %"
    assert interval(6.912, 7.718) == "[6.91, 7.72]"
    assert interval(math.nan, 7) == "–"
    assert interval(100, math.inf) == "[100, ∞]"
    assert estimate(7, math.nan, math.nan) == "7.00"
    assert head_name(3, 5) == "L03H05"
    assert head_name(117, 5) == "L117H05"


@pytest.mark.parametrize(
    ("position", "text"),
    [
        (math.inf, "∞"),
        (math.nan, "–"),
        (5121, "> 10 × context"),
        (5120, "5,120"),
        (1e300, "> 10 × context"),
    ],
)
def test_horizon(position, text):
    assert horizon(position, context=512) == text


def test_every_picture_returns_the_axes_it_was_given(run, row):
    heads, tests, spectra = run.heads(), run.details.tests, run.details.spectra
    calls = {
        plots.load_map: (heads,),
        plots.load_ranking: (heads,),
        plots.load_by_depth: (heads,),
        plots.head_load: (row,),
        plots.load_distribution: (tests, row),
        plots.load_position: (tests, row),
        plots.fidelity_load: (tests, row),
        plots.spectrum: (spectra, row),
        plots.head_kinds: (row,),
    }
    of_experiments = {"infidelity_calibration", "gain_map", "end_gains", "distinct_heads", "redundancy_of_pairs"}
    of_experiments |= {"acquisition_curve", "conditioning_ablation", "paradigm_effects", "recall_curve"}
    assert {f.__name__ for f in calls} | of_experiments == set(plots.__all__)  # those are drawn in test_beside_a_run
    for function, arguments in calls.items():
        _, ax = plt.subplots()
        assert function(*arguments, ax=ax) is ax
        own = function(*arguments)
        assert isinstance(own, Axes)
        own.figure.canvas.draw()


def test_map_shows_load_over_bound(run):
    heads = run.heads()
    collection = next(c for c in plots.load_map(heads).collections if isinstance(c, PatchCollection))
    shown = np.ma.filled(collection.get_array(), np.nan)
    np.testing.assert_allclose(shown, heads["effective_load"] / heads["capacity_worst"])
    assert np.isnan(shown).sum() == 1
    frames = [p for p in plots.load_map(heads).patches if p.get_label() == "_regime"]
    assert len(frames) == (~heads["regime"].isin(["error-free", "undefined"])).sum()


def test_ranking_rises_and_keeps_each_interval_with_its_head(run):
    heads = run.heads()
    points = next(m for m in across_heads.load_ranking(heads).marks if isinstance(m, Points))
    assert (np.diff(points.y) >= 0).all()
    assert len(points.y) == heads["effective_load"].notna().sum()
    for name, low, high in zip(points.heads, points.low, points.high, strict=True):
        expected = heads.loc[(int(name[1:3]), int(name[4:6]))]
        assert (low, high) == (expected["effective_load_lo"], expected["effective_load_hi"])


def test_bounds_of_heads_with_different_widths_step():
    heads = pd.concat([synthetic.run(1, 4, d_k=16).heads(), synthetic.run(2, 4, d_k=64).heads().loc[1:]])
    lines = [m for m in across_heads.load_ranking(heads).marks if isinstance(m, Line)]
    known = heads[heads["effective_load"].notna()].sort_values("effective_load", kind="stable")
    np.testing.assert_array_equal(lines[0].y, known["capacity_worst"])
    np.testing.assert_array_equal(lines[1].y, known["capacity_average"])
    assert lines[0].label == "N_worst"  # no single number to print
    ElementTree.fromstring(svg(across_heads.load_ranking(heads)))


def test_distribution_weights_tests(run, row):
    tests = run.details.tests
    mine = tests[(tests["layer"] == 1) & (tests["head"] == 3)]
    stairs = plots.load_distribution(tests, row).patches[0].get_data()
    expected = np.histogram(mine["effective_load"], stairs.edges, weights=mine["weight"])[0]
    np.testing.assert_allclose(stairs.values, 100 * expected / mine["weight"].sum(), rtol=1e-6)
    assert stairs.values.sum() == pytest.approx(100)


def test_position_shows_the_fit_of_the_head(run, row):
    ax = plots.load_position(run.details.tests, row)
    fit = next(line for line in ax.lines if str(line.get_label()).startswith("fit"))
    x, y = np.asarray(fit.get_xdata()), np.asarray(fit.get_ydata())
    np.testing.assert_allclose(y, np.exp(row["load_intercept"]) * x ** row["load_growth"])
    offsets = ax.collections[0].get_offsets()
    assert offsets[:, 0].min() == 1  # positions are counted from 1


def test_fit_continues_to_a_horizon_that_is_near(run, row):
    near = row.copy()
    near.name = row.name
    near["load_growth"], near["load_intercept"] = 0.2, math.log(row["capacity_worst"]) - 0.2 * math.log(2000)
    near["horizon_worst"], near["horizon_average"] = 2000.0, math.inf
    picture = one_head.load_position(run.details.tests, near)
    beyond = next(m for m in picture.marks if isinstance(m, Line) and m.role == "beyond_fit")
    assert beyond.x[-1] == pytest.approx(2000)
    assert beyond.y[-1] == pytest.approx(row["capacity_worst"])
    assert "∞" in picture.description
    far = near.copy()
    far.name, far["horizon_worst"] = row.name, 1e6
    assert not any(getattr(m, "role", "") == "beyond_fit" for m in one_head.load_position(run.details.tests, far).marks)


def test_fidelity_curve_is_the_theorys(run, row):
    marks = one_head.fidelity_load(run.details.tests, row).marks
    lines = [m for m in marks if isinstance(m, Line) and m.role in ("theory", "own")]
    for line, d_eff in zip(lines, (row["d_k"], row["d_eff"]), strict=True):
        np.testing.assert_allclose(line.y, 1 / (1 + (line.x - 1) / d_eff))


def test_spectrum_picks_the_kv_head():
    run = synthetic.run(2, 4, group=2)
    row = run.heads().loc[(1, 3)]
    lines = [m for m in one_head.spectrum(run.details.spectra, row).marks if isinstance(m, Line)]
    line = next(m for m in lines if m.role == "data")
    spectra = run.details.spectra
    mine = spectra[(spectra["layer"] == 1) & (spectra["kv_head"] == 1)]
    np.testing.assert_allclose(line.y, mine["eigenvalue"])


def test_pictures_say_what_is_missing(run):
    undefined = run.heads()[run.heads()["effective_load"].isna()].iloc[0]
    empty = pd.DataFrame()
    for picture in (
        one_head.load_distribution(empty, undefined),
        one_head.load_position(empty, undefined),
        one_head.fidelity_load(empty, undefined),
        one_head.spectrum(empty, undefined),
        one_head.head_kinds(undefined),
        across_heads.load_ranking(run.heads().iloc[:0]),
    ):
        assert picture.missing
        assert picture.missing in svg(picture)
    ElementTree.fromstring(svg(one_head.head_load(undefined)))


def pictures(run):
    heads, tests, spectra = run.heads(), run.details.tests, run.details.spectra
    yield across_heads.load_map(heads)
    yield across_heads.load_ranking(heads)
    yield across_heads.load_by_depth(heads)
    for _, row in itertools.islice(heads.iterrows(), 12):
        yield one_head.head_load(row)
        yield one_head.load_distribution(tests, row)
        yield one_head.load_position(tests, row)
        yield one_head.fidelity_load(tests, row)
        yield one_head.spectrum(spectra, row)
        yield one_head.head_kinds(row)


@pytest.mark.parametrize("size", SIZES)
def test_no_text_is_clipped_or_overlaps(size):
    layers, heads = SIZES[size]
    run = synthetic.run(layers, heads, d_k=16 if size == "one" else 64, sequences=2, examples=0, seed=3)
    for picture, width in itertools.product(pictures(run), (340, 760)):
        root = ElementTree.fromstring(svg(picture, width))
        boxes = [text_box(element) for element in root.iter("text")]
        tall = float(root.get("height"))
        for left, top, right, bottom, text in boxes:
            assert left >= -1, (picture.name, text)
            assert right <= width + 1, (picture.name, text)
            assert top >= -1, (picture.name, text)
            assert bottom <= tall + 1, (picture.name, text)
        for a, b in itertools.combinations(boxes, 2):
            apart = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
            assert apart, (picture.name, width, a, b)


def text_box(element):
    text = "".join(element.itertext())
    wide = LETTER * 0.92 * len(text)  # LETTER has room to spare
    x, y = float(element.get("x")), float(element.get("y"))
    left = {"start": x, "middle": x - wide / 2, "end": x - wide}[element.get("text-anchor", "start")]
    return left, y - 8, left + wide, y + 2, text


def test_svg_is_safe_small_and_without_ids(run):
    name = "<script>&\"'"
    axis = Axis(f"x {name}", "linear", 0.0, 1.0)
    mark = Points(np.array([0.5]), np.array([0.5]), "data", name, heads=(name,), titles=(name,))
    text = svg(Picture("p", name, axis, axis, (mark,)), link=lambda head: f"heads/{head}.html")
    root = ElementTree.fromstring(text)
    assert root.find(".//script") is None
    assert name in "".join(root.itertext())
    assert root.find(".//a").get("href") == f"heads/{name}.html"
    for picture in pictures(run):
        assert " id=" not in svg(picture)
    assert len(svg(one_head.load_position(run.details.tests, run.heads().loc[(1, 3)]))) < 8_000


def test_svg_file_stands_alone(run):
    text = svg(across_heads.load_map(run.heads()), 760, alone=True)
    root = ElementTree.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "var(" not in text
    assert "href" not in text


def test_map_tells_regimes_without_colour(run):
    assert {*REGIMES, ""} == set(OUTLINES)  # "" is a map of something else
    drawn = [OUTLINES[r] for r in REGIMES if r not in ("undefined", "error-free/beyond")]
    assert len(set(drawn)) == len(drawn)
    text = svg(across_heads.load_map(run.heads()))
    for regime, n in run.heads()["regime"].value_counts().items():
        assert f">{regime} ({n:,})<" in text


def test_map_without_intervals_says_so():
    text = svg(across_heads.load_map(synthetic.run(2, 4, clusters=5).heads()))
    assert "no intervals, so no regimes" in text


def test_a_map_of_an_experiment_tells_endless_from_missing():
    index = pd.MultiIndex.from_product([range(2), range(3)], names=["layer", "head"])
    heads = pd.DataFrame({"needed_5": [1.0, 4.0, math.inf, math.nan, 2.0, 0.0]}, index=index)
    picture = number_map(heads, "needed_5")
    np.testing.assert_array_equal(picture.marks[0].value, [0.5, 2.0, math.inf, math.nan, 1.0, math.nan])
    text = svg(picture)
    assert (text.count(">∞</text>"), text.count(">–</text>")) == (1, 2)
    signs = [sign.get_text() for sign in draw(picture).texts]
    assert (signs.count("∞"), signs.count("–")) == (1, 2)


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
def test_text_can_be_read(palette):
    for name in ("ink", "muted", *{look.colour for look in ROLES.values()}):
        assert contrast(palette[name], palette["paper"]) >= 4.5, name


def contrast(a, b):
    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize(("low", "high"), [(1, 2), (1, 300), (0.9, 1.2), (1e-4, 0.3), (1, 1e6), (3.1, 3.3), (0.5, 2)])
def test_log_ticks_are_within_and_not_crowded(low, high):
    found = ticks(Axis("", "log", low, high), 300, 40)
    values = [value for value, _ in found]
    assert values == sorted(set(values))
    assert all(low <= value <= high for value in values)
    assert len(values) >= (2 if high / low >= 5 else 0)
    places = [300 * math.log(v / low) / math.log(high / low) for v in values]
    assert all(b - a >= 35 for a, b in itertools.pairwise(places))


def test_labels_are_stacked_and_legends_wrapped():
    assert stacked([(0, 50), (40, 90), (100, 150), (45, 60)]) == [0, 1, 0, 2]
    assert wrapped([100, 100, 100], 250) == [(0.0, 0), (100.0, 0), (0.0, 1)]
