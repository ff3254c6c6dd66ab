"""The planner against plain loops, its constants against a run's own tables, and the command."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import one_line

import pavinterp as pi
from pavinterp.errors import UserError
from pavinterp.experiment import Experiment
from pavinterp.measured_constants import Constants
from pavinterp.plan_command import parse_kv_heads, parse_parameters
from pavinterp.planner import COLUMNS, flatness, rate
from pavinterp.plots.plan import reliability_by_depth
from pavinterp.theory.propagation import llama_parameters

SMALL = {"vocabulary": 500, "d_k": (8, 16, 32), "depth": range(1, 9)}


def brute_force(budget, load, combination, hops, kv_heads=None, vocabulary=500):
    """Every shape tried by plain loops with the formulas written out; (reliability, shape), the best first."""
    found = {}
    for depth in range(1, 9):
        if hops is not None and depth < hops:
            continue
        for d_k in (8, 16, 32):
            for group in (1, 2, 4, 8):
                best = None
                for heads in range(1, 400):
                    if heads % group if kv_heads is None else heads % kv_heads:
                        continue
                    memories = heads // group if kv_heads is None else kv_heads
                    d, mlp = heads * d_k, max(8, 8 * round(heads * d_k / 3))
                    while True:
                        count = vocabulary * d + d
                        for _ in range(depth):
                            count += d * d + d * memories * d_k * 2 + d * d + 3 * d * mlp + 2 * d
                        if count > budget:
                            break
                        best = (depth, d, heads, memories, d_k, mlp, count)
                        mlp += 8
                if best is None:
                    continue
                sizes = [1] * depth if hops is None else [depth // hops + (i < depth % hops) for i in range(hops)]
                product = 1.0
                for size in sizes:
                    r = best[3] * size
                    eps = (load - 1) / (load - 1 + d_k)
                    product *= 1 - (eps**r if combination == "any" else (load - 1) / (load - 1 + r * d_k))
                found[best] = product
    return sorted(((value, shape) for shape, value in found.items()), reverse=True)


@pytest.mark.parametrize("combination", ["summed", "any"])
@pytest.mark.parametrize("hops", [None, 1, 3])
@pytest.mark.parametrize("kv_heads", [None, 2])
def test_the_optimum_is_that_of_plain_loops(combination, hops, kv_heads):
    expected = brute_force(400_000, 30.0, combination, hops, kv_heads)
    plan = pi.plan(400_000, 30, combination=combination, hops=hops, kv_heads=kv_heads, **SMALL)
    found = {
        tuple(row): value
        for *row, value in plan.designs[
            ["depth", "d_model", "heads", "kv_heads", "d_k", "mlp", "parameters", "reliability"]
        ].itertuples(index=False)
    }
    assert found == pytest.approx({shape: value for value, shape in expected}, rel=1e-9)
    assert len(found) == len(plan.designs) >= 5
    assert plan.optimum["reliability"] == pytest.approx(expected[0][0], rel=1e-9)
    assert (plan.designs["log_reliability"].diff().dropna() <= 0).all()
    for within in (0.01, 0.05):
        near = [shape for value, shape in expected if value >= (1 - within) * expected[0][0]]
        row = plan.flat.loc[within]
        assert row["designs"] == len(near)
        assert (row["depth_min"], row["depth_max"]) == (min(s[0] for s in near), max(s[0] for s in near))
        assert (row["d_k_min"], row["d_k_max"]) == (min(s[4] for s in near), max(s[4] for s in near))


def test_designs_use_the_budget_and_say_what_they_are():
    plan = pi.plan(3_000_000, 100, vocabulary=2000)
    assert plan.designs["parameters"].between(0.95 * 3_000_000, 3_000_000).all()
    for row in plan.designs.head(20).to_dict("records"):
        shape = {name: row[name] for name in ("depth", "d_model", "heads", "kv_heads", "d_k", "mlp")}
        assert row["parameters"] == llama_parameters(**shape, vocabulary=2000)
        assert row["d_model"] == row["heads"] * row["d_k"]
    assert set(plan.designs.columns) == set(COLUMNS) == set(plan.designs.attrs["units"])
    assert "designs; best:" in repr(plan)
    assert plan.manifest["measured"] == ()


def test_in_series_the_shallowest_of_equals_is_best_and_with_one_hop_depth_is_redundancy():
    same = pd.DataFrame({"depth": [1, 2, 4], "kv_heads": 4, "d_k": 16})
    for combination in ("any", "summed"):
        series = rate(same, 40, combination=combination)["reliability"]
        assert series.is_monotonic_decreasing
        assert series.iloc[2] == pytest.approx(series.iloc[0] ** 4)
        tries = rate(same, 40, combination=combination, hops=1)["reliability"]
        assert tries.is_monotonic_increasing
    assert rate(same, 40, hops=1, combination="any")["reliability"].iloc[2] == pytest.approx(1 - (39 / 55) ** 16)
    assert rate(same, 40, hops=3)["reliability"].tolist()[:2] == [0, 0]
    assert rate(same, 40, hops=3)["log_reliability"].iloc[0] == -math.inf


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 12), st.integers(1, 16), st.integers(1, 128), st.floats(1, 1e4), st.floats(1, 1e4), st.data())
def test_monotone(depth, kv_heads, d_k, one, two, data):
    few, many = sorted((one, two))
    combination = data.draw(st.sampled_from(["any", "summed"]))
    hops = data.draw(st.none() | st.integers(1, depth))

    def logs(load, **change):
        row = pd.DataFrame([{"depth": depth, "kv_heads": kv_heads, "d_k": d_k} | change])
        return rate(row, load, combination=combination, hops=hops)["log_reliability"].iloc[0]

    here, room = logs(few), 1e-9
    assert here <= 0
    assert logs(many) <= here + room
    assert logs(few, kv_heads=kv_heads + 1) >= here - room
    assert logs(few, d_k=d_k + 1) >= here - room
    if hops is None:
        assert logs(few, depth=depth + 1) <= here + room
    else:
        assert logs(few, depth=depth + 1) >= here - room


def test_flatness_counts_designs_that_are_all_hopeless():
    designs = pd.DataFrame({"log_reliability": [-np.inf] * 3, "depth": 1, "heads": 1, "kv_heads": 1, "d_k": 8})
    assert flatness(designs)["designs"].tolist() == [3, 3]
    shares = np.array([0.8, 0.8 * 0.9901, 0.8 * 0.9899, 0.8 * 0.9501, 0.8 * 0.9499])
    designs = pd.DataFrame({"log_reliability": np.log(shares), "depth": 1, "heads": 1, "kv_heads": 1, "d_k": 8})
    assert flatness(designs)["designs"].tolist() == [2, 4]


@pytest.fixture
def run():
    """What a plan reads of a run: heads with loads, distinct heads, gains."""
    loads = pd.DataFrame({"effective_load": [2.0, 4.0, np.nan, 12.0]})
    index = pd.RangeIndex(2, name="layer")
    redundancy = pd.DataFrame({"distinct": [2.0, 1.0], "heads": [4, 4]}, index=index)
    gains = pd.DataFrame({"gain": [0.5, 1.0]}, index=index)
    empty = pd.DataFrame()
    return SimpleNamespace(
        manifest={"model": {"name": "toy", "layers": 2}},
        heads=lambda: loads,
        experiments={
            "redundancy": Experiment("redundancy", empty, {"layers": redundancy}),
            "propagate": Experiment("propagate", empty, {"layers": gains}),
        },
    )


def test_constants_of_a_run(run):
    found = Constants.of(run, None)
    assert found.load == 6  # mean of 2, 4, 12
    assert found.distinct_share == pytest.approx(0.375)  # mean of 2/4 and 1/4
    assert found.gains_of(3) == pytest.approx([0.5, 0.75, 1.0])
    assert found.gains_of(1) == pytest.approx([1.0])
    assert len(found.measured) == 3
    design = pd.DataFrame({"depth": [2], "kv_heads": [8], "d_k": [16]})
    rated = rate(design, 6, constants=found).iloc[0]
    assert rated["redundancy"] == pytest.approx(3.0)
    error = 5 / (5 + 3 * 16)
    assert rated["layer_error"] == pytest.approx(error)
    assert rated["reliability"] == pytest.approx((1 - 0.25 * error) * (1 - error))
    # with one hop both layers' heads are tries at it; its gain is the root mean square of theirs
    once = rate(design, 6, constants=found, hops=1)["reliability"].iloc[0]
    assert once == pytest.approx(1 - (0.25 + 1) / 2 * 5 / (5 + 6 * 16))


def test_what_a_run_lacks_is_assumed(run):
    run.experiments = {}
    found = Constants.of(run, 9)
    assert (found.load, found.distinct_share) == (9, 1)
    assert found.gains_of(4).tolist() == [1, 1, 1, 1]
    assert found.measured == ()
    assert any("no redundancy in the run" in words for words in found.assumed)
    run.experiments = {}
    assert Constants.of(run, None).measured[0].startswith("6 associations a head (mean over 3 heads of toy")


def test_a_run_that_cannot_be_right(run):
    run.experiments["propagate"].frames["layers"].loc[0, "gain"] = -1.0
    with pytest.raises(UserError, match="a gain below 0"):
        Constants.of(run, None)
    run.experiments["redundancy"].frames["layers"].loc[:, "distinct"] = 9.0
    with pytest.raises(UserError, match="not in"):
        Constants.of(run, None)
    run.heads = lambda: pd.DataFrame({"effective_load": [np.nan]})
    with pytest.raises(UserError, match="no effective load"):
        Constants.of(run, None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"parameters": 10}, "parameters must be a whole number of at least 1000"),
        ({"associations": 0.5}, "associations must be a number of at least 1, got 0.5"),
        ({"associations": math.nan}, "associations must be a number of at least 1, got nan"),
        ({"associations": True}, "associations must be a number"),
        ({"associations": None}, "say how many each head holds"),
        ({"kv_heads": "some"}, "kv_heads must be a whole number"),
        ({"hops": 0}, "hops must be a whole number"),
        ({"combination": "sum"}, "combination must be one of any, summed"),
        ({"d_k": []}, "at least one number"),
        ({"depth": [0]}, "each of depth"),
        ({"mlp_ratio": 0}, "mlp_ratio must be a number above 0"),
        ({"vocabulary": 10**9}, "no design with vocabulary 1,000,000,000 has as few as 1,000,000 parameters"),
        ({"tied": "no"}, "tied must be True or False"),
    ],
)
def test_arguments_that_make_no_sense(arguments, words):
    with pytest.raises(UserError, match=words) as caught:
        pi.plan(**{"parameters": 1_000_000, "associations": 20, "vocabulary": 1000} | arguments)
    one_line(caught)


def test_rate_needs_its_columns():
    with pytest.raises(UserError, match="missing: kv_heads, d_k"):
        rate(pd.DataFrame({"depth": [1]}), 5)


def test_numbers_on_the_command_line():
    assert [parse_parameters(text) for text in ("10M", "1.5b", "500K", "12,345", "2000")] == [
        10_000_000, 1_500_000_000, 500_000, 12_345, 2000,
    ]  # fmt: skip
    for text in ("", "M", "10G", "-5M", "999", "1e6", "nan", "9" * 15 + "B"):
        with pytest.raises(UserError, match="--parameters"):
            parse_parameters(text)
    assert [parse_kv_heads(text) for text in (None, "all", "4")] == [None, "all", 4]
    for text in ("0", "x", "-1", "1.5", ""):
        with pytest.raises(UserError, match="--kv-heads"):
            parse_kv_heads(text)


def test_picture_shows_the_best_of_each_depth():
    designs = pi.plan(400_000, 30, hops=1, **SMALL).designs
    picture = reliability_by_depth(designs)
    ring = picture.marks[-1]
    assert (ring.x[0], ring.y[0]) == (designs["depth"].iloc[0], designs["reliability"].iloc[0])
    for mark in picture.marks[1:-1:2]:
        width = int(mark.label.split()[1])
        for depth, value, title in zip(mark.x, mark.y, mark.titles, strict=True):
            same = designs[(designs["d_k"] == width) & (designs["depth"] == depth)]
            assert value == same["reliability"].max()
            assert f"of {width}:" in title
    many = pi.plan(3_000_000, 100, vocabulary=500).designs
    shown = {int(mark.label.split()[1]) for mark in reliability_by_depth(many).marks[1:-1:2]}
    assert len(shown) == 4
    assert int(many["d_k"].iloc[0]) in shown
    assert reliability_by_depth(designs.assign(log_reliability=-np.inf)).missing


def test_the_command(capsys, tmp_path):
    from pavinterp.cli import main

    def ran(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(["plan", *arguments])
        return ended.value.code, *capsys.readouterr()

    code, out, err = ran("--parameters", "1M", "--associations", "30", "--vocabulary", "1000", "--top", "3")
    assert code == 0
    lines = out.splitlines()
    assert len(lines) == 6
    assert lines[0].split()[:3] == ["depth", "d_model", "heads"]
    assert lines[4].startswith("within 1 % of the best: ")
    assert "measured: nothing. assumed: 30 associations a head" in err
    assert "as deep as was tried" not in err
    code, out, err = ran("--parameters", "1M", "--associations", "30", "--vocabulary", "1000", "--hops", "1")
    assert code == 0
    assert "The best is as deep as was tried (64 layers)" in err
    file = tmp_path / "plan.csv"
    budget = ("--parameters", "1M", "--associations", "30", "--vocabulary", "1000")
    code, out, err = ran(*budget, "--json", "--csv", str(file))
    assert code == 0
    found = json.loads(out)
    expected = pi.plan(1_000_000, 30, vocabulary=1000)
    assert found["designs"][0]["reliability"] == pytest.approx(expected.optimum["reliability"])
    assert len(pd.read_csv(file)) == len(found["designs"]) == len(expected.designs)
    for wrong in (
        ["--parameters", "10G", "--associations", "30"],
        ["--parameters", "10M"],
        ["--parameters", "10M", "--associations", "0"],
        ["--parameters", "10M", "--associations", "30", "--kv-heads", "x"],
        ["--parameters", "10M", "--associations", "30", "--combination", "x"],
        ["--parameters", "10M", "--associations", "30", "--hops", "65"],
        ["--parameters", "10M", "--from", str(tmp_path / "none")],
        [*budget, "--csv", str(file)],
        ["--associations", "30"],
    ):
        code, out, err = ran(*wrong)
        assert code == 2, wrong
        assert out == ""
        assert len(err.strip().splitlines()) == 1
        assert err.startswith("pavinterp: ")
