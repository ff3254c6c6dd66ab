"""Theories of conditioning against closed forms, plain loops, the memory rules of theory/rules, and invariances."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pavinterp.theory.conditioning import MODELS, Parameters, encode, similarity_of
from pavinterp.theory.rules import RULES
from pavinterp.theory.schedules import Trial, parse, trials

LEARNERS = ("rescorla_wagner", "pearce_hall", "mackintosh")


def sequence(text: str) -> list[Trial]:
    """Trials in the order written: `A -> X x3; AB -> x2`."""
    groups = {"experimental": text.split(";"), "control": ["A -> X"]}
    table = {"name": "x", "about": "x", "source": "x", "test": "A", "response": "X", "predicts": "none"}
    return trials(parse(table | {"groups": groups}), "experimental", 0)


def run(model: str, listed, probes, us="X", similarity=None, overlap=0.0, **parameters):
    """Responses to `us`, [*batch, trials + 1, probes]."""
    design = encode(listed, [tuple(probe) for probe in probes], similarity=similarity, overlap=overlap)
    return MODELS[model](design, Parameters(**parameters))[..., design.uss.index(us)]


# --- Rescorla-Wagner, closed forms


def test_acquisition_is_geometric():
    n = np.arange(11)
    rate, lam, alpha = np.array([[0.1], [0.3], [0.9]]), np.array([1.0, 2.5]), 0.7
    found = run("rescorla_wagner", sequence("A -> X x10"), "A", rate=rate, lam=lam, saliences={"A": alpha})[..., 0]
    assert found.shape == (3, 2, 11)
    np.testing.assert_allclose(found, lam[:, None] * (1 - (1 - alpha * rate[..., None]) ** n), atol=1e-12)


def test_extinction_decays_geometrically_at_the_rate_of_absence():
    found = run("rescorla_wagner", sequence("A -> X x5; A -> x6"), "A", rate=0.2, absent=0.4)[5:, 0]
    np.testing.assert_allclose(found, (1 - 0.8**5) * (1 - 0.2 * 0.4) ** np.arange(7), atol=1e-12)


def test_a_compound_is_shared_by_salience():
    saliences = {"A": 0.9, "B": 0.3}
    found = run("rescorla_wagner", sequence("AB -> X x9"), ["A", "B", "AB"], rate=0.25, saliences=saliences)
    together = 1 - (1 - 0.25 * 1.2) ** np.arange(10)
    np.testing.assert_allclose(found, together[:, None] * [0.75, 0.25, 1.0], atol=1e-12)


def test_blocking_leaves_what_a_has_not_learned():
    for n, m in ((0, 5), (3, 4), (200, 50)):
        listed = sequence(f"A -> X x{n}; AB -> X x{m}") if n else sequence(f"AB -> X x{m}")
        found = run("rescorla_wagner", listed, "B", rate=0.2, saliences={"B": 0.5})[-1, 0]
        left = 0.8**n * (1 - (1 - 0.2 * 1.5) ** m)
        assert found == pytest.approx(left * 0.5 / 1.5, abs=1e-12)
    assert found < 1e-12  # A at its asymptote: nothing for B


def test_a_stronger_us_unblocks():
    listed = sequence("A -> X x200; AB -> X x200")
    design = encode(listed, [("B",)])
    stronger = replace(design, outcome=design.outcome * np.where(np.arange(400) < 200, 1.0, 3.0)[:, None])
    assert MODELS["rescorla_wagner"](design, Parameters(rate=0.2))[-1, 0, 0] == pytest.approx(0, abs=1e-12)
    assert MODELS["rescorla_wagner"](stronger, Parameters(rate=0.2))[-1, 0, 0] == pytest.approx(1)  # (3 - 1) / 2


def test_an_inhibitor_goes_to_minus_lambda_and_makes_superconditioning():
    first = sequence(";".join(["A -> X; AB ->"] * 600))
    found = run("rescorla_wagner", first + sequence("BC -> X x100"), ["A", "B", "C"], rate=0.2, lam=1.5)
    np.testing.assert_allclose(found[1200], [1.5, -1.5, 0], atol=1e-6)
    assert found[-1, 2] == pytest.approx(1.5, abs=1e-6)  # two lambda to make up, shared by B and C
    control = run("rescorla_wagner", sequence("BC -> X x100"), "C", rate=0.2, lam=1.5)
    assert control[-1, 0] == pytest.approx(0.75, abs=1e-6)


def test_overexpectation_loses_half_of_what_is_too_much():
    found = run("rescorla_wagner", sequence("A -> X x100; B -> X x100; AB -> X x200"), "AB", rate=0.2)
    np.testing.assert_allclose(found[[200, -1]], [[1, 1], [0.5, 0.5]], atol=1e-9)


@pytest.mark.parametrize(("absent", "given_a", "given_k"), [(1.0, 0.75, 0.25), (0.25, 12 / 13, 4 / 7)])
def test_contingency_at_the_asymptote_is_the_difference_of_probabilities(absent, given_a, given_k):
    # Chapman & Robbins 1990: P(X | A) - P(X | no A) at equal rates; at unequal ones each P becomes p / (p + r (1 - p)).
    kinds = sequence("AK -> X x3; AK ->; K -> X; K -> x3")
    orders = np.random.default_rng(0).permuted(np.tile(np.arange(8), (64, 250)), axis=1)  # 2,000 trials in random order
    listed = [[kinds[i] for i in order] for order in orders]
    found = run("rescorla_wagner", listed, "AK", rate=0.02, absent=absent)[:, 1000:].mean((0, 1))
    # the asymptote of the mean is exact only for small steps: 64 x 1,000 correlated trials have s.e. 0.003, bias 0.003
    np.testing.assert_allclose(found, [given_a - given_k, given_k], atol=0.012)


def test_only_a_configural_cue_solves_negative_patterning():
    listed = sequence(";".join(["A -> X; B -> X; AB ->; AB ->"] * 400))
    table = {c: run("rescorla_wagner", listed, ["A", "AB"], rate=0.1, configural=c)[-1] for c in (0.0, 1.0)}
    assert table[0.0][1] > table[0.0][0] > 0
    np.testing.assert_allclose(table[1.0], [1, 0], atol=1e-5)  # approached geometrically


def test_what_follows_is_there_too_so_second_order_conditioning_becomes_inhibition():
    found = run("rescorla_wagner", sequence("A -> X x50; B -> A"), ["B", "A"], rate=0.2)
    np.testing.assert_allclose(found[-1], [-0.2, 0.8], atol=1e-4)  # A and B share the error of minus one
    assert run("rescorla_wagner", sequence("A -> X; B -> A x3"), ["B", "A"], us="A", rate=0.2)[-1].tolist() == (
        pytest.approx([1 - 0.8**3, 0])
    )  # and A is not its own cause


def test_a_context_takes_its_share_and_filler_teaches_nothing():
    found = run("rescorla_wagner", sequence("A -> X x100; filler x50"), ["A", "B"], rate=0.2, context=0.25)
    np.testing.assert_allclose(found[-1], [1, 0.2], atol=1e-9)
    np.testing.assert_array_equal(found[-1], found[-51])


def test_similar_stimuli_are_the_delta_rule_over_their_elements():
    """`rules.delta` learns key by key from vectors; here only their cosines are known."""
    rng = np.random.default_rng(3)
    vectors = rng.normal(size=(4, 6))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    names, uss = "ABCD", ("X", "Y")
    listed = [
        Trial((names[i],), uss[j]) for i, j in zip(rng.integers(4, size=30), rng.integers(2, size=30), strict=True)
    ]
    similarity = {(names[i], names[j]): float(vectors[i] @ vectors[j]) for i in range(4) for j in range(i)}
    design = encode(listed, [(name,) for name in names], similarity=similarity)
    keys = torch.tensor(np.array([vectors[names.index(trial.cs[0])] for trial in listed]))
    values, queries = torch.tensor(design.outcome), torch.tensor(vectors)
    for name, rule, own in (
        ("rescorla_wagner", RULES["delta"], {"eta": 0.4}),
        ("hebbian", RULES["hebbian"], {}),
    ):
        for n in (1, 7, 30):
            expected = rule(keys, values, queries, torch.full((4,), n - 1), **own)
            found = MODELS[name](design, Parameters(rate=0.4))[n]
            np.testing.assert_allclose(found, expected.numpy(), atol=1e-12, err_msg=name)


# --- the other theories, by hand


def test_pearce_hall_by_hand():
    s = 0.2
    found = run("pearce_hall", sequence("A -> X x3"), "A", rate=s, attention=1.0)[:, 0]
    np.testing.assert_allclose(found, [0, s, 2 * s, 2 * s + s * (1 - s)], atol=1e-12)  # alpha 1, 1, 1 - s
    # after a CS alone alpha is 1 - gamma; then gamma + (1 - gamma)^2
    found = run("pearce_hall", sequence("A -> ; A -> X x2"), "A", rate=s, attention=0.25)[:, 0]
    np.testing.assert_allclose(found, [0, 0, s * 0.75, s * (0.75 + 0.25 + 0.75**2)], atol=1e-12)
    # extinction: alpha stays gamma |0 - V| + (1 - gamma) alpha, here gamma = 1
    found = run("pearce_hall", sequence("A -> X; A -> x2"), "A", rate=s, attention=1.0)[:, 0]
    v2 = s - s * 1.0 * s
    np.testing.assert_allclose(found, [0, s, v2, v2 - s * s * v2], atol=1e-12)


def test_mackintosh_by_hand():
    r, k = 0.3, 0.5
    found = run("mackintosh", sequence("A -> X x3"), "A", rate=r, attention=k)[:, 0]
    alpha1 = 1 - k * 0.1  # at first no better than nothing
    v2 = r + r * alpha1 * (1 - r)
    alpha2 = alpha1 + k * (1 - (1 - r))  # then better by V
    np.testing.assert_allclose(found, [0, r, v2, v2 + r * alpha2 * (1 - v2)], atol=1e-12)
    # each learns by its own error: two CSs at their asymptotes together evoke two lambda, and lose nothing
    found = run("mackintosh", sequence("A -> X x99; B -> X x99; AB -> X x9"), ["AB", "A"], rate=0.4)
    np.testing.assert_allclose(found[-1], [2, 1], atol=1e-9)


def test_hebbian_memories_by_hand():
    listed = sequence("A -> X x2; AB -> X; C ->; -> X; filler x9")
    found = run("hebbian", listed, ["A", "B", "AB", "C"], lam=2.0)
    np.testing.assert_allclose(found[-1], [6, 2, 8, 0])
    w0, near, far = 0.75 / 0.25, np.exp(4 * (np.sqrt(0.5) - 1)), np.exp(-4)
    found = run("hebbian_softmax", listed, ["A", "C"], rate=0.25, lam=2.0)
    a = 2 * (2 + near + far) / (w0 + 2 + near + 2 * far)
    c = 2 * (4 * far) / (w0 + 1 + 4 * far)
    np.testing.assert_allclose(found[-1], [a, c])
    n = np.arange(9)
    curve = run("hebbian_softmax", sequence("A -> X x8"), "A", rate=0.25)[:, 0]
    np.testing.assert_allclose(curve, n / (n + w0))


# --- plain loops

COMPOUNDS = ("A", "B", "C", "AB", "BC", "ABC", "")
trial_lists = st.lists(
    st.tuples(st.sampled_from(COMPOUNDS), st.sampled_from(["X", "Y", None])), min_size=1, max_size=14
).map(lambda pairs: [*(Trial(tuple(cs), us) for cs, us in pairs), Trial(("A",), "X"), Trial(("B",), "Y")])


def plain(model, listed, probes, *, rate, lam, absent, context, attention, saliences):
    """The three learning theories trial by trial over dictionaries, from their equations; responses to X at the end."""
    alpha0 = {**saliences, "context": context}
    v = {(cue, us): 0.0 for cue in alpha0 for us in "XY"}
    alpha = dict.fromkeys(alpha0, 1.0)
    for trial in listed:
        if not trial.cs and trial.us is None:
            continue
        there = [*trial.cs, "context"]
        target = {us: lam if trial.us == us else 0.0 for us in "XY"}
        total = {us: sum(v[cue, us] for cue in there) for us in "XY"}
        old = dict(v)
        for us in "XY":
            beta = rate * (1.0 if trial.us == us else absent)
            for cue in there:
                if model == "rescorla_wagner":
                    v[cue, us] += alpha0[cue] * beta * (target[us] - total[us])
                elif model == "mackintosh":
                    v[cue, us] += alpha[cue] * alpha0[cue] * beta * (target[us] - old[cue, us])
                elif target[us] >= total[us]:
                    v[cue, us] += rate * alpha0[cue] * alpha[cue] * target[us]
                else:
                    v[cue, us] -= rate * alpha0[cue] * alpha[cue] * absent * (total[us] - target[us])
        for cue in there:
            if model == "pearce_hall":
                surprise = min(1.0, max(abs(target[us] - total[us]) for us in "XY") / lam)
                alpha[cue] = attention * surprise + (1 - attention) * alpha[cue]
            if model == "mackintosh":
                own = {us: abs(target[us] - old[cue, us]) for us in "XY"}
                rest = {us: abs(target[us] - (total[us] - old[cue, us])) for us in "XY"}
                lead = sum(rest[us] - own[us] for us in "XY") / lam
                change = attention * (lead if lead > 1e-12 else lead - 0.1)
                alpha[cue] = min(2.0, max(0.1, alpha[cue] + change))
    return [sum(v[cue, "X"] for cue in [*probe, "context"]) for probe in probes]


@pytest.mark.parametrize("model", LEARNERS)
@settings(max_examples=60, deadline=None)
@given(listed=trial_lists, rate=st.floats(0.01, 0.4), absent=st.floats(0, 1), context=st.sampled_from([0.0, 0.3]))
def test_arrays_do_what_a_plain_loop_does(model, listed, rate, absent, context):
    saliences = {"A": 0.9, "B": 0.5, "C": 0.2}
    given_ = {"rate": rate, "lam": 1.7, "absent": absent, "context": context, "attention": 0.35, "saliences": saliences}
    expected = plain(model, listed, ["A", "BC", ""], **given_)
    found = run(model, listed, ["A", "BC", ""], **given_)[-1]
    np.testing.assert_allclose(found, expected, atol=1e-9)


@pytest.mark.parametrize("model", MODELS)
def test_a_batch_of_orders_and_parameters_is_each_of_them_alone(model):
    rng = np.random.default_rng(0)
    kinds = sequence("A -> X x4; AB -> X x4; B -> x3; C -> Y x3; -> Y; filler")
    orders = [[kinds[i] for i in rng.permutation(len(kinds))] for _ in range(3)]
    batch = {
        "rate": np.array([0.1, 0.2, 0.3, 0.4])[:, None],
        "lam": np.array([1.0, 2.0, 1.0, 3.0])[:, None],
        "absent": 0.7,
        "context": np.array([0.0, 0.1, 0.2, 0.3])[:, None],
        "configural": 0.2,
        "attention": np.array([0.2, 0.4, 0.6, 1.0])[:, None],
        "sharpness": np.array([1.0, 2.0, 3.0, 4.0])[:, None],
        "saliences": {"A": np.array([1.0, 0.5, 1.0, 0.2])[:, None]},
    }
    probes, similarity = ["A", "B", "AB", "D"], {("A", "B"): 0.3, ("A", "D"): 0.5}
    found = run(model, orders, probes, us="Y", similarity=similarity, **batch)
    assert found.shape == (4, 3, len(kinds) + 1, 4)
    for i in range(4):
        for j in range(3):
            one = {key: np.asarray(value).ravel()[i] for key, value in batch.items() if np.ndim(value)}
            one |= {"saliences": {"A": batch["saliences"]["A"][i, 0]}, "absent": 0.7, "configural": 0.2}
            alone = run(model, orders[j], probes, us="Y", similarity=similarity, **one)
            np.testing.assert_allclose(found[i, j], alone, atol=1e-12)


# --- invariances


@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=30, deadline=None)
@given(listed=trial_lists, factor=st.floats(0.01, 100))
def test_responses_scale_with_lambda(model, listed, factor):
    one = run(model, listed, COMPOUNDS[:-1], context=0.2, rate=0.2, overlap=0.1)
    other = run(model, listed, COMPOUNDS[:-1], context=0.2, rate=0.2, overlap=0.1, lam=factor)
    np.testing.assert_allclose(other, factor * one, atol=1e-9 * factor)


@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=30, deadline=None)
@given(listed=trial_lists, seed=st.integers(0, 2**32 - 1))
def test_stimuli_that_never_meet_do_not_depend_on_one_anothers_order(model, listed, seed):
    """A-C with X, Y; D-F with Z: any merging of the two streams ends alike."""
    others = sequence("D -> Z x2; DE -> Z x2; E -> x2; F -> Z")
    rng = np.random.default_rng(seed)
    places = rng.permutation(len(listed) + len(others)) < len(others)
    one, two = iter(listed), iter(others)
    merged = [next(two) if place else next(one) for place in places]
    for us, probes in (("X", ["A", "BC"]), ("Z", ["D", "EF"])):
        found = [run(model, order, probes, us=us, rate=0.2)[-1] for order in (listed + others, merged)]
        np.testing.assert_allclose(*found, atol=1e-12)


@pytest.mark.parametrize("model", MODELS)
def test_probes_and_filler_teach_nothing_and_the_first_pairing_gives_the_rate(model):
    listed = sequence("A -> X x3; AB -> X x2; A ->")
    one = run(model, listed, ["A"], context=0.2)
    more = run(model, listed, ["B", "A", "AB"], context=0.2)
    np.testing.assert_array_equal(one[..., 0], more[..., 1])
    between = [trial for kind in listed for trial in (kind, Trial((), None))]
    np.testing.assert_array_equal(run(model, between, ["A"], context=0.2)[::2], one)
    if model != "hebbian":
        assert run(model, listed, ["A"], rate=0.17, lam=3.0)[1, 0] == pytest.approx(0.17 * 3)


# --- what is wrong


def test_what_is_wrong_is_said():
    listed = sequence("A -> X x3; B -> X")
    with pytest.raises(ValueError, match="no US follows in any trial"):
        encode(sequence("A -> x3"), [("A",)])
    with pytest.raises(ValueError, match="same number of trials"):
        encode([listed, listed[1:]], [("A",)])
    with pytest.raises(ValueError, match="contradict one another"):
        encode(listed, [("C",)], similarity={("A", "B"): 0.9, ("B", "C"): 0.9, ("A", "C"): -0.9})
    with pytest.raises(ValueError, match=r"overlap must lie in \[0, 1\), got 1"):
        encode(listed, [("A",)], overlap=1.0)
    for name, value in (("rate", 0.0), ("rate", 1.2), ("lam", 0.0), ("lam", np.nan), ("attention", -0.1)):
        with pytest.raises(ValueError, match=f"{name} must lie between"):
            Parameters(**{name: value})
    with pytest.raises(ValueError, match="salience of A must be at least 0"):
        Parameters(saliences={"A": -1.0})
    with pytest.raises(ValueError, match="do not broadcast"):
        run("rescorla_wagner", [listed, listed], "A", rate=np.array([0.1, 0.2, 0.3]))
    with pytest.raises(FloatingPointError):
        run("rescorla_wagner", sequence("A -> X x2000"), "A", rate=1.0, saliences={"A": 5.0})


def test_similarities_multiply_along_the_tree():
    table = {"name": "x", "about": "x", "source": "x", "test": "A", "response": "X", "predicts": "none"}
    groups = {"experimental": ["A -> X, B -> X, C -> X, D -> X"], "control": ["A -> X"]}
    similar = ["B ~ 0.8 A", "C ~ 0.5 A", "D ~ 0.5 B"]
    found = similarity_of(parse(table | {"groups": groups, "similar": similar}))
    both = {frozenset(pair): cosine for pair, cosine in found.items()}
    assert both == {
        frozenset("AB"): 0.8, frozenset("AC"): 0.5, frozenset("BC"): 0.4,
        frozenset("BD"): 0.5, frozenset("AD"): 0.4, frozenset("CD"): 0.2,
    }  # fmt: skip
