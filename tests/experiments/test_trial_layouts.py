"""Layouts of trials: positions, lengths, and prompts that survive being written out and read again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pavinterp import paradigms as library
from pavinterp.experiments.conditioning_stimuli import draw, needed, pool, vocabulary_of
from pavinterp.experiments.trial_layouts import TEXTS, Layout, lay_out
from pavinterp.models import untouched
from pavinterp.stimuli import tokenise
from pavinterp.theory.schedules import Trial, trials

TOKENS = {"A": 11, "B": 12, "X": 13, "Y": 14}
ARROW, LINE = Layout("arrow", (1, 2), (3,)), Layout("line", (), (3,))
KINDS = [Trial(("A",), "X"), Trial(("A", "B"), "X"), Trial(("B",), None), Trial((), "Y"), Trial((), None)]


def test_a_prompt_by_hand():
    listed = [Trial(("A",), "X"), Trial(("B",), None), Trial((), "X"), Trial((), None)]
    got = lay_out(listed, ("A",), TOKENS, ARROW, start=[0], filler=[21, 22])
    assert got.tokens.tolist() == [0, 11, 1, 2, 13, 3, 12, 1, 2, 3, 1, 2, 13, 3, 21, 22, 21, 22, 3, 11, 1, 2]
    assert got.cs == ((1,), (6,), (), (), (19,))
    assert got.us == (4, -1, 12, -1, -1)
    assert got.tested == (3, 8, 11, -1, 21)
    got = lay_out(listed, ("A",), TOKENS, LINE, filler=[21, 22])
    assert got.tokens.tolist() == [11, 13, 3, 12, 3, 13, 3, 21, 22, 3, 11]
    assert got.tested == (0, 3, 4, -1, 10)


def test_nothing_comes_before_a_us_at_the_very_beginning():
    assert lay_out([Trial((), "X")], ("A",), TOKENS, LINE).tested == (-1, 2)
    assert lay_out([Trial((), "X")], ("A",), TOKENS, LINE, start=[0]).tested == (0, 3)


def test_filler_is_as_long_as_a_pairing():
    lengths = [len(lay_out([kind], ("A",), TOKENS, ARROW, filler=[9]).tokens) for kind in (KINDS[0], KINDS[4])]
    assert lengths[0] == lengths[1]
    with pytest.raises(ValueError, match="filler"):
        lay_out([KINDS[4]], ("A",), TOKENS, ARROW)


@given(st.lists(st.sampled_from(KINDS), min_size=1, max_size=12), st.integers(0, 9), st.sampled_from([ARROW, LINE]))
def test_positions_hold_what_they_say(listed, seed, layout):
    got = lay_out(listed, ("B", "A"), TOKENS, layout, start=[0], filler=[9], seed=seed)
    for trial, cs, us, tested in zip(got.trials, got.cs, got.us, got.tested, strict=True):
        assert [int(got.tokens[i]) for i in cs] == [TOKENS[name] for name in trial.cs]
        if trial.us is not None:
            assert got.tokens[us] == TOKENS[trial.us]
            assert tested == us - 1
        if cs:
            assert tested == max(cs) + len(layout.between)
    assert got.tested[-1] == len(got.tokens) - 1


def test_css_of_a_compound_come_in_either_order_and_alike_in_both_groups():
    listed = [Trial(("A", "B"), "X")] * 40
    one = lay_out(listed, ("A",), TOKENS, LINE, seed=1)
    first = [cs[0] < cs[1] for cs in one.cs[:-1]]
    assert 8 < sum(first) < 32
    blocking = library.builtin()["blocking"]
    orders = []
    for group in ("experimental", "control"):
        tokens = {"A": 11, "B": 12, "C": 15, "X": 13}
        got = lay_out(trials(blocking, group, 5), ("B",), tokens, LINE, seed=5)
        orders.append(got.tokens[24:].tolist())
    assert orders[0] == orders[1]


@pytest.mark.parametrize("name", ["blocking", "contingency", "generalisation"])
def test_prompts_are_the_same_tokens_when_they_are_read_again(demo, name):
    text = tokenise_demo(demo)
    with untouched(demo.model):
        words, layouts = vocabulary_of(demo, "words", list(TEXTS), text)
    paradigm = library.builtin()[name]
    chosen = pool(words, needed(paradigm, 4))
    for number in range(5):
        drawn = draw(words, chosen, paradigm, 4, 0, number)
        for layout in layouts:
            listed = trials(paradigm, "control", number)
            got = lay_out(listed, paradigm.groups[0].test, drawn.tokens, layout, filler=drawn.filler.tolist())
            written = demo.tokenizer.decode(got.tokens.tolist())
            again = demo.tokenizer(written, add_special_tokens=False)["input_ids"]
            np.testing.assert_array_equal(again, got.tokens)
            between, after = TEXTS[layout.name]
            if name == "blocking":
                a, b, x = (demo.tokenizer.decode([drawn.tokens[s]]) for s in "CBX")
                assert written.startswith(f"{a}{between}{x}{after}" * 8)
                assert written.endswith(f"{b}{between}")


def tokenise_demo(demo):
    from pavinterp.corpora import corpus

    return tokenise(corpus("demo"), demo.tokenizer, context=32, sequences=2)
