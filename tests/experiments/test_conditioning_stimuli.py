"""Stimuli of conditioning: matched as they say, no shared beginnings, neighbours, what is refused."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from known_memories import vocabulary as alike
from test_trial_layouts import tokenise_demo

import pavinterp as pi
from pavinterp import paradigms as library
from pavinterp.errors import UserError
from pavinterp.experiments.conditioning_stimuli import (
    WINDOWS,
    draw,
    needed,
    pool,
    unigram_logits,
    vocabulary_of,
)
from pavinterp.experiments.trial_layouts import TEXTS
from pavinterp.models import untouched


@pytest.fixture(scope="module")
def words(demo):
    with untouched(demo.model):
        return vocabulary_of(demo, "words", list(TEXTS), tokenise_demo(demo))


def test_unigram_logits_equal_a_plain_loop(demo, words):
    text = tokenise_demo(demo)
    got = unigram_logits(demo, text)
    rows = []
    with torch.no_grad():
        for tokens in text.tokens:
            for position in range(len(tokens)):
                logits = demo.model(input_ids=torch.from_numpy(tokens[: position + 1])[None]).logits[0, -1]
                rows.append(logits.double().softmax(-1).numpy())
    np.testing.assert_allclose(got, np.log(np.mean(rows, 0)), atol=1e-4)
    np.testing.assert_array_equal(words[0].unigram, got[words[0].ids])


def test_words_are_words_and_layouts_are_those_of_the_tokenizer(demo, words):
    vocabulary, layouts = words
    assert len(vocabulary.ids) > 300
    for token, text in zip(vocabulary.ids, vocabulary.texts, strict=True):
        assert re.fullmatch(" [a-z]{3,}", text)
        assert demo.tokenizer(f"the{text}", add_special_tokens=False)["input_ids"][-1] == token
    assert not {f"{text}ly" for text in vocabulary.texts} & set(vocabulary.texts)
    for layout in layouts:
        assert (demo.tokenizer.decode(layout.between), demo.tokenizer.decode(layout.after)) == TEXTS[layout.name]


@pytest.mark.parametrize("name", ["blocking", "capacity", "generalisation"])
def test_stimuli_of_a_draw_are_matched(demo, words, name):
    vocabulary, _ = words
    paradigm = library.builtin()[name]
    chosen = pool(vocabulary, needed(paradigm, 8))
    if name != "capacity":
        assert (chosen.logit_window, chosen.norm_window) <= WINDOWS[0]
        assert chosen.norm_window <= WINDOWS[0][1] + 1e-9
    assert any(chosen.logit_window <= width and chosen.norm_window <= ratio + 1e-9 for width, ratio in WINDOWS)
    norms = demo.model.get_input_embeddings().weight.detach().norm(dim=1).numpy()
    unigram = dict(zip(vocabulary.ids.tolist(), vocabulary.unigram, strict=True))
    for number in range(10):
        drawn = draw(vocabulary, chosen, paradigm, 8, 3, number)
        tokens = [*drawn.tokens.values(), *drawn.foils.tolist()]
        assert set(drawn.tokens) == {*paradigm.css, *paradigm.uss}
        assert len(set(tokens)) == len(tokens) == needed(paradigm, 8)
        assert np.ptp([unigram[t] for t in tokens]) <= chosen.logit_window + 1e-12
        assert norms[tokens].max() / norms[tokens].min() <= chosen.norm_window * (1 + 1e-5)
        begins = [demo.tokenizer.decode([t]).strip().lower()[:3] for t in [*tokens, *drawn.filler.tolist()[:1]]]
        assert len(set(begins)) == len(begins)
        assert not set(drawn.filler.tolist()) & set(tokens)
        again = draw(vocabulary, chosen, paradigm, 8, 3, number)
        assert again.tokens == drawn.tokens
    assert draw(vocabulary, chosen, paradigm, 8, 4, 0).tokens != draw(vocabulary, chosen, paradigm, 8, 3, 0).tokens


def test_parts_are_drawn_at_random(words):
    """Which stimulus is the US and which a foil does not hang on frequency: over many draws both have the same mean."""
    vocabulary, _ = words
    paradigm = library.builtin()["blocking"]
    chosen = pool(vocabulary, needed(paradigm, 8))
    unigram = dict(zip(vocabulary.ids.tolist(), vocabulary.unigram, strict=True))
    apart = []
    for number in range(300):
        drawn = draw(vocabulary, chosen, paradigm, 8, 0, number)
        apart.append(unigram[drawn.tokens["X"]] - np.mean([unigram[t] for t in drawn.foils.tolist()]))
    assert abs(np.mean(apart)) < 4 * np.std(apart) / np.sqrt(300)


def test_neighbours_are_near_in_the_order_that_the_paradigm_says(words):
    vocabulary, _ = words
    paradigm = library.builtin()["generalisation"]
    chosen = pool(vocabulary, needed(paradigm, 8))
    row = {token: i for i, token in enumerate(vocabulary.ids.tolist())}
    near = []
    for number in range(20):
        drawn = draw(vocabulary, chosen, paradigm, 8, 0, number)
        of = {name: vocabulary.directions[row[token]] for name, token in drawn.tokens.items()}
        near.append([of["A"] @ of["B"], of["A"] @ of["C"], of["A"] @ of["D"]])
        assert drawn.cosines["B", "A"] == pytest.approx(near[-1][0])
        assert drawn.cosines["C", "A"] == pytest.approx(near[-1][1])
        free = [i for i in chosen.places if vocabulary.prefix(i) != vocabulary.prefix(row[drawn.tokens["A"]])]
        assert near[-1][0] == pytest.approx((vocabulary.directions[free] @ of["A"]).max())
    mean = np.mean(near, 0)
    assert mean[0] > 1.5 * mean[1] > 1.5 * mean[2]
    assert np.mean([row[1] / row[0] for row in near]) == pytest.approx(0.5, abs=0.05)


def test_the_tightest_window_that_holds_enough_is_taken(words):
    vocabulary, _ = words
    few, many = pool(vocabulary, 10), pool(vocabulary, 90)
    assert few.logit_window <= many.logit_window
    assert few.logit_window <= 1.0
    with pytest.raises(UserError, match=r"^900000 |different stimuli are needed") as said:
        pool(vocabulary, 600_000)
    assert "\n" not in str(said.value)


def test_other_kinds(demo, tmp_path):
    with untouched(demo.model):
        random, _ = vocabulary_of(demo, "random", ["line"], tokenise_demo(demo))
        nonsense, _ = vocabulary_of(demo, "nonsense", ["line"], tokenise_demo(demo))
        file = tmp_path / "mine.txt"
        file.write_text("king\nqueen\n\nantidisestablishment\nking\nsword\n", encoding="utf-8")
        mine, _ = vocabulary_of(demo, file, ["line"], tokenise_demo(demo))
    assert len(random.ids) > 1000
    assert set(demo.tokenizer.all_special_ids).isdisjoint(random.ids.tolist())
    assert all(not set("aeiou") & set(text.lower()) for text in nonsense.texts)
    assert sorted(mine.texts) == [" king", " queen", " sword"]
    assert not mine.matched
    assert set(pool(mine, 3).places.tolist()) == {0, 1, 2}
    with pytest.raises(UserError, match=r"4 different stimuli are needed and the stimuli of mine.txt .* are 3"):
        pool(mine, 4)
    with pytest.raises(UserError, match="give words, random, nonsense, or a text file"):
        vocabulary_of(demo, tmp_path / "none.txt", ["line"], tokenise_demo(demo))


def test_a_model_without_a_tokenizer_is_refused():
    import tiny

    with pytest.raises(UserError, match="tokenizer"):
        pi.condition(pi.load(tiny.llama(), tokenizer=False), draws=2, progress=False)


def test_known_stimuli_need_nothing_of_a_model():
    words = alike()
    paradigm = library.builtin()["acquisition"]
    drawn = draw(words, pool(words, needed(paradigm, 4)), paradigm, 4, 0, 0)
    assert len({*drawn.tokens.values(), *drawn.foils.tolist()}) == 8
