"""Controls of the conditioning experiments: memories with known learning rules get the verdicts that theory says."""

from __future__ import annotations

import pytest
from known_memories import LAYOUT, SIZE, Memory, vocabulary

import pavinterp as pi
from pavinterp import paradigms as library
from pavinterp.experiments.conditioned_responses import measured, parts_of
from pavinterp.experiments.conditioning import analysed
from pavinterp.experiments.conditioning_stimuli import draw, needed, pool
from pavinterp.experiments.random_weights import untrained

NAMES = (
    "acquisition", "extinction", "reversal", "latent_inhibition", "overshadowing", "blocking", "unblocking",
    "overexpectation", "superconditioning", "partial_reinforcement",
)  # fmt: skip
# second_order and contingency are left out: in the theory a CS that follows is extinguished, and the context learns;
# these memories have neither.


@pytest.fixture(scope="module", params=["hebbian", "delta"])
def control(request):
    words, chosen = vocabulary(), [library.builtin()[name] for name in NAMES]
    draws = {p.name: [draw(words, pool(words, needed(p, 3)), p, 3, 0, i) for i in range(8)] for p in chosen}
    parts = parts_of(chosen, [LAYOUT])
    records = measured(Memory(request.param), parts, draws, start=[0], vocabulary=SIZE)
    return request.param, records, analysed(records, chosen, None, 0)


def test_each_memory_does_what_its_theory_predicts_everywhere(control):
    rule, _, (_, _, _, verdicts) = control
    model = {"hebbian": "hebbian", "delta": "rescorla_wagner"}[rule]
    of = verdicts.xs(model, level="model")
    assert dict(of["verdict"]) == dict.fromkeys(of.index, "as predicted")


def test_blocking_tells_the_learning_rules_apart(control):
    rule, _, (effects, _, _, verdicts) = control
    found = verdicts.xs(("blocking", "control"), level=("paradigm", "control"))["verdict"]
    effect = effects.loc[("blocking", "control", "all"), "effect"]
    if rule == "hebbian":
        assert found["hebbian"] == "as predicted"
        assert found["rescorla_wagner"] == found["conditioning"] == "absent"
        assert effect == 0
    else:
        assert found["rescorla_wagner"] == found["conditioning"] == "as predicted"
        assert found["hebbian"] == "present"
        # closed form at rate 0.3, gain 2: A alone to 1 - 0.7^8, then AB shares what is left, each with a factor 0.4
        gain = lambda left: left / 2 * (1 - 0.4**8)  # noqa: E731
        assert effect == pytest.approx(2 * (gain(0.7**8) - gain(1.0)), rel=1e-9)


def test_responses_grow_by_the_rule(control):
    """Hebbian: gain x pairings. Delta: gain x (1 - 0.7^pairings)."""
    rule, records, _ = control
    own = records.query("paradigm == 'acquisition' and group == 'experimental' and cs == 'A'")
    n = own["presentation"] - 1
    expected = 2.0 * n if rule == "hebbian" else 2 * (1 - 0.7**n)
    assert own["response"].to_numpy() == pytest.approx(expected.to_numpy(), abs=1e-12)


def test_rates_are_found_again(control):
    rule, _, (_, fits, _, _) = control
    of = {one.model: one for one in fits}
    if rule == "delta":  # the theory has a context beside, a fifth as salient
        assert of["rescorla_wagner"].rate == pytest.approx(0.3, rel=0.1)
        assert of["rescorla_wagner"].explained > 0.999
        assert of["hebbian"].explained < 0.97  # a straight line through a curve
    else:
        assert of["hebbian"].scale == pytest.approx(2.0)
        assert of["hebbian"].explained == pytest.approx(1)


def test_random_weights_show_nothing(demo):
    names = ["acquisition", "extinction", "blocking"]
    found = pi.condition(
        untrained(demo), paradigms=names, draws=16, layouts=["sentence", "line"], heads=False, progress=False
    )
    of = found.verdicts.xs("conditioning", level="model")
    assert list(of["verdict"]) == ["absent"] * 3
    assert list(of["by_layout"]) == ["00"] * 3
