"""The notation of paradigms: what each form means, trials in order, and what a wrong table is told."""

from __future__ import annotations

import tomllib
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pavinterp.theory.schedules import Group, Phase, Trial, parse, trials

TABLE = """
name = "blocking"
about = "A predicts X already"
source = "Kamin 1969"
test = "B"
response = "X"
predicts = "lower"
[groups]
experimental = ["A -> X x8", "AB -> X x8"]
control = ["C -> X x8", "AB -> X x8"]
"""


def table(**changed):
    """The table above with keys changed, or left out where None."""
    made = tomllib.loads(TABLE) | changed
    return {key: value for key, value in made.items() if value is not None}


def phase(text: str) -> dict[tuple[str, str | None], int]:
    """What one phase holds, as {("AB", "X"): 8}."""
    made = parse(table(groups={"experimental": [text], "control": ["A -> X"]}))
    return {("".join(trial.cs), trial.us): count for trial, count in made.groups[0].phases[0].kinds}


def test_a_table_of_ten_lines_is_a_paradigm():
    paradigm = parse(tomllib.loads(TABLE))
    a, ab, c = Trial(("A",), "X"), Trial(("A", "B"), "X"), Trial(("C",), "X")
    assert paradigm.groups == (
        Group("experimental", (Phase(((a, 8),)), Phase(((ab, 8),))), ("B",), "X"),
        Group("control", (Phase(((c, 8),)), Phase(((ab, 8),))), ("B",), "X"),
    )
    assert (paradigm.name, paradigm.source, paradigm.direction) == ("blocking", "Kamin 1969", -1)
    assert trials(paradigm, "control", 5) == [c] * 8 + [ab] * 8
    assert (paradigm.css, paradigm.uss) == (("A", "B", "C"), ("X",))
    assert paradigm.controls == paradigm.groups[1:]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A -> X", {("A", "X"): 1}),
        ("A->X x8", {("A", "X"): 8}),
        ("A -> X  x 8", {("A", "X"): 8}),
        ("A B -> X x2", {("AB", "X"): 2}),
        ("A1B12 -> X3", {("A1B12", "X3"): 1}),
        ("A -> x8", {("A", None): 8}),
        ("-> X x8", {("", "X"): 8}),
        ("B -> A", {("B", "A"): 1}),
        ("filler x16", {("", None): 16}),
        ("A -> X 25% x8", {("A", "X"): 2, ("A", None): 6}),
        ("A -> X 100 % x8", {("A", "X"): 8}),
        ("A -> X 0% x8", {("A", None): 8}),
        ("A -> X x2, B -> x3", {("A", "X"): 2, ("B", None): 3}),
        ("A -> X x2, A -> X", {("A", "X"): 3}),
        ("A1..A3 -> X1..X3 x2", {("A1", "X1"): 2, ("A2", "X2"): 2, ("A3", "X3"): 2}),
        ("A1..A2 -> X", {("A1", "X"): 1, ("A2", "X"): 1}),
        ("A9..A10 ->", {("A9", None): 1, ("A10", None): 1}),
    ],
)
def test_what_a_phase_means(text, expected):
    assert phase(text) == expected


def test_groups_may_have_a_test_of_their_own():
    groups = {
        "control": {"phases": ["B -> Y"], "test": "AB", "response": "Y", "baseline": "D"},
        "experimental": ["A -> X"],
    }
    experimental, control = parse(table(groups=groups)).groups
    assert (experimental.name, experimental.test, experimental.response) == ("experimental", ("B",), "X")
    assert experimental.baseline is None
    assert (control.test, control.response, control.baseline) == (("A", "B"), "Y", ("D",))
    assert [group.baseline for group in parse(table(baseline="C")).groups] == [("C",)] * 2


def test_a_stimulus_that_follows_and_is_a_cs_counts_as_cs():
    paradigm = parse(table(groups={"experimental": ["A -> X", "B -> A"], "control": ["C -> Y"]}))
    assert (paradigm.css, paradigm.uss) == (("A", "B", "C"), ("X", "Y"))


@given(st.integers(0, 2**40), st.integers(1, 9), st.integers(1, 9))
def test_order_is_random_fixed_by_the_seed_and_the_same_in_groups_that_are_equally_long(seed, a, b):
    text = f"A -> X x{a}, B -> x{b}"
    groups = {"experimental": [text, text], "control": [f"C -> X x{a}, D -> x{b}", text]}
    paradigm = parse(table(groups=groups))
    one, two = (trials(paradigm, group, seed) for group in groups)
    assert one == trials(paradigm, "experimental", seed)
    for first in (one[: a + b], one[a + b :]):
        assert Counter(first) == {Trial(("A",), "X"): a, Trial(("B",), None): b}
    assert [trial.us for trial in one] == [trial.us for trial in two]


def test_orders_differ_between_seeds_and_phases_and_are_even():
    paradigm = parse(table(groups={"experimental": ["A -> X x8, B -> x8"] * 2, "control": ["A -> X"]}))
    orders = [trials(paradigm, "experimental", seed) for seed in range(400)]
    assert len({tuple(order) for order in orders}) == 400
    assert all(order[:16] != order[16:] for order in orders)
    # each place holds A in half of the orders: standard error 0.025, 32 places, so within 4.5 of them
    for place in range(32):
        assert abs(sum(order[place].us == "X" for order in orders) / 400 - 0.5) < 0.11


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"test": None}, 'test: write a text, test = "..."'),
        ({"response": 3}, 'response: write a text, response = "..."'),
        ({"name": "Blocking!"}, "name: write small letters, digits and _, such as blocking, not 'Blocking!'"),
        ({"groop": 1}, "key 'groop' is not known: write name, about, source, test, response"),
        ({"predicts": "less"}, "predicts: write higher, lower, none (experimental against control), not 'less'"),
        ({"groups": None}, "groups: write a table [groups] with experimental = [...]"),
        ({"groups": {"experimental": ["A -> X"]}}, "and at least one control = [...]"),
        ({"groups": {"one": ["A -> X"], "two": ["A -> X"]}}, "groups: write a table [groups] with experimental"),
        ({"response": "Z"}, "response: Z follows no CS in any group: write one of the USs"),
        ({"response": "XY"}, "response: write one US such as X, not 'XY'"),
        ({"test": "a"}, "test: write stimuli as capital letters, such as A, AB or A1B2, not 'a'"),
        ({"test": "BB"}, "test: 'BB' holds a stimulus twice: write it once"),
        ({"baseline": "x"}, "baseline: write stimuli as capital letters"),
        (
            {"similar": ["B = A"]},
            "similar: write stimulus ~ cosine stimulus, as B ~ 0.8 A, between 0 and 1, not 'B = A'",
        ),
        ({"similar": ["B ~ 1.5 A"]}, "between 0 and 1, not 'B ~ 1.5 A'"),
        ({"similar": "B ~ 0.8 A"}, 'similar: write a list, such as ["B ~ 0.8 A"]'),
        ({"similar": ["B ~ 0.8 Q"]}, "similar: Q is in no group: write stimuli of the paradigm"),
        ({"similar": ["B ~ 0.8 A", "C ~ 0.4 B", "B ~ 0.2 C"]}, "similar: B has its place already"),
        ({"similar": ["A ~ 0.8 A"]}, "similar: A has its place already"),
    ],
)
def test_what_a_wrong_table_is_told(changed, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        parse(table(**changed))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("A = X", "write trials as A -> X x8, A -> x8, -> X x8 or filler x8, not 'A = X'"),
        ("->", "write trials as A -> X x8"),
        ("A -> B -> X", "write trials as A -> X x8"),
        ("A -> X,", "write trials as A -> X x8"),
        ("A -> X x0", "'A -> X x0': write at least x1"),
        ("A -> XY", "write one US after ->"),
        ("A -> A", "A cannot follow itself: write two stimuli"),
        ("a -> X", "write stimuli as capital letters"),
        ("A -> X 30% x8", "write a share of CS -> US that is a whole number of trials"),
        ("A -> X 150% x8", "write a share of CS -> US"),
        ("A -> 50% x8", "write a share of CS -> US"),
        ("A -> X 5.0.0% x8", "write stimuli as capital letters"),
        ("A -> X x1234567890", "write stimuli as capital letters"),
        ("A\u0661 -> X", "write stimuli as capital letters"),
        ("filler 50% x8", "write trials as A -> X x8"),
        ("A1..A3 -> X1..X2", "write ranges of one length on both sides"),
        ("A1..B3 -> X", "write a range as A1..A32"),
        ("A3..A1 -> X", "write a range as A1..A32"),
        ("A -> X x99999", "100000 trials: write at most 10000"),
    ],
)
def test_what_a_wrong_phase_is_told(text, message):
    groups = {"experimental": ["A -> X", text], "control": ["A -> X"]}
    with pytest.raises(ValueError) as error:  # noqa: PT011
        parse(table(groups=groups))
    assert message in str(error.value)
    assert str(error.value).startswith("groups.experimental")
    assert "\n" not in str(error.value)


@given(st.text(max_size=30))
def test_no_text_of_a_phase_ends_in_anything_but_a_paradigm_or_a_line(text):
    try:
        parse(table(groups={"experimental": [text], "control": ["A -> X"]}))
    except ValueError as error:
        assert str(error).startswith(("groups.experimental", "response"))  # noqa: PT017
