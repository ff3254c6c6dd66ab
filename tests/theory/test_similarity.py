"""Similarity: the estimate against the n x n formula and plain loops, unbiased in simulation, and its invariances."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ortho_group

from pavinterp.theory.similarity import cka, distinct, hsic, overlap


def samples(units=7, n=5, heads=3, d=4, seed=0, shift=0.0):
    return list(np.random.default_rng(seed).normal(size=(units, n, heads, d)) + shift)


def song(x, y):
    """Unbiased HSIC of n independent samples from n x n kernels: Song et al. 2012, as it is written there."""
    n = len(x)
    k, l = (z @ z.T * (1 - np.eye(n)) for z in (x, y))  # noqa: E741
    one = np.ones(n)
    cross = np.trace(k @ l) + one @ k @ one * (one @ l @ one) / ((n - 1) * (n - 2)) - 2 / (n - 2) * one @ k @ l @ one
    return cross / (n * (n - 3))


def loops(units, g, h, weights):
    """Averages over positions of distinct units, one tuple after another."""
    k = lambda a, b: units[a[0]][a[1], g] @ units[b[0]][b[1], g]  # noqa: E731
    l = lambda a, b: units[a[0]][a[1], h] @ units[b[0]][b[1], h]  # noqa: E731, E741
    terms = (
        (lambda a, b: k(a, b) * l(a, b)),
        (lambda a, b, c: k(a, b) * l(a, c)),
        (lambda a, b, c, d: k(a, b) * l(c, d)),
    )
    found = []
    for count, term in zip((2, 3, 4), terms, strict=True):
        total = of = 0.0
        for tuple_ in itertools.permutations(range(len(units)), count):
            weight = np.prod([weights[u] for u in tuple_])
            places = list(itertools.product(*[[(u, i) for i in range(len(units[u]))] for u in tuple_]))
            total += weight * np.mean([term(*place) for place in places])
            of += weight
        found.append(total / of)
    return found[0] + found[2] - 2 * found[1]


@pytest.mark.parametrize("shift", [0.0, 30.0])
def test_one_sample_a_unit_is_the_n_by_n_formula(shift):
    units = samples(units=24, n=1, shift=shift)
    got = hsic(units)[0]
    x = np.stack(units)[:, 0]
    for g, h in itertools.product(range(3), repeat=2):
        # with a shift the plain formula itself cancels: 1e4 squared times 1e-16
        assert got[g, h] == pytest.approx(song(x[:, g], x[:, h]), abs=1e-10 if shift == 0 else 1e-6)


def test_units_are_distinct_by_plain_loops():
    units = [unit[: 2 + i % 2] for i, unit in enumerate(samples(units=6, n=3, heads=2, d=2, shift=1.0))]
    weights = np.array([[1, 1, 1, 1, 1, 1], [2, 0, 1, 3, 1, 1], [0, 1, 2, 2, 0, 3]])
    got = hsic(units, weights)
    assert got[0, 0, 1] == pytest.approx(loops(units, 0, 1, weights[0]), abs=1e-10)  # centred or not
    about = np.mean([unit.mean(0) for unit in units], axis=0)
    units = [unit - about for unit in units]
    for draw, (g, h) in itertools.product(range(3), [(0, 0), (0, 1), (1, 1)]):
        assert got[draw, g, h] == pytest.approx(loops(units, g, h, weights[draw]), abs=1e-10)


def test_unrelated_writes_have_none_and_related_ones_the_closed_form():
    """Over 400 texts of 8 documents: the mean is within 3.5 of its standard errors of the truth.

    Positions of a document share a value (they are dependent), and y = B x + noise: HSIC = ||cov(x, y)||^2.
    """
    rng, found = np.random.default_rng(1), []
    b = rng.normal(size=(3, 3))
    for _ in range(400):
        x, z = (rng.normal(size=(8, 1, 3)) + rng.normal(size=(8, 4, 3)) for _ in range(2))
        y = x @ b + rng.normal(size=(8, 4, 3))
        found.append(hsic(list(np.stack([x, y, z], axis=2)))[0])
    mean, error = np.mean(found, axis=0), np.std(found, axis=0) / np.sqrt(400)
    covariance = 2 * np.eye(3)
    truth = {(0, 2): 0.0, (1, 2): 0.0, (0, 1): np.square(covariance @ b).sum(), (0, 0): np.square(covariance).sum()}
    for place, expected in truth.items():
        assert abs(mean[place] - expected) < 3.5 * error[place]
    assert error[0, 2] < 0.3  # against 12 of x with itself


def test_intervals_of_resampled_documents_hold_the_truth():
    """y = 0.7 x + z: CKA 0.49 / (0.49 + 1), in about 95 of 100 texts of 16 documents."""
    rng, held = np.random.default_rng(5), 0
    for _ in range(100):
        x, z = (rng.normal(size=(16, 1, 3)) + rng.normal(size=(16, 6, 3)) for _ in range(2))
        weights = rng.multinomial(16, np.full(16, 1 / 16), size=200)
        drawn = cka(list(np.stack([x, 0.7 * x + z], axis=2)), weights)[:, 0, 1]
        low, high = np.quantile(drawn, [0.025, 0.975])
        held += low <= 0.49 / 1.49 <= high
    assert held >= 88  # three standard errors of 100 texts below 95


def test_pairs_within_documents_would_be_biased():
    """What the distinct units are for: positions taken as independent find similarity where there is none."""
    rng, naive = np.random.default_rng(2), []
    for _ in range(200):
        x, y = (rng.normal(size=(8, 1, 3)) + 0.3 * rng.normal(size=(8, 4, 3)) for _ in range(2))
        naive.append(song(x.reshape(-1, 3), y.reshape(-1, 3)))
    assert np.mean(naive) > 5 * np.std(naive) / np.sqrt(200)


@given(st.integers(0, 2**31), st.floats(0.01, 100), st.floats(-10, 10))
def test_rotation_scale_and_shift_change_nothing(seed, scale, shift):
    units = samples(seed=seed % 1000)
    rotation = ortho_group.rvs(4, random_state=seed)
    other = [unit.copy() for unit in units]
    for unit in other:
        unit[:, 1] = scale * unit[:, 1] @ rotation + shift
    np.testing.assert_allclose(cka(other), cka(units), rtol=1e-7, atol=1e-8)


def test_a_copy_of_a_head_is_the_same_head():
    units = [np.concatenate([unit, -2 * unit[:, :1, ::-1] + 1], axis=1) for unit in samples(units=8)]
    weights = np.random.default_rng(0).multinomial(8, np.full(8, 1 / 8), size=50)
    weights = weights[(weights > 0).sum(1) >= 4]
    got = cka(units, weights)
    known = ~np.isnan(got[:, 0, 3])
    assert known.mean() > 0.8
    np.testing.assert_allclose(got[known, 0, 3], 1, rtol=1e-9)
    np.testing.assert_allclose(got[known, 0], got[known, 3], rtol=1e-7)


def test_heads_that_write_a_constant_have_no_similarity():
    units = [unit.astype(np.float32) for unit in samples(units=8)]
    for i, unit in enumerate(units):
        unit[:, 1] = 1e3 * (1 + 1e-7 * (i % 2))  # float32 tells 1e3 from it, or not: that is rounding
        unit[:, 2] = 0
    got = cka(units, rounding=1e-6)[0]
    assert np.isnan(got[1:]).all()
    assert got[0, 0] == pytest.approx(1)
    assert distinct(got) == pytest.approx(1)


def test_fewer_than_four_documents_are_refused():
    with pytest.raises(ValueError, match="needs 4 distinct units"):
        hsic(samples(units=5), np.array([[1, 1, 1, 1, 1], [3, 1, 1, 0, 0]]))


def test_the_number_of_distinct_heads_is_the_participation_ratio_of_eigenvalues():
    matrix = cka(samples(units=40, n=3, heads=5))[0]
    eigenvalues = np.linalg.eigvalsh(matrix)
    assert distinct(matrix) == pytest.approx(eigenvalues.sum() ** 2 / np.square(eigenvalues).sum())
    assert distinct(np.eye(6)) == 6
    assert distinct(np.ones((6, 6))) == 1
    assert distinct(np.kron(np.eye(3), np.ones((2, 2)))) == pytest.approx(3)  # three pairs of equals
    with_nan = np.full((4, 4), np.nan)
    with_nan[:3, :3] = np.eye(3)
    assert distinct(np.stack([with_nan, np.eye(4)])).tolist() == [3, 4]


def test_overlap_is_that_of_principal_angles():
    rng = np.random.default_rng(3)
    bases = np.stack([np.linalg.qr(rng.normal(size=(12, 3)))[0].T for _ in range(2)])
    bases = np.concatenate([bases, bases[:1], np.zeros((2, 3, 12))])
    bases[3, 0] = bases[0, 1]  # one of the dimensions of the first
    got, random = overlap(bases)
    cosines = np.linalg.svd(bases[0] @ bases[1].T, compute_uv=False)
    assert got[0, 1] == pytest.approx(np.square(cosines).mean())
    assert got[0, 2] == got[0, 0] == pytest.approx(1)
    assert got[0, 3] == pytest.approx(1)
    assert random[0, 1] == pytest.approx(3 / 12)
    assert np.isnan(got[4]).all()
    many = np.stack([np.linalg.qr(rng.normal(size=(12, 3)))[0].T for _ in range(60)])
    found = overlap(many)[0][np.triu_indices(60, 1)]
    assert found.mean() == pytest.approx(3 / 12, rel=0.02)  # 1,770 pairs: 0.3 % of standard error
