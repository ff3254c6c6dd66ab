"""Recall against the number of pairs: tables against plain loops, halving against closed forms, known memories."""

from __future__ import annotations

import numpy as np
import pytest
from known_memories import LAYOUT, SIZE, Memory, vocabulary

import pavinterp as pi
from pavinterp import paradigms as library
from pavinterp.experiments.conditioned_responses import measured, parts_of
from pavinterp.experiments.conditioning_recall import halving, halving_table, recall_table
from pavinterp.experiments.conditioning_stimuli import draw, needed, pool

CAPACITY = library.builtin()["capacity"]
BOUNDS = {"capacity_worst": 5.0, "capacity_average": 33.0}


@pytest.fixture(scope="module")
def records():
    words = vocabulary()
    draws = {"capacity": [draw(words, pool(words, needed(CAPACITY, 3)), CAPACITY, 3, 0, i) for i in range(9)]}
    return measured(Memory("hebbian"), parts_of([CAPACITY], [LAYOUT]), draws, start=[0], vocabulary=SIZE)


def test_an_exact_memory_of_orthogonal_css_forgets_nothing(records):
    found = recall_table(records, [CAPACITY])
    assert list(found.index) == [1, 2, 4, 8, 16, 32]
    np.testing.assert_allclose(found["response"], 4.0)  # two pairings at a gain of 2, nothing on what never came
    np.testing.assert_allclose(found["left"], 1.0)
    assert np.isnan(found.loc[1, "against_others"])
    np.testing.assert_allclose(found["against_others"][1:], 4.0)
    halves = halving_table(records, [CAPACITY], BOUNDS)
    assert (halves["pairs"] == np.inf).all()
    assert (halves["most"] == 32).all()
    assert (halves["capacity_average"] == 33).all()


def test_means_are_those_of_a_loop(records):
    noisy = records.copy()
    noisy["response"] += np.random.default_rng(0).normal(size=len(noisy))
    found = recall_table(noisy, [CAPACITY])
    groups = {"control": 1, "pairs_2": 2, "pairs_4": 4, "pairs_8": 8, "pairs_16": 16, "experimental": 32}
    for group, pairs in groups.items():
        own = [row["response"] for row in noisy.to_dict("records") if row["test"] and row["group"] == group]
        assert found.loc[pairs, "response"] == pytest.approx(np.mean(own))
        assert found.loc[pairs, "response_lo"] < np.mean(own) < found.loc[pairs, "response_hi"]


def test_halving():
    pairs = np.array([1.0, 2, 4, 8])
    assert halving(pairs, np.array([8.0, 6, 4, 1])) == 4
    assert halving(pairs, np.array([8.0, 5, 3, 1])) == pytest.approx(2 * 2**0.5)  # half way between 2 and 4
    assert halving(pairs, np.array([8.0, 7, 6, 5])) == np.inf
    assert np.isnan(halving(pairs, np.array([-1.0, 7, 6, 5])))


def test_without_the_paradigm(records):
    others = [library.builtin()["acquisition"]]
    assert not len(recall_table(records, others))
    assert not len(halving_table(records, others, BOUNDS))


def test_the_embedded_model(demo, capsys):
    found = pi.condition(demo, paradigms=["capacity"], draws=8, layouts=["line"], heads=False, progress=False)
    assert found.recall.loc[32, "against_others_lo"] > 10  # it copies, whatever else is there
    assert found.halving.loc["response", "capacity_average"] == 33
    pi.plots.recall_curve(found.recall)
    from pavinterp import terminal

    terminal.print_conditioning(found)
    assert "halved at" in capsys.readouterr().out
