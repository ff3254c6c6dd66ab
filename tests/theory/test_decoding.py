"""Decoding capacity against simulated memories, its limits, and its order."""

import numpy as np
import pytest

from pavinterp.theory.decoding import decoding_capacity, decoding_success


def simulated_success(load: int, d_k: int, d_v: int, probes: int, rng: np.random.Generator) -> float:
    """Share of probes whose own US is the nearest of all stored ones to the response, over many memories."""
    hits = memories = 0
    while memories * load < probes:
        keys, values = rng.normal(size=(load, d_k)), rng.normal(size=(load, d_v))
        keys /= np.linalg.norm(keys, axis=1, keepdims=True)
        values /= np.linalg.norm(values, axis=1, keepdims=True)
        responses = keys @ (keys.T @ values)
        hits += ((responses @ values.T).argmax(1) == np.arange(load)).sum()
        memories += 1
    return hits / (memories * load)


@pytest.mark.parametrize(("d_k", "d_v", "within"), [(16, 16, 0.09), (16, 64, 0.06), (64, 16, 0.07), (64, 64, 0.035)])
def test_success_and_capacity_are_those_of_simulated_memories(d_k, d_v, within):
    rng = np.random.default_rng(d_k + 2 * d_v)
    capacity = decoding_capacity(d_k, d_v)
    loads = np.unique((capacity * np.array([0.5, 0.9, 1.0, 1.1, 1.2, 2.0])).round().astype(int))
    success = np.array([simulated_success(n, d_k, d_v, 20_000, rng) for n in loads])
    np.testing.assert_allclose([decoding_success(n, d_k, d_v) for n in loads], success, atol=0.05)
    simulated = np.exp(np.interp(-0.5, -success, np.log(loads)))
    assert capacity == pytest.approx(simulated, rel=within)


def test_success_falls_from_one_and_halves_at_the_capacity():
    curve = [decoding_success(n, 32, 48) for n in (1, 2, 3, 10, 30, 100, 300, 1000, 10_000)]
    assert curve[:2] == [1, 1]
    assert all(np.diff(curve[1:]) < 0)
    assert curve[-1] < 0.01
    for success in (0.1, 0.5, 0.99):
        assert decoding_success(decoding_capacity(32, 48, success), 32, 48) == pytest.approx(success, abs=1e-5)


def test_two_associations_are_never_confused():
    assert simulated_success(2, 4, 4, 2000, np.random.default_rng(0)) == 1


def test_order_is_the_product_of_the_dimensions_over_the_logarithm():
    d = np.array([64, 256, 1024, 4096])
    capacity = np.array([decoding_capacity(x, x) for x in d])
    constant = 2 * np.log(capacity) * capacity / d**2  # above 1 by corrections of order log log N / log N
    assert all((constant > 1) & (constant < 1.2))
    assert capacity[-1] / d[-1] ** 2 < 0.5 * capacity[0] / d[0] ** 2
    assert decoding_capacity(64, 128) > 1.5 * decoding_capacity(64, 64)


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (decoding_success, (0.5, 16, 16), "load must be at least 1, got 0.5"),
        (decoding_success, (5, 2, 16), "d_k must be at least 3, got 2"),
        (decoding_success, (5, 16, 2), "d_v must be at least 3, got 2"),
        (decoding_capacity, (16, 16, 0), "success must lie between 0 and 1, got 0"),
        (decoding_capacity, (16, 16, 1), "success must lie between 0 and 1"),
        (decoding_capacity, (1, 16), "d_k must be at least 3"),
    ],
)
def test_nonsense_is_refused(function, arguments, message):
    with pytest.raises(ValueError, match=message):
        function(*arguments)


def test_what_is_not_known_stays_so():
    assert np.isnan(decoding_capacity(float("nan"), 16))


def test_success_is_the_mean_that_the_derivation_says():
    """Its integral by random draws of unit vectors, at loads so small that one association more or less shows."""
    rng = np.random.default_rng(3)
    draws, d_k, d_v = 20_000, 4, 5
    for load in (3, 6):
        x, y, u = ((v := rng.normal(size=(draws, d)))[:, 0] / np.linalg.norm(v, axis=1) for d in (d_k, d_v, d_v - 1))
        s = np.sqrt((load - 2) / (d_k * d_v))
        across = s * np.sqrt(d_v - 1)  # |C| in the dimensions across v_i
        wins = [
            np.mean(across * np.sqrt(1 - y**2) * u > (1 - x) * (1 - y) + s * z * (1 - y)) for z in rng.normal(size=600)
        ]
        expected = np.mean((1 - np.array(wins)) ** (load - 1))
        assert decoding_success(load, d_k, d_v) == pytest.approx(expected, abs=0.01)
